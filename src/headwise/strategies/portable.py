"""One size for all layers and one set of rotary pairs: an ordinary model that stock code loads (`--portable`)."""

from __future__ import annotations

from headwise.strategies._equal import best_equal
from headwise.strategies._options import finish, menus
from headwise.types import Budget, LayerShape, ModelShape, Plan, Readings

NAME = "portable"
MEANING = "one size and one set of rotary pairs for the whole model: loads in stock transformers"


def allocate(
    source: ModelShape, readings: Readings, budgets: tuple[Budget, ...], allow: tuple[str, ...], seed: int
) -> Plan:
    """The best plan whose result is an ordinary model: one head dimension for queries, keys and values."""
    offered = menus(source, readings, allow, ("qk_pairs_shared",))

    def legal(layer: LayerShape) -> bool:
        return layer.qk_dim == layer.v_dim == layer.qk_width and source.hidden_size % layer.query_heads == 0

    layers, damage = best_equal(source, offered, budgets, allow, legal)
    return finish(source, readings, layers, damage, NAME, budgets, seed, pairs="qk_pairs_shared", portable=True)
