"""Plans with the same sizes in every layer: the baselines and the portable form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from headwise import budgets as prices
from headwise.errors import PlanError
from headwise.strategies._options import PRICED, Choice, LayerMenu, affordable, refuse, with_choices
from headwise.types import Budget, LayerShape, ModelShape


def refuse_unequal(source: ModelShape) -> None:
    """Layers that differ cannot be given the same sizes."""
    widest = max(layer.mlp_width for layer in source.layers)
    if len({replace(layer, role="", mlp_width=layer.mlp_width or widest) for layer in source.layers}) > 1:
        raise PlanError("this model's layers have different sizes already; use --strategy exact and no --portable.")


def combinations(source: ModelShape, offered: list[LayerMenu]) -> Iterator[tuple[list[LayerShape], float]]:
    """Every way to give all layers the same sizes, with its total damage; layers without an MLP stay without."""
    refuse_unequal(source)
    tables = [
        {kind: {c.sizes: c for c in getattr(menu, kind)} for kind in ("heads", "qk", "v", "mlp")} for menu in offered
    ]
    for table, layer in zip(tables, source.layers, strict=True):
        if not layer.mlp_width:  # whatever the others get
            (nothing,) = table["mlp"].values()
            table["mlp"] = {sizes: nothing for other in tables for sizes in other["mlp"]}
    places = {layer: index for index, layer in enumerate(source.layers)}
    shared = [[s for s in tables[0][kind] if all(s in t[kind] for t in tables)] for kind in ("heads", "qk", "v", "mlp")]
    for sizes in product(*shared):
        chosen: list[tuple[Choice, ...]] = [
            tuple(t[kind][s] for kind, s in zip(("heads", "qk", "v", "mlp"), sizes, strict=True)) for t in tables
        ]
        made = {layer: with_choices(layer, *chosen[index]) for layer, index in places.items()}
        if source.grain.equal and any(layer.qk_dim != layer.v_dim for layer in made.values()):
            continue
        yield [made[layer] for layer in source.layers], sum(c.damage for row in chosen for c in row)


def best_equal(
    source: ModelShape,
    offered: list[LayerMenu],
    budgets: tuple[Budget, ...],
    allow: tuple[str, ...],
    legal: Callable[[LayerShape], bool] = lambda layer: True,
    possible: Sequence[str] = PRICED,
) -> tuple[list[LayerShape], float]:
    """The affordable combination of least damage; ties go to the larger model."""
    best: tuple[float, float, list[LayerShape]] | None = None
    smallest = [float("inf")] * len(budgets)
    for layers, damage in combinations(source, offered):
        if not legal(layers[0]):
            continue
        model = source.with_layers(tuple(layers))
        costs = [prices.price(budget, model) for budget in budgets]
        smallest = [min(pair) for pair in zip(smallest, costs, strict=True)]
        rank = (damage, -sum(costs))
        if affordable(budgets, model) and (best is None or rank < best[:2]):
            best = (*rank, layers)
    if best is None and float("inf") in smallest:
        raise PlanError("no equal sizes are legal in every layer; use --strategy exact and no --portable.")
    if best is None:
        raise refuse(source, budgets, smallest, allow, possible)
    return best[2], best[0]
