"""Trains one layer by gradient to do what its source layer did."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from headwise.families import Block, widened
from headwise.heal._adam import RelativeAdam
from headwise.heal._job import Job, gradients
from headwise.tasks import Prepared
from headwise.training.loop import FitSettings, Move, State, move

CHECKS = 5  # on held-out rows, evenly spaced
MIDDLE = 0.3  # weight of the stream after attention beside that after the layer
RATE = 0.005  # highest learning rate, as a share of a tensor's mean size; lowered when a check finds the layer worse
LOWER = 0.3
LEAST = 1e-6  # smallest gain that is more than rounding
LOWEST = 3e-4  # below this learning rate a layer has nothing to learn
ONE_STEP = FitSettings(steps=1, clip=0.0)  # one batch, no clipping


class LayerBatch(NamedTuple):
    """Rows of one length before a layer, and what the layer should make of them.

    A tuple, so that a captured step can copy another batch into the memory of the first.
    """

    rows: Prepared
    cut: torch.Tensor  # the cut model's residual stream, which the layer reads
    target: torch.Tensor  # the source's stream behind the layer and the removed layers behind it
    middle: torch.Tensor  # the source's stream after attention
    context: dict[str, Any]  # of the source's layer: positions, masks


def in_full(given: Any) -> Any:
    """What a layer is given beside the stream, with all its numbers in float32."""
    if isinstance(given, torch.Tensor):
        return widened(given) if given.is_floating_point() else given
    if isinstance(given, dict):
        return {name: in_full(value) for name, value in given.items()}
    return tuple(in_full(value) for value in given) if isinstance(given, tuple) else given


def passed(block: Block, stream: torch.Tensor, context: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """A stream after a layer's attention (the layer's own tokens only) and after the layer."""
    own = block.own(stream, context)
    middle = block.middle(own, block.attended(*block.heads(stream, context), context))
    end = block.end(middle, block.channels(own, middle)) if block.down else middle
    return middle, block.joined(stream, end, context)


def checks_of(numbers: range) -> list[int]:
    """Steps done at the start and at every check."""
    return [numbers.start + round(len(numbers) * check / CHECKS) for check in range(CHECKS + 1)]


def mean_of(values: Iterable[torch.Tensor]) -> float:
    """The mean over all entries of some tensors."""
    found = [(float(some.double().sum()), some.numel()) for some in values]
    return max(0.0, sum(total for total, _ in found) / max(1, sum(count for _, count in found)))


@torch.no_grad()
def restore(weights: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    """Set weights to copies of them."""
    torch._foreach_copy_(weights, copies)


class LayerTrainer:
    """Trains a layer to leave the residual stream that its source layer leaves.

    `power` is the mean square of what the source layer changes, in proportion to which errors are measured.
    `new_step` makes the function that does a step, for every new optimizer.
    """

    part, middle = "stream", MIDDLE

    def __init__(
        self,
        job: Job,
        layer: nn.Module,
        block: Block,
        learned: Sequence[LayerBatch],
        held_out: Sequence[LayerBatch],
        power: float,
        new_step: Callable[[], Move] = lambda: move,
    ) -> None:
        self.job, self.layer, self.block, self.learned, self.held_out = job, layer, block, learned, held_out
        self.power, self.new_step = max(power, 1e-30), new_step

    def distance(self, batch: LayerBatch, out: torch.Tensor) -> torch.Tensor:
        """Squared, from the source's stream."""
        return (out - batch.target).square() / self.power

    @torch.no_grad()
    def error(self) -> float:
        """The mean distance on the held-out rows."""
        return mean_of(self.distance(batch, self.block(batch.cut, batch.context)) for batch in self.held_out)

    def _loss(self, _layer: nn.Module, batch: LayerBatch) -> torch.Tensor:
        middle, out = passed(self.block, batch.cut, batch.context)
        loss = self.distance(batch, out).mean()
        if self.middle:
            loss = loss + self.middle * (middle - batch.middle).square().mean() / self.power
        return loss

    def train(self, numbers: range, total: int, rate: float, seed: int) -> list[float]:
        """Train the layer in place and leave it in its best state; returns the least error found until each check.

        `numbers` are the steps to do, of `total` steps over which the learning rate falls. Training stops early when
        checks have lowered the rate so often that nothing is left of it.
        """
        errors, draw = [self.error()], torch.Generator().manual_seed(seed)
        with gradients(self.layer, True) as weights:
            best, (run, step) = [weight.detach().clone() for weight in weights], self._start(weights)
            try:
                for first, last in pairwise(checks_of(numbers)):
                    if rate >= LOWEST:
                        self._train(run, step, range(first, last), total, rate, draw)
                        if (found := self.error()) < errors[-1] - LEAST:
                            best = [weight.detach().clone() for weight in weights]
                            errors.append(found)
                            continue
                        restore(weights, best)
                        rate, (run, step) = rate * LOWER, self._start(weights)
                    errors.append(errors[-1])
            finally:
                restore(weights, best)
        return errors

    def _start(self, weights: list[torch.Tensor]) -> tuple[State, Move]:
        """A run before its first step."""
        sizes = [float(weight.detach().square().mean().sqrt()) for weight in weights]
        optimiser = RelativeAdam(weights, sizes, 0.0, (0.9, 0.95))
        return State(self.layer, optimiser, torch.zeros(2, device=weights[0].device)), self.new_step()

    def _train(self, run: State, step: Move, numbers: range, total: int, rate: float, draw: torch.Generator) -> None:
        """The steps until a check: the learning rate rises again at their start, and falls over all steps."""

        def drawn(_: int) -> LayerBatch:
            return self.learned[int(torch.randint(len(self.learned), (), generator=draw))]

        for number in numbers:
            rise = min(1.0, (number - numbers.start + 1) / 4)
            run.optimiser.param_groups[0]["lr"] = rate * rise * (1 - number / total)
            step(run, drawn, self._loss, ONE_STEP, nullcontext)


class AnswerTrainer(LayerTrainer):
    """Trains the last layer to give the source's answers, in which the task measures damage."""

    part, middle = "answers", 0.0

    def distance(self, batch: LayerBatch, out: torch.Tensor) -> torch.Tensor:
        """Divergence of the answers, per row."""
        task, family, source = self.job.task, self.job.family, self.job.source
        with torch.no_grad():
            wanted = task.outputs_from(family, source, batch.target, batch.rows)
        return task.divergence(wanted, task.outputs_from(family, source, out, batch.rows))
