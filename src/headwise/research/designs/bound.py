"""Sizes by the first paper's theory: the bound on heads and dimensions, and the saturation of late layers.

Early layers extract: a head count and a dimension cost what the approximation bound says for the lags that the layer
reads. In late layers the softmax saturates: an error of the logits reaches the output only through the norm of the
softmax Jacobian, so dimensions cost the energy they carry times that norm.

Every term is a relative error `e` of a layer's output and enters as `e^2 / 2`: losses are quadratic in small errors.
The theory is silent on MLPs: they go last, evenly. The integer program that finds the sizes is the exact strategy's.
For cutting trained models the theory was refuted (experiment A8, which measures these facts): here it designs new ones.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from headwise.research.theory.allocation import allocate as split
from headwise.research.theory.saturation import norm_bound
from headwise.strategies._options import Choice, LayerMenu, legal_menus
from headwise.strategies._program import solve
from headwise.types import Budget, LayerShape, ModelShape

MLP_WEIGHT = 10.0  # of the squared share of an MLP that is lost, beside errors of attention that are at most about 1


@dataclass(frozen=True, slots=True)
class Facts:
    """What the theory needs to know about one layer."""

    rho: tuple[float, ...]  # contribution of lags 1, 2, ...
    late: bool
    jacobian_norm: float  # of the softmax, at the longest length
    logit_spread: float
    logits_lost: dict[int, float]  # share of the logits' energy lost, by query/key dimension kept
    outputs_lost: dict[int, float]  # of the outputs', by value dimension


def design(
    source: ModelShape, budgets: tuple[Budget, ...], allow: tuple[str, ...], rho: tuple[float, ...], length: int
) -> ModelShape:
    """A new model below `source`'s sizes for targets with lags `rho`: the first half extracts, the second saturates.

    Nothing is measured yet, so energy is taken as spread evenly over dimensions and logits as at most 1.
    """

    def facts(index: int, shape: LayerShape) -> Facts:
        qk = {size: 1 - size / shape.qk_dim for size in source.grain.qk_sizes(shape.qk_dim)}
        v = {size: 1 - size / shape.v_dim for size in source.grain.v_sizes(shape.v_dim)}
        return Facts(rho, 2 * index >= len(source.layers), float(norm_bound(length, 1.0)), 1.0, qk, v)

    known = [facts(index, shape) for index, shape in enumerate(source.layers)]
    found = solve(source, by_theory(source, legal_menus(source, allow), known), budgets, allow)
    return source.with_layers(tuple(found.targets))


def by_theory(source: ModelShape, offered: list[LayerMenu], facts: list[Facts]) -> list[LayerMenu]:
    """The menus with the theory's prices: the least total squared error is then what the solver looks for."""
    return [_by_theory(*row) for row in zip(source.layers, offered, facts, strict=True)]


def _by_theory(shape: LayerShape, menu: LayerMenu, facts: Facts) -> LayerMenu:
    """A layer's choices, each with the theory's price in place of the measured one."""

    def heads(choice: Choice) -> float:
        count = dict(choice.sizes)["query_heads"]
        return max(0.0, heads_error(facts.rho, count) ** 2 - heads_error(facts.rho, shape.query_heads) ** 2) / 2

    def price(choice: Choice) -> float:
        name, size = choice.sizes[-1]
        if name == "kv_heads":
            return heads(choice)
        if name == "mlp_width":
            return MLP_WEIGHT * (1 - size / shape.mlp_width) ** 2 if shape.mlp_width else 0.0
        return dimension_error(facts, name, size, getattr(shape, name)) ** 2 / 2

    kinds = ("heads", "qk", "v", "mlp")
    return LayerMenu(*(tuple(c._replace(damage=price(c)) for c in getattr(menu, kind)) for kind in kinds))


def dimension_error(facts: Facts, name: str, size: int, full: int) -> float:
    """Relative error of a layer's output when `qk_dim` or `v_dim` falls from `full` to `size`.

    Early: `sqrt(1 - d_m / d)` of the bound. Late: the energy lost, for queries and keys through the Jacobian's norm.
    """
    if not facts.late:
        return math.sqrt(max(0.0, 1 - size / full))
    lost = (facts.logits_lost if name == "qk_dim" else facts.outputs_lost).get(size, 1 - size / full)
    error = math.sqrt(max(0.0, lost))
    return min(1.0, facts.jacobian_norm * facts.logit_spread * error) if name == "qk_dim" else error


@lru_cache(maxsize=4096)
def heads_error(rho: tuple[float, ...], heads: int) -> float:
    """The part of the bound that heads decide, at the best split of `heads` heads over lags; other lags go unserved."""
    return float(split(rho, heads, 1, exact_spend=False, any_lags=True).error)
