"""Ways of spending a budget. One per file; each turns readings and budgets into a plan. No torch."""

from __future__ import annotations

from dataclasses import replace

from headwise.errors import PlanError
from headwise.registry import find, names
from headwise.strategies._options import keep_for, ways
from headwise.types import DEFAULT_UNITS, UNITS, Budget, ModelShape, Plan, Readings

__all__ = ["allocate", "blind", "keep_for", "known", "ways"]


def allocate(
    readings: Readings,
    budgets: tuple[Budget, ...],
    strategy: str = "exact",
    allow: tuple[str, ...] = DEFAULT_UNITS,
    portable: bool = False,
    seed: int = 0,
) -> Plan:
    """The plan of a strategy for what the probes found. Same inputs, same plan."""
    if unknown := sorted(set(allow) - set(UNITS)):
        raise PlanError(f"'{unknown[0]}' is no unit that can be cut; --allow takes: {', '.join(UNITS)}.")
    source = ModelShape.from_json(readings.shape, "readings.shape")
    module = find("headwise.strategies", "portable" if portable else strategy)
    plan: Plan = module.allocate(source, readings, budgets, allow, seed)
    return replace(plan, context=readings.context)


def blind(strategy: str) -> bool:
    """Whether a strategy's cut reads no data, only weights."""
    return bool(getattr(find("headwise.strategies", strategy), "BLIND", False))


def known() -> tuple[str, ...]:
    """The names of all strategies."""
    return names("headwise.strategies")
