"""The best plan there is: least predicted damage over all layers and units together, proven.

Whole layers go in the one order that was measured jointly; for every number of removed layers the rest is solved.
"""

from __future__ import annotations

from headwise.strategies._options import depth_steps, finish, menus, refuse, ways, without_layers
from headwise.strategies._program import Case, frontier
from headwise.types import Budget, ModelShape, Plan, Readings

NAME = "exact"
MEANING = "least predicted damage over all layers and units together, proven optimal"


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
