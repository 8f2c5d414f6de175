"""Baseline: whole heads and MLP channels with the smallest weights go, the same number in every layer."""

from __future__ import annotations

from headwise.strategies._equal import best_equal
from headwise.strategies._options import by_weight, finish, menus
from headwise.types import Budget, ModelShape, Plan, Readings

NAME = "magnitude"
MEANING = "head pruning: the heads and channels with the smallest weights go, equally in all layers"
EQUAL = True  # one size for all layers
BLIND = True  # the cut reads no data either
CUTS = ("heads", "kv_heads", "mlp")


def allocate(
    source: ModelShape, readings: Readings, budgets: tuple[Budget, ...], allow: tuple[str, ...], seed: int
) -> Plan:
    """As many heads and channels as the budgets allow, of those that may go; it knows no smaller dimensions."""
    units = tuple(unit for unit in CUTS if unit in allow)
    layers, damage = best_equal(source, menus(source, readings, units, ()), budgets, allow)
    return finish(source, by_weight(readings), layers, damage, NAME, budgets, seed)
