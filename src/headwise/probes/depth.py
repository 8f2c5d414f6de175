"""Which whole layers can go, and what that costs: remove, measure, repeat.

Scores of single layers mislead, because a layer matters more once its neighbour is gone. So layers are removed one by
one, each time the one whose removal, on top of all before, moves the predictions least; and the price of having removed
that many is measured again after healing, since the layers that are left can make up for much of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from headwise.data import places
from headwise.families import Family
from headwise.progress import Track, silently
from headwise.runs.unfinished import Progress
from headwise.tasks import Task
from headwise.tasks.causal import Causal
from headwise.types import GONE, Reading

NAME = "depth"
TRIED = 8  # candidates after the first removal: those that were cheapest the last time they were measured
WORST = 3.0  # damage before healing, twenty times the perplexity: nobody wants to go on from there
Remove = Callable[[tuple[int, ...]], nn.Module]  # the model without those layers, healed


class Skipper:
    """Measures the model with some layers left out, on the same few tokens."""

    def __init__(
        self, family: Family, model: nn.Module, tokens: torch.Tensor, task: Task | None = None, seed: int = 0
    ) -> None:
        self.family, self.model, self.task = family, model, task or Causal()
        self.parts = self.task.prepare(tokens, seed).to(model.device).batches(2048)
        self.contexts = family.contexts(model, [part.inputs for part in self.parts])
        self.shapes = family.shape_of(model.config).layers
        self.reference = [self._answers(number, ()) for number in range(len(self.parts))]

    @torch.no_grad()
    def _answers(self, number: int, gone: tuple[int, ...]) -> torch.Tensor:
        part = self.parts[number]
        stream = self.family.embed(self.model, part.inputs)
        for index, context in enumerate(self.contexts[number]):
            if index not in gone:
                stream = self.family.run_layer(self.model, index, stream, context)
        return self.task.outputs_from(self.family, self.model, stream, part)

    @torch.no_grad()
    def _damage(self, answers: Callable[[int], torch.Tensor]) -> tuple[float, float]:
        rows = []
        for number, reference in enumerate(self.reference):
            rows.append(self.task.divergence(reference, answers(number)))
        values = torch.cat(rows).double()
        error = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        return max(0.0, float(values.mean())), error

    def without(self, gone: tuple[int, ...]) -> float:
        """Mean divergence from the whole model when these layers are left out; no end of it where none can be."""
        left = [GONE if index in gone else shape for index, shape in enumerate(self.shapes)]
        return self._damage(lambda number: self._answers(number, gone))[0] if self.family.may_go(left) else math.inf

    def of(self, model: nn.Module) -> tuple[float, float]:
        """Mean divergence of another model from the whole one, and its standard error."""
        return self._damage(lambda number: self.task.outputs(self.family, model, self.parts[number]))


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
    """The damage of removing 0 to `most` layers, and the layers in the order of their going."""
    skipper, progress = Skipper(family, model, tokens, task, seed), progress or Progress()
    order = _greedy(skipper, len(skipper.shapes), most, track, progress)
    values, errors = [0.0], [0.0]
    for count in track(range(1, len(order) + 1), "depth, healed"):
        gone = order[:count]
        damage, error = progress.piece(f"healed without {gone}", lambda: skipper.of(remove(gone)))  # noqa: B023  # at once
        values.append(max(damage, values[-1]))  # fewer layers cannot be better but by chance
        errors.append(error)
    reading = Reading(
        probe=NAME,
        kind="damage.depth",
        axis="layers removed",
        ticks=(tuple(range(len(order) + 1)),),
        values=(tuple(values),),
        standard_error=(tuple(errors),),
        unit=skipper.task.unit,
        meaning=f"Measured damage ({skipper.task.divergence_name} to the source, healed) with whole layers removed, "
        "chosen jointly.",
        tokens=places(tokens, skipper.task.row_tokens),
        seed=seed,
    )
    return reading, order


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
