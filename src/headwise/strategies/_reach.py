"""The least that a model can cost, by its shape alone: budgets out of reach are refused before any probing.

The least over all legal sizes is a lower bound for every strategy. A strategy with fewer choices, such as one size for
all layers, may still refuse later what is accepted here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np

from headwise import budgets as prices
from headwise.errors import BudgetError
from headwise.strategies._equal import refuse_unequal
from headwise.strategies._multipliers import Floats
from headwise.strategies._options import PRICED, applicable, menus, nothing_portable, portable_limits, refuse
from headwise.strategies._program import Program, build
from headwise.types import BITS, Budget, LayerShape, ModelShape, Reading, Readings, code_bytes
from headwise.types.unit import Order
from headwise.types.weights import ENDS, FIELDS, WIDTHS, ranks

WEIGHTS = 33  # of two budgets against each other that are tried
WAYS = ("qk_projected", "qk_pairs", "q_rank")


def check(
    source: ModelShape,
    budgets: tuple[Budget, ...],
    module: ModuleType,
    cuts: tuple[str, ...],
    possible: Sequence[str] = PRICED,
) -> None:
    """Refuse budgets that a strategy, which may cut `cuts`, cannot meet, whatever the probes find.

    `possible` is what it could be allowed to cut.
    """
    if getattr(module, "EQUAL", False):
        refuse_unequal(source)
    if module.NAME == "portable" and source.grain.portable is not None:
        possible = source.grain.portable
        cuts = tuple(unit for unit in cuts if unit in possible)
        if not cuts:
            raise nothing_portable(source)
    refused = _refusal(source, budgets, *(applicable(source, units, budgets) for units in (cuts, possible)))
    if refused and possible is source.grain.portable:
        raise BudgetError(f"{refused} {portable_limits(source)} Leave out --portable to cut more.")
    if refused and _could_share(source, budgets, cuts):
        raise BudgetError(f"{refused} Rows that heads share can be smaller: add --pool all.")
    if refused:
        raise refused


def _could_share(source: ModelShape, budgets: tuple[Budget, ...], cuts: tuple[str, ...]) -> bool:
    """Whether an engine's smallest head is what stands in the way, and heads could share rows."""
    apart = all(layer.pooled == 1 and layer.kv_heads > 1 for layer in source.layers)
    return bool(source.grain.heads) and apart and "heads" not in cuts and any(map(prices.of_cache, budgets))


def _refusal(
    source: ModelShape, budgets: tuple[Budget, ...], cuts: tuple[str, ...], possible: Sequence[str]
) -> BudgetError | None:
    """The error for budgets out of reach: each alone, or any two together."""
    if not budgets:
        return None
    costs = _Costs(source, budgets, cuts)
    limits = np.array([budget.limit for budget in budgets]) * (1 + 1e-9)
    least = [costs.least(row) for row in np.eye(len(budgets))]
    alone = any(low > limit for low, limit in zip(least, limits, strict=True))
    together = any(costs.least(weights) > float(weights @ limits) for weights in _mixed(limits))
    return refuse(source, budgets, least, cuts, possible) if alone or together else None


def _mixed(limits: Floats) -> Iterator[Floats]:
    """Weights of two budgets each: a sum that no selection keeps below that of the limits cannot be met."""
    for first in range(len(limits)):
        for second in range(first):
            for share in np.linspace(0, 1, WEIGHTS)[1:-1]:
                weights = np.zeros(len(limits))
                weights[[first, second]] = share / max(limits[first], 1e-30), (1 - share) / max(limits[second], 1e-30)
                yield weights


class _Costs:
    """The least that a model can cost, in budgets weighed against each other."""

    def __init__(self, source: ModelShape, budgets: tuple[Budget, ...], cuts: tuple[str, ...]) -> None:
        def price(layer: LayerShape) -> list[float]:
            return [prices.layer_price(budget, source, layer) for budget in budgets]

        self.counts = Counter(source.layers)
        self.programs: dict[LayerShape, Program] = {}
        for layer in self.counts:
            alone = source.with_layers((layer,))
            self.programs[layer] = build(alone, menus(alone, _legal(alone), cuts, WAYS), price)
        packed: dict[str, Any] = dict.fromkeys(ENDS, WIDTHS[-1]) if "weights" in cuts else {}
        smallest = np.array([prices.price(budget, replace(source, **packed)) for budget in budgets])
        self.fixed = smallest - np.sum([np.array(price(layer)) * n for layer, n in self.counts.items()], axis=0)
        self.may_go = len(source.layers) // 2 if "depth" in cuts else 0

    def least(self, weights: Floats) -> float:
        """The least total, with as many layers gone as may be."""
        layers: list[float] = []
        for layer, count in self.counts.items():
            program = self.programs[layer]
            layers += [program.cheapest(weights @ program.price)[0]] * count
        left = sorted(layers)[: len(layers) - self.may_go]
        return float(weights @ self.fixed) + sum(left)


def _legal(source: ModelShape) -> Readings:
    """Readings that price every legal size at nothing, as menus are made from readings."""
    grain = source.grain
    kinds = {
        "qk_projected": [grain.qk_sizes(layer.qk_dim) for layer in source.layers],
        "v": [grain.v_sizes(layer.v_dim) for layer in source.layers],
        "mlp": [grain.mlp_sizes(layer.mlp_width) for layer in source.layers],
        "heads": [tuple(range(layer.queries_per_group, 0, -1)) for layer in source.layers],
        "kv_heads": [tuple(range(layer.kv_heads, 0, -1)) for layer in source.layers],
    }
    wide = source.hidden_size
    kinds["q_rank"] = [ranks(x.query_heads * x.head_width, wide, x.query_rank) for x in source.layers]
    if grain.rotary and not any(layer.projected for layer in source.layers):
        kinds["qk_pairs"] = [grain.qk_sizes(layer.qk_width) for layer in source.layers]
    order: Order = {}
    if source.codable:  # rows of one number in one bit, at least
        least = (*(0 for _ in BITS[1:]), 1)
        order = {"k_bits": (least,), "v_bits": (least,)}
        kinds["k_bits"] = [(layer.k_bytes, code_bytes(least, layer.qk_dim)) for layer in source.layers]
        kinds["v_bits"] = [(layer.v_bytes, code_bytes(least, layer.v_dim)) for layer in source.layers]
    if source.packable:
        kinds |= {name: [WIDTHS] * len(source.layers) for name in FIELDS}
    curves = tuple(_free(f"damage.{kind}", tuple(sizes)) for kind, sizes in kinds.items())
    return Readings("", source, curves, (order,) * len(source.layers), 0, 0)


def _free(kind: str, ticks: tuple[tuple[int, ...], ...]) -> Reading:
    return Reading("none", kind, kind, ticks, tuple((0.0,) * len(row) for row in ticks), None, "", "", 0, 0)
