"""Ways of spending a budget. One per file; each turns readings and budgets into a plan. No torch."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

from headwise.errors import PlanError
from headwise.registry import find, names
from headwise.strategies._options import keep_for, ways
from headwise.strategies._unpriced import bits_alone, unpriced
from headwise.types import DEFAULT_UNITS, UNITS, Budget, Plan, Readings

__all__ = ["POOLING", "allocate", "bits_alone", "blind", "chosen", "cuts", "keep_for", "known", "unpriced", "ways"]

DEFAULT = "exact"
POOLING = ("exact", "uniform", "depth")  # know rows that heads share
INNER = tuple(
    unit for unit in UNITS if unit not in ("rank", "depth", "bits", "weights")
)  # what most strategies can cut


def allocate(
    readings: Readings,
    budgets: tuple[Budget, ...],
    strategy: str = DEFAULT,
    allow: tuple[str, ...] = DEFAULT_UNITS,
    portable: bool = False,
    seed: int = 0,
) -> Plan:
    """The plan of a strategy for what the probes found. Same inputs, same plan."""
    module = chosen(strategy, allow, portable)
    source = readings.source
    if lacking := unpriced(source, readings, budgets, cuts(module, allow)):
        raise PlanError(lacking)
    units = tuple(unit for unit in allow if unit != "bits" or _choose_bits(module, readings))
    plan: Plan = module.allocate(source, readings, budgets, units, seed)
    return replace(plan, context=readings.context)


def _choose_bits(module: ModuleType, readings: Readings) -> bool:
    """Whether a strategy can choose the bits of cached numbers, and they were priced."""
    return bool(cuts(module, ("bits",))) and readings.curve("damage.k_bits") is not None


def chosen(strategy: str, allow: tuple[str, ...], portable: bool) -> ModuleType:
    """The module that plans; names that do not exist or do not go together are refused."""
    if unknown := sorted(set(allow) - set(UNITS)):
        raise PlanError(f"'{unknown[0]}' is no unit that can be cut; --allow takes: {', '.join(UNITS)}.")
    module = find("headwise.strategies", strategy)
    if portable and strategy not in (DEFAULT, "portable"):
        raise PlanError(f"--portable plans in its own way and would ignore --strategy {strategy}; leave out one.")
    module = find("headwise.strategies", "portable") if portable else module
    if not cuts(module, allow):
        able = getattr(module, "CUTS", UNITS)
        raise PlanError(f"strategy {strategy} cuts only {', '.join(able)}; name some of these in --allow.")
    return module


def cuts(module: ModuleType, allow: tuple[str, ...]) -> tuple[str, ...]:
    """Which of the allowed units a strategy can cut."""
    able = getattr(module, "CUTS", INNER)
    return tuple(unit for unit in allow if unit in able)


def blind(strategy: str) -> bool:
    """Whether a strategy's cut reads no data, only weights."""
    return bool(getattr(find("headwise.strategies", strategy), "BLIND", False))


def known() -> tuple[str, ...]:
    """The names of all strategies."""
    return names("headwise.strategies")
