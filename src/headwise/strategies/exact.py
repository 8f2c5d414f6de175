"""The best plan there is: least predicted damage over all layers and units together, proven."""

from __future__ import annotations

from headwise.strategies._options import finish, menus, ways
from headwise.strategies._program import solve
from headwise.types import Budget, ModelShape, Plan, Readings

NAME = "exact"
MEANING = "least predicted damage over all layers and units together, proven optimal"


def allocate(
    source: ModelShape, readings: Readings, budgets: tuple[Budget, ...], allow: tuple[str, ...], seed: int
) -> Plan:
    """The plan of least predicted damage that meets every budget."""
    found = solve(source, menus(source, readings, allow, ways(readings)), budgets, allow)
    return finish(
        source,
        readings,
        found.targets,
        found.damage,
        NAME,
        budgets,
        seed,
        gap=found.gap,
        frontier=found.frontier,
    )
