"""Shapes for new models, by strategy. No torch: a family's way to price a sketch comes in as a function.

- uniform: all layers alike, in the proportions that published models have;
- leaner: "Leaner Transformers: More Heads, Less Depth" (arXiv 2505.20802): half the layers, heads half as wide, so more
  of them, and the parameters saved go into width; heads stop at `SMALLEST_HEAD`, below which they are known to lose;
- taper and bound: "Allocation of Parameters in Transformers" (arXiv 2510.03784): layers differ;
- mix: of depths, head dimensions, MLP ratios and tapers, the shape that the first paper's heads term ranks best.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from headwise import budgets as prices
from headwise.errors import BudgetError, PlanError
from headwise.types import Budget, LayerShape, ModelShape

STRATEGIES = {
    "uniform": "all layers alike, in the usual proportions",
    "leaner": "half the layers, more and smaller heads, wider: the second paper's rule",
    "taper": "heads and dimensions fall with depth: the first paper's rule",
    "bound": "the first paper's bound, minimised",
    "mix": "a search over depth, heads, MLP and taper by the first paper's heads term",
}
HEAD, SMALLEST_HEAD = 64, 32
WIDEST = 16_384
MLP_STEP = 32
ROOM = 1.15  # how much larger than the budget the model is that a taper starts from; attention is about a third
LAGS = "geometric:0.9"  # what a new layer is assumed to read of the past
LAG_COUNT = 32
TOKENS = 64  # whose conditioning is predicted
UNITS = ("qk", "v", "mlp", "heads", "kv_heads")
DIMENSIONS = ("qk", "v", "mlp")  # heads without a measured price would all go: the bound prices them below MLPs
DEEPER = 1.5  # how much deeper than usual a uniform model may be to spend what is left


class Sketch(NamedTuple):
    """A model whose layers are alike."""

    width: int
    depth: int
    heads: int
    head_dim: int
    mlp: int


Make = Callable[[Sketch], ModelShape]


class Rules(NamedTuple):
    """What is fixed before a shape is chosen."""

    mlp_ratio: float  # of the MLP's width to the model's, in this family
    width: int | None = None
    depth: int | None = None
    heads: int | None = None
    length: int = 2048
    uneven: bool = True  # whether layers may differ
    usual_depth: int | None = None  # of the model that a design should be like


def design(strategy: str, make: Make, budgets: tuple[Budget, ...], rules: Rules) -> ModelShape:
    """The shape of a strategy that meets every budget."""
    if strategy not in STRATEGIES:
        raise PlanError(f"no way to design is called '{strategy}'. Known: {', '.join(STRATEGIES)}.")
    if strategy in ("taper", "bound", "mix") and not rules.uneven:
        raise PlanError(
            f"strategy {strategy} gives layers different sizes, which this family cannot have; its models are designed "
            "through heads, depth and width: use uniform or leaner."
        )
    if strategy == "uniform":
        return make(uniform(make, budgets, rules))
    if strategy == "leaner":
        return make(leaner(make, budgets, rules))
    if strategy == "mix":
        return mix(make, budgets, rules)
    from headwise.research.designs import bound, taper  # they import SciPy: not before a shape is wanted

    source = _oversized(make, budgets, rules)
    if strategy == "taper":
        return taper.design(source, budgets, UNITS)
    return bound.design(source, budgets, DIMENSIONS, _lags(), rules.length)


def uniform(make: Make, budgets: tuple[Budget, ...], rules: Rules) -> Sketch:
    """The largest model of the usual proportions: 64 channels to a head, as many layers as heads."""

    def at(width: int) -> Sketch:
        heads = rules.heads or _heads(width, HEAD)
        depth = rules.depth or rules.usual_depth or max(2, round(width / HEAD))
        return Sketch(width, depth, heads, width // heads, _mlp(width, rules))

    if rules.width is not None and rules.depth is None:
        return _filled(make, budgets, _deepest(make, budgets, at(rules.width)))
    found = _widest(make, budgets, at, rules)
    if rules.depth is None:
        deeper = range(int(found.depth * DEEPER), found.depth, -1)
        found = next((d for n in deeper if _fits(make, budgets, d := found._replace(depth=n))), found)
    return _filled(make, budgets, found)


def leaner(make: Make, budgets: tuple[Budget, ...], rules: Rules) -> Sketch:
    """Half of uniform's layers (or the given depth), heads of half its dimension, and the width that this pays for.

    Where the width is fixed, only depth is free: the most layers that fit, at most half.
    """
    usual = uniform(make, budgets, rules._replace(depth=None, heads=None))
    depth = rules.depth or max(1, (rules.usual_depth or usual.depth) // 2)
    head = max(SMALLEST_HEAD, usual.head_dim // 2) if usual.head_dim > SMALLEST_HEAD else usual.head_dim

    def at(width: int) -> Sketch:
        heads = rules.heads or _heads(width, head)
        return Sketch(width, depth, heads, width // heads, _mlp(width, rules))

    if rules.width is not None:
        return _filled(make, budgets, _deepest(make, budgets, at(rules.width)))
    return _filled(make, budgets, _widest(make, budgets, at, rules, head))


def mix(make: Make, budgets: tuple[Budget, ...], rules: Rules) -> ModelShape:
    """The shape of least heads term of the bound; of equals the first, which is the shallowest.

    Predicted conditioning has no say: it was not shown to predict anything (docs/DESIGN_RULES.md).
    """
    found = list(dict.fromkeys(_mixed(make, budgets, rules)))
    return min(found, key=heads_error) if found else design("leaner", make, budgets, rules)


def _mixed(make: Make, budgets: tuple[Budget, ...], rules: Rules) -> Iterator[ModelShape]:
    """Every combination of depth, head dimension, MLP ratio and taper, each as wide as the budgets allow."""
    from headwise.research.designs import taper

    usual = uniform(make, budgets, rules)
    depths = [rules.depth] if rules.depth else sorted({max(1, round(usual.depth * s)) for s in (1, 0.75, 0.5)})
    for depth, head, ratio, tapered in itertools.product(depths, (HEAD, SMALLEST_HEAD), (1.0, 0.75, 0.5), (0, 1)):
        wanted = rules._replace(depth=depth, mlp_ratio=rules.mlp_ratio * ratio)

        def at(width: int, depth: int = depth, head: int = head, wanted: Rules = wanted) -> Sketch:
            heads = rules.heads or _heads(width, head)
            return Sketch(width, depth, heads, width // heads, _mlp(width, wanted))

        limits = _loosened(budgets) if tapered else budgets
        try:
            shape = make(_filled(make, limits, _widest(make, limits, at, wanted, head)))
            yield taper.design(shape, budgets, UNITS) if tapered else shape
        except BudgetError:
            continue


def layer_conditioning(layer: LayerShape, tokens: int = TOKENS) -> float:
    """The Gaussian condition number of a layer's head outputs for so many tokens; infinite where both are as many."""
    from headwise.research.theory import conditioning

    wide = layer.query_heads * layer.v_dim
    if not wide:
        return math.inf
    return conditioning.gaussian(min(tokens, wide), 1, max(tokens, wide))


def log_conditioning(model: ModelShape) -> float:
    """The logarithm of all layers' condition numbers multiplied: what a signal has to pass through."""
    return sum(math.log(layer_conditioning(layer)) for layer in model.layers)


def heads_error(model: ModelShape) -> float:
    """The first paper's heads term, squared and summed over the first half of the layers, which it is about."""
    from headwise.research.designs import bound

    rho = _lags()
    early = model.layers[: (len(model.layers) + 1) // 2]
    return sum(bound.heads_error(rho, layer.query_heads) ** 2 for layer in early) / len(early)


def _lags() -> tuple[float, ...]:
    """What a new layer is assumed to read of the past."""
    from headwise.research.theory import profiles

    return tuple(float(weight) for weight in profiles.parse(LAGS, LAG_COUNT))


def _heads(width: int, head: int) -> int:
    """Heads of about that dimension that share a width evenly; dimensions are even, since positions turn in pairs."""
    able = [count for count in range(1, width + 1) if width % (2 * count) == 0] or [1]
    return min(able, key=lambda count: (abs(width / count - head), count))


def _mlp(width: int, rules: Rules) -> int:
    return max(MLP_STEP, round(width * rules.mlp_ratio / MLP_STEP) * MLP_STEP)


def _fits(make: Make, budgets: tuple[Budget, ...], sketch: Sketch) -> bool:
    model = make(sketch)
    return all(prices.price(budget, model) <= budget.limit for budget in budgets)


def _widest(
    make: Make, budgets: tuple[Budget, ...], at: Callable[[int], Sketch], rules: Rules, head: int = HEAD
) -> Sketch:
    """The sketch of the largest width that fits; prices rise with the width."""
    if rules.width is not None:
        if not _fits(make, budgets, at(rules.width)):
            raise _too_small(make, budgets, at(rules.width))
        return at(rules.width)
    step = math.lcm(head, 2 * (rules.heads or 1))
    low, high = 0, WIDEST // step + 1  # in steps: fits, does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(make, budgets, at(middle * step)) else (low, middle)
    if not low:
        raise _too_small(make, budgets, at(step))
    return at(low * step)


def _deepest(make: Make, budgets: tuple[Budget, ...], sketch: Sketch) -> Sketch:
    """As many of the sketch's layers as fit."""
    for depth in range(sketch.depth, 0, -1):
        if _fits(make, budgets, fewer := sketch._replace(depth=depth)):
            return fewer
    raise _too_small(make, budgets, sketch._replace(depth=1))


def _filled(make: Make, budgets: tuple[Budget, ...], sketch: Sketch) -> Sketch:
    """Spend what is left on the MLPs, by at most half their width, so that strategies are compared at equal cost."""
    most = sketch.mlp + sketch.mlp // 2
    for mlp in range(most // MLP_STEP * MLP_STEP, sketch.mlp, -MLP_STEP):
        if _fits(make, budgets, wider := sketch._replace(mlp=mlp)):
            return wider
    return sketch


def _oversized(make: Make, budgets: tuple[Budget, ...], rules: Rules) -> ModelShape:
    """The smallest uniform model that is clearly above the budgets, for a taper to start from."""
    found = uniform(make, budgets, rules)
    for room in (ROOM, ROOM**2, ROOM**3, ROOM**4):
        found = uniform(make, _loosened(budgets, room), rules)
        if not _fits(make, _loosened(budgets, 1 + (ROOM - 1) / 3), found):
            break
    return make(found)


def _loosened(budgets: tuple[Budget, ...], room: float = ROOM) -> tuple[Budget, ...]:
    return tuple(replace(budget, limit=budget.limit * room) for budget in budgets)


def _too_small(make: Make, budgets: tuple[Budget, ...], sketch: Sketch) -> BudgetError:
    model = make(sketch)
    worst = max(budgets, key=lambda budget: prices.price(budget, model) / budget.limit)
    least = prices.price(worst, model)
    return BudgetError(
        f"{worst.text} is too little: {sketch.depth} layers of width {sketch.width} need {least:,.0f} {worst.unit}. "
        "Give more, or a smaller vocabulary (--vocab), fewer layers (--depth) or a smaller --width."
    )
