"""Whole layers only, in the order that was measured jointly: what depth alone can do, to compare with."""

from __future__ import annotations

from headwise import budgets as prices
from headwise.errors import PlanError
from headwise.strategies._options import affordable, depth_steps, finish, refuse
from headwise.types import GONE, Budget, ModelShape, Plan, Readings

NAME = "depth"
MEANING = "whole layers only, as few as the budgets ask for"
CUTS = ("depth",)


def allocate(
    source: ModelShape, readings: Readings, budgets: tuple[Budget, ...], allow: tuple[str, ...], seed: int
) -> Plan:
    """The fewest removed layers that meet every budget."""
    if "depth" not in allow or not readings.depth:
        raise PlanError("strategy depth needs whole layers to be priced; probe with --allow depth (and others).")
    model = source
    for gone, damage in depth_steps(readings, allow):
        layers = tuple(GONE if index in gone else layer for index, layer in enumerate(source.layers))
        model = source.with_layers(layers)
        if affordable(budgets, model):
            return finish(source, readings, list(layers), damage, NAME, budgets, seed)
    raise refuse(source, budgets, [prices.price(budget, model) for budget in budgets], allow)
