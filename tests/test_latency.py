"""Latency as a budget: what is timed, how a table prices the rest, what is said where it cannot. Clocks are fake."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from test_pipeline import SMALL, call, folder, refused  # noqa: F401  # a fixture

from headwise import budgets
from headwise.errors import BudgetError
from headwise.fast import choice
from headwise.latency import lattice
from headwise.types import (
    GONE,
    Grain,
    LatencyTable,
    LayerShape,
    ModelShape,
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
    return lattice.measure(FakeClock(ms), source, work, allow, 4, "a device", **more)


def invented_table(readings, ms, work=WORK, allow=("qk", "v", "mlp", "heads", "kv_heads")):
    return table_of(ms, readings.source, allow, work)


def costly(layer: LayerShape) -> float:
    """As `smooth`, far above what the rest of the model takes."""
    return 100 * smooth(layer)


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
    table = lattice.measure(clock, MODEL, WORK, ("qk", "v"), 4)
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
    table = lattice.measure(clock, large, WORK, allow, 4)
    every = sum(len(one.shapes(LAYER)) for one in lattice.lattices(large, frozenset(allow)))
    assert every > lattice.EVERY and len(table.times) < every / 2
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
