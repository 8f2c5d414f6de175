"""The shapes that a search may try: depth, head dimension, MLP ratio and a taper, as wide as the budgets allow.

A taper above 0 takes heads from later layers, one below 0 from earlier ones: the search decides which is better.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from headwise.errors import BudgetError
from headwise.research.designs.shapes import WIDEST, Make, Rules, Sketch, Sketching, fits, largest
from headwise.types import Budget, LayerShape, ModelShape

HEAD_DIMS = (32, 64, 128)
MLP_SHARES = (0.5, 0.75, 1.0, 1.5)  # of the family's usual ratio
TAPERS = (-0.5, -0.25, 0.0, 0.25, 0.5)
RATES = (3e-4, 4e-3)


class Proportions(NamedTuple):
    """What is chosen; the width follows from the budgets."""

    depth: int
    head_dim: int
    mlp_share: float
    taper: float


def suggest(trial: Any, make: Make, budgets: tuple[Budget, ...], rules: Rules) -> tuple[ModelShape, float]:
    """A shape and a learning rate for a trial; shapes that cannot be had are refused with a `BudgetError`."""
    usual = Sketching(make, budgets, rules).uniform().depth
    tapers = TAPERS if rules.uneven else (0.0,)
    wanted = Proportions(
        trial.suggest_int("depth", max(1, usual // 3), 2 * usual) if rules.depth is None else rules.depth,
        trial.suggest_categorical("head_dim", HEAD_DIMS),
        trial.suggest_categorical("mlp_share", MLP_SHARES),
        trial.suggest_categorical("taper", tapers),
    )
    return widest(make, budgets, rules, wanted), trial.suggest_float("rate", *RATES, log=True)


def widest(make: Make, budgets: tuple[Budget, ...], rules: Rules, wanted: Proportions) -> ModelShape:
    """The widest model of these proportions that meets every budget."""

    def at(steps: int) -> ModelShape:
        width = steps * wanted.head_dim
        mlp = max(32, round(width * rules.mlp_ratio * wanted.mlp_share / 32) * 32)
        model = make(Sketch(width, wanted.depth, steps, wanted.head_dim, mlp))
        return model.with_layers(tapered(model.layers, wanted.taper))

    heads = largest(lambda steps: fits(at(steps), budgets), WIDEST // wanted.head_dim)
    if not heads:
        texts = " and ".join(budget.text for budget in budgets)
        raise BudgetError(f"{texts}: no {wanted.depth} layers with heads of {wanted.head_dim} fit; give more.")
    return at(heads)


def tapered(layers: tuple[LayerShape, ...], slope: float) -> tuple[LayerShape, ...]:
    """Heads fall linearly over the layers by the share `slope`; a negative one lets them rise to the full number.

    >>> full = LayerShape(8, 8, 4, 4, 16, 4)
    >>> [layer.query_heads for layer in tapered((full,) * 3, 0.5)], [x.query_heads for x in tapered((full,) * 3, -0.5)]
    ([8, 6, 4], [4, 6, 8])
    """
    last = max(1, len(layers) - 1)
    found = []
    for index, layer in enumerate(layers):
        place = index if slope > 0 else last - index
        heads = max(1, round(layer.query_heads * (1 - abs(slope) * place / last)))
        found.append(replace(layer, query_heads=heads, kv_heads=heads))
    return tuple(found)
