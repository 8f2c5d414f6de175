"""One size for all layers and one set of rotary pairs: an ordinary model that stock code loads (`--portable`)."""

from __future__ import annotations

from headwise.errors import BudgetError
from headwise.strategies._equal import best_equal
from headwise.strategies._options import PRICED, finish, menus, nothing_portable, portable_limits
from headwise.types import Budget, LayerShape, ModelShape, Plan, Readings

NAME = "portable"
MEANING = "one size and one set of rotary pairs for the whole model: loads in stock transformers"
EQUAL = True  # one size for all layers


def allocate(
    source: ModelShape, readings: Readings, budgets: tuple[Budget, ...], allow: tuple[str, ...], seed: int
) -> Plan:
    """The best plan whose result is an ordinary model: one head dimension for queries, keys and values."""
    possible = PRICED if source.grain.portable is None else source.grain.portable
    allowed = tuple(unit for unit in allow if unit in possible)
    if not allowed:
        raise nothing_portable(source)
    offered = menus(source, readings, allowed, ("qk_pairs_shared",))

    def legal(layer: LayerShape) -> bool:
        return layer.qk_dim == layer.v_dim == layer.qk_width and source.hidden_size % layer.query_heads == 0

    try:
        layers, damage = best_equal(source, offered, budgets, allowed, legal, possible)
    except BudgetError as error:
        if source.grain.portable is None:
            raise
        raise BudgetError(f"{error} {portable_limits(source)} Leave out --portable to cut more.") from None
    return finish(source, readings, layers, damage, NAME, budgets, seed, pairs="qk_pairs_shared", portable=True)
