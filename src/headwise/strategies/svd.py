"""Baseline: every head replaced by its truncated singular value decomposition, from the weights alone.

The same size everywhere, queries and keys as wide as values; the directions of largest singular value of `W_q' W_k` and
of `W_o W_v` stay, and of MLPs the channels with the largest weights. No data is read for the cut.
"""

from __future__ import annotations

from headwise.strategies._equal import best_equal
from headwise.strategies._options import by_weight, finish, menus
from headwise.types import Budget, LayerShape, ModelShape, Plan, Readings

NAME = "svd"
MEANING = "equal sizes, heads by the singular values of their weights, no data"
EQUAL = True  # one size for all layers
BLIND = True  # the cut reads no data either


def allocate(
    source: ModelShape, readings: Readings, budgets: tuple[Budget, ...], allow: tuple[str, ...], seed: int
) -> Plan:
    """Equal sizes for queries, keys and values in every layer, as large as the budgets allow."""
    offered, full = menus(source, readings, allow, ("qk_projected",)), source.layers[0]

    def legal(layer: LayerShape) -> bool:
        return layer.qk_dim * full.v_dim == layer.v_dim * full.qk_dim

    layers, damage = best_equal(source, offered, budgets, allow, legal)
    return finish(source, by_weight(readings), layers, damage, NAME, budgets, seed)
