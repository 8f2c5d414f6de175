"""Plans under limits on time: the exact strategy stays exact, and a plan is timed on the device before it is built."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from conftest import Invented, invent
from test_latency import WORK, FakeClock, costly, invented_table, own_cache, smooth, table_of  # noqa: F401  # a fixture
from test_pipeline import SMALL, call, folder, refused  # noqa: F401  # a fixture

from headwise import budgets, strategies
from headwise.errors import BudgetError
from headwise.latency import measured
from headwise.runs.folder import RunFolder
from headwise.stages import frontier
from headwise.types import (
    LayerShape,
    Plan,
    Workload,
)


def unequal(layer: LayerShape) -> float:
    """No sum over qk and v: kernels pad to the larger, and unequal dimensions cost extra."""
    wide = -(-max(layer.qk_dim, layer.v_dim) // 4)
    return layer.kv_heads * wide + 0.5 * (layer.qk_dim != layer.v_dim) + layer.mlp_width / 32 + layer.qk_width / 64


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


@pytest.mark.parametrize("strategy", ["exact", "uniform", "depth"])
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


def test_if_no_plan_keeps_its_limit_the_nearest_comes_out_and_is_told_of(caplog):
    source, found = invent(4).source.layers, dict[tuple, float]()
    whole = honest(source)

    def never(stack):  # every plan that is timed is further off than the one before
        if len(set(stack)) == 1:
            return honest(stack)
        return found.setdefault(tuple(stack), 0.85 * whole * (1.03 + 0.01 * len(found)))

    plan, share, asked, _ = confirm(4, never)
    assert "no plan keeps latency=85%" in caplog.text and "3.0% longer" in caplog.text
    assert len(asked) > 1 and share == pytest.approx(0.85 * 1.03) and tuple(plan.target.layers) == next(iter(found))
    assert plan.spent[f"latency@{WORK}"] == pytest.approx(1.03 * plan.budgets[0].limit), "the time that was seen"
