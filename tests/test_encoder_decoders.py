"""Models of two stacks: halves of decoder blocks, the memory between the stacks, tables of positions, pairs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import FakeTokenizer, attending, cut, logits, random_plan, rows, tiny, written
from typer.testing import CliRunner

from headwise import cost, data
from headwise.checks import quality
from headwise.checks.exactness import cache_bytes_per_token
from headwise.cli.commands import app
from headwise.cuts import reshape, save
from headwise.data import own_text
from headwise.errors import DataError, ModelError
from headwise.families import auto_class_of
from headwise.families.bart import FAMILY as bart
from headwise.families.t5 import FAMILY as t5
from headwise.families.whisper import FAMILY as whisper
from headwise.heal.refit import refit
from headwise.probes import depth, gram
from headwise.tasks.seq2seq import Seq2Seq
from headwise.types import GONE, LayerKeep, LayerShape, ModelShape

EMBEDDED = Path(__file__).parents[1] / "src" / "headwise" / "embedded"
FAMILIES = pytest.mark.parametrize("family", [t5, bart], ids=lambda family: family.name)
STACKS = pytest.mark.parametrize("family", [t5, bart, whisper], ids=lambda family: family.name)
V1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "own_head": True}


def without(family, model, gone):
    """The model with some layers gone and the others cut at random, and its plan."""
    plan = random_plan(family, model, 4)
    layers = tuple(GONE if i in gone else layer for i, layer in enumerate(plan.target.layers))
    keep = tuple(LayerKeep() if i in gone else keep for i, keep in enumerate(plan.keep))
    plan = replace(plan, target=plan.target.with_layers(layers), keep=keep)
    return reshape(family, model, plan, gram.collect(family, model, rows(model), mlp=False)), plan


# Layers of the tiny models: 0 and 1 are the encoder's, 2 and 4 attend to their own stack, 3 and 5 to its output.
@STACKS
@pytest.mark.parametrize("gone", [(2,), (3,), (2, 3), (0, 4), (1, 2, 5)], ids=str)
def test_halves_of_blocks_can_go(family, gone, tmp_path):
    import transformers

    source = family.tailor(tiny(family, family.name, {}))
    made, plan = without(family, source, gone)
    assert sum(p.numel() for p in made.parameters()) == cost.parameters(plan.target)
    assert cache_bytes_per_token(made, plan.target.cache_bytes) == cost.kv_bytes_per_token(plan.target)
    save(family, made, FakeTokenizer(), tmp_path / "model", portable=False)
    loaded = getattr(transformers, auto_class_of(made)).from_pretrained(tmp_path / "model")
    attending(loaded, "eager")
    assert torch.equal(logits(loaded), logits(made))
    begun = want = family.example(made.config, 2, 9)
    for _ in range(4):
        want = family.longer(want, logits(made, want)[:, -1:].argmax(-1))
    got = loaded.generate(**family.arguments(begun), max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert torch.equal(got[:, -4:], written(family, want)[:, -4:]), "the cache counts tokens whichever half is left"
    again, _ = without(family, made, (0,)) if len(family.layers(made)) == 5 and 0 not in gone else (made, None)
    assert torch.isfinite(logits(again)).all(), "what lost layers can lose more"


@STACKS
def test_the_last_layer_of_a_kind_cannot_go(family):
    source = family.tailor(tiny(family, family.name, {}))
    shape = family.shape_of(source.config)
    layers = tuple(GONE if layer.role == "self" else layer for layer in shape.layers)
    with pytest.raises(ModelError, match="need a layer of each kind: encoder, self, cross"):
        family.build(source, layers, family.state_of(source))
    skipper = depth.Skipper(family, source, rows(source), Seq2Seq())
    assert skipper.without((2, 4)) == float("inf") and skipper.without((2,)) < 100


def test_an_output_table_of_its_own_stays_one(tmp_path):
    from transformers import AutoModelForSeq2SeqLM

    made = cut(t5, tiny(t5, "t5", V1_1), random_plan(t5, tiny(t5, "t5", V1_1), 2))
    save(t5, made, FakeTokenizer(), tmp_path / "model", portable=False)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    assert not torch.equal(loaded.lm_head.weight, loaded.shared.weight)
    assert loaded.encoder.embed_tokens.weight is loaded.shared.weight, "words are tied all the same"
    assert sum(p.numel() for p in loaded.parameters()) == cost.parameters(t5.shape_of(loaded.config))
    attending(loaded, "eager")
    assert torch.equal(logits(loaded), logits(made))


def test_every_layer_picks_its_own_heads_of_the_position_bias():
    model = t5.tailor(tiny(t5, "t5", {}))
    made = cut(t5, model, random_plan(t5, model, 6))
    with torch.no_grad():
        before = logits(made)
        unused = sorted(set(range(4)) - {int(h) for layer in made.encoder.block for h in layer.attention.heads_H})
        made.encoder.block[0].positions.table.weight[:, unused] += 5.0
        assert torch.equal(logits(made), before), "columns of heads that are gone mean nothing"
        used = made.encoder.block[1].attention.heads_H[:1]
        made.encoder.block[0].positions.table.weight[:3, used] += 1.0
        assert not torch.equal(logits(made), before), "the last layer reads the table of the first"


@STACKS
def test_a_refit_walks_each_model_with_its_own_memory(family):
    source = family.tailor(tiny(family, family.name, {}))
    broken = family.tailor(source)
    with torch.no_grad():
        family.blocks(broken)[0].output.weight.mul_(0.5)
    found = refit(family, source, broken, rows(source), strength=1e9)[1].layers  # so strong that nothing moves
    assert found[2]["attention"].error_before < 1e-6, "the decoder begins as the source's does"
    assert found[3]["attention"].error_before > 1e-4, "and then looks at what its own encoder made"
    healed, _ = refit(family, source, broken, rows(source), strength=1e-6)
    want = logits(source)
    assert (logits(healed) - want).square().mean() < 0.5 * (logits(broken) - want).square().mean()


def test_roles_price_what_they_keep():
    layers = [LayerShape(4, 4, 6, 5, 0 if role == "self" else 10, 6, role) for role in ("encoder", "self", "cross")]
    grain = t5.shape_of(tiny(t5, "t5", {}).config).grain
    model = ModelShape("t5", 7, 11, True, tuple(layers), grain, mlp_matrices=2, layer_norms=14, element_bytes=2)
    assert [cost.layer_kv_bytes_per_token(model, layer) for layer in layers] == [0, 4 * 11 * 2, 4 * 11 * 2]
    attention, mlp = 2 * 7 * 4 * (6 + 5), 2 * 7 * 10
    assert [cost.layer_parameters(model, layer) for layer in layers] == [
        attention + mlp + 14, attention + 7, attention + mlp + 14,
    ]  # fmt: skip
    seen = [3, 2, 3]  # of three tokens: all, those before, all of the input
    reading = 3 * sum(2 * (attention + m) + 2 * n * 4 * 11 for m, n in zip((mlp, 0, mlp), seen, strict=True))
    assert cost.prefill_flops(model, 3) == 2 * 7 * 11 + reading
    assert ModelShape.from_json(model.to_json()) == model and "role" not in replace(layers[0], role="").to_json()


PAIRS = [{"text": f"one two {'three ' * i}", "target": f"four {'five ' * i}"} for i in range(1, 5)]


def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(EMBEDDED)


def test_pairs_become_rows_whose_labels_are_the_target(tmp_path):
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    task, words = Seq2Seq(start=7), tokenizer()
    ids = task.blocks(data.documents(str(tmp_path / "pairs.jsonl")), words, 64)
    target = words(PAIRS[0]["target"])["input_ids"]
    read = words(PAIRS[0]["text"])["input_ids"]
    row = [*read, data.GIVEN, 7, *target]
    assert ids[0, : len(row)].tolist() == row and (ids[0, len(row) :] == data.NOTHING).all()
    assert torch.equal(task.complete(None, ids, 0, None), ids), "nothing is left to write"
    batch = task.prepare(ids, 0)
    first = batch._replace(inputs=batch.inputs[:1], labels=batch.labels[:1]).batches()[0]
    arguments = t5.arguments(first.inputs)
    assert arguments["input_ids"][0].tolist() == read and arguments["decoder_input_ids"][0].tolist() == [
        7,
        *target[:-1],
    ]
    assert first.labels[0, -len(target) :].tolist() == target and task.terms(first) == len(target)
    for part in batch.batches():
        assert (part.inputs == data.GIVEN).int().argmax(1).unique().numel() == 1, "rows of a batch share both lengths"


def test_targets_on_some_lines_only_are_refused(tmp_path):
    lines = [*PAIRS, {"text": "alone"}]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(DataError, match='has a "target" on some lines only'):
        Seq2Seq().blocks(data.documents(str(tmp_path / "mixed.jsonl")), tokenizer(), 64)
    (tmp_path / "wrong.jsonl").write_text(json.dumps({"text": "a", "target": 3}))
    with pytest.raises(DataError, match='"target" must be a string'):
        list(data.documents(str(tmp_path / "wrong.jsonl")))
    with pytest.raises(DataError, match="reads a text before it writes one"):
        own_text.written_by(tiny(t5, "t5", {}), 1, 8)


def test_texts_that_fit_are_rows_and_longer_ones_are_cut():
    class Letters:
        eos_token_id = 1

        def __call__(self, text, add_special_tokens=True, verbose=False):
            return {"input_ids": [ord(letter) for letter in text] + [1] * add_special_tokens}

    ids = Seq2Seq().blocks(["ab", "c" * 100], Letters(), 32)
    rows = [row[row != data.NOTHING].tolist() for row in ids]
    assert rows[0] == [97, 98, 1] and {len(row) for row in rows[1:]} <= {8, 16, 32}
    assert all(row[0] == 99 and row[-1] == 1 for row in rows[1:]), "a tokenizer that only ends texts ends them all"


def test_a_model_without_a_head_is_for_writing_too():
    from headwise import families

    for head, task in (("", "seq2seq"), ("BartModel", "seq2seq"), ("BartForConditionalGeneration", "seq2seq")):
        config = tiny(bart, "bart", {}).config
        config.architectures = [head] if head else None
        assert families.task_of(config) == task
    config.architectures = ["BartForQuestionAnswering"]
    with pytest.raises(ModelError, match="BartForQuestionAnswering is for none of the tasks"):
        families.task_of(config)


@FAMILIES
def test_a_model_writes_its_own_targets(family):
    model = tiny(family, family.name, {})
    task = Seq2Seq.for_model(model.config, None, "")
    texts = torch.tensor([[5, 6, 7, 8] + [data.NOTHING] * 8, [*range(9, 21)], [*range(21, 33)]])
    ids = task.complete(model, texts, 3, lambda items, label: items)
    assert torch.equal(ids, task.complete(model, texts, 3, lambda items, label: items)), "seeded"
    assert not torch.equal(ids, task.complete(model, texts, 4, lambda items, label: items))
    for row, text in zip(ids, texts, strict=True):
        length = int((text >= 0).sum())
        target = row[length + 1 :][row[length + 1 :] != data.NOTHING].tolist()
        assert row[:length].tolist() == text[:length].tolist() and int(row[length]) == data.WRITTEN
        assert target[0] == task.start and task.end not in target[1:-1], "one end at most, and nothing behind it"
        assert target[-1] == task.end or len(target) == 1 + max(8, length)


@STACKS
def test_damage_is_the_divergence_per_target_token(family):
    source = family.tailor(tiny(family, family.name, {}))
    made = cut(family, source, random_plan(family, source, 1))
    ids, task = rows(source), Seq2Seq()
    found = quality.compare(family, source, made, ids, task=task)
    p, q = (logits(model, ids)[:, :-1].double().log_softmax(-1) for model in (source, made))
    assert torch.allclose(torch.tensor(found.kl), (p.exp() * (p - q)).sum(-1).mean(-1), atol=1e-6)
    target = written(family, ids)[:, 1:].unsqueeze(-1)
    assert torch.allclose(torch.tensor(found.loss_after), -q.gather(-1, target).mean((1, 2)), atol=1e-5)
    own = ids.clone()
    data.marks_of(own)[data.marks_of(ids) == data.GIVEN] = data.WRITTEN
    assert not len(quality.compare(family, source, made, own, task=task).loss_before), "its own targets prove nothing"


@FAMILIES
def test_the_command_line_from_a_folder_to_a_verified_model(family, tmp_path):
    words = tokenizer()
    special = dict.fromkeys(("eos_token_id", "pad_token_id", "decoder_start_token_id"), words.eos_token_id)
    model = family.tiny(family.name, vocab_size=len(words), **special)
    model.save_pretrained(tmp_path / "source")
    words.save_pretrained(tmp_path / "source")
    text = tmp_path / ("pairs.jsonl" if family is t5 else "text.txt")
    if family is t5:
        pairs = [{"text": "a b c d " * (1 + i % 2), "target": "e f g " * (1 + i % 3)} for i in range(40)]
        text.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    else:
        text.write_text(Path(cost.__file__).read_text())
    options = "--budget params=90% --tokens 512 --eval-tokens 256 --swap-tokens 64 --context 32 --allow qk,v,mlp,depth"
    arguments = ["run", str(tmp_path / "source"), *options.split(), "--data", str(text), "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert all(check["passed"] for check in verdict["checks"]), verdict["checks"]
    assert verdict["size"]["parameters_after"] <= 0.9 * verdict["size"]["parameters_before"]
    assert ("loss_after" in verdict["quality"]) == (family is t5), "where targets were given"
    assert len(verdict["samples"]) == 3
    arguments = ["allocate", str(tmp_path / "run"), "--budget", "params=95%", "--strategy", "uniform"]
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 0, again.output
    target = json.loads((tmp_path / "run" / "plan.json").read_text())["target"]["layers"]
    for role, width in (("self", {0}), ("cross", {target[0]["mlp_width"]})):
        assert {layer["mlp_width"] for layer in target if layer["role"] == role} == width, "equal where there is one"
    report = (tmp_path / "run" / "report.html").read_text()
    assert "AutoModelForSeq2SeqLM" in report and "2 self" in report and "nats per target token" in report
