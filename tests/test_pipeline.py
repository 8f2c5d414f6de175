"""The straight line as its user meets it: commands, files, errors, resuming."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headwise import cli, families, pipeline, stages
from headwise.cuts import save
from headwise.errors import HeadwiseError
from headwise.families.llama import FAMILY as llama
from headwise.runs.finished import Ledger
from headwise.runs.folder import RunFolder
from headwise.runs.settings import Settings
from headwise.types import Plan, Readings

SMALL = ["--tokens", "1024", "--eval-tokens", "512", "--swap-tokens", "128", "--length", "64", "--device", "cpu"]
RUN = ["--budget", "kv=75%", "--data", "stdlib", *SMALL]
ROUNDS = ["--allow", "qk,v,mlp", "--rounds", "2"]  # bits are chosen at once


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tiny stock model with the embedded tokenizer, as a user's folder."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    llama.tiny(vocab_size=4096, tie_word_embeddings=True).save_pretrained(path)
    embedded = Path(families.locate("embedded")[0])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(embedded / name, path / name)
    return path


@pytest.fixture(scope="session")
def finished(folder, tmp_path_factory):
    """A finished run of that model."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert call("run", folder, *RUN, "--out", out) == 0
    return out


def call(*arguments):
    """The exit code of the command line, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["headwise", *map(str, arguments)])
        try:
            cli.main()
        except SystemExit as stop:
            return stop.code or 0
    return 0


def refused(capsys, *arguments):
    """The error text of a command that must end with code 2 and one line."""
    capsys.readouterr()
    assert call(*arguments) == 2
    text = capsys.readouterr().err.strip().splitlines()[-1]
    assert text.startswith("error: ")
    return text


def tree(path):
    return {p.relative_to(path): hashlib.sha256(p.read_bytes()).hexdigest() for p in path.rglob("*") if p.is_file()}


def test_run_prints_the_verdict_as_json(folder, finished, tmp_path, capsys):
    before = tree(folder)
    assert call("run", folder, *RUN, "--out", tmp_path / "run", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    verdict = found["verdict"]
    ends = ("before", "after", "after_low", "after_high")
    assert {*(f"perplexity_{end}" for end in ends), "kl", "next_token_agreement"} <= set(verdict["quality"])
    sizes = {f"{name}_{end}" for name in ("parameters", "kv_bytes_per_token") for end in ("before", "after")}
    assert sizes == set(verdict["size"])
    assert {"predicted", "measured"} <= set(verdict["damage"])
    assert verdict["checks"] and all(check["passed"] for check in verdict["checks"])
    assert verdict["size"]["kv_bytes_per_token_after"] <= 0.75 * verdict["size"]["kv_bytes_per_token_before"]
    assert found["plan"]["strategy"] == "exact" and found["out"] == str(tmp_path / "run")
    assert tree(folder) == before, "the source's folder is never written"
    plans = [(path / "plan.json").read_bytes() for path in (tmp_path / "run", finished)]
    assert plans[0] == plans[1], "the same seed gives the same plan"
    assert "<html" in (tmp_path / "run" / "report.html").read_text()


def test_the_stages_alone_do_what_run_does(folder, finished, tmp_path, capsys):
    out = tmp_path / "staged"
    probing = [argument for argument in RUN if argument not in ("--eval-tokens", "512")]
    assert call("probe", folder, *probing, "--out", out) == 0
    assert call("allocate", out, "--budget", "kv=75%") == 0
    assert Plan.read(out / "plan.json").target == Plan.read(finished / "plan.json").target
    assert call("heal", out) == 0
    assert call("verify", out) == 0
    assert call("report", out) == 0
    assert call("show", out / "plan.json") == 0
    assert call("show", out / "readings.json") == 0
    assert call("show", out / "verdict.json") == 0
    assert "predicted damage before healing" in capsys.readouterr().out


def test_verifying_too_early_says_what_to_run(finished, tmp_path, capsys):
    out = tmp_path / "early"
    shutil.copytree(finished, out)
    shutil.rmtree(out / "model")
    assert f"run: headwise heal {out}" in refused(capsys, "verify", out)


def test_thinking_again_keeps_the_old_plan(finished, tmp_path):
    out = tmp_path / "again"
    shutil.copytree(finished, out)
    old = (out / "plan.json").read_bytes()
    assert call("allocate", out, "--budget", "kv=60%") == 0
    assert (out / "plan.previous.json").read_bytes() == old


def test_a_killed_run_goes_on_and_ends_the_same(folder, finished, tmp_path, monkeypatch):
    out = tmp_path / "killed"
    for module, stage in ((stages.in_memory, "reshape"), (stages.in_memory, "save_model"), (pipeline, "verify")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, stage, lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
            assert call("run", folder, *RUN, "--out", out) == 130, f"killed in {stage}"
    monkeypatch.setattr(stages.probe, "probe", lambda *a, **k: pytest.fail("probed again although readings were there"))
    assert call("run", folder, *RUN, "--out", out) == 0
    for name in ("plan.json", "model/model.safetensors"):
        assert (out / name).read_bytes() == (finished / name).read_bytes(), f"{name} as if it had never been killed"


def test_rounds_meet_the_budget_and_compose(folder, tmp_path):
    out, record = tmp_path / "rounds", Ledger.record

    def killed_in_the_second(ledger, stage, *rest, **more):
        if stage == "probe" and ledger.folder.name == "2":
            raise KeyboardInterrupt
        record(ledger, stage, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "record", killed_in_the_second)
        assert call("run", folder, *RUN, *ROUNDS, "--out", out) == 130
    assert call("run", folder, *RUN, *ROUNDS, "--out", out) == 0
    assert (out / "rounds" / "2" / "finished.json").exists(), "as if it had never been killed"
    plan = Plan.read(out / "plan.json")
    assert plan.source == llama.shape_of(families.load(str(folder))[0].config), "the plan starts at the source"
    assert plan.spent["kv"] <= plan.budgets[0].limit


def test_every_unit_can_be_cut_under_several_budgets(folder, tmp_path):
    units = ["--allow", "heads,kv_heads,qk,v,mlp", "--budget", "params=97%", "--budget", "flops=80%@64"]
    assert call("run", folder, *RUN, *units, "--out", tmp_path / "all") == 0
    verdict = json.loads((tmp_path / "all" / "verdict.json").read_text())
    assert all(check["passed"] for check in verdict["checks"])


def test_portable_results_need_no_custom_code(folder, tmp_path):
    assert call("run", folder, *RUN, "--portable", "--out", tmp_path / "run") == 0
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert all(check["passed"] for check in verdict["checks"]), "stock code gives the tailored model's logits"
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["model_type"] == "llama" and "auto_map" not in config
    assert not list((tmp_path / "run" / "model").glob("*.py"))


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
LLAMA3 = YARN | {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


LINEAR = {"rope_type": "linear", "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


@pytest.mark.parametrize("rope", [LINEAR, LLAMA3, YARN, DYNAMIC], ids=lambda rope: rope["rope_type"])
def test_every_way_to_scale_positions_is_kept(folder, tmp_path, capsys, rope):
    source, portable = tmp_path / "source", rope is not DYNAMIC
    shutil.copytree(folder, source)
    model = llama.tiny(vocab_size=4096, tie_word_embeddings=True, rope_parameters={"rope_theta": 10000.0, **rope})
    model.save_pretrained(source)
    settings = Settings(
        str(source), ("kv=75%",), data="stdlib", tokens=256, eval_tokens=128, swap_tokens=0, length=32,
        heal="none", portable=portable, device="cpu",
    )  # fmt: skip
    held = pipeline.load_source(settings)
    fitted = pipeline.fit(settings, held, first=pipeline.probe(settings, held, diagnose=False))
    assert fitted.plan.target != fitted.plan.source
    rounded = save(llama, fitted.model, held.tokenizer, tmp_path / "model", portable)
    again = families.load(str(tmp_path / "model"))[0]
    assert again.config.model_type == ("llama" if portable else "headwise_llama")
    with torch.no_grad():
        ours, theirs = (found(held.evaluation).logits for found in (rounded, again))
    assert torch.allclose(ours, theirs, atol=1e-5), "a loaded model gives the same logits, portable ones in stock code"
    if not portable:
        text = refused(capsys, "run", source, *RUN, "--portable", "--out", tmp_path / "other")
        assert "Leave out --portable" in text


def test_text_of_any_kind_calibrates(folder, tmp_path):
    lines = tmp_path / "text.jsonl"
    lines.write_text("".join(json.dumps({"text": "def f(x):\n    return x\n" * 200}) + "\n" for _ in range(8)))
    for source in (str(lines), "self"):
        settings = Settings(model=str(folder), data=source, tokens=512, eval_tokens=128, length=32, device="cpu")
        bench = pipeline.load_source(settings)
        parts = (bench.calibration, bench.rehearsal, bench.evaluation)
        assert [part.shape for part in parts] == [(14, 32), (2, 32), (4, 32)]


def test_a_datasets_folder_calibrates(folder, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text(
        "".join(json.dumps({"text": "x = 1\n" * 400}) + "\n" for _ in range(8))
    )
    settings = Settings(
        model=str(folder), data=str(tmp_path / "set"), tokens=512, eval_tokens=128, length=32, device="cpu"
    )
    assert len(pipeline.load_source(settings).calibration) == 14


def test_probing_leaves_the_model_as_it_was(folder):
    settings = Settings(str(folder), ("kv=75%",), data="stdlib", tokens=512, swap_tokens=64, length=32, device="cpu")
    bench = pipeline.load_source(settings)
    before = {name: tensor.clone() for name, tensor in bench.model.state_dict().items()}
    pipeline.probe(settings, bench)
    assert all(torch.equal(tensor, before[name]) for name, tensor in bench.model.state_dict().items())
    assert all(p.requires_grad for p in bench.model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in bench.model.modules()), "no hook stays behind"


def test_bad_input_is_refused_in_one_line(folder, finished, tmp_path, capsys):
    out = tmp_path / "run"
    other = tmp_path / "mamba"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "mamba"}')
    assert "type 'mamba' are not supported" in refused(capsys, "run", other, *RUN, "--out", out)
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    text = refused(capsys, "run", folder, *RUN[:2], "--data", empty, *SMALL, "--out", out, "--overwrite")
    assert "give a longer text" in text
    assert "does not exist" in refused(capsys, "run", tmp_path / "nowhere", *RUN, "--out", out)
    assert "kv=10%" in refused(capsys, "run", folder, *RUN, "--budget", "kv=10%", "--out", out, "--overwrite")
    assert "Did you mean 'exact'?" in refused(
        capsys, "run", folder, *RUN, "--strategy", "exat", "--out", out, "--overwrite"
    )
    assert "cannot read the budget" in refused(
        capsys, "run", folder, "--budget", "kv", *SMALL, "--out", out, "--overwrite"
    )
    assert "finished run" in refused(capsys, "run", folder, *RUN, "--out", finished)
    assert "lies in the source" in refused(capsys, "run", folder, *RUN, "--out", folder / "run")
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    (stranger / "precious.txt").write_text("mine")
    assert "choose another --out" in refused(capsys, "run", folder, *RUN, "--out", stranger, "--overwrite")
    assert tree(stranger) == {Path("precious.txt"): hashlib.sha256(b"mine").hexdigest()}, "nothing written or lost"


def test_damaged_checkpoints_are_refused(folder, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:20_000])
    assert "fetch the files again" in refused(capsys, "run", broken, *RUN, "--out", tmp_path / "a")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.layers.1.self_attn.k_proj.weight")
    save_file(tensors, weights, metadata={"format": "pt"})
    assert "1 tensors are missing" in refused(capsys, "run", broken, *RUN, "--out", tmp_path / "b")


def test_a_plan_edited_into_nonsense_is_refused(finished, tmp_path, capsys):
    out = tmp_path / "edited"
    shutil.copytree(finished, out)
    plan = json.loads((out / "plan.json").read_text())
    layer, before = plan["target"]["layers"][1], tree(out / "model")
    layer["mlp_width"] *= 2
    (out / "plan.json").write_text(json.dumps(plan))
    assert "layer 1: mlp_width grows from 64 to 128; plans only shrink" in refused(capsys, "heal", out)
    layer |= {"mlp_width": 64, "v_code": {"13": 16}}
    (out / "plan.json").write_text(json.dumps(plan))
    assert "v_code gives a count for '13' bits; widths are 1 to 12 bits" in refused(capsys, "heal", out)
    (out / "plan.json").write_text("{")
    assert "not valid JSON" in refused(capsys, "heal", out)
    assert tree(out / "model") == before, "the model that was there is still there"


def test_a_full_disk_loses_nothing(folder, tmp_path, capsys, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    out = tmp_path / "full"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.PreTrainedModel.save_pretrained", full)
        text = refused(capsys, "run", folder, *RUN, "--out", out)
    assert "No space left on device" in text
    assert not (out / "model").exists() and not [p for p in out.iterdir() if p.name.startswith(".")], (
        "no half-written folder"
    )
    assert call("run", folder, *RUN, "--out", out) == 0, "resumes once there is space"


def test_help_and_allocate_never_import_torch(finished, tmp_path):
    out = tmp_path / "light"
    shutil.copytree(finished, out)
    for arguments in (
        ["--help"],
        ["allocate", str(out), "--budget", "kv=80%"],
        ["report", str(out)],
        ["show", str(out / "plan.json")],
    ):
        script = f"import sys; sys.argv = ['headwise', *{arguments!r}]\nfrom headwise.cli.commands import main\n"
        script += (
            "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code\nassert 'torch' not in sys.modules"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert done.returncode == 0, f"{arguments}: {done.stderr[-500:]}"


def test_the_python_interface(finished):
    import headwise

    plan = headwise.allocate(finished, "kv=75%")
    assert plan == Plan.read(finished / "plan.json")
    model = headwise.load(finished / "model")
    assert model.config.model_type == "headwise_llama"
    with pytest.raises(HeadwiseError, match="holds no run"):
        headwise.verify(finished / "model")
    assert isinstance(Readings.read(RunFolder(finished).readings_file), Readings)
