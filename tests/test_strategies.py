"""Strategies: what each promises, and that the exact one is exact."""

from __future__ import annotations

import os
import random
import re
from contextlib import suppress
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
from conftest import Invented, invent

from headwise import budgets as prices
from headwise import strategies
from headwise.errors import BudgetError, PlanError, UnknownNameError
from headwise.strategies import _program, _reach, exact
from headwise.strategies._options import depth_steps
from headwise.strategies._quiet import without_marked_lines
from headwise.types import GONE, UNITS, Budget, LayerKeep, LayerShape, ModelShape, Plan, Readings

EVERY = pytest.mark.parametrize("strategy", strategies.known())
NOT_DEPTH = pytest.mark.parametrize("strategy", [name for name in strategies.known() if name != "depth"])
HAIR = 1 + 1e-12  # a percentage of bytes is rarely a whole number


def budgets_of(readings: Readings, *texts: str) -> tuple[Budget, ...]:
    source = readings.source
    return tuple(prices.parse(text, source) for text in texts)


def plan_for(strategy: str, readings: Readings, *texts: str, allow: tuple[str, ...] = UNITS) -> Plan:
    return strategies.allocate(readings, budgets_of(readings, *texts), strategy, allow)


@EVERY
@pytest.mark.parametrize("texts", [("kv=80%",), ("params=85%",), ("flops=85%@64",), ("kv=80%", "params=90%")])
@pytest.mark.parametrize("seed", [1, 2])
def test_contract(strategy: str, texts: tuple[str, ...], seed: int) -> None:
    readings = invent(seed)
    plan = plan_for(strategy, readings, *texts)
    for budget in plan.budgets:
        spent = prices.price(budget, plan.target)
        assert spent <= budget.limit * HAIR, "spends no more than it has"
        assert plan.spent[budget.name] == spent, "and says what it spends"
    assert plan == plan_for(strategy, readings, *texts), "same inputs, same plan"
    assert plan.strategy == strategy, "signs its plan"
    assert plan.source != plan.target and plan.predicted_damage > 0, "has to cut, and says what that damages"
    assert Plan.from_json(plan.to_json()) == plan, "survives its file"
    for old, new, keep in zip(plan.source.layers, plan.target.layers, plan.keep, strict=True):
        for name in LayerShape.__slots__:
            assert getattr(new, name) <= getattr(old, name), "a plan only shrinks"
        if new.gone:
            assert keep == LayerKeep(), "nothing is kept of a layer that goes"
            continue
        for kept, before, after in (
            (keep.query_heads, old.query_heads, new.query_heads),
            (keep.kv_heads, old.kv_heads, new.kv_heads),
            (keep.mlp_channels, old.mlp_width, new.mlp_width),
            *((pairs, old.qk_width // 2, new.qk_width // 2) for pairs in keep.rotary_pairs or ()),
        ):
            assert (kept is None) == (before == after), "names what stays exactly where something goes"
            assert kept is None or (list(kept) == sorted(set(kept)) and len(kept) == after), "in order, once each"
            assert kept is None or all(0 <= index < before for index in kept), "of what there was"
        if keep.query_heads is not None:
            groups = [head // old.queries_per_group for head in keep.query_heads]
            wanted = keep.kv_heads if keep.kv_heads is not None else tuple(range(old.kv_heads))
            assert groups == [g for g in wanted for _ in range(new.queries_per_group)], "heads stay with their group"


@EVERY
def test_nothing_is_cut_where_nothing_has_to_be(strategy: str) -> None:
    plan = plan_for(strategy, invent(3), "kv=100%", "params=100%", "flops=100%")
    assert plan.source == plan.target and plan.predicted_damage == 0 and plan.gap == 0


@NOT_DEPTH
def test_only_what_is_allowed_is_cut(strategy: str) -> None:
    plan = plan_for(strategy, invent(4), "params=90%", allow=("mlp",))
    for old, new in zip(plan.source.layers, plan.target.layers, strict=True):
        assert replace(new, mlp_width=old.mlp_width) == old


@EVERY
@pytest.mark.parametrize("text", ["kv=5%", "params=1%", "flops=2%@4k", "flops=2%@16", "kv=10B@8"])
def test_an_unreachable_budget_names_one_that_is_reachable(strategy: str, text: str) -> None:
    readings = invent(5)
    with pytest.raises(BudgetError) as caught:
        plan_for(strategy, readings, text)
    found = re.fullmatch(
        rf"{re.escape(text)} is out of reach: with everything that may be cut "
        r"\(qk, v, mlp, heads, kv_heads, (?:rank, )?depth\) at its smallest legal size, "
        r"([0-9.]+)% remains\. Try --budget (\S+)\.",
        str(caught.value),
    )
    assert found, str(caught.value)
    share, proposal = float(found[1]), found[2]
    plan = plan_for(strategy, readings, proposal)
    spent = plan.spent[plan.budgets[0].name] / prices.price(plan.budgets[0], plan.source)
    assert 100 * spent == pytest.approx(share, abs=0.06), "what it named is what remains"
    tighter = proposal.replace(found := re.search(r"=([0-9.]+)%", proposal)[0], f"={float(found[1:-1]) - 0.2:g}%")
    with pytest.raises(BudgetError, match="is out of reach"):
        plan_for(strategy, readings, tighter)


@NOT_DEPTH
def test_the_refusal_says_what_else_could_be_cut(strategy: str) -> None:
    with pytest.raises(BudgetError, match=re.escape(", or allow more with --allow mlp,qk,v,heads,kv_heads,depth.")):
        plan_for(strategy, invent(5), "params=1%", allow=("mlp",))


def test_budgets_that_only_fail_together_are_refused_as_such() -> None:
    whole = invent(6)
    # With projections alone, a smaller cache costs parameters: each budget can be met, both cannot.
    shape = whole.source
    shape = replace(shape, grain=replace(shape.grain, rotary=False))
    curves = tuple(c for c in whole.curves if c.kind == "damage.qk_projected")
    readings = replace(whole, shape=shape, curves=curves)
    for text in ("kv=75%", "params=100%"):
        assert plan_for("exact", readings, text, allow=("qk",))
    text = "no plan meets kv=75% and params=100% together, though each alone can be met. Loosen one, or allow more"
    with pytest.raises(BudgetError, match=text):
        plan_for("exact", readings, "kv=75%", "params=100%", allow=("qk",))
    with pytest.raises(BudgetError, match=text):
        _reach.check(shape, budgets_of(readings, "kv=75%", "params=100%"), exact, ("qk",))


def test_unknown_units_and_strategies_are_named() -> None:
    readings = invent(1)
    with pytest.raises(PlanError) as caught:
        plan_for("exact", readings, "kv=80%", allow=("qk", "layers"))
    known = "qk, v, mlp, bits, heads, kv_heads, rank, weights, depth"
    assert str(caught.value) == f"'layers' is no unit that can be cut; --allow takes: {known}."
    with pytest.raises(UnknownNameError, match="no strategy is called 'exat'. Did you mean 'exact'?"):
        plan_for("exat", readings, "kv=80%")


@pytest.mark.parametrize("strategy", ["uniform", "portable", "published"])
def test_equal_strategies_give_every_layer_the_same_sizes(strategy: str) -> None:
    plan = plan_for(strategy, invent(7), "kv=70%")
    assert len(set(plan.target.layers)) == 1


def test_equal_strategies_refuse_a_model_with_unequal_layers() -> None:
    readings = invent(7)
    source = readings.source
    uneven = source.with_layers((replace(source.layers[0], v_dim=10), *source.layers[1:]))
    with pytest.raises(PlanError, match="layers have different sizes already; use --strategy exact"):
        plan_for("uniform", replace(readings, shape=uneven), "kv=80%")


def test_a_portable_plan_is_an_ordinary_architecture() -> None:
    plan = strategies.allocate(invent(8), budgets_of(invent(8), "kv=75%"), portable=True, allow=("qk", "v"))
    layer, kept = plan.target.layers[0], {pairs for keep in plan.keep for pairs in keep.rotary_pairs or ()}
    assert plan.portable and layer.qk_dim == layer.v_dim == layer.qk_width == 6
    assert all(len({*(keep.rotary_pairs or ())}) == 1 for keep in plan.keep) and kept, "heads share their pairs"


# The exact strategy against brute force.


def every_layer(source: ModelShape, readings: Readings, layer: int, allow: tuple[str, ...]) -> list[tuple]:
    """Every form of a layer with its damage, straight from the curves."""
    full = source.layers[layer]

    def sizes(kind: str, unit: str, whole: int) -> list[tuple[int, float]]:
        reading = readings.curve(f"damage.{kind}")
        assert reading is not None
        return list(zip(reading.ticks[layer], reading.values[layer], strict=True)) if unit in allow else [(whole, 0.0)]

    qk = [((full.qk_width, size), d) for size, d in sizes("qk_projected", "qk", full.qk_dim)]
    qk += [((size, size), d) for size, d in sizes("qk_pairs", "qk", full.qk_dim)]
    return [
        (LayerShape(g * n, g, dim, v, mlp, width), dg + dn + dq + dv + dm)
        for (g, dg), (n, dn), ((width, dim), dq), (v, dv), (mlp, dm) in product(
            sizes("kv_heads", "kv_heads", full.kv_heads),
            sizes("heads", "heads", full.queries_per_group),
            qk,
            sizes("v", "v", full.v_dim),
            sizes("mlp", "mlp", full.mlp_width),
        )
    ]


def brute_force(readings: Readings, budgets: tuple[Budget, ...], allow: tuple[str, ...]) -> float | None:
    """The least damage of any plan, by trying them all; None where none is affordable."""
    found = [_brute_force(readings, budgets, allow, gone, lost) for gone, lost in depth_steps(readings, allow)]
    return min((damage for damage in found if damage is not None), default=None)


def _brute_force(readings, budgets, allow, gone: tuple[int, ...], lost: float) -> float | None:
    source = readings.source
    layers = [
        [(GONE, 0.0)] if i in gone else every_layer(source, readings, i, allow) for i in range(len(source.layers))
    ]
    priced = [[(d, [prices.layer_price(b, source, s) for b in budgets]) for s, d in options] for options in layers]
    fixed = [
        prices.price(b, source) - sum(prices.layer_price(b, source, layer) for layer in source.layers) for b in budgets
    ]
    states: list[tuple[float, list[float]]] = [(lost, fixed)]
    for options in priced:
        grown = [(a + d, [x + y for x, y in zip(s, p, strict=True)]) for a, s in states for d, p in options]
        states = grown
    affordable = [d for d, spent in states if all(s <= b.limit * HAIR for s, b in zip(spent, budgets, strict=True))]
    return min(affordable, default=None)


def small_case(seed: int) -> tuple[Readings, tuple[Budget, ...], tuple[str, ...]]:
    """A random model small enough to try every plan, with one to three budgets and two or three kinds of units."""
    rng = random.Random(seed)
    layers = rng.choice((2, 3))
    model = Invented(layers, rng.choice((1, 2)), rng.choice((1, 2)), rng.choice((4, 6)), 16, 2)
    units = [unit for unit in UNITS if unit not in ("rank", "weights")]  # which have tests of their own
    allow = tuple(sorted(rng.sample(units, 2 if layers == 3 else 4)))
    texts = rng.sample(["kv", "params", "flops"], rng.choice((1, 2, 3)))
    readings = invent(seed, model)
    return readings, budgets_of(readings, *(f"{name}={rng.uniform(55, 99):.2f}%@32" for name in texts)), allow


@pytest.mark.parametrize("core", [4, 0], ids=["as shipped", "starting from almost nothing"])
def test_exact_equals_brute_force_and_is_never_worse_than_uniform(core: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_program, "CORE", core)  # small programs would never be cut down otherwise
    monkeypatch.setattr(exact.Depths, "frontier", lambda self: ())  # it has a test of its own
    feasible = better = 0
    for seed in range(bool(core), 160, 2):
        readings, budgets, allow = small_case(seed)
        best = brute_force(readings, budgets, allow)
        if best is None:
            with pytest.raises(BudgetError):
                strategies.allocate(readings, budgets, "exact", allow)
            continue
        plan = strategies.allocate(readings, budgets, "exact", allow)
        assert plan.predicted_damage == pytest.approx(best, rel=1e-9, abs=1e-12), f"case {seed} is not optimal"
        assert plan.gap == 0, "and proven to be"
        assert all(prices.price(b, plan.target) <= b.limit * HAIR for b in budgets)
        with suppress(BudgetError):  # equal sizes may be out of reach
            uniform = strategies.allocate(readings, budgets, "uniform", allow)
            assert plan.predicted_damage <= uniform.predicted_damage + 1e-12
            better += plan.predicted_damage < uniform.predicted_damage - 1e-12
        feasible += 1
    assert feasible >= 25 and better >= 10, "most cases should test something, and exact is often better"


@EVERY
def test_no_strategy_beats_exact(strategy: str) -> None:
    readings = invent(9)
    best = plan_for("exact", readings, "kv=75%", "params=90%").predicted_damage
    if strategy != "portable":  # its rotary pairs have a curve of their own
        assert best <= plan_for(strategy, readings, "kv=75%", "params=90%").predicted_damage + 1e-12


@pytest.mark.parametrize("texts", [("kv=70%",), ("params=80%", "kv=75%"), ("flops=80%", "params=90%", "kv=80%")])
def test_the_frontier_falls_and_agrees_with_plans(texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    readings = invent(10, Invented(layers=4))
    plan = plan_for("exact", readings, *texts)
    shares, damages = [p.share for p in plan.frontier], [p.damage for p in plan.frontier]
    assert len(plan.frontier) >= 2 and shares == sorted(shares) and shares[-1] == 1.0
    assert damages == sorted(damages, reverse=True) and damages[0] > damages[-1], "more budget, less damage"
    monkeypatch.setattr(exact.Depths, "frontier", lambda self: ())
    for point in plan.frontier[1:-1:4]:
        name = plan.budgets[0].name
        there = plan_for("exact", readings, f"{name}={100 * point.share:.12f}%", *texts[1:]).predicted_damage
        assert there <= point.damage * (1 + 1e-9) and point.damage <= there * (1 + 2 * _program.FRONTIER_GAP)


def test_without_budgets_nothing_is_cut() -> None:
    plan = strategies.allocate(invent(1), (), "exact")
    assert plan.source == plan.target and plan.frontier == ()


def test_a_solver_that_fails_is_not_taken_for_an_answer(monkeypatch):
    monkeypatch.setattr(_program, "milp", lambda *a, **k: SimpleNamespace(x=None, status=4, message="HiGHS: memory"))
    readings = invent(0, Invented(dim=16, mlp_width=64, sizes=6))
    with pytest.raises(MemoryError):
        strategies.allocate(readings, budgets_of(readings, "kv=70%", "params=90%"), "exact")


def test_only_the_solvers_own_lines_are_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    with without_marked_lines():
        os.write(1, b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();\nkept\n")
        os.write(1, b"of another\n")
        os.write(2, b"HighsMipSolverData::x\nalso kept")
    found = capfd.readouterr()
    assert found.out == "kept\nof another\n" and found.err == "also kept"
