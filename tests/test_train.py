"""Training: the loop, what random models begin with, data of every kind, and runs that are killed and resume."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import headwise
from headwise import cli, families
from headwise.errors import HeadwiseError
from headwise.research.train.images import _moved
from headwise.research.train.labelled import Labels, read
from headwise.research.train.model import AUTO, has_weights
from headwise.research.train.settings import TASKS
from headwise.training import checkpoint

LLAMA = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=4096, hidden_size=16, intermediate_size=24,
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=64,
    tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
GPT2 = dict(
    model_type="gpt2", architectures=["GPT2LMHeadModel"], vocab_size=4096, n_embd=16, n_layer=2, n_head=2,
    n_positions=64, resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
BERT = dict(
    model_type="bert", architectures=["BertForMaskedLM"], vocab_size=300, hidden_size=16, intermediate_size=24,
    num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=64,
)  # fmt: skip
FEW = dict(device="cpu", length=32, batch_rows=4, eval_tokens=64)
KILLED = dict(FEW, steps=10, save_every=4, point_every=3, eval_every=5)


def folder_with(tmp_path: Path, config: dict, name: str = "source") -> str:
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps(config))
    return str(tmp_path / name)


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("<|endoftext|>".join(f"def f{n}(x):\n    return x * {n * n}\n" * 3 for n in range(40)))
    return str(path)


def tailored(kind: str) -> dict:
    """A tailored configuration: the second layer with fewer query/key and more value dimensions."""
    config = transformers.AutoConfig.for_model(**(LLAMA if kind == "llama" else GPT2))
    family = families.family_of(config)
    layers = [layer.to_json() for layer in family.shape_of(config).layers]
    layers[1] = {**layers[1], "qk_dim": 4, "qk_width": 4, "v_dim": 12, "mlp_width": 16}
    return {**(LLAMA if kind == "llama" else GPT2), "model_type": f"headwise_{kind}", "architectures": None,
            "headwise": {"version": 1, "layers": layers, "kept": [0, 1]}}  # fmt: skip


# Runs.


def curve_of(out: Path) -> list[dict]:
    points = [json.loads(line) for line in (out / "curve.jsonl").read_text().splitlines()]
    return [{k: v for k, v in point.items() if k != "seconds"} for point in points]


def test_a_killed_run_goes_on_as_if_it_had_not_stopped(tmp_path, text):
    config = folder_with(tmp_path, tailored("gpt2"))  # with dropout
    whole = headwise.train(config, text, tmp_path / "whole", **KILLED)
    code = (
        "import os, signal, headwise\n"
        "def kill(steps, label):\n"
        "    for step in steps:\n"
        "        yield step\n"
        "        if step == 6: os.kill(os.getpid(), signal.SIGKILL)  # seven are done\n"
        f"headwise.train({config!r}, {text!r}, {str(tmp_path / 'killed')!r}, track=kill, **{KILLED!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [path.name for path in checkpoint.all_in(tmp_path / "killed" / "checkpoints")] == ["step-00000004"]
    again = headwise.train(config, text, tmp_path / "killed", **KILLED)
    assert (whole["resumed"], again["resumed"]) == (False, True)
    assert curve_of(tmp_path / "killed") == curve_of(tmp_path / "whole")
    assert [point["step"] for point in curve_of(tmp_path / "whole")] == [3, 5, 6, 9, 10]
    models = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert models[0] == models[1], "bit for bit the same weights"
    assert len(checkpoint.all_in(tmp_path / "killed" / "checkpoints")) == 2
    pickles = [path for path in (tmp_path / "killed").rglob("*") if path.suffix in (".pt", ".pth", ".pkl", ".bin")]
    assert [path.name for path in pickles] == ["train.bin"], "plain token numbers"


def test_two_processes_train_the_same_model(tmp_path, text):
    config, settings = folder_with(tmp_path, LLAMA), dict(FEW, steps=4, point_every=1)
    headwise.train(config, text, tmp_path / "one", **settings)
    parts = dict(settings, micro_tokens=32)  # every process computes its two rows one after the other
    code = f"import headwise\nheadwise.train({config!r}, {text!r}, {str(tmp_path / 'two')!r}, **{parts!r})"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    told = dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS="1")
    ranks = [{**os.environ, **told, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]  # what torchrun tells them
    both = [subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE) for env in ranks]
    try:
        said = [process.communicate(timeout=120)[1].decode() for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], said
    found = json.loads((tmp_path / "two" / "training.json").read_text())
    assert (found["processes"], found["fit"]["accumulate"]) == (2, 2)
    one, two = curve_of(tmp_path / "one"), curve_of(tmp_path / "two")
    assert [point["loss"] for point in two] == pytest.approx([point["loss"] for point in one], rel=1e-5)
    assert two[-1]["evaluation"]["loss"] == pytest.approx(one[-1]["evaluation"]["loss"], rel=1e-5)


def test_a_tailored_design_becomes_a_normal_folder(tmp_path, text):
    config = folder_with(tmp_path, tailored("llama"))
    found = headwise.train(config, text, tmp_path / "out", steps=25, **FEW)
    out = tmp_path / "out"
    settings = json.loads((out / "model" / "config.json").read_text())
    assert settings["model_type"] == "headwise_llama" and "AutoModelForCausalLM" in settings["auto_map"]
    assert (out / "model" / "modeling_headwise.py").is_file() and list((out / "logs").iterdir())
    model = headwise.load(out / "model")
    attention = model.model.layers[1].self_attn
    assert (attention.qk_dim, attention.v_dim, model.model.layers[1].mlp.up_proj.out_features) == (4, 12, 16)
    curve = curve_of(out)
    assert curve[-1]["loss"] < curve[0]["loss"] - 0.5
    assert found == json.loads((out / "training.json").read_text())
    assert found["tokens"] == 25 * 4 * 32 and found["flops"] > 0 and found["evaluation"]["loss_se"] > 0
    further = headwise.train(str(out / "model"), text, tmp_path / "further", steps=2, **FEW)
    assert further["train_loss"] < curve[0]["loss"] - 0.5, "training continues from the weights"
    assert further["fit"]["rate"] == pytest.approx(found["fit"]["rate"] / 20)


def test_an_encoder_learns_hidden_tokens_with_a_tokenizer_of_its_own(tmp_path, text):
    config = folder_with(tmp_path, BERT)
    found = headwise.train(config, text, tmp_path / "out", train_tokenizer=300, steps=30, rate=1e-2, **FEW)
    assert found["task"] == "masked" and curve_of(tmp_path / "out")[-1]["loss"] < math.log(300) - 0.5
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out" / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
    ids = tokenizer("return x", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == "return x" and model(ids).logits.isfinite().all()
    assert ids[0, [0, -1]].tolist() == [tokenizer.cls_token_id, tokenizer.sep_token_id]


def test_hidden_tokens_are_fifteen_percent_most_of_them_masked(tmp_path, text):
    from headwise.research.train.settings import TrainSettings
    from headwise.research.train.texts import HiddenTokens, train_tokenizer

    tokenizer = train_tokenizer([Path(text).read_text()], 300, masked=True)
    settings = TrainSettings(config="", data=text, length=40)
    source = HiddenTokens(settings, tokenizer, 40, tmp_path, torch.device("cpu"))
    rows = torch.arange(40) % source.train_rows
    ids, places, labels = source.batch(rows, source.draw(40, torch.Generator().manual_seed(0)))
    assert ids.shape == (40, 40) and places.shape == labels.shape == (40, 6)
    assert all(len(set(row.tolist())) == 6 and int(row.min()) > 0 and int(row.max()) < 39 for row in places)
    seen = ids.gather(1, places)
    assert float((seen == tokenizer.mask_token_id).float().mean()) == pytest.approx(0.8, abs=0.1)
    assert 0.02 < float((seen == labels).float().mean()) < 0.25
    whole = ids.scatter(1, places, labels)
    assert torch.equal(whole[:, 1:-1], source.train[rows]), "nothing else changed"


def test_a_classifier_learns_pairs_of_texts(tmp_path):
    data = tmp_path / "pairs.jsonl"
    kinds = [dict(text="up", text_pair="it went", label="yes"), dict(text="down", text_pair="it went", label="no")]
    data.write_text("\n".join(map(json.dumps, kinds * 30)))
    config = folder_with(tmp_path, {**BERT, "architectures": None})
    settings = dict(FEW, batch_rows=8, train_tokenizer=300, epochs=6, rate=1e-2)
    found = headwise.train(config, str(data), tmp_path / "out", **settings)
    assert found["task"] == "classification" and found["evaluation"]["accuracy"] == 1
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "model")
    assert model.config.label2id == {"no": 0, "yes": 1}


def test_labelled_files_as_in_glue(tmp_path):
    def example(name, lines):
        (tmp_path / name).write_text("\n".join(lines), encoding="utf-8-sig")
        return read(str(tmp_path / name))

    assert example("a.tsv", ["sentence\tlabel", 'a "quote \t1'])[0] == ('a "quote ', None, "1")
    assert example("b.tsv", ["gj04\t0\t*\tBooks were sent."])[0] == ("Books were sent.", None, "0")
    mrpc = example("c.tsv", ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", "1\t7\t8\tone\ttwo"])
    assert mrpc[0] == ("one", "two", "1")
    scores = example("d.tsv", ["index\tsentence1\tsentence2\tscore", "0\ta\tb\t4.75"])
    assert Labels.of(scores, {}).names == () and float(Labels.of(scores, {}).tensor(scores, "")[0]) == 4.75
    with pytest.raises(HeadwiseError, match="names no text and label"):
        example("e.tsv", ["x\ty", "1\t2"])


def test_an_image_classifier_learns(tmp_path):
    rng = np.random.default_rng(0)
    labels = np.arange(80) % 2
    images = rng.integers(0, 60, (80, 8, 8, 3), dtype=np.uint8) + (labels * 150).astype(np.uint8)[:, None, None, None]
    np.savez(tmp_path / "data.npz", x_train=images[:64], y_train=labels[:64], x_test=images[64:], y_test=labels[64:])
    vit = dict(
        model_type="vit", hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        image_size=8, patch_size=4,
    )  # fmt: skip
    config = folder_with(tmp_path, vit)
    settings = dict(device="cpu", batch_rows=16, epochs=8, rate=1e-2)
    found = headwise.train(config, str(tmp_path / "data.npz"), tmp_path / "out", **settings)
    assert found["task"] == "image_classification" and found["row_tokens"] == 5 and found["evaluation"]["accuracy"] == 1
    model = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "out" / "model")
    assert model.config.num_labels == 2
    about = json.loads((tmp_path / "out" / "model" / "preprocessor_config.json").read_text())
    assert len(about["image_mean"]) == 3 and about["size"] == {"height": 8, "width": 8}
    with pytest.raises(HeadwiseError, match="takes images of 16 x 16"):
        wrong = folder_with(tmp_path, {**vit, "image_size": 16}, "wrong")
        headwise.train(wrong, str(tmp_path / "data.npz"), tmp_path / "out2", **settings)


def test_images_are_moved_whole_and_turned_over():
    image = torch.arange(1, 65, dtype=torch.uint8).view(1, 8, 8, 1)
    still, turned, moved = (torch.tensor([draw]) for draw in ([0.5, 0.5, 0.0], [0.5, 0.5, 0.9], [0.0, 0.5, 0.0]))
    assert torch.equal(_moved(image, still), image)
    assert torch.equal(_moved(image, turned), image.flip(2))
    assert torch.equal(_moved(image, moved)[:, 1:], image[:, :-1]) and not _moved(image, moved)[:, 0].any()


# What is refused.


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        ({"vocab_size": 5000}, {}, "no tokenizer beside it.*--train-tokenizer 5000"),
        ({"vocab_size": 100}, {"tokenizer": "embedded"}, "4,096 tokens.*vocab_size of 100"),
        ({}, {"batch_rows": None, "batch_tokens": 16}, "16 tokens is smaller than one row of 32.*--batch-tokens"),
        ({}, {"task": "sorting"}, "no task is called 'sorting'. Known: causal"),
        ({}, {"task": "image_classification"}, "x_train"),
        ({}, {"task": "masked"}, "no cls token"),
        ({}, {"steps": 2, "tokens": 9}, "both steps and tokens"),
        ({"model_type": "nonsense"}, {}, "no configuration that transformers can read"),
        ({}, {"data": "missing.txt"}, "missing.txt does not exist"),
        ({}, {"length": 4}, "length is 4; it must be at least 8"),
    ],
)
def test_errors_say_what_to_do(tmp_path, text, change, settings, message):
    config = folder_with(tmp_path, {**LLAMA, **change})
    asked = {"data": text, **FEW, **settings}
    with pytest.raises(HeadwiseError, match=message):
        headwise.train(config, out=tmp_path / "out", **asked)


def test_every_task_has_a_class_of_transformers():
    assert set(AUTO) == set(TASKS) and all(hasattr(transformers, name) for name in AUTO.values())


def test_only_a_bare_configuration_begins_at_random(tmp_path, monkeypatch):
    monkeypatch.setattr("headwise.families._missing._answers", lambda host: True)  # whether or not a hub is there
    config = folder_with(tmp_path, LLAMA)
    found = [has_weights(where) for where in ("embedded", "owner/model", config, f"{config}/config.json")]
    assert found == [True, True, False, False]


def test_empty_and_short_texts_are_refused(tmp_path):
    config = folder_with(tmp_path, LLAMA)
    for content, message in (("", "holds no text"), ("few words", "fewer than one row of 32")):
        (tmp_path / "short.txt").write_text(content)
        with pytest.raises(HeadwiseError, match=message):
            headwise.train(config, str(tmp_path / "short.txt"), tmp_path / f"out{len(content)}", **FEW)


def test_the_command_trains_once_and_says_so(tmp_path, text, monkeypatch, capsys):
    config = folder_with(tmp_path, LLAMA)
    out = tmp_path / "out"
    command = ["headwise", "train", config, "--data", text, "--out", str(out), "--steps", "2", "--device", "cpu"]
    command += ["--length", "32", "--batch-rows", "4", "--eval-tokens", "64"]

    def run(*more):
        monkeypatch.setattr(sys, "argv", [*command, *more])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        return code, capsys.readouterr()

    code, said = run("--json")
    assert code == 0 and json.loads(said.out)["fit"]["steps"] == 2
    code, said = run()
    assert code == 2 and "holds a finished training" in said.err
    code, said = run("--seed", "1", "--micro-tokens", "64")
    assert code == 2 and "other settings" in said.err
    code, said = run("--overwrite")
    assert code == 0 and "held out: loss" in said.out and str(out / "model") in said.out


def test_a_run_that_never_began_does_not_keep_the_folder(tmp_path, text):
    config = folder_with(tmp_path, LLAMA)
    with pytest.raises(HeadwiseError, match="no cls token"):
        headwise.train(config, text, tmp_path / "out", task="masked", **FEW)
    assert headwise.train(config, text, tmp_path / "out", steps=1, **FEW)["task"] == "causal"


def test_the_folder_of_the_configuration_is_never_written(tmp_path, text):
    config = folder_with(tmp_path, LLAMA)
    with pytest.raises(HeadwiseError, match="never written"):
        headwise.train(config, text, Path(config) / "out", **FEW)
    assert sorted(path.name for path in Path(config).iterdir()) == ["config.json"]
