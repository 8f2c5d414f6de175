"""Latency tables and timed models on a device: what is kept, what is measured again, what the certificate shows."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from types import SimpleNamespace

import coded_models
import pytest
import torch
from conftest import invent
from test_latency import WORK, FakeClock, costly, invented_table, own_cache, smooth, table_of  # noqa: F401  # a fixture
from test_pipeline import SMALL, call, folder, refused  # noqa: F401  # a fixture

from headwise import budgets, families, processes, strategies
from headwise.checks import exactness, speed
from headwise.errors import BudgetError
from headwise.families.llama import FAMILY as llama
from headwise.fast import choice, native, native_build
from headwise.latency import lattice, measured, measuring
from headwise.latency.stacks import Stacks
from headwise.report import measured as measured_table
from headwise.runs.folder import RunFolder
from headwise.types import (
    Check,
    LatencyTable,
    Plan,
    Verdict,
    Workload,
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A tiny model, and a fake clock in place of the real one."""
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "cache"))
    clock = FakeClock(lambda layer: smooth(layer) + layer.mlp_width)

    def stacks(family, model, work, repeats=5):
        shape = family.shape_of(model.config)
        made = SimpleNamespace(shape=shape, chain=2, device=torch.device("cpu"), dtype=torch.float32, captured=True)
        return type("Clock", (), {"__call__": lambda self, asked: clock(asked), **vars(made)})()

    monkeypatch.setattr(measured, "Stacks", stacks)
    return llama.tailor(llama.tiny()), clock, tmp_path / "cache"


TINY = Workload("decode", 64, 2)


def timed(model, run=None, allow=("qk", "v")):
    return measured.tables((TINY,), llama, model, allow, run)[0]


def test_what_was_measured_once_is_not_measured_again(here, tmp_path):
    model, clock, cache = here
    first = timed(model, RunFolder(tmp_path / "a"))
    (file,) = cache.glob("latency-*.json")
    count = len(clock.asked)
    assert (tmp_path / "a" / "latency-decode-64-b2.json").is_file() and count > 10
    again = timed(model, RunFolder(tmp_path / "a"))
    assert again == first and len(clock.asked) == count, "the run's own file"
    other = timed(model, RunFolder(tmp_path / "b"))
    assert other.times == first.times and len(clock.asked) - count <= 2 * lattice.HELD_OUT, "the cache: only checks"
    count = len(clock.asked)
    wider = timed(model, RunFolder(tmp_path / "a"), ("qk", "v", "mlp"))
    assert len(wider.mlp) > 1 and len(clock.asked) > count, "what was lacking is added"
    file.write_text(file.read_text()[:100])
    count = len(clock.asked)
    assert timed(model, RunFolder(tmp_path / "c")).times == first.times
    assert len(clock.asked) - count > 2 * lattice.HELD_OUT, "a broken file is measured over"
    assert LatencyTable.read(file).workload == TINY


def test_measuring_goes_on_where_it_was_killed(here, monkeypatch):
    monkeypatch.setattr(lattice, "_mixed", lambda *args: ())  # stacks that are drawn may be of one layer by chance
    model, clock, cache = here
    real, seen = clock.ms, []

    def killed(layer):
        seen.append(layer)
        if len(seen) > 60:
            raise KeyboardInterrupt
        return real(layer)

    clock.ms = killed
    with pytest.raises(KeyboardInterrupt):
        timed(model)
    (file,) = cache.glob("latency-*.json")
    known = {time.shape for time in LatencyTable.read(file).times}
    assert len(known) > 2
    clock.ms, clock.asked = real, []
    timed(model)
    fresh = {stack[0] for stack in clock.asked if len(set(stack)) == 1}
    assert not (fresh & known) - {lattice.base_of(llama.shape_of(model.config))}


def test_a_process_waits_for_the_first_one_though_its_table_is_there_already(here, tmp_path, monkeypatch):
    model, _, _ = here
    run, waited = RunFolder(tmp_path / "run"), []
    table = timed(model, run)  # the first process was quick
    monkeypatch.setattr(processes, "agrees", lambda said: True)  # it found no table when it looked
    monkeypatch.setattr(processes, "by_first", waited.append)
    assert timed(model, run) == table and len(waited) == 1, "it would wait for this one for hours"


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.delenv("HEADWISE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert measured.cache_folder() == tmp_path / "headwise"
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "own"))
    assert measured.cache_folder() == tmp_path / "own"


def test_a_table_of_another_device_is_refused(here, tmp_path):
    model, _, _ = here
    run = RunFolder(tmp_path / "run")
    replace(timed(model), device="NVIDIA H200").save(run.table_file(TINY))
    with pytest.raises(
        BudgetError, match="was measured on NVIDIA H200, this is .*; delete .*latency-decode-64-b2.json"
    ):
        timed(model, run)


def test_tables_of_another_runtime_are_not_used(here, tmp_path, monkeypatch):
    model, clock, cache = here
    run = RunFolder(tmp_path / "run")
    fast = timed(model, run)
    assert fast.runtime == fast.facts["runtime"] == "fast" and fast.captured
    assert LatencyTable.read(run.table_file(TINY)) == fast
    monkeypatch.setattr(measuring, "runtime_of", lambda model: "plain")
    clock.ms, clock.asked = (lambda layer: 2 * (smooth(layer) + layer.mlp_width)), []
    plain = timed(model, run)
    assert plain.runtime == "plain" and len(clock.asked) > 10, "neither the run's nor the cache's"
    assert plain.times != fast.times and len(list(cache.glob("latency-*.json"))) == 2
    old = {name: value for name, value in fast.to_json().items() if name not in ("runtime", "captured")}
    assert LatencyTable.from_json(old).runtime == "plain", "what older versions wrote"


def test_steps_that_were_not_captured_are_on_record(here, monkeypatch):
    model, _, _ = here
    stacks = measured.Stacks

    def uncaptured(family, model, work, repeats=5):
        made = stacks(family, model, work, repeats)
        made.captured, made.device = False, torch.device("cuda")
        return made

    monkeypatch.setattr(measured, "Stacks", uncaptured)
    monkeypatch.setattr(measuring, "device_name", lambda device: "a GPU")
    with pytest.warns(UserWarning, match="decode,64,b2: steps were not captured but launched one by one"):
        assert not timed(model).captured


def test_what_the_model_cannot_do_is_not_timed(here):
    model, _, _ = here
    with pytest.raises(BudgetError, match="longer than the 128 tokens that the model takes; use decode,128,b2"):
        measured.tables((Workload("decode", 4096, 2),), llama, model, ("qk",), None)
    t5 = families.family_of(SimpleNamespace(model_type="t5"))
    with pytest.raises(BudgetError, match="two stacks, which are not timed yet"):
        measured.tables((TINY,), t5, t5.tailor(t5.tiny("t5")), ("qk",), None)


# The certificate.


def plan_at(share: int, device: str) -> Plan:
    readings = invent(5)
    source = readings.source
    table = replace(invented_table(readings, costly, TINY), device=device)
    return strategies.allocate(readings, (budgets.parse(f"latency={share}%@{TINY}", source, (table,)),))


@pytest.mark.parametrize(("after", "met"), [(8.0, True), (8.39, True), (8.41, False)])
def test_a_limit_is_kept_within_five_percent_of_what_is_measured(after, met):
    (limit,) = plan_at(80, "a device").budgets
    check = speed.kept(limit, {"before": 10.0, "after": after}, "fast")
    assert check.observed.endswith("both with optimise=True"), "it says how they were run"
    assert check.passed is met and check.expected == "at most 8 ms + 5%" and f"{after / 10:.1%}" in check.observed
    absolute = replace(limit, text="latency=7ms@decode,64,b2", limit=7.0)
    assert not speed.kept(absolute, {"before": 10.0, "after": 8.0}, "plain").passed, "an absolute limit is no share"


def test_speed_is_compared_on_one_runtime(monkeypatch):
    source = llama.tailor(llama.tiny())
    assert speed.runtime(source, source) == "plain", "on a CPU as they are"
    twins = []
    made = measuring.fast_twin
    monkeypatch.setattr(measuring, "fast_twin", lambda model: twins.append(made(model)) or twins[-1])
    for name, count in ((measuring.PLAIN, 0), (measuring.FAST, 2)):
        found = speed.measure(source, source, prompt=16, steps=4, repeats=1, runtime=name)
        assert found["decode_ms_per_token_after"] > 0 and found["prompt_tokens"] == 16 and len(twins) == count
    assert all(twin.headwise_fast.pool is not None and twin.headwise_fast.ordinary == 0 for twin in twins)
    assert not hasattr(source, "headwise_fast")


@pytest.mark.skipif(not native_build.runs(), reason="this machine has no C compiler")
def test_a_cache_in_bits_is_timed_as_it_is_best_run_on_a_cpu(monkeypatch):
    source, cut = (copy.deepcopy(coded_models.made("llama", 2, 0.75)[place]).float() for place in (1, 3))
    cut.config._attn_implementation = "sdpa"
    assert speed.runtime(source, cut) == "fast" and "optimise=True" in speed.machine(cut.device, "fast")
    read, token = [], native._token
    monkeypatch.setattr(native, "_token", lambda *given: read.append(token(*given)) or read[-1])
    found = speed.measure(source, cut, prompt=60, steps=4, repeats=1, runtime="fast")
    assert found["decode_ms_per_token_after"] > 0 and read and all(out is not None for out in read)
    kinds = {type(module).__module__ for module in cut.modules()}
    assert not any("fast" in kind for kind in kinds), "the models themselves stay as they are"
    monkeypatch.setattr(native_build, "runs", lambda: False)
    assert speed.runtime(source, cut) == "plain"


def test_the_certificate_shows_predicted_beside_measured(monkeypatch):
    device = measuring.device_name(torch.device("cpu"))
    took = {"before": 10.0, "before_low": 9.0, "before_high": 11.0, "after": 8.0, "after_low": 7.5, "after_high": 8.5}
    monkeypatch.setattr(speed, "side_by_side", lambda source, cut, work: took)
    model, plan = llama.tailor(llama.tiny()), plan_at(80, device)
    found, checks = speed.latencies(model, model, plan)
    verdict = Verdict.of({}, {}, found, {}, tuple(checks), (), "", 1, "", "")
    rows = {row[0]: row[1:] for row in measured_table(verdict).rows}
    assert verdict.passed and checks[0].name == f"measured latency=80%@{TINY}"
    assert rows["Decode ms at 64 batch 2"][:2] == ("10", "8") and rows["Decode ms at 64 batch 2"][3] == "7.500 to 8.500"
    assert rows["Decode ms at 64 batch 2 predicted"][2] == f"−{(1 - _predicted(plan)) * 100:.1f}%"


def _predicted(plan: Plan) -> float:
    return plan.spent[f"latency@{TINY}"] / plan.budgets[0].table.model_ms(plan.source)


def test_a_limit_of_another_device_is_not_certified_here():
    model = llama.tailor(llama.tiny())
    found, checks = speed.latencies(model, model, plan_at(80, "NVIDIA H200"))
    assert found == {} and not checks[0].passed and "planned on NVIDIA H200, this is" in checks[0].observed


# What is run.

KINDS = [(family, kind) for family in families.known() for kind in family.model_types if family.package == ""]


@pytest.mark.parametrize(("family", "kind"), KINDS, ids=[kind for _, kind in KINDS])
def test_stacks_of_every_family_run_with_the_sizes_they_should_have(family, kind):
    model = family.tailor(family.tiny(kind))
    shape = family.shape_of(model.config)
    if any(layer.role for layer in shape.layers):
        pytest.skip("two stacks are not timed")
    whole = lattice.base_of(shape)
    less = replace(whole, v_dim=max(1, whole.v_dim // 2), mlp_width=shape.grain.mlp_sizes(whole.mlp_width)[-1])
    phases = ("decode", "prefill") if shape.cached else ("prefill",)
    for phase in phases:
        clock = Stacks(family, model, Workload(phase, 16, 2), repeats=1)
        built = clock.model((whole, less))
        assert [block.attention.v_dim for block in family.blocks(built)] == [whole.v_dim, less.v_dim]
        assert [block.down.in_features for block in family.blocks(built)] == [whole.mlp_width, less.mlp_width]
        assert not any(t.is_meta for t in (*built.parameters(), *built.buffers()))
        with torch.no_grad():
            before = [weight.data_ptr() for weight in built.parameters()]
            step = measuring.prepare(family, built, clock.work)
            assert step.run() is not None and not step.captured
        assert step.runtime == ("fast" if shape.cached else "plain"), "decoders as `optimise=True` makes them"
        assert not hasattr(built, "headwise_fast") and [w.data_ptr() for w in built.parameters()] == before


@torch.no_grad()
def test_a_step_at_the_end_of_a_full_cache_is_the_models_own():
    from transformers import DynamicCache

    cut = replace(llama.shape_of(llama.tiny().config).layers[0], v_dim=8)
    model = Stacks(llama, llama.tailor(llama.tiny()), Workload("decode", 9, 2)).model((cut, cut))
    before, own = llama.example(model.config, 2, 8), DynamicCache()
    rows = torch.cat((before, before[:, :1]), 1)
    model(input_ids=rows[:, :8], past_key_values=own, use_cache=True)
    wanted = model(input_ids=rows).logits[:, -1:]
    plain = measuring._plain(llama, model, Workload("decode", 9, 2), rows[:, 8:])
    for _ in range(2):  # every step does the same work
        torch.testing.assert_close(plain.run().logits, wanted, atol=1e-5, rtol=1e-4)
    fast, ids = measuring.fast_twin(model), rows[:, 8:]
    cache = measuring.filled(fast, 2, 9)
    for full, layer in zip(cache.layers, own.layers, strict=True):
        full.keys[:, :, :8], full.values[:, :, :8] = layer.keys, layer.values
    for _ in range(2):
        found = measuring.repeated(fast, cache, ids, torch.full_like(ids, 8))
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_stacks_on_cuda_are_replayed_with_kernels_of_their_sizes(phase):
    model = llama.tailor(llama.tiny()).to("cuda", torch.bfloat16)
    model.config.dtype = torch.bfloat16
    clock = Stacks(llama, model, Workload(phase, 100, 2), repeats=2)
    whole = clock.shape.layers[0]
    less = replace(whole, v_dim=8)
    clock.ahead([whole, less])
    ahead = set(choice._table().rows)
    times = clock([(whole, whole), (whole, less)])
    rows = set(choice._table().rows)
    assert all(time > 0 for stack in times for time in stack) and clock.captured == (phase == "decode")
    assert rows and (ahead == rows) == (phase == "decode"), "kernels of decode steps were chosen before"
    clock([(whole, whole), (less, whole)])
    assert set(choice._table().rows) == rows, "and not again"


# The command line.


def test_a_run_under_a_limit_on_time(here, folder, tmp_path, monkeypatch, capsys):  # noqa: F811
    _, clock, _ = here
    took = {"before": 10.0, "after": 8.0}
    monkeypatch.setattr(speed, "side_by_side", lambda source, cut, work: took)
    monkeypatch.setattr(exactness, "reload_check", lambda *given: Check(exactness.RELOADS, True, "", ""))
    out, text = tmp_path / "run", "latency=90%@decode,64,b2"
    assert call("run", folder, "--budget", text, "--data", "stdlib", *SMALL, "--rounds", 2, "--out", out) == 0
    assert "all 5 checks passed" in capsys.readouterr().out
    plan = json.loads((out / "plan.json").read_text())
    assert plan["spent"]["latency@decode,64,b2"] <= plan["budgets"][0]["limit"]
    assert text in (out / "report.md").read_text() and "latency=" in (out / "frontier.json").read_text()

    assert call("allocate", out, "--budget", "latency=85%@decode,64,b2", "--budget", "kv=90%") == 0
    error = refused(capsys, "allocate", out, "--budget", "latency=85%@prefill,64,b2")
    assert "headwise probe MODEL --latency prefill,64,b2 --out FOLDER" in error
    before = (out / "readings.json").stat().st_mtime_ns
    assert call("probe", folder, "--latency", "prefill,64,b2", "--device", "cpu", "--out", out) == 0
    assert (out / "readings.json").stat().st_mtime_ns == before, "only time was measured"
    assert call("allocate", out, "--budget", "latency=95%@prefill,64,b2") == 0
    few = ["--data", "stdlib", "--tokens", 256, "--swap-tokens", 0, "--length", 32, "--device", "cpu"]
    assert call("probe", folder, "--latency", "decode,64,b2", *few, "--out", tmp_path / "timed") == 0, "not coded"
    assert "is no phase (decode or prefill)" in refused(capsys, "probe", folder, "--latency", "both", "--out", out)
