"""Healing as its user meets it: layers that learn get better or stay as they were, and nothing else changes."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from tiny_models import attending, random_plan
from transformers import AutoTokenizer

from headwise import families, heal, tasks
from headwise.cuts import reshape
from headwise.errors import HeadwiseError
from headwise.families.bert import FAMILY as bert
from headwise.families.gpt2 import FAMILY as gpt2
from headwise.families.llama import FAMILY as llama
from headwise.families.t5 import FAMILY as t5
from headwise.families.vit import FAMILY as vit
from headwise.heal import _layer_refit, blockwise, refit
from headwise.heal._job import Job
from headwise.probes import gram
from headwise.progress import silently
from headwise.registry import find, names
from headwise.runs.heal_options import Options
from headwise.runs.settings import Settings
from headwise.stages.texts import read_texts
from headwise.tasks import Prepared
from headwise.tasks.causal import Causal
from headwise.training.captured import CapturedStep
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
    """What every layer learned: the stream behind it or, if it is the last one, the answers."""
    return [layer["answers" if layer is record.layers[-1] else "stream"] for layer in record.layers]


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

    class Watched(_layer_refit._LeastSquares):
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

    plain, worked_on = refit.RefitBatch, ("source_z", "z", "source_middle", "source_end", "cut_middle", "channels")
    monkeypatch.setattr(_layer_refit, "_LeastSquares", Watched)
    monkeypatch.setattr(refit, "RefitBatch", kept)
    refit.heal(replace(job_of(family, kind, changes), track=track))


@pytest.mark.parametrize(("family", "kind", "changes"), MODELS)
def test_every_layer_gets_better_or_stays_and_the_models_given_are_untouched(family, kind, changes):
    job = job_of(family, kind, changes)
    before = state(job.source), state(job.cut)
    asked = [p.requires_grad for p in job.cut.parameters()]
    healed, found = blockwise.heal(job)
    gains = gains_of(found)
    assert len(gains) == len(family.layers(job.cut))
    assert all(gain.error_after <= gain.error_before for gain in gains)
    assert sum(gain.error_after for gain in gains) < 0.97 * sum(gain.error_before for gain in gains)
    assert equal(state(job.source), before[0]) and equal(state(job.cut), before[1])
    assert [p.requires_grad for p in healed.parameters()] == asked and all(p.grad is None for p in healed.parameters())
    losses = [point.loss for point in found.curve]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    assert found.curve[-1].step == 24 and found.tokens > 0


def test_learning_starts_from_the_refit_and_brings_the_whole_model_nearer_to_its_source():
    job = job_of(llama, "llama")
    rows = torch.randint(3, 97, (160, 20))  # random, so that nothing is learned by heart
    job = replace(job, calibration=Prepared(rows[:128], rows[:128]), options=Options(steps=60))
    models, found = zip(*(heal.healed(method, job) for method in ("refit", "blockwise")), strict=True)
    with torch.no_grad():
        want, *got = (llama.run(model, rows[128:]) for model in (job.source, *models))
    errors = [float((logits - want).square().mean()) for logits in got]
    assert errors[1] < errors[0]
    assert [stage.method for stage in found[1].stages] == ["refit", "blockwise"]
    assert [set(record.layers[0]) - {"channels"} for record in found] == [
        {"attention", "mlp"},
        {"attention", "mlp", "stream"},
    ]


def with_more_text():
    """A job with little text to calibrate on and more to learn from, and rows that nothing is learned from."""
    torch.manual_seed(1)
    rows = torch.randint(3, 97, (160, 20))
    few, more = Prepared(rows[:16], rows[:16]), Prepared(rows[16:128], rows[16:128])
    return replace(job_of(llama, "llama"), calibration=few, more=more), rows[128:]


def test_more_text_is_learned_from_where_it_is_asked_for_and_heals_more(monkeypatch):
    job, unseen = with_more_text()
    monkeypatch.setitem(blockwise.BATCH_TOKENS, "cpu", 80)

    def heal(**asked):
        model, found = blockwise.heal(replace(job, options=Options(**asked)))
        with torch.no_grad():
            return float((llama.run(model, unseen) - llama.run(job.source, unseen)).square().mean()), found

    error, found = heal(steps=60)
    assert found.tokens == 16 * 20 and heal(tokens=160, steps=5)[1].tokens == 160, "never more than asked for"
    fewer, found = heal(tokens=2000, steps=60)
    assert found.tokens == 2000 and fewer < error
    assert heal(tokens=10**9)[1].curve[-1].step == round((14 + 112) / 4), "all of it once"


@pytest.mark.parametrize(("method", "rows"), [("refit", 0), ("blockwise", 12), ("distill", 12)])
def test_further_text_is_read_for_healings_that_learn(method, rows):
    asked = {"heal": method, "heal_options": ("tokens=1024",), "tokens": 256, "eval_tokens": 64, "length": 64}
    settings, place = Settings(model="embedded", data=__file__, **asked), families.locate("embedded")[0]
    config, tokenizer = families.configuration(place), AutoTokenizer.from_pretrained(place)
    more = read_texts(settings, llama, config, tokenizer, Causal(), None, silently).more
    assert (0 if more is None else len(more)) == rows


def test_text_beyond_the_memory_is_learned_from_in_portions_and_a_kill_loses_none(monkeypatch, tmp_path):
    job, unseen = with_more_text()
    job, held = replace(job, options=Options(tokens=10**9, batch=80, steps=60)), []
    monkeypatch.setitem(blockwise.ROOM, "cpu", 40 * 20 * 32 * 4 * blockwise.STREAMS)  # streams of forty rows
    own = blockwise.LayerWalk.__init__

    def noted(walk, job, device, rows, *told):
        held.extend(len(half.inputs) for half in rows)
        own(walk, job, device, rows, *told)

    monkeypatch.setattr(blockwise.LayerWalk, "__init__", noted)
    healed, found = blockwise.heal(job)
    assert held[1::2] == [2] * 4 and sum(held[::2]) == 14 + 112 and max(held) <= 40
    assert [point.step for point in found.curve] == list(range(0, 61, 3)) and found.tokens == 128 * 20
    assert all(gain.error_after < gain.error_before for gain in gains_of(found))
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
    monkeypatch.setattr(blockwise, "_trained", full)
    with pytest.raises(HeadwiseError, match=r"add --heal-option batch=128 or --heal-option tokens=160\.$"):
        blockwise.heal(job)
    assert all(p.requires_grad for p in job.source.parameters()), "the source is as it was"


def test_a_layer_that_cannot_get_better_is_left_alone():
    job = job_of(llama, "llama")
    whole = replace(job, cut=llama.tailor(job.source))
    healed, found = blockwise.heal(whole)
    assert equal(state(healed), state(job.source)), "there is nothing to learn where nothing was cut"
    assert all(gain.error_after == gain.error_before for gain in gains_of(found))


def test_a_rate_that_would_wreck_a_layer_does_it_no_harm():
    job = job_of(llama, "llama")
    _, found = blockwise.heal(replace(job, options=Options(steps=12, rate=1e6)))
    assert all(gain.error_after <= gain.error_before for gain in gains_of(found))


@pytest.mark.parametrize("gone", [(0,), (1, 2)], ids=str)
def test_layers_learn_to_stand_in_for_those_that_are_gone(gone):
    _, found = blockwise.heal(job_of(llama, "llama", gone=gone))
    gains = gains_of(found)
    assert len(gains) == 3 - len(gone) and any(gain.error_after < gain.error_before for gain in gains)


@pytest.mark.parametrize(("family", "kind", "changes"), MODELS)
def test_replayed_steps_of_a_layer_are_the_ordinary_ones(family, kind, changes, monkeypatch):
    job, made = replace(job_of(family, kind, changes), options=Options(steps=20, batch=80)), []
    plain, told = blockwise.heal(job)

    def steps():
        made.append(CapturedStep(lambda work: work))  # reads and writes the same memory as a captured graph
        return made[-1]

    trainer = blockwise.LayerWalk.trainer
    monkeypatch.setattr(blockwise, "CapturedStep", steps)
    monkeypatch.setattr(blockwise.LayerWalk, "trainer", lambda walk, pair, captured: trainer(walk, pair, True))
    healed, found = blockwise.heal(job)
    assert equal(state(healed), state(plain)) and found == told
    assert sum(step.replay is not None for step in made) >= len(family.layers(job.cut)), "of every layer"


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
    assert equal(state(resumed), state(whole)) and found.curve == told.curve
    assert all((tmp_path / name).stat().st_mtime_ns == at for name, at in done.items()), "nothing is done twice"
    other = heal.healed("blockwise", replace(job, folder=tmp_path, options=Options(steps=18)))[0]
    assert not equal(state(other), state(whole)), "work under other settings is not taken for this"


def test_a_damaged_file_is_work_still_to_do(tmp_path):
    job = job_of(llama, "llama", folder=tmp_path)
    first = state(heal.healed("blockwise", job)[0])
    (tmp_path / "blockwise-1.safetensors").write_bytes(b"half a file")
    assert equal(state(heal.healed("blockwise", job)[0]), first)
