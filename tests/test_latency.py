"""Latency as a budget: what is timed, how a table prices the rest, what is said where it cannot. Clocks are fake."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import Invented, invent
from test_pipeline import SMALL, call, folder, refused  # noqa: F401  # a fixture

from headwise import budgets, families, processes, strategies
from headwise.checks import speed
from headwise.errors import BudgetError
from headwise.families.llama import FAMILY as llama
from headwise.fast import choice, decode
from headwise.latency import measured, measuring
from headwise.latency import probe as latency
from headwise.latency.stacks import Stacks
from headwise.report import measured as measured_table
from headwise.runs.folder import RunFolder
from headwise.stages import frontier
from headwise.types import (
    GONE,
    Grain,
    LatencyTable,
    LayerShape,
    ModelShape,
    Plan,
    Verdict,
    Workload,
)

WORK = Workload("decode", 1024, 4)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """No test sees or changes what the user's machine measured."""
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "cache"))
    choice.forget()
    yield
    choice.forget()


LAYER = LayerShape(query_heads=4, kv_heads=2, qk_dim=64, v_dim=64, mlp_width=1024, qk_width=64)
GRAIN = Grain(qk_step=8, v_step=8, mlp_step=32, qk_floor=16, v_floor=16, mlp_floor=256, rotary=True, projectable=True)
MODEL = ModelShape("llama", 256, 100, True, (LAYER,) * 6, GRAIN)


def smooth(layer: LayerShape) -> float:
    """A time that is linear in every size, given heads."""
    cache = layer.kv_heads * (layer.qk_dim + layer.v_dim) / 256
    return cache + layer.query_heads * layer.qk_width / 1024 + layer.mlp_width / 2048 + 0.1 * layer.projected


def stepped(layer: LayerShape) -> float:
    """A time as kernels have it: the larger dimension counts, rounded up, and MLPs move in tiles."""
    wide = -(-max(layer.qk_dim, layer.v_dim) // 32)
    return wide + layer.qk_width / 256 + -(-layer.mlp_width // 256) + 0.2 * (layer.qk_dim != layer.v_dim)


class FakeClock:
    """Times by a formula, and what was asked."""

    def __init__(self, ms=smooth, rest=2.0, drift=0.0):
        self.ms, self.rest, self.drift, self.asked = ms, rest, drift, []

    def __call__(self, stacks):
        self.asked += stacks
        slow = 1 + self.drift * (len(self.asked) % 7)  # the machine slows down and recovers, for all alike
        return [[slow * (self.rest + sum(map(self.ms, stack)))] * 3 for stack in stacks]


def table_of(ms=smooth, source=MODEL, allow=("qk", "v", "mlp"), work=WORK, **more) -> LatencyTable:
    return latency.measure(FakeClock(ms), source, work, allow, 4, "a device", **more)


# What can be written.


@pytest.mark.parametrize(
    ("text", "work"),
    [
        ("decode,32k,b8", Workload("decode", 32768, 8)),
        ("b8, prefill", Workload("prefill", 2048, 8)),
        ("1000", Workload("decode", 1000, 1)),
        ("", Workload("decode", 2048, 1)),
        ("0.5k,prefill", Workload("prefill", 512, 1)),
    ],
)
def test_a_workload_is_read_in_any_order_with_defaults(text, work):
    assert Workload.parse(text) == work
    assert Workload.parse(str(work)) == work


@pytest.mark.parametrize("text", ["decod,32k", "b", "decode,prefill", "b8,b9", "1k,2k", "b0", "0", "1.2.3k"])
def test_a_workload_that_cannot_be_read_says_how_it_is_written(text):
    with pytest.raises(BudgetError, match="Write it like decode,32k,b8"):
        Workload.parse(text)


def test_limits_on_time_are_shares_or_absolute():
    table = table_of()
    full = 2.0 + 6 * smooth(LAYER)
    assert budgets.parse("latency=80%@decode,1k,b4", MODEL, (table,)).limit == pytest.approx(0.8 * full)
    for text, ms in (("12ms", 12.0), ("0.5s", 500.0), ("900us", 0.9)):
        found = budgets.parse(f"latency = {text} @ b4, decode, 1k", MODEL, (table,))
        assert found.limit == pytest.approx(ms) and found.workload == WORK and found.device == "a device"
    with pytest.raises(BudgetError, match="'GB' is no unit of latency; known: %, us, ms, s"):
        budgets.parse("latency=3GB@decode,1k,b4", MODEL, (table,))
    with pytest.raises(BudgetError, match="a percentage of the source lies above 0"):
        budgets.parse("latency=120%@decode,1k,b4", MODEL, (table,))


def test_time_that_was_not_measured_is_refused_with_the_command_that_measures_it():
    with pytest.raises(BudgetError) as caught:
        budgets.parse("latency=80%@prefill,8k", MODEL, (table_of(),))
    assert "headwise probe MODEL --latency prefill,8k,b1 --out FOLDER" in str(caught.value)


def test_models_that_keep_no_cache_only_read():
    encoder = replace(MODEL, cached=False)
    assert budgets.workloads(["latency=80%@b4", "kv=50%", "params=3M"], encoder) == (Workload("prefill", 2048, 4),)
    with pytest.raises(BudgetError, match="do not write token by token; use prefill"):
        budgets.workloads(["latency=80%@decode"], encoder)


# The table.


@pytest.mark.parametrize("ms", [smooth, stepped])
def test_every_size_that_a_plan_may_choose_is_measured_where_they_are_few(ms):
    table = table_of(ms)
    for qk, v in itertools.product(GRAIN.qk_sizes(64), GRAIN.v_sizes(64)):
        for width in {qk, 64}:
            layer = replace(LAYER, qk_dim=qk, qk_width=width, v_dim=v)
            assert table.layer_ms(layer) == pytest.approx(ms(layer)), "steps and unequal dimensions are seen"
    assert table.model_ms(MODEL) == pytest.approx(2.0 + 6 * ms(LAYER))
    assert table.layer_ms(GONE) == 0


def test_a_machine_that_slows_down_does_not_bend_the_table():
    clock = FakeClock(smooth, drift=0.1)
    table = latency.measure(clock, MODEL, WORK, ("qk", "v"), 4)
    small = replace(LAYER, qk_dim=16, v_dim=32)
    share = (table.rest_ms + 4 * table.layer_ms(small)) / (table.rest_ms + 4 * table.layer_ms(LAYER))
    assert share == pytest.approx((2.0 + 4 * smooth(small)) / (2.0 + 4 * smooth(LAYER)))


def test_lines_between_widths_are_checked_and_refined_only_where_they_are_off():
    wide = MODEL.with_layers((replace(LAYER, mlp_width=8192),) * 6)
    wide = replace(wide, grain=replace(GRAIN, mlp_floor=2048))
    straight = table_of(smooth, wide, ("mlp",))
    assert straight.held_out and not any(check.refined for check in straight.held_out) and straight.error < 1e-9

    def cliff(layer):
        return 10.0 + (5.0 if layer.mlp_width > 5000 else 0.0)

    found = table_of(cliff, wide, ("mlp",))
    assert any(check.refined and check.error > 0.1 for check in found.held_out), "what was off is on record"
    near = [size for size in found.mlp if 4900 < size < 5100]
    assert len(near) >= 2 and len(found.mlp) < 40, "more was measured at the step, and only there"
    assert found.layer_ms(replace(LAYER, mlp_width=5024)) == pytest.approx(15.0)
    assert found.layer_ms(replace(LAYER, mlp_width=4992)) == pytest.approx(10.0)


def test_too_many_combinations_are_read_off_a_lattice():
    allow = ("qk", "v", "heads", "kv_heads")
    large = replace(MODEL, layers=(replace(LAYER, query_heads=32, kv_heads=8),) * 6)
    clock = FakeClock()
    table = latency.measure(clock, large, WORK, allow, 4)
    every = sum(len(lattice.shapes(LAYER)) for lattice in latency.lattices(large, frozenset(allow)))
    assert every > latency.EVERY and len(table.times) < every / 2
    assert table.lattices[0].qk != GRAIN.qk_sizes(64)[::-1]
    for heads, groups, qk, v in ((15, 5, 40, 48), (28, 7, 24, 64), (3, 3, 56, 16)):
        layer = LayerShape(heads, groups, qk, v, 1024, qk)
        assert table.layer_ms(layer) == pytest.approx(smooth(layer), rel=0.05)
    assert table.error < 0.05 and any("mixed" in check.what for check in table.held_out)


def test_a_width_between_is_never_priced_too_low():
    table = table_of()
    between = replace(LAYER, qk_width=48, qk_dim=32)  # dropped pairs, then projected: only rounds make it
    assert table.layer_ms(between) >= smooth(between)


def test_a_source_whose_layers_differ_already_is_priced_layer_by_layer():
    layers = (LAYER, replace(LAYER, qk_dim=40), replace(LAYER, qk_dim=32, qk_width=48, v_dim=24, mlp_width=512))
    table = table_of(stepped, MODEL.with_layers(layers))
    assert table.model_ms(MODEL.with_layers(layers)) == pytest.approx(2.0 + sum(map(stepped, layers)))


def test_what_is_outside_the_table_is_refused_with_what_to_do():
    table = table_of(allow=("v",))
    for layer in (replace(LAYER, query_heads=8), replace(LAYER, mlp_width=512), replace(LAYER, qk_dim=32)):
        with pytest.raises(BudgetError, match="outside the table that was measured for decode,1k,b4; measure it too"):
            table.layer_ms(layer)


def test_a_table_survives_its_file(tmp_path):
    table = table_of(stepped)
    table.save(tmp_path / "t.json")
    assert LatencyTable.read(tmp_path / "t.json") == table


# Planning.


def invented_table(readings, ms, work=WORK, allow=("qk", "v", "mlp", "heads", "kv_heads")):
    return table_of(ms, readings.source, allow, work)


def unequal(layer: LayerShape) -> float:
    """No sum over qk and v: kernels pad to the larger, and unequal dimensions cost extra."""
    wide = -(-max(layer.qk_dim, layer.v_dim) // 4)
    return layer.kv_heads * wide + 0.5 * (layer.qk_dim != layer.v_dim) + layer.mlp_width / 32 + layer.qk_width / 64


def costly(layer: LayerShape) -> float:
    """As `smooth`, far above what the rest of the model takes."""
    return 100 * smooth(layer)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [95, 80, 65])
def test_the_exact_strategy_finds_the_best_plan_where_sizes_do_not_add_up(seed, share):
    readings = invent(seed, Invented(layers=2))
    source, table = readings.source, invented_table(readings, unequal)
    limit = budgets.parse(f"latency={share}%@{WORK}", source, (table,))
    plan = strategies.allocate(readings, (limit,), allow=("qk", "v", "mlp"))
    assert budgets.price(limit, plan.target) <= limit.limit * (1 + 1e-9), "spends no more than it has"

    def curve(kind, layer):
        reading = readings.curve(f"damage.{kind}")
        return list(zip(reading.ticks[layer], reading.values[layer], strict=True))

    options = []
    for index, shape in enumerate(source.layers):
        qk = [((s, shape.qk_width), d) for s, d in curve("qk_projected", index)]
        qk += [((s, s), d) for s, d in curve("qk_pairs", index)]
        rows = itertools.product(qk, curve("v", index), curve("mlp", index))
        options.append([
            (table.layer_ms(replace(shape, qk_dim=a[0], qk_width=a[1], v_dim=v, mlp_width=m)), x + y + z)
            for (a, x), (v, y), (m, z) in rows
        ])  # fmt: skip
    best = min(
        sum(damage for _, damage in pick)
        for pick in itertools.product(*options)
        if table.rest_ms + sum(ms for ms, _ in pick) <= limit.limit * (1 - 1e-9)
    )
    assert plan.predicted_damage == pytest.approx(best)


@pytest.mark.parametrize("strategy", ["exact", "uniform", "taper", "bound", "depth"])
def test_every_strategy_keeps_limits_on_time_along_others(strategy):
    readings = invent(3)
    source = readings.source
    works = (WORK, Workload("prefill", 64, 1))
    tables = [invented_table(readings, ms, work) for ms, work in zip((costly, unequal), works, strict=True)]
    texts = [f"latency=90%@{WORK}", f"latency=95%@{works[1]}", "kv=95%"]
    limits = tuple(budgets.parse(text, source, tables) for text in texts)
    plan = strategies.allocate(readings, limits, strategy, ("qk", "v", "mlp", "depth"))
    assert set(plan.spent) == {f"latency@{WORK}", f"latency@{works[1]}", "kv"}, "both limits on time are accounted for"
    assert all(plan.spent[limit.key] <= limit.limit * (1 + 1e-9) for limit in limits)


def test_a_plan_is_readable_alone_and_says_what_it_lacks(tmp_path):
    readings = invent(1)
    source, table = readings.source, invented_table(readings, costly)
    limit = budgets.parse(f"latency=85%@{WORK}", source, (table,))
    plan = strategies.allocate(readings, (limit,))
    plan.save(tmp_path / "plan.json")
    assert "times" not in (tmp_path / "plan.json").read_text()
    alone = Plan.read(tmp_path / "plan.json")
    assert alone == plan and alone.spent == plan.spent
    with pytest.raises(BudgetError, match=r"priced by a table of a device that is not here; put the run's latency-"):
        budgets.price(alone.budgets[0], source)
    run = RunFolder(tmp_path)
    table.save(run.table_file(WORK))
    assert budgets.price(run.read_plan().budgets[0], source) == pytest.approx(table.model_ms(source))


def test_the_slider_moves_along_time():
    readings = invent(2)
    source, table = readings.source, invented_table(readings, costly)
    plan = strategies.allocate(readings, (budgets.parse(f"latency=85%@{WORK}", source, (table,)),))
    sweep = frontier.solve(readings, plan, ("qk", "v", "mlp"))
    assert len(sweep.answers) > 5 and all(f"%@{WORK}" in answer.text for answer in sweep.answers)
    for answer in sweep.answers:
        shape = source.with_layers(sweep.target(answer))
        assert table.model_ms(shape) <= answer.share * table.model_ms(source) * (1 + 1e-9)
    slower = replace(plan.budgets[0], table=replace(table, rest_ms=9.0))
    key = frontier.fingerprint(readings, plan, ("qk",))
    assert frontier.fingerprint(readings, replace(plan, budgets=(slower,)), ("qk",)) != key, "of other times no answer"


def confirm(seed, ms, told=costly):
    """A plan of a table that says `told`, on a device whose stacks take `ms`; limits that were asked; kept tables."""
    readings = invent(seed)
    source, table = readings.source, invented_table(readings, told)
    limit = budgets.parse(f"latency=85%@{WORK}", source, (table,))
    asked, kept = [], []

    def plan_for(limits):
        asked.append(limits[0].limit)
        return strategies.allocate(readings, limits)

    plan = measured.confirmed(
        plan_for, (limit,), source, lambda work: lambda stacks: [[ms(stack)] * 3 for stack in stacks], kept.append
    )
    assert plan.budgets == (limit,), "the plan states what the user asked for"
    share = ms(tuple(plan.target.layers)) / ms(source.layers)
    return plan, share, asked, kept[0]


def honest(stack):
    return 2.0 + sum(map(costly, stack))


def test_a_plan_that_keeps_its_limit_on_the_device_stays():
    plan, share, asked, _ = confirm(4, honest)
    assert len(asked) == 1 and share <= 0.85


def test_layers_that_were_timed_too_short_are_found_out_before_the_plan_is_built():
    lucky = set()

    def told(layer):  # one size in three came out a third too short
        if sum((layer.qk_dim, layer.v_dim, layer.mlp_width // 8)) % 3 == 0 and layer.v_dim < 8:
            lucky.add(layer)
            return 0.65 * costly(layer)
        return costly(layer)

    plan, share, asked, table = confirm(4, honest, told)
    assert lucky and len(asked) > 1 and share <= 0.85 * 1.01
    for layer in plan.target.layers:
        assert table.layer_ms(layer) == pytest.approx(costly(layer)), "the table that is kept knows better"
    assert plan.spent[f"latency@{WORK}"] == pytest.approx(table.model_ms(plan.target))


def test_where_layers_do_not_add_up_the_limit_is_tightened():
    def mixed(stack):
        return honest(stack) * (1.06 if len(set(stack)) > 1 else 1.0)

    plan, share, asked, _ = confirm(4, mixed)
    assert asked[-1] < asked[0] and share <= 0.85 * 1.01


# Files and devices.


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
    assert other.times == first.times and len(clock.asked) - count <= 2 * latency.HELD_OUT, "the cache: only checks"
    count = len(clock.asked)
    wider = timed(model, RunFolder(tmp_path / "a"), ("qk", "v", "mlp"))
    assert len(wider.mlp) > 1 and len(clock.asked) > count, "what was lacking is added"
    file.write_text(file.read_text()[:100])
    count = len(clock.asked)
    assert timed(model, RunFolder(tmp_path / "c")).times == first.times
    assert len(clock.asked) - count > 2 * latency.HELD_OUT, "a broken file is measured over"
    assert LatencyTable.read(file).workload == TINY


def test_measuring_goes_on_where_it_was_killed(here, monkeypatch):
    monkeypatch.setattr(latency, "_mixed", lambda *args: ())  # stacks that are drawn may be of one layer by chance
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
    assert not (fresh & known) - {latency.base_of(llama.shape_of(model.config))}


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
    monkeypatch.setattr(speed, "fast_twin", lambda model: twins.append(measuring.fast_twin(model)) or twins[-1])
    for name, count in ((measuring.PLAIN, 0), (measuring.FAST, 2)):
        found = speed.measure(source, source, prompt=16, steps=4, repeats=1, runtime=name)
        assert found["decode_ms_per_token_after"] > 0 and found["prompt_tokens"] == 16 and len(twins) == count
    assert all(twin.headwise_fast.pool is not None and twin.headwise_fast.ordinary == 0 for twin in twins)
    assert not hasattr(source, "headwise_fast")


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
    whole = latency.base_of(shape)
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
            assert step() is not None and not step.captured
        assert step.runtime == ("fast" if shape.cached else "plain"), "decoders as `optimise=True` makes them"
        assert not hasattr(built, "headwise_fast") and [w.data_ptr() for w in built.parameters()] == before


@torch.no_grad()
def test_a_step_at_the_end_of_a_full_cache_is_the_models_own():
    from transformers import DynamicCache

    cut = replace(llama.shape_of(llama.tiny().config).layers[0], v_dim=8)
    model = Stacks(llama, llama.tailor(llama.tiny()), Workload("decode", 9, 2)).model((cut, cut))
    rows, own = llama.example(model.config, 2, 9), DynamicCache()
    model(input_ids=rows[:, :8], past_key_values=own, use_cache=True)
    cache = measuring.filled_cache(llama, model, Workload("decode", 9, 2))
    for full, layer in zip(cache.layers, own.layers, strict=True):
        full.keys[:, :, :8], full.values[:, :, :8] = layer.keys, layer.values
    wanted = model(input_ids=rows).logits[:, -1:]
    for _ in range(2):  # again and again
        found = model(input_ids=rows[:, 8:], past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    fast, ids = measuring.fast_twin(model), rows[:, 8:]
    cache = decode.filled(fast, 2, 9)
    for full, layer in zip(cache.layers, own.layers, strict=True):
        full.keys[:, :, :8], full.values[:, :, :8] = layer.keys, layer.values
    for _ in range(2):
        found = decode.repeated(fast, cache, ids, torch.full_like(ids, 8))
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
    assert "is no phase (decode or prefill)" in refused(capsys, "probe", folder, "--latency", "both", "--out", out)
