"""Which whole layers can go, and what that costs: remove, measure, repeat.

Scores of single layers mislead, because a layer matters more once its neighbour is gone. So layers are removed one by
one, each time the one whose removal, on top of all before, changes the predictions least. The price of having removed
that many is measured again after healing, because the remaining layers can make up for much of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from headwise.data import places
from headwise.families import Family
from headwise.probes._layers import LayerRunner, reading
from headwise.progress import Track, silently
from headwise.runs.unfinished import Progress
from headwise.tasks import Task
from headwise.types import GONE, Reading

NAME = "depth"
MEANING = "damage of removing whole layers, chosen jointly and healed"
TRIED = 8  # candidates after the first removal: those that were cheapest when last measured
WORST = 3.0  # damage before healing, twenty times the perplexity: healing does not recover from more
Remove = Callable[[tuple[int, ...]], nn.Module]  # the model without those layers, healed


class Skipper(LayerRunner):
    """Measures the model with some layers left out, on the same few tokens."""

    def __init__(
        self, family: Family, model: nn.Module, tokens: torch.Tensor, task: Task | None = None, seed: int = 0
    ) -> None:
        super().__init__(family, model, tokens, task, seed)
        self.reference = [self.answers(batch, range(len(self.shapes))) for batch in range(len(self.batches))]

    def without(self, gone: tuple[int, ...]) -> float:
        """Mean divergence from the whole model when these layers are left out; infinite where the family forbids it."""
        left = [GONE if index in gone else shape for index, shape in enumerate(self.shapes)]
        if not self.family.may_go(left):
            return math.inf
        stay = [index for index in range(len(self.shapes)) if index not in gone]
        return self.divergence(lambda batch: self.answers(batch, stay))[0]

    def of(self, model: nn.Module) -> tuple[float, float]:
        """Mean divergence of another model from the whole one, and its standard error."""
        return self.divergence(lambda batch: self.task.outputs(self.family, model, self.batches[batch]))


def measure(
    family: Family,
    model: nn.Module,
    tokens: torch.Tensor,
    most: int,
    remove: Remove,
    seed: int,
    track: Track = silently,
    task: Task | None = None,
    progress: Progress | None = None,
) -> tuple[Reading, tuple[int, ...]]:
    """The damage of removing 0 to `most` layers, and the layers in the order of their removal."""
    skipper, progress = Skipper(family, model, tokens, task, seed), progress or Progress()
    order = _greedy(skipper, len(skipper.shapes), most, track, progress)
    values, errors = [0.0], [0.0]
    for count in track(range(1, len(order) + 1), "depth, healed"):
        gone = order[:count]
        damage, error = progress.piece(f"healed without {gone}", lambda: skipper.of(remove(gone)))  # noqa: B023  # at once
        values.append(max(damage, values[-1]))  # fewer layers are better only by chance
        errors.append(error)
    meaning = f"Measured damage ({skipper.task.divergence_name} to the source, healed) with whole layers removed, "
    row = tuple(range(len(values))), tuple(values), tuple(errors)
    read = places(tokens, skipper.task.row_tokens)
    unit, what = skipper.task.unit, "layers removed"
    return reading(NAME, "damage.depth", what, [row], unit, meaning + "chosen jointly.", read, seed), order


def _greedy(skipper: Skipper, layers: int, most: int, track: Track, progress: Progress) -> tuple[int, ...]:
    def without(*gone: int) -> float:
        return float(progress.piece(f"without {gone}", lambda: skipper.without(gone)))

    able = range(int(skipper.family.keeps_first), layers)
    last = {index: without(index) for index in track(able, "depth")}
    order: list[int] = []
    while len(order) < most and last:
        if order:
            near = sorted(last, key=lambda index: last[index])[:TRIED]
            for index in track(near, f"depth, after {len(order)}"):
                last[index] = without(*order, index)
        best = min(last, key=lambda index: last[index])
        if last[best] > WORST:
            break
        order.append(best)
        del last[best]
    return tuple(order)
