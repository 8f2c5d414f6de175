"""Baseline: the recipe of the best training-free paper (A3), so that every comparison is one flag away.

The same size everywhere, queries and keys as wide as values; the rotary pairs with the largest
`sum E[q_j^2] E[k_j^2]` (queries summed over their group); values by the spectrum of `C^1/2 W_o`; no gradient, no
measurement, no difference between layers. A3: "A3: an Analytical Low-Rank Approximation Framework for Attention", 2025.
"""

from __future__ import annotations

from headwise.strategies._equal import best_equal
from headwise.strategies._options import finish, menus
from headwise.types import Budget, LayerShape, ModelShape, Plan, Readings

NAME = "published"
MEANING = "the recipe of A3 (arXiv 2505.12942): equal sizes, strongest rotary pairs, no training"
EQUAL = True  # one size for all layers


def allocate(
    source: ModelShape, readings: Readings, budgets: tuple[Budget, ...], allow: tuple[str, ...], seed: int
) -> Plan:
    """Equal sizes for queries, keys and values in every layer, as large as the budgets allow."""
    offered = menus(source, readings, allow, ("qk_pairs",) if source.grain.rotary else ("qk_projected",))
    full = source.layers[0]

    def legal(layer: LayerShape) -> bool:
        return layer.qk_dim * full.v_dim == layer.v_dim * full.qk_dim

    layers, damage = best_equal(source, offered, budgets, allow, legal)
    return finish(source, readings, layers, damage, NAME, budgets, seed, pairs="qk_pairs_power")
