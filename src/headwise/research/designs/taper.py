"""The rule of "Allocation of Parameters in Transformers": heads and dimensions fall with depth.

A family with one parameter, the slope `t`: layer `l` of `n` keeps the share `1 - t (l + 1) / n` of every size, at least
the smallest legal one, so that the first layer loses least and the last most. The slope is the smallest that meets the
budgets. The rule is about attention only; MLP widths follow it where attention alone cannot meet the budgets. For
cutting trained models the rule was refuted (experiment A8): here it designs new ones.
"""

from collections.abc import Iterator
from typing import NamedTuple

from headwise import budgets as prices
from headwise.errors import BudgetError
from headwise.strategies._options import Choice, LayerMenu, affordable, legal_menus, refuse, with_choices
from headwise.types import Budget, LayerShape, ModelShape

SLOPES = 400  # tried at most: finer than any legal step of the usual models


class Tapered(NamedTuple):
    """The layers at one slope, and what they were predicted to damage."""

    layers: list[LayerShape]
    damage: float
    slope: float


def design(source: ModelShape, budgets: tuple[Budget, ...], allow: tuple[str, ...]) -> ModelShape:
    """A new model that tapers from `source`'s sizes until it meets the budgets; there is nothing to keep yet."""
    return source.with_layers(tuple(least_steep(source, [legal_menus(source, allow)], budgets, allow).layers))


def least_steep(
    source: ModelShape,
    offered: list[list[LayerMenu]],
    budgets: tuple[Budget, ...],
    allow: tuple[str, ...],
) -> Tapered:
    """The first slope that meets the budgets; MLPs taper only where attention alone cannot meet them.

    `offered` holds the menus of every way to shrink queries and keys.
    """
    for mlp in (False, True):
        fits = [found for way in offered for found in _first_fit(source, way, budgets, mlp)]
        if fits:
            return min(fits, key=lambda found: found.damage)
    raise _out_of_reach(source, offered, budgets, allow)


def share(layer: int, layers: int, slope: float) -> float:
    """What a layer keeps of its sizes.

    >>> [share(layer, 4, 0.4) for layer in range(4)]
    [0.9, 0.8, 0.7, 0.6]
    """
    return max(0.0, round(1.0 - slope * (layer + 1) / layers, 12))


def at_slope(source: ModelShape, menu: list[LayerMenu], slope: float, mlp: bool) -> Tapered:
    """Every size at the legal one nearest to its share."""
    layers, damage = [], 0.0
    for index, (shape, offer) in enumerate(zip(source.layers, menu, strict=True)):
        kept = share(index, len(menu), slope)
        kinds = [offer.heads, offer.qk, offer.v, *([offer.mlp] if mlp else [])]
        choices = [_nearest(choices, kept) for choices in kinds]
        layers.append(with_choices(shape, *choices))
        damage += sum(choice.damage for choice in choices)
    return Tapered(layers, damage, slope)


def _nearest(choices: tuple[Choice, ...], kept: float) -> Choice:
    """The choice whose sizes are each the legal one nearest to the share."""
    points = {_sizes(choice): choice for choice in choices}
    axes = zip(_sizes(choices[0]), zip(*points, strict=True), strict=True)
    return points[tuple(min((abs(size - kept * full), -size, size) for size in legal)[2] for full, legal in axes)]


def _sizes(choice: Choice) -> tuple[int, ...]:
    """What a choice decides: key/value heads and how many queries share one, or a single size."""
    sizes = dict(choice.sizes)
    if "kv_heads" in sizes:
        return sizes["kv_heads"], sizes["query_heads"] // sizes["kv_heads"]
    return (choice.sizes[-1][1],)


def _first_fit(source: ModelShape, menu: list[LayerMenu], budgets: tuple[Budget, ...], mlp: bool) -> Iterator[Tapered]:
    """The least steep taper that meets the budgets, if any does. A price need not fall with the slope: try in order."""
    for slope in _slopes(menu, mlp):
        found = at_slope(source, menu, slope, mlp)
        if affordable(budgets, source.with_layers(tuple(found.layers))):
            yield found
            return


def _slopes(menu: list[LayerMenu], mlp: bool) -> list[float]:
    """Slopes between those at which some size falls, from none to all at their smallest; thinned if there are many."""
    falls = {0.0}
    for layer, offer in enumerate(menu):
        reach = 1.0 - share(layer, len(menu), 1.0)
        for choices in (offer.heads, offer.qk, offer.v, *([offer.mlp] if mlp else [])):
            for full, legal in zip(_sizes(choices[0]), zip(*map(_sizes, choices), strict=True), strict=True):
                sizes = sorted(set(legal), reverse=True)
                falls |= {(1 - (a + b) / 2 / full) / reach for a, b in zip(sizes, sizes[1:], strict=False)}
    steps = sorted(falls)
    between = [0.0, *((a + b) / 2 for a, b in zip(steps, steps[1:], strict=False)), steps[-1] + len(menu) + 1.0]
    stride = max(1, len(between) // SLOPES)
    return [*between[:-1:stride], between[-1]]


def _out_of_reach(
    source: ModelShape,
    offered: list[list[LayerMenu]],
    budgets: tuple[Budget, ...],
    allow: tuple[str, ...],
) -> BudgetError:
    steepest = [
        source.with_layers(tuple(at_slope(source, menu, _slopes(menu, True)[-1], True).layers)) for menu in offered
    ]
    return refuse(source, budgets, [min(prices.price(b, model) for model in steepest) for b in budgets], allow)
