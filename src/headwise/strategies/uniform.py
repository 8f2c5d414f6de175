"""Baseline: the same sizes in every layer, with our own directions and prices."""

from __future__ import annotations

from headwise.strategies._equal import best_equal
from headwise.strategies._options import finish, menus, ways
from headwise.types import Budget, ModelShape, Plan, Readings

NAME = "uniform"
MEANING = "the same sizes in every layer, our directions"
EQUAL = True  # one size for all layers


def allocate(
    source: ModelShape, readings: Readings, budgets: tuple[Budget, ...], allow: tuple[str, ...], seed: int
) -> Plan:
    """The best plan among those that treat all layers alike."""
    offered = menus(source, readings, allow, ways(readings))
    layers, damage = best_equal(source, offered, budgets, allow)
    return finish(source, readings, layers, damage, NAME, budgets, seed)
