"""Streamed runs: the files of any run, chosen by memory, resumed at the layer where they were killed."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from test_pipeline import call
from test_stream import Killed, small_model

from headwise import api, families, memory
from headwise.errors import DataError, HeadwiseError
from headwise.runs.folder import RunFolder
from headwise.runs.settings import Settings
from headwise.stream import verify
from headwise.stream._model import Streamed
from headwise.stream.build import StreamedBuild
from headwise.stream.source import is_streamed, load_streaming
from headwise.types import Plan

SMALL = ["--tokens", "1024", "--eval-tokens", "256", "--swap-tokens", "64", "--length", "64", "--device", "cpu"]
HEAL = ["--heal", "blockwise", "--heal-option", "steps=5"]
RUN = ["--budget", "kv=75%", "--data", "stdlib", "--stream", *SMALL, *HEAL]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert call("run", model, *RUN, "--out", out) == 0
    return out


def test_a_streamed_run_leaves_the_files_of_any_run(finished, model):
    names = {path.name for path in finished.iterdir()}
    assert {"run.json", "readings.json", "plan.json", "heal.json", "verdict.json", "report.html", "model"} <= names
    assert {path.name for path in (finished / "streaming").iterdir()} == {"moments", "prices"}, "work is cleared away"
    verdict = json.loads((finished / "verdict.json").read_text())
    assert all(check["passed"] for check in verdict["checks"])
    loaded = [check["name"] for check in verdict["checks"] if "fresh process" in check["name"]]
    assert loaded == ["reloads in a fresh process without headwise"], "plain transformers gives the same logits"
    assert verdict["size"]["kv_bytes_per_token_after"] <= 0.75 * verdict["size"]["kv_bytes_per_token_before"]
    assert verdict["tokens"] == 256
    weights = [load_file(file) for file in (finished / "model").glob("*.safetensors")]
    assert {t.dtype for part in weights for t in part.values() if t.is_floating_point()} == {torch.bfloat16}
    assert not any(name == "lm_head.weight" for part in weights for name in part), "tied weights are stored once"


def test_its_verdict_is_that_of_both_models_in_memory(finished, model):
    from headwise import pipeline
    from headwise.checks import quality

    bench = pipeline.load_source(RunFolder(finished).require())
    cut = bench.family.tailor(families.load(str(finished / "model"))[0])
    found = quality.compare(bench.family, bench.model, cut, bench.evaluation).summary()
    told = json.loads((finished / "verdict.json").read_text())["quality"]
    assert told["loss_before"] == pytest.approx(found["loss_before"], rel=1e-5)
    assert told["loss_after"] == pytest.approx(found["loss_after"], rel=1e-5)
    assert told["kl"] == pytest.approx(found["kl"], rel=1e-2, abs=1e-7)


def test_later_stages_of_a_streamed_folder_stream_too(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "available_bytes", lambda *_: 0)  # no memory to load the model whole
    again = tmp_path / "again"
    shutil.copytree(finished, again)
    assert call("allocate", again, "--budget", "kv=60%") == 0
    assert call("reshape", again) == 0
    assert not (again / "verdict.json").exists()
    assert call("verify", again) == 0
    plan, verdict = Plan.read(again / "plan.json"), api.RunFolder(again).dossier().verdict
    assert verdict is not None and verdict.passed and "kv=60%" in plan.budgets[0].text
    assert not any("fresh process" in check.name for check in verdict.checks), "what was not tried is not claimed"
    assert len(list((again / "model").glob("*.safetensors"))) > 1


def killed_at(layer: int, walk: int):
    """A way to enter a layer that fails at one of them in the walk of this number, as a kill would."""
    own, left = Streamed.tensors, [walk]

    def tensors(self, index):
        if index == layer:
            left[0] -= 1
            if not left[0]:
                raise Killed
        return own(self, index)

    return tensors


def test_a_run_that_was_killed_goes_on_at_its_layer_to_the_same_result(finished, model, tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "available_bytes", lambda *_: 0)
    out, seen = tmp_path / "killed", []
    plain = Streamed.tensors

    def counting(self, index):
        seen.append(index)
        return plain(self, index)

    def go(*, layer=None, walk=1):
        seen.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Streamed, "tensors", counting)
            if layer is not None:
                patch.setattr(Streamed, "tensors", killed_at(layer, walk))
            settings = Settings.read(finished / "run.json")
            return api.run(
                str(model), settings.budgets, out, **{k: getattr(settings, k) for k in
                ("data", "tokens", "eval_tokens", "swap_tokens", "length", "device", "stream", "heal", "heal_options")}
            )  # fmt: skip

    with pytest.raises(Killed):
        go(layer=2)  # while it probes
    assert not (out / "readings.json").exists()
    with pytest.raises(Killed):
        go(layer=2, walk=2)  # while it heals
    assert seen[0] == 2 and seen[-2:] == [0, 1], "the first two layers are not probed again"
    with monkeypatch.context() as patch:
        patch.setattr(StreamedBuild, "finish", lambda self, *rest: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            go()
    assert seen[0] == 2, "nor are they healed again"
    assert not (out / "model").exists()
    with monkeypatch.context() as patch:  # the model is whole; only verification is left to be killed
        patch.setattr(verify.SideBySide, "compared", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            go()
    assert seen[:2] == [0, 0], "nothing is left to build: both models' first layers are verified"
    go()
    assert seen == [], "what was verified up to the last layer is not walked again"
    for name in ("plan.json", "heal.json"):
        one, two = (json.loads((path / name).read_text()) for path in (out, finished))
        for timed in ("seconds", "stages"):
            one.pop(timed, None), two.pop(timed, None)
        assert one == two
    for file in (finished / "model").glob("*.safetensors"):
        assert file.read_bytes() == (out / "model" / file.name).read_bytes()


def test_streaming_is_chosen_by_memory_unless_said(model, tmp_path, monkeypatch, caplog):
    folder, asked = RunFolder(tmp_path / "new"), Settings(model=str(model), device="cpu")
    monkeypatch.setattr(memory, "available_bytes", lambda *_: 10**12)
    assert not is_streamed(asked, folder)
    monkeypatch.setattr(memory, "available_bytes", lambda *_: 10**6)
    assert is_streamed(asked, folder)
    assert "one layer at a time" in caplog.text and "--no-stream" in caplog.text
    assert not is_streamed(Settings(model=str(model), device="cpu", stream=False), folder)
    assert not is_streamed(Settings(model=str(tmp_path / "nothing"), device="cpu"), folder)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(heal="distill"), "take blockwise or refit or none"),
        (dict(heal="blockwise", heal_options=("tokens=1e6",)), "leave out --heal-option tokens"),
        (dict(portable=True), "leave out --portable"),
        (dict(allow=("qk", "depth")), "--allow depth"),
        (dict(rounds=2), "--rounds"),
        (dict(task="masked"), "only decoders"),
        (dict(data=None), "give --data FILE"),
    ],
)
def test_what_cannot_be_streamed_is_refused_with_a_way_out(model, changes, text):
    settings = Settings(**{**dict(model=str(model), data="stdlib", device="cpu", stream=True), **changes})
    with pytest.raises((HeadwiseError, DataError), match=text):
        load_streaming(settings)
