"""Distillation that begins with layers that learn by themselves: who reads how much, and that a kill loses nothing."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_distill import damaged, held_out, job_of

from headwise import heal
from headwise.errors import HeadwiseError
from headwise.families.llama import FAMILY as llama
from headwise.runs.heal_options import Options
from headwise.tasks.causal import Causal

ASKED = Options(tokens=5120, batch=256, rate=1e-3, micro=512)


def asked(**options):
    """Of each stage its name and tokens."""
    return [(module.NAME, own.tokens) for module, own in heal.stages("distill", Options(**options))]


def test_layers_and_the_whole_model_share_the_tokens():
    assert asked(tokens=1000) == [("refit", 1000), ("blockwise", 500), ("distill", 500)]
    assert asked(tokens=1000, blockwise=0.2)[1:] == [("blockwise", 200), ("distill", 800)]
    assert asked(tokens=1000, blockwise=0) == [("refit", 1000), ("distill", 1000)]
    assert asked() == [("refit", None), ("distill", None)], "on the calibration alone"
    (_, most), (_, rest) = asked(tokens=10**9)[1:]
    assert most < rest and most + rest == 10**9, "processes share what most tokens are for"
    told = heal.stages("distill", replace(ASKED, steps=7, lora=4))[1][1]
    assert told.rate != ASKED.rate and told.steps is told.batch is told.lora is None, "meant for the whole model"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["tokens=9", "blockwise=1"], "it is a share of the tokens, below 1. For layers alone, use --heal blockwise"),
        (["tokens=9", "blockwise=-0.1"], "it must be above 0"),
        (["blockwise=0.5"], "a share of the tokens; add --heal-option tokens="),
    ],
    ids=str,
)
def test_shares_that_are_none_are_refused(options, message):
    with pytest.raises(HeadwiseError, match=message):
        Options.parse(options)


@pytest.fixture(scope="module")
def job():
    torch.manual_seed(0)
    source = llama.tailor(llama.tiny())
    source.lm_head.weight.data *= 24  # a trained model has favourites
    job = job_of(llama, Causal(), source, damaged(source, llama), ASKED)
    torch.manual_seed(2)
    return replace(job, more=job.task.prepare(torch.randint(3, 90, (120, 32)), 0))


@pytest.fixture(scope="module")
def whole(job):
    return heal.healed("distill", job)


def test_the_record_counts_what_every_stage_read(job, whole):
    model, record = whole
    read = {stage.method: stage.tokens for stage in record.stages}
    assert list(read) == ["refit", "blockwise", "distill"] and read["blockwise"] == read["distill"] == 2560
    assert record.method == "distill" and record.tokens == sum(read.values())
    assert {"stream", "attention"} <= set(record.layers[0]), "what layers gained is told, too"
    assert held_out(job, model) < held_out(job, job.cut)


class Killed(Exception):
    pass


@pytest.mark.parametrize(("stage", "at"), [("blockwise", 1), ("distill", 6)])
def test_a_kill_in_either_stage_changes_nothing(job, whole, stage, at, tmp_path):
    def track(items, label):
        for item in items:
            if item == at and (label if isinstance(label, str) else label()).startswith(stage):
                raise Killed
            yield item

    with pytest.raises(Killed):
        heal.healed("distill", replace(job, folder=tmp_path, track=track))
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("blockwise-*")}
    steps = list((tmp_path / "distill").glob("step-*"))
    assert kept and bool(steps) == (stage == "distill")
    model, record = heal.healed("distill", replace(job, folder=tmp_path))
    assert all(path.stat().st_mtime_ns == at for path, at in kept.items()), "no layer learns twice"
    assert record.tokens == whole[1].tokens
    for name, tensor in whole[0].state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)


def test_another_share_is_other_work(job, tmp_path):
    """The same number of tokens for the whole model, behind layers that learned and behind others that did not."""
    heal.healed("distill", replace(job, folder=tmp_path))
    plain = replace(job, options=replace(ASKED, tokens=2560, blockwise=0))
    found = heal.healed("distill", replace(plain, folder=tmp_path))[0]
    wanted = heal.healed("distill", plain)[0]
    for name, tensor in wanted.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)


def test_the_benchmark_heals_as_a_run_does(job, whole, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    quality = importlib.import_module("quality")
    states = {"none": quality.Healed(job.cut, 0, 0.0)}
    found = quality.Table._healed(None, "distill", states, job)
    assert found.tokens == whole[1].tokens
    assert all(torch.equal(tensor, whole[0].state_dict()[name]) for name, tensor in found.model.state_dict().items())
    assert quality.Table._healed(None, "refit", states, job) is states["refit"], "nothing is done twice"
    assert "blockwise" not in states, "layers that learn from all tokens are other ones"
