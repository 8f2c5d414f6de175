"""Shapes for new models, by strategy. No torch: a family's way to price a sketch comes in as a function.

- uniform: all layers alike, in the proportions that published models have;
- leaner: "Leaner Transformers: More Heads, Less Depth" (arXiv 2505.20802): half the layers, heads half as wide, so more
  of them, and the parameters saved go into width; heads stop at `SMALLEST_HEAD`, below which they are known to lose;
- taper and bound: "Allocation of Parameters in Transformers" (arXiv 2510.03784): layers differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
    if strategy in ("taper", "bound") and not rules.uneven:
        raise PlanError(
            f"strategy {strategy} gives layers different sizes, which this family cannot have; its models are designed "
            "through heads, depth and width: use uniform or leaner."
        )
    sketching = Sketching(make, budgets, rules)
    if strategy == "uniform":
        return make(sketching.uniform())
    if strategy == "leaner":
        return make(sketching.leaner())
    from headwise.research.designs import bound, taper  # they import SciPy: not before a shape is wanted

    source = sketching.oversized()
    if strategy == "taper":
        return taper.design(source, budgets, UNITS)
    return bound.design(source, budgets, DIMENSIONS, _lags(), rules.length)


class Sketching(NamedTuple):
    """The largest sketches within budgets: how a sketch becomes a model, what that may cost, and what is fixed."""

    make: Make
    budgets: tuple[Budget, ...]
    rules: Rules

    def uniform(self) -> Sketch:
        """The largest model of the usual proportions: 64 channels to a head, as many layers as heads."""
        rules = self.rules

        def at(width: int) -> Sketch:
            return self.sketch(width, rules.depth or rules.usual_depth or max(2, round(width / HEAD)), HEAD)

        if rules.width is not None and rules.depth is None:
            return self._filled(self._deepest(at(rules.width)))
        found = self.widest(at)
        if rules.depth is None:
            deeper = range(int(found.depth * DEEPER), found.depth, -1)
            found = next((d for n in deeper if self.fits(d := found._replace(depth=n))), found)
        return self._filled(found)

    def leaner(self) -> Sketch:
        """Half of uniform's layers (or the given depth), heads of half its dimension, and the width that this pays for.

        Where the width is fixed, only depth is free: the most layers that fit, at most half.
        """
        rules = self.rules
        usual = self._replace(rules=rules._replace(depth=None, heads=None)).uniform()
        depth = rules.depth or max(1, (rules.usual_depth or usual.depth) // 2)
        head = max(SMALLEST_HEAD, usual.head_dim // 2) if usual.head_dim > SMALLEST_HEAD else usual.head_dim
        if rules.width is not None:
            return self._filled(self._deepest(self.sketch(rules.width, depth, head)))
        return self._filled(self.widest(lambda width: self.sketch(width, depth, head), head))

    def sketch(self, width: int, depth: int, head: int) -> Sketch:
        """Of this width and depth, with heads of about the dimension `head`, unless their number is given."""
        heads = self.rules.heads or _heads(width, head)
        mlp = max(MLP_STEP, round(width * self.rules.mlp_ratio / MLP_STEP) * MLP_STEP)
        return Sketch(width, depth, heads, width // heads, mlp)

    def fits(self, sketch: Sketch) -> bool:
        """Whether a sketch meets every budget."""
        return fits(self.make(sketch), self.budgets)

    def widest(self, at: Callable[[int], Sketch], head: int = HEAD) -> Sketch:
        """The sketch of the largest width that fits; prices rise with the width."""
        if (width := self.rules.width) is None:
            step = math.lcm(head, 2 * (self.rules.heads or 1))
            width = max(1, largest(lambda steps: self.fits(at(steps * step)), WIDEST // step)) * step
        if not self.fits(at(width)):
            raise self._too_small(at(width))
        return at(width)

    def _deepest(self, sketch: Sketch) -> Sketch:
        """As many of the sketch's layers as fit."""
        for depth in range(sketch.depth, 0, -1):
            if self.fits(fewer := sketch._replace(depth=depth)):
                return fewer
        raise self._too_small(sketch._replace(depth=1))

    def _filled(self, sketch: Sketch) -> Sketch:
        """Spend what is left on the MLPs, at most half their width more: strategies are compared at equal cost."""
        most = sketch.mlp + sketch.mlp // 2
        for mlp in range(most // MLP_STEP * MLP_STEP, sketch.mlp, -MLP_STEP):
            if self.fits(wider := sketch._replace(mlp=mlp)):
                return wider
        return sketch

    def loosened(self, room: float) -> Sketching:
        """With budgets that are so much larger."""
        return self._replace(budgets=tuple(replace(budget, limit=budget.limit * room) for budget in self.budgets))

    def oversized(self) -> ModelShape:
        """The smallest uniform model that is clearly above the budgets, for a taper to start from."""
        found = self.uniform()
        for room in (ROOM, ROOM**2, ROOM**3, ROOM**4):
            found = self.loosened(room).uniform()
            if not self.loosened(1 + (ROOM - 1) / 3).fits(found):
                break
        return self.make(found)

    def _too_small(self, sketch: Sketch) -> BudgetError:
        model = self.make(sketch)
        worst = max(self.budgets, key=lambda budget: prices.price(budget, model) / budget.limit)
        need = f"{prices.price(worst, model):,.0f} {worst.unit}"
        return BudgetError(
            f"{worst.text} is too little: {sketch.depth} layers of width {sketch.width} need {need}. "
            "Give more, or a smaller vocabulary (--vocab), fewer layers (--depth) or a smaller --width."
        )


def fits(model: ModelShape, budgets: tuple[Budget, ...]) -> bool:
    """Whether a model meets every budget."""
    return all(prices.price(budget, model) <= budget.limit for budget in budgets)


def largest(is_small: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that is small enough, where all below one that is are, too; 0: none is."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_small(middle) else (low, middle)
    return low


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


def _lags() -> tuple[float, ...]:
    """What a new layer is assumed to read of the past."""
    from headwise.research.theory import profiles

    return tuple(float(weight) for weight in profiles.parse(LAGS, LAG_COUNT))


def _heads(width: int, head: int) -> int:
    """Heads of about that dimension that share a width evenly; dimensions are even, since positions turn in pairs."""
    able = [count for count in range(1, width + 1) if width % (2 * count) == 0] or [1]
    return min(able, key=lambda count: (abs(width / count - head), count))
