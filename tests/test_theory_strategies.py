"""The strategies of the first paper: what tapers, what the theory prices, and what both do for new models."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Invented, invent

sys.path.insert(0, str(Path(__file__).parents[1]))  # experiments live beside the package

from experiments import _first_paper  # noqa: E402

from headwise import budgets as prices  # noqa: E402
from headwise import strategies  # noqa: E402
from headwise.errors import BudgetError, PlanError, UnknownNameError  # noqa: E402
from headwise.research.designs import bound, taper  # noqa: E402
from headwise.strategies._options import menus  # noqa: E402
from headwise.types import Grain, LayerShape, ModelShape, Plan, Readings  # noqa: E402

WIDE = Invented(layers=6, kv_heads=2, queries_per_group=4, dim=32, mlp_width=256, sizes=13)
FULL = LayerShape(query_heads=8, kv_heads=8, qk_dim=64, v_dim=64, mlp_width=512, qk_width=64)
GRAIN = Grain(qk_step=8, v_step=8, mlp_step=32, qk_floor=8, v_floor=8, mlp_floor=64, rotary=True, projectable=True)
NEW = ModelShape("llama", 512, 1000, True, (FULL,) * 12, GRAIN)


def plan_for(rule: Callable[..., Plan], readings: Readings, *texts: str, allow: tuple[str, ...]) -> list[LayerShape]:
    source = readings.source
    plan = rule(source, readings, tuple(prices.parse(t, source) for t in texts), allow)
    return list(plan.target.layers)


@pytest.mark.parametrize("name", ["taper", "bound"])
def test_no_run_offers_them(name: str) -> None:
    with pytest.raises(UnknownNameError, match=f"no strategy is called '{name}'.* Known: depth, exact"):
        strategies.allocate(invent(1), (), name)


def test_a_taper_falls_with_depth_and_starts_where_the_source_is() -> None:
    layers = plan_for(_first_paper.taper, invent(1, WIDE), "kv=80%", allow=("qk", "v"))
    for size in ("qk_dim", "v_dim"):
        sizes = [getattr(layer, size) for layer in layers]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]
    assert layers[0].qk_dim >= 30, "the first layer loses least"


def test_a_taper_leaves_the_mlp_alone_while_attention_can_pay() -> None:
    allow = ("v", "mlp")
    some = plan_for(_first_paper.taper, invent(2, WIDE), "flops=95%@256", allow=allow)
    assert {layer.mlp_width for layer in some} == {256}
    more = plan_for(_first_paper.taper, invent(2, WIDE), "flops=75%@64", allow=allow)
    assert min(layer.mlp_width for layer in more) < 256


def test_no_gentler_taper_meets_the_budget() -> None:
    readings = invent(3, WIDE)
    source = readings.source
    budget = (prices.parse("kv=70%", source),)
    offered = menus(source, readings, ("qk", "v"), ("qk_projected",))
    found = taper.least_steep(source, [offered], budget, ("qk", "v"))
    assert prices.price(budget[0], source.with_layers(tuple(found.layers))) <= budget[0].limit
    for share in (0.5, 0.8, 0.95):
        gentler = taper.at_slope(source, offered, found.slope * share, mlp=False)
        if gentler.layers != found.layers:
            assert prices.price(budget[0], source.with_layers(tuple(gentler.layers))) > budget[0].limit


def test_a_reversed_taper_spares_the_last_layers() -> None:
    def reverse(*given: object) -> Plan:
        return _first_paper.taper(*given, reverse=True)  # type: ignore[arg-type]

    dims = [layer.qk_dim for layer in plan_for(reverse, invent(4, WIDE), "kv=75%", allow=("qk", "v"))]
    assert dims == sorted(dims) and dims[0] < dims[-1]


@pytest.mark.parametrize("text", ["params=80%", "flops=80%@4k", "kv=50%", "attention=75%@1k"])
def test_new_models_meet_their_budget(text: str) -> None:
    budget, allow = prices.parse(text, NEW), ("qk", "v", "heads", "kv_heads", "mlp")
    for made in (
        taper.design(NEW, (budget,), allow),
        bound.design(NEW, (budget,), allow, (0.5, 0.25, 0.125), 1024),
    ):
        assert 0.9 * budget.limit < prices.price(budget, made) <= budget.limit, "and use it"
        assert all(layer.qk_dim % 8 == 0 and layer.v_dim % 8 == 0 for layer in made.layers)


def test_a_budget_below_every_taper_is_refused_with_one_that_works() -> None:
    with pytest.raises(BudgetError, match=r"is out of reach.*Try --budget kv=12.5%"):
        taper.design(NEW, (prices.parse("kv=5%", NEW),), ("qk", "v"))


def test_early_ends_where_saturation_begins() -> None:
    assert _first_paper.early_layers([-0.1, -0.2, -0.9, -0.8]) == 2
    assert _first_paper.early_layers([-0.1, -0.2]) == 2, "nothing saturates: all are early"
    assert _first_paper.early_layers([-0.9, -0.9]) == 0, "everything does"


def test_late_layers_lose_the_key_dimensions_that_saturation_makes_cheap() -> None:
    readings = invent(5, WIDE)

    def fixed(kind: str, rows: list[tuple[float, ...]]) -> Readings:
        curves = tuple(replace(c, values=tuple(rows)) if c.kind == kind else c for c in readings.curves)
        return replace(readings, curves=curves)

    readings = fixed("saturation.slope", [(0.0,) * 8] * 3 + [(-1.0,) * 8] * 3)
    readings = fixed("saturation.jacobian_norm", [(0.2, 0.01)] * 6)
    layers = plan_for(_first_paper.bound, readings, "kv=85%", allow=("qk", "v"))
    assert min(layer.qk_dim for layer in layers[:3]) > max(layer.qk_dim for layer in layers[3:])


def test_fewer_heads_never_have_a_smaller_bound() -> None:
    errors = [bound.heads_error((0.4, 0.3, 0.2), heads) for heads in range(1, 17)]
    assert errors == sorted(errors, reverse=True) and errors[0] > errors[-1]


def test_readings_without_the_theorys_quantities_are_refused() -> None:
    readings = invent(6)
    old = replace(readings, curves=tuple(c for c in readings.curves if not c.kind.startswith("lags")))
    with pytest.raises(PlanError, match=r"the bound needs the reading lags\.contribution.*headwise probe"):
        plan_for(_first_paper.bound, old, "kv=80%", allow=("qk", "v"))
