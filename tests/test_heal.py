"""Healing as its user meets it: layers that learn get better or stay as they were, and nothing else changes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_pipeline import RUN, call, refused
from tiny_models import attending, random_plan

from headwise import families, heal, pipeline, tasks
from headwise.cuts import reshape
from headwise.errors import HeadwiseError
from headwise.families.bert import FAMILY as bert
from headwise.families.gpt2 import FAMILY as gpt2
from headwise.families.llama import FAMILY as llama
from headwise.families.t5 import FAMILY as t5
from headwise.families.vit import FAMILY as vit
from headwise.heal import _replay, blockwise, refit
from headwise.heal._job import Job
from headwise.heal._layer import attention_of, passage
from headwise.probes import gram
from headwise.registry import find, names
from headwise.runs.heal_options import Options
from headwise.runs.settings import Settings
from headwise.tasks import Prepared
from headwise.types import GONE, LayerKeep

CLASSIFIER = {"head": "AutoModelForSequenceClassification", "num_labels": 3}
MODELS = [
    pytest.param(llama, "llama", {}, id="llama"),
    pytest.param(gpt2, "gpt2", {}, id="gpt2"),
    pytest.param(bert, "bert", CLASSIFIER, id="bert"),
    pytest.param(vit, "vit", {}, id="vit"),
    pytest.param(t5, "t5", {}, id="t5"),
]


def job_of(family, kind, changes=None, gone=(), **more):
    """A model with a random plan carried out, layers gone among it, and rows to heal it on."""
    torch.manual_seed(0)
    source = family.tailor(attending(family.tiny(kind, **(changes or {})), "eager"))
    rows = family.example(source.config, 32)
    plan = random_plan(family, source, 3, least=0.25)  # what a few steps can heal
    layers = tuple(GONE if i in gone else layer for i, layer in enumerate(plan.target.layers))
    keep = tuple(LayerKeep() if i in gone else kept for i, kept in enumerate(plan.keep))
    plan = replace(plan, target=plan.target.with_layers(layers), keep=keep)
    cut = reshape(family, source, plan, gram.collect(family, source, rows, mlp=False))
    task = tasks.of(source, None)
    text = Prepared(rows, rows, row=task.row_tokens)
    return Job(family, task, source, cut, text, text, options=Options(steps=24), **more)


def gains_of(record):
    """Of every layer, what it learned: the stream behind it, or of the last one the answers."""
    return [layer["answers" if layer is record["layers"][-1] else "stream"] for layer in record["layers"]]


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", names("headwise.heal"))
def test_a_method_says_what_it_is_and_what_it_starts_from(name):
    module = find("headwise.heal", name)
    assert name == module.NAME and module.MEANING
    seen = {name}
    while module.AFTER:
        module = find("headwise.heal", module.AFTER)
        assert module.NAME not in seen, "a chain has an end"
        seen.add(module.NAME)
    assert module.NAME == "refit", "prices are measured after a refit, so all that heals begins with one"


@pytest.mark.parametrize(("family", "kind", "changes"), MODELS)
def test_a_refit_holds_nothing_of_a_layer_that_is_done_but_the_streams(family, kind, changes, monkeypatch):
    problems, rows = weakref.WeakSet(), []

    class Watched(refit._LeastSquares):
        def __init__(self, linear):
            super().__init__(linear)
            problems.add(self)

    def kept(*args):
        rows.append(batch := plain(*args))
        return batch

    def track(items, label):
        for item in items:
            assert not problems, "moments go with their layer"
            assert rows and all(getattr(batch, name) is None for batch in rows for name in worked_on)
            yield item

    plain, worked_on = refit._Rows, ("source_z", "z", "source_middle", "source_end", "cut_middle", "channels")
    monkeypatch.setattr(refit, "_LeastSquares", Watched)
    monkeypatch.setattr(refit, "_Rows", kept)
    refit.heal(replace(job_of(family, kind, changes), track=track))


@pytest.mark.parametrize(("family", "kind", "changes"), MODELS)
def test_every_layer_gets_better_or_stays_and_the_models_given_are_untouched(family, kind, changes):
    job = job_of(family, kind, changes)
    before = state(job.source), state(job.cut)
    asked = [p.requires_grad for p in job.cut.parameters()]
    healed, found = blockwise.heal(job)
    gains = gains_of(found)
    assert len(gains) == len(family.layers(job.cut))
    assert all(gain["error_after"] <= gain["error_before"] for gain in gains)
    assert sum(gain["error_after"] for gain in gains) < 0.97 * sum(gain["error_before"] for gain in gains)
    assert equal(state(job.source), before[0]) and equal(state(job.cut), before[1])
    assert [p.requires_grad for p in healed.parameters()] == asked and all(p.grad is None for p in healed.parameters())
    losses = [point["loss"] for point in found["curve"]]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    assert found["curve"][-1]["step"] == 24 and found["tokens"] > 0


def test_learning_starts_from_the_refit_and_brings_the_whole_model_nearer_to_its_source():
    job = job_of(llama, "llama")
    rows = torch.randint(3, 97, (160, 20))  # random, so that nothing is learned by heart
    job = replace(job, calibration=Prepared(rows[:128], rows[:128]), options=Options(steps=60))
    models, found = zip(*(heal.healed(method, job) for method in ("refit", "blockwise")), strict=True)
    with torch.no_grad():
        want, *got = (llama.run(model, rows[128:]) for model in (job.source, *models))
    errors = [float((logits - want).square().mean()) for logits in got]
    assert errors[1] < errors[0]
    assert [stage["method"] for stage in found[1]["stages"]] == ["refit", "blockwise"]
    assert [set(record["layers"][0]) - {"channels"} for record in found] == [
        {"attention", "mlp"},
        {"attention", "mlp", "stream"},
    ]


def with_more_text():
    """A job with little text to calibrate on and more to learn from, and rows that nothing is learned from."""
    torch.manual_seed(1)
    rows = torch.randint(3, 97, (160, 20))
    few, more = Prepared(rows[:16], rows[:16]), Prepared(rows[16:128], rows[16:128])
    return replace(job_of(llama, "llama"), calibration=few, more=more), rows[128:]


@pytest.mark.parametrize("side_by_side", [None, 2])
def test_more_text_is_learned_from_where_it_is_asked_for_and_heals_more(side_by_side, monkeypatch):
    job, unseen = with_more_text()
    monkeypatch.setitem(blockwise.BATCH_TOKENS, "cpu", 80)

    def heal(**asked):
        options = Options(side_by_side=side_by_side, **asked)
        model, found = blockwise.heal(replace(job, options=options))
        with torch.no_grad():
            return float((llama.run(model, unseen) - llama.run(job.source, unseen)).square().mean()), found

    error, found = heal(steps=60)
    assert found["tokens"] == 16 * 20 and heal(tokens=160, steps=5)[1]["tokens"] == 160, "never more than asked for"
    fewer, found = heal(tokens=2000, steps=60)
    assert found["tokens"] == 2000 and fewer < error
    assert heal(tokens=10**9)[1]["curve"][-1]["step"] == round((14 + 112) / 4), "all of it once"


@pytest.mark.parametrize(("method", "rows"), [("refit", 0), ("blockwise", 12), ("distill", 12)])
def test_further_text_is_read_for_healings_that_learn(method, rows):
    asked = {"heal": method, "heal_options": ("tokens=1024",), "tokens": 256, "eval_tokens": 64, "length": 64}
    more = pipeline.workbench(Settings(model="embedded", budgets=("kv=50%",), device="cpu", **asked)).more
    assert (0 if more is None else len(more)) == rows


def test_text_beyond_the_memory_is_learned_from_in_portions_and_a_kill_loses_none(monkeypatch, tmp_path):
    job, unseen = with_more_text()
    job, held = replace(job, options=Options(tokens=10**9, batch=80, steps=60)), []
    monkeypatch.setitem(blockwise.ROOM, "cpu", 40 * 20 * 32 * 4 * blockwise.STREAMS)  # streams of forty rows
    own = blockwise._Walk._parts
    monkeypatch.setattr(blockwise._Walk, "_parts", lambda walk, rows: held.append(len(rows.inputs)) or own(walk, rows))
    healed, found = blockwise.heal(job)
    assert held[1::2] == [2] * 4 and sum(held[::2]) == 14 + 112 and max(held) <= 40
    assert [point["step"] for point in found["curve"]] == list(range(0, 61, 3)) and found["tokens"] == 128 * 20
    assert all(gain["error_after"] < gain["error_before"] for gain in gains_of(found))
    with torch.no_grad():
        want, before, after = (llama.run(model, unseen) for model in (job.source, job.cut, healed))
    assert (after - want).square().mean() < (before - want).square().mean()

    def track(items, label):
        for item in items:
            if (label, item) == ("blockwise, portion 2 of 4", 1):
                raise Killed
            yield item

    with pytest.raises(Killed):
        blockwise.heal(replace(job, folder=tmp_path, track=track))
    assert len(list(tmp_path.iterdir())) == 3 + 1
    resumed, again = blockwise.heal(replace(job, folder=tmp_path))
    assert equal(state(resumed), state(healed)) and again == found


def test_a_device_that_is_too_small_is_no_riddle(monkeypatch):
    def full(*told):
        raise torch.OutOfMemoryError

    job = job_of(llama, "llama")
    monkeypatch.setattr(blockwise, "_in_turn", full)
    with pytest.raises(HeadwiseError, match=r"add --heal-option batch=128 or --heal-option tokens=160\.$"):
        blockwise.heal(job)
    assert all(p.requires_grad for p in job.source.parameters()), "the source is as it was"


def test_a_layer_that_cannot_get_better_is_left_alone():
    job = job_of(llama, "llama")
    whole = replace(job, cut=llama.tailor(job.source))
    healed, found = blockwise.heal(whole)
    assert equal(state(healed), state(job.source)), "there is nothing to learn where nothing was cut"
    assert all(gain["error_after"] == gain["error_before"] for gain in gains_of(found))


def test_a_rate_that_would_wreck_a_layer_does_it_no_harm():
    job = job_of(llama, "llama")
    _, found = blockwise.heal(replace(job, options=Options(steps=12, rate=1e6)))
    assert all(gain["error_after"] <= gain["error_before"] for gain in gains_of(found))


@pytest.mark.parametrize("gone", [(0,), (1, 2)], ids=str)
def test_layers_learn_to_stand_in_for_those_that_are_gone(gone):
    _, found = blockwise.heal(job_of(llama, "llama", gone=gone))
    gains = gains_of(found)
    assert len(gains) == 3 - len(gone) and any(gain["error_after"] < gain["error_before"] for gain in gains)


@pytest.mark.parametrize(("family", "kind", "changes"), MODELS)
def test_layers_learn_side_by_side_as_well_and_however_many_at_once(family, kind, changes):
    job = job_of(family, kind, changes)
    models, found = zip(
        *(blockwise.heal(replace(job, options=Options(steps=12, side_by_side=count))) for count in (1, 3)), strict=True
    )
    assert equal(*map(state, models)) and found[0] == found[1], "how many learn at once changes nothing"
    assert sum(g["error_after"] for g in gains_of(found[0])) < sum(g["error_before"] for g in gains_of(found[0]))
    assert all(p.grad is None for model in (models[0], job.source) for p in model.parameters())


def test_a_layer_that_learns_side_by_side_does_not_see_what_others_learned():
    job = replace(job_of(llama, "llama"), options=Options(steps=12, side_by_side=1))
    whole, _ = blockwise.heal(job)
    first = llama.tailor(job.cut)  # whose second layer will read another stream once the first has learned
    llama.layers(first)[0].load_state_dict(llama.layers(whole)[0].state_dict())
    other, _ = blockwise.heal(replace(job, cut=first))
    one, two, base = (state(llama.layers(model)[1]) for model in (whole, other, job.cut))
    assert not equal(one, two) and not equal(one, base)


@pytest.mark.parametrize(("family", "kind", "changes"), MODELS)
def test_attention_is_compared_as_the_model_computes_it(family, kind, changes):
    job = job_of(family, kind, changes)
    rows = job.calibration.batches()[0]
    contexts = family.contexts(job.source, [rows.inputs])[0]
    stream = family.embed(job.source, rows.inputs)
    for block, context in zip(family.blocks(job.source), contexts, strict=True):
        with torch.no_grad():
            seen = passage(block, stream, context)
            places = torch.arange(seen.q.shape[2])
            weights = attention_of(block, seen, context, places).exp()
            q, k, v = block.heads(stream, context)
            z = block.attended(q, k, v, context).unflatten(-1, (weights.shape[1], -1)).transpose(1, 2)
            values = v.repeat_interleave(block.attention.attend.num_key_value_groups, dim=1)
            assert torch.allclose(weights @ values, z, atol=1e-5), "the same weights give the same outputs"
            stream = seen.out


def test_matching_attention_brings_its_weights_nearer():
    job = job_of(llama, "llama")  # whose second layer has all its heads, with fewer dimensions
    rows = job.calibration.inputs
    contexts = llama.contexts(job.source, [rows])[0]
    places = torch.arange(rows.shape[1])

    def attention(first, second):
        """Of the second layer, on what a first layer puts out."""
        stream = first(llama.embed(job.source, rows), contexts[0])
        return attention_of(second, passage(second, stream, contexts[1]), contexts[1], places)

    def distance(model):
        with torch.no_grad():
            want = attention(*llama.blocks(job.source)[:2])
            return float((want.exp() * (want - attention(llama.blocks(job.cut)[0], llama.blocks(model)[1]))).sum())

    plain, matched = (
        blockwise.heal(replace(job, options=Options(steps=24, side_by_side=1, attention=weight)))[0]
        for weight in (None, 1000.0)  # random heads look everywhere alike
    )
    assert distance(matched) < min(distance(plain), distance(job.cut))


@pytest.mark.parametrize(("family", "kind", "changes"), MODELS)
def test_replayed_steps_of_a_layer_are_the_ordinary_ones(family, kind, changes, monkeypatch):
    job, made = replace(job_of(family, kind, changes), options=Options(steps=20, batch=80, attention=0.1)), []
    plain, told = blockwise.heal(job)

    def replay():
        made.append(_replay.Replay(lambda body: body))  # reads and writes the same memory as a captured graph
        return made[-1]

    monkeypatch.setattr(blockwise, "Replay", replay)
    monkeypatch.setattr(blockwise, "_replayable", lambda job, stretch: True)
    healed, found = blockwise.heal(job)
    assert equal(state(healed), state(plain)) and found == told
    assert sum(replay.again is not None for replay in made) >= len(family.layers(job.cut)), "of every layer"


class Killed(Exception):
    pass


def until(layer):
    """A way to show progress that ends in a kill before a layer."""

    def track(items, label):
        for item in items:
            if label == "blockwise" and item == layer:
                raise Killed
            yield item

    return track


def test_work_that_was_killed_goes_on_and_ends_in_the_same_model(tmp_path):
    job = job_of(llama, "llama")
    whole, told = heal.healed("blockwise", job)
    with pytest.raises(Killed):
        heal.healed("blockwise", replace(job, folder=tmp_path, track=until(2)))
    done = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert set(done) == {"blockwise-1.safetensors", "blockwise-2.safetensors"}
    resumed, found = heal.healed("blockwise", replace(job, folder=tmp_path))
    assert equal(state(resumed), state(whole)) and found["curve"] == told["curve"]
    assert all((tmp_path / name).stat().st_mtime_ns == at for name, at in done.items()), "nothing is done twice"
    other = heal.healed("blockwise", replace(job, folder=tmp_path, options=Options(steps=18)))[0]
    assert not equal(state(other), state(whole)), "work under other settings is not taken for this"


def test_work_side_by_side_that_was_killed_goes_on_as_well(tmp_path):
    job = replace(job_of(llama, "llama"), options=Options(steps=12, side_by_side=2))
    whole, told = blockwise.heal(job)
    with pytest.raises(Killed):
        blockwise.heal(replace(job, folder=tmp_path, track=until(2)))
    assert {path.name for path in tmp_path.iterdir()} == {"blockwise-1.safetensors", "blockwise-2.safetensors"}
    resumed, found = blockwise.heal(replace(job, folder=tmp_path))
    assert equal(state(resumed), state(whole)) and found == told


SHARED = """
import json, sys, torch
from pathlib import Path
from test_heal import Options, blockwise, job_of, llama, replace, state
from headwise import processes
from safetensors.torch import save_file

processes.begin("cpu")
job = replace(job_of(llama, "llama"), options=Options(steps=8, side_by_side=1), folder=Path(sys.argv[1]))
healed, record = blockwise.heal(job)
save_file({k: v.contiguous() for k, v in state(healed).items() if k != "lm_head.weight"}, sys.argv[2])
print(json.dumps(record), flush=True)
torch.distributed.destroy_process_group()
"""


def test_processes_share_layers_that_learn_side_by_side(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    told |= {"PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))}
    files = [tmp_path / f"{rank}.safetensors" for rank in range(2)]
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", SHARED, str(tmp_path / "work"), str(file)],
            env={**os.environ, **told, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank, file in enumerate(files)
    ]
    said = [worker.communicate(timeout=300) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], [error.decode()[-2000:] for _, error in said]
    records = [json.loads(out.decode().splitlines()[-1]) for out, _ in said]
    found = [load_file(file) for file in files]
    assert equal(*found) and records[0] == records[1], "all have all layers"
    assert len(list((tmp_path / "work").iterdir())) == 3, "each keeps those that it taught"
    alone, record = blockwise.heal(replace(job_of(llama, "llama"), options=Options(steps=8, side_by_side=1)))
    assert all(torch.allclose(state(alone)[name], tensor, atol=1e-4) for name, tensor in found[0].items())
    assert [g["error_after"] for g in gains_of(record)] == pytest.approx(
        [g["error_after"] for g in gains_of(records[0])], rel=1e-4
    )


def test_a_damaged_file_is_work_still_to_do(tmp_path):
    job = job_of(llama, "llama", folder=tmp_path)
    first = state(heal.healed("blockwise", job)[0])
    (tmp_path / "blockwise-1.safetensors").write_bytes(b"half a file")
    assert equal(state(heal.healed("blockwise", job)[0]), first)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"heal": "blokwise"}, "no healing is called 'blokwise'. Known: none, blockwise, refit"),
        ({"heal_options": ("speed=3",)}, "no healing option is called 'speed'. Known: tokens, steps, rate"),
        ({"heal_options": ("steps=many",)}, "'many' is no number; write it as steps=100"),
        ({"heal_options": ("rate=-1",)}, "rate is -1; it must be above 0"),
    ],
    ids=str,
)
def test_healings_that_do_not_exist_are_refused_before_anything_is_loaded(asked, message):
    known = {"heal": "blockwise", **asked}
    with pytest.raises(HeadwiseError) as found:
        Settings(model="any", **known)
    for part in message.split("Known: "):
        assert part.rstrip(" ,") in str(found.value) or all(name in str(found.value) for name in part.split(", "))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run whose layers learned, in two rounds."""
    place = tmp_path_factory.mktemp("heal")
    llama.tiny(vocab_size=4096, tie_word_embeddings=True).save_pretrained(place / "tiny")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path(families.locate("embedded")[0]) / name, place / "tiny" / name)
    more = ["--rounds", "2", "--heal", "blockwise", "--heal-option", "steps=12"]
    assert call("run", place / "tiny", *RUN, *more, "--out", place / "run") == 0
    return place / "run"


def test_the_curve_lands_in_the_folder_and_in_the_report(run, capsys):
    found = json.loads((run / "heal.json").read_text())
    assert found["method"] == "blockwise" and len(found["curve"]) > 2 and len(found["rounds"]) == 1
    assert found["rounds"][0]["method"] == "blockwise", "models are healed between rounds as well"
    refit, learned = found["stages"]
    assert (refit["method"], learned["method"]) == ("refit", "blockwise")
    gains = {"stream"} | ({"attention", "mlp"} if refit["kept"] else set())  # of a stage that did harm there are none
    assert gains <= set(found["layers"][0]), "what every layer gained by the stages that were kept"
    assert len(found["layers"][0]["stream"]["curve"]) == len(found["curve"]), "every layer's own curve is kept"
    assert found["rehearsed_before"] > 0
    page = (run / "report.html").read_text()
    assert "loss while healing" in page and "Method: blockwise" in page and "before healing" in page
    assert "--heal blockwise" in page and "--heal-option steps=12" in page, "the command that makes the run again"
    assert not list(run.rglob("*blockwise-*")), "unfinished work is gone once the model is there"


def test_a_folder_is_healed_anew_by_another_method(run, capsys):
    assert call("heal", run, "--heal", "blockwise", "--heal-option", "steps=6") == 0
    assert json.loads((run / "heal.json").read_text())["curve"][-1]["step"] == 6
    assert "Known: " in refused(capsys, "heal", run, "--heal", "prayer")
    assert call("heal", run) == 0
    assert json.loads((run / "heal.json").read_text())["method"] == "refit"
