"""The best plan there is: least predicted damage over all layers and units together, proven.

Whole layers go in the one order that was measured jointly; for every number of removed layers the rest is solved.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from headwise import budgets as prices
from headwise.strategies._options import (
    Choice,
    applicable,
    depth_steps,
    finish,
    menus,
    refuse,
    ways,
    widths,
    without_layers,
)
from headwise.strategies._program import Problem, Solution
from headwise.types import DAMAGE, UNITS, Budget, FrontierPoint, LayerShape, ModelShape, Plan, Readings
from headwise.types.weights import ENDS

NAME = "exact"
MEANING = "least predicted damage over all layers and units together, proven optimal"
CUTS = UNITS
FRONTIER_POINTS = 12
Found = tuple[float, float, list[LayerShape], dict[str, int]]  # damage, gap, layers, bits of the tables of words
Answerer = Callable[[float, float], Found | None]


class Depths:
    """One problem for every number of removed layers, built when it is first needed: large ones take a second."""

    def __init__(
        self, source: ModelShape, readings: Readings, budgets: tuple[Budget, ...], allow: tuple[str, ...]
    ) -> None:
        allow = applicable(source, allow, budgets)
        # Rows that are not coded add no parameters and may be read faster; else codes alone are solved much faster.
        whole = any(prices.of_weights(budget) or budget.workload for budget in budgets)
        curves = (*ways(readings), "q_rank")
        offered, steps = menus(source, readings, allow, curves, whole), depth_steps(readings, allow)
        self.budgets, self.lost = budgets, [lost for _, lost in steps]  # damage of the removed layers alone
        tables = ends(readings, allow)
        self.problem = cache(lambda place: Problem(source, without_layers(offered, steps[place][0]), budgets, tables))

    def best(self, limits: list[float], gap: float = 0.0) -> tuple[float, Solution] | None:
        """The least damage within these limits. Without a gap no solve depends on earlier ones."""
        best: tuple[float, Solution] | None = None
        for place, lost in enumerate(self.lost):
            if best is not None and lost >= best[0]:
                continue  # the removed layers alone do more damage
            problem = self.problem(place)
            if limits and problem.least[0] > limits[0] * (1 + 1e-12):
                continue
            if not gap:
                problem.seen[:] = False
            found = problem.solve(limits, gap)
            if found is not None and (best is None or found.damage + lost < best[0]):
                best = found.damage + lost, found
        return best

    def frontier(self) -> tuple[FrontierPoint, ...]:
        """Least damage against the first budget's price."""
        if not self.budgets:
            return ()
        problems = [(self.problem(place), lost) for place, lost in enumerate(self.lost)]
        points: list[FrontierPoint] = []
        for share in np.linspace(min(p.least[0] / p.full[0] for p, _ in problems), 1.0, FRONTIER_POINTS):
            damage = float("inf")
            for problem, lost in problems:
                if lost < damage:  # else the removed layers alone do more
                    damage = min(damage, problem.damage_at(float(share)) + lost)
            if damage < float("inf"):
                # A plan for less is a plan for more, so within the gap the better of the two counts.
                points.append(FrontierPoint(float(share), min([damage, *(p.damage for p in points[-1:])])))
        return tuple(points)


def allocate(
    source: ModelShape, readings: Readings, budgets: tuple[Budget, ...], allow: tuple[str, ...], seed: int
) -> Plan:
    """The plan of least predicted damage that meets every budget."""
    depths = Depths(source, readings, budgets, allow)
    best = depths.best([budget.limit for budget in budgets])
    if best is None:
        problems = [depths.problem(place) for place in range(len(depths.lost))]
        raise refuse(source, budgets, np.min([problem.least for problem in problems], axis=0).tolist(), allow)
    damage, found = best
    points = depths.frontier()
    return finish(
        source, readings, found.targets, damage, NAME, budgets, seed, ends=found.ends, gap=found.gap, frontier=points
    )


def answers(
    source: ModelShape, readings: Readings, budgets: tuple[Budget, ...], allow: tuple[str, ...]
) -> tuple[float, Answerer]:
    """The least limit of the first budget that may be met, and a function from a limit to what is best there."""
    depths = Depths(source, readings, budgets, allow)

    def answer(limit: float, gap: float) -> Found | None:
        best = depths.best([limit, *(budget.limit for budget in budgets[1:])], gap)
        return None if best is None else (best[0], best[1].gap, best[1].targets, best[1].ends)

    return float(depths.problem(len(depths.lost) - 1).least[0]), answer  # the fewer layers, the cheaper


def ends(readings: Readings, allow: tuple[str, ...]) -> tuple[tuple[Choice, ...], ...]:
    """The widths of the tables of words, where bits of weights are chosen."""
    found = [(name, readings.curve(DAMAGE + name)) for name in ENDS] if "weights" in allow else []
    rows = [(name, list(zip(r.ticks[0], r.values[0], strict=True))[1:]) for name, r in found if r is not None]
    return tuple(widths(name, sizes) for name, sizes in rows)
