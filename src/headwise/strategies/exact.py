"""The best plan there is: least predicted damage over all layers and units together, proven.

Whole layers go in the one order that was measured jointly; for every number of removed layers the rest is solved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from headwise.strategies._options import depth_steps, finish, menus, refuse, ways, without_layers
from headwise.strategies._program import Case
from headwise.types import UNITS, Budget, FrontierPoint, LayerShape, ModelShape, Plan, Readings

NAME = "exact"
MEANING = "least predicted damage over all layers and units together, proven optimal"
CUTS = UNITS
FRONTIER_POINTS = 12


def allocate(
    source: ModelShape, readings: Readings, budgets: tuple[Budget, ...], allow: tuple[str, ...], seed: int
) -> Plan:
    """The plan of least predicted damage that meets every budget."""
    offered = menus(source, readings, allow, ways(readings))
    steps = depth_steps(readings, allow)
    cases = [(Case(source, without_layers(offered, gone), budgets), lost) for gone, lost in steps]
    best, total = None, float("inf")
    for case, lost in cases:
        found = case.solve() if lost < total else None  # the removed layers alone may do more damage than is needed
        if found is not None and found.damage + lost < total:
            best, total = found, found.damage + lost
    if best is None:
        least = [min(case.least[row] for case, _ in cases) for row in range(len(budgets))]
        raise refuse(source, budgets, least, allow)
    points = frontier(cases)
    return finish(source, readings, best.targets, total, NAME, budgets, seed, gap=best.gap, frontier=points)


def frontier(cases: Sequence[tuple[Case, float]]) -> tuple[FrontierPoint, ...]:
    """Least damage against the first budget's price, over cases with a damage of their own (layers already removed)."""
    if not cases[0][0].budgets:
        return ()
    points: list[FrontierPoint] = []
    for share in np.linspace(min(case.least[0] / case.full[0] for case, _ in cases), 1.0, FRONTIER_POINTS):
        damage = float("inf")
        for case, lost in cases:
            if lost < damage:  # else the removed layers alone do more
                damage = min(damage, case.damage_at(float(share)) + lost)
        if damage < float("inf"):
            # A plan for less is a plan for more, so within the gap the better of the two counts.
            points.append(FrontierPoint(float(share), min([damage, *(p.damage for p in points[-1:])])))
    return tuple(points)


Answerer = Callable[[float, float], tuple[float, float, list[LayerShape]] | None]


def answers(
    source: ModelShape, readings: Readings, budgets: tuple[Budget, ...], allow: tuple[str, ...]
) -> tuple[float, Answerer]:
    """The least limit of the first budget that may be met, and what answers a limit with damage, gap and layers.

    With no gap allowed it decides as `allocate` does: every solve begins afresh, so that no answer depends on others.
    """
    offered, steps = menus(source, readings, allow, ways(readings)), depth_steps(readings, allow)

    @cache  # a case of a large model takes a second to build, and most are never asked
    def case(place: int) -> Case:
        return Case(source, without_layers(offered, steps[place][0]), budgets)

    def answer(limit: float, gap: float) -> tuple[float, float, list[LayerShape]] | None:
        best: tuple[float, float, list[LayerShape]] | None = None
        for place, (_, lost) in enumerate(steps):
            if best is not None and lost >= best[0]:
                continue  # the removed layers alone do more damage
            if case(place).least[0] > limit * (1 + 1e-12):
                continue
            if not gap:
                case(place).seen[:] = False
            found = case(place).solve([limit, *(budget.limit for budget in budgets[1:])], gap)
            if found is not None and (best is None or found.damage + lost < best[0]):
                best = found.damage + lost, found.gap, found.targets
        return best

    return float(case(len(steps) - 1).least[0]), answer  # the fewer layers, the cheaper
