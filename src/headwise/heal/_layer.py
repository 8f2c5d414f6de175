"""One layer that learns by gradient to do what its source layer did."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from headwise.families import Block
from headwise.families._watch import capped
from headwise.heal._adam import RelativeAdam
from headwise.heal._job import Job
from headwise.tasks import Prepared
from headwise.training.loop import FitSettings, Move, State, move

CHECKS = 5  # on held-out rows, evenly spaced
MIDDLE = 0.3  # weight of the stream after attention beside that after the layer
RATE = 0.005  # of a tensor's mean size per step, at most; lowered whenever a check finds the layer worse
LOWER = 0.3
LEAST = 1e-6  # gain that is no rounding
LOWEST = 3e-4  # below it a layer has nothing to learn
QUERIES = 16  # of a row, whose attention is compared where that is asked for
NOTHING = -1e4  # logarithm of a weight that is none
PLAIN = FitSettings(steps=1, clip=0.0)  # one step at a time, of one batch


@dataclass(slots=True)
class Part:
    """Some rows of one length before a layer: the streams of both models, and what the layer should make of them."""

    rows: Prepared
    source: torch.Tensor
    cut: torch.Tensor
    contexts: list[dict[str, Any]]  # of the source's layers
    wanted: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    middle: torch.Tensor = field(default_factory=lambda: torch.zeros(0))  # wanted after attention
    weights: torch.Tensor | None = None  # logarithms of the source's attention, of some queries
    queries: torch.Tensor = field(default_factory=lambda: torch.zeros(0))  # which

    def read(self, index: int) -> Read:
        """What the source's layer of that number and its rival are compared on."""
        context = self.contexts[index]
        return Read(self.rows, self.cut, self.wanted, self.middle, context, self.weights, self.queries)


class Read(NamedTuple):
    """What a step reads of a part."""

    rows: Prepared
    cut: torch.Tensor
    wanted: torch.Tensor
    middle: torch.Tensor
    context: dict[str, Any]
    weights: torch.Tensor | None
    queries: torch.Tensor


class Passage(NamedTuple):
    """What a layer makes of a stream."""

    q: torch.Tensor
    k: torch.Tensor
    middle: torch.Tensor  # its own tokens after attention
    out: torch.Tensor  # the stream after the layer


def passage(block: Block, stream: torch.Tensor, context: dict[str, Any]) -> Passage:
    """A stream through a layer, with what is seen on the way."""
    own = block.own(stream, context)
    q, k, v = block.heads(stream, context)
    middle = block.middle(own, block.attended(q, k, v, context))
    end = block.end(middle, block.channels(own, middle)) if block.down else middle
    return Passage(q, k, middle, block.joined(stream, end, context))


def attention_of(block: Block, seen: Passage, context: dict[str, Any], queries: torch.Tensor) -> torch.Tensor:
    """Logarithms of the attention weights of some queries (B, H, Q, T)."""
    attention, attend = block.attention, block.attention.attend
    mask = attention.added(seen.q, seen.k, context.get("attention_mask"), context.get("position_bias"))
    q, k = attention.project(seen.q[:, :, queries], seen.k)
    k = k.repeat_interleave(attend.num_key_value_groups, dim=1)
    logits = capped(q @ k.mT * attend.scaling, attend.softcap)
    if mask is None and attend.is_causal:
        mask = queries[:, None] >= torch.arange(k.shape[2], device=k.device)
    elif mask is not None and mask.shape[-2] > 1:
        mask = mask[..., queries, :]
    if mask is not None:
        logits = logits.masked_fill(~mask, NOTHING) if mask.dtype == torch.bool else logits + mask
    return logits.log_softmax(-1).clamp_min(NOTHING)


def marks_of(numbers: range) -> list[int]:
    """How many steps are done at each check, and before the first of these."""
    return [numbers.start + round(len(numbers) * check / CHECKS) for check in range(CHECKS + 1)]


def _mean(values: Iterable[torch.Tensor]) -> float:
    """Of all places."""
    found = [(float(some.double().sum()), some.numel()) for some in values]
    return max(0.0, sum(total for total, _ in found) / max(1, sum(count for _, count in found)))


class LayerLesson:
    """One layer that learns, which was number `index` of the source's, to leave the stream that its source leaves."""

    name, aside = "stream", MIDDLE

    def __init__(
        self, layer: nn.Module, block: Block, index: int, seen: list[Part], checked: list[Part], attention: float = 0.0
    ) -> None:
        self.layer, self.block, self.index, self.seen, self.checked = layer, block, index, seen, checked
        self.attention = attention
        self.move_by: Callable[[], Move] = lambda: move  # -> how steps are done until the next one is made
        self.power = _mean((part.wanted - part.source).square() for part in checked)

    def distance(self, part: Read, out: torch.Tensor) -> torch.Tensor:
        """Squared, to the source's stream, relative to what the source's layer changes."""
        return (out - part.wanted).square() / max(self.power, 1e-30)

    @torch.no_grad()
    def error(self) -> float:
        """On the held-out rows, as the layer will read them."""
        parts = (part.read(self.index) for part in self.checked)
        return _mean(self.distance(part, self.block(part.cut, part.context)) for part in parts)

    def _loss(self, part: Read) -> torch.Tensor:
        """What is made less."""
        seen = passage(self.block, part.cut, part.context)
        loss = self.distance(part, seen.out).mean()
        if self.aside:
            loss = loss + self.aside * (seen.middle - part.middle).square().mean() / max(self.power, 1e-30)
        if self.attention and part.weights is not None:
            found = attention_of(self.block, seen, part.context, part.queries)
            loss = loss + self.attention * (part.weights.exp() * (part.weights - found)).sum(-1).mean()
        return loss

    def learn(self, numbers: range, steps: int, rate: float, seed: int) -> list[float]:
        """Train the layer in place; returns the least error found until each check. Ends in the best state.

        `numbers` are those, of all steps, that are to be done. It stops early when checks found it worse so often that
        nothing is left of the rate.
        """
        state = _State(self.layer)
        errors, draw = [self.error()], torch.Generator().manual_seed(seed)
        marks = marks_of(numbers)
        run, move_by = state.run(), self.move_by()
        try:
            for first, last in zip(marks, marks[1:], strict=False):
                if rate >= LOWEST:
                    self._train(run, move_by, range(first, last), steps, rate, draw)
                    found = self.error()
                    if found < errors[-1] - LEAST:
                        state.keep()
                        errors.append(found)
                        continue
                    state.restore()
                    rate, run, move_by = rate * LOWER, state.run(), self.move_by()
                errors.append(errors[-1])
        finally:
            state.restore()
            state.close()
        return errors

    def _train(self, run: State, move_by: Move, numbers: range, steps: int, rate: float, draw: torch.Generator) -> None:
        """Some steps, at a rate that rises within each stretch and falls over all of them."""

        def drawn(_: int) -> Read:
            return self.seen[int(torch.randint(len(self.seen), (), generator=draw))].read(self.index)

        for number in numbers:
            rise = min(1.0, (number - numbers.start + 1) / 4)
            run.optimiser.param_groups[0]["lr"] = rate * rise * (1 - number / steps)
            move_by(run, drawn, lambda _, part: self._loss(part), PLAIN, nullcontext)


class AnswerLesson(LayerLesson):
    """The last layer, which learns to give the source's answers: what its task measures damage in."""

    name, aside = "answers", 0.0

    def __init__(self, job: Job, lesson: LayerLesson) -> None:
        super().__init__(lesson.layer, lesson.block, lesson.index, lesson.seen, lesson.checked, lesson.attention)
        self.job = job

    def distance(self, part: Read, out: torch.Tensor) -> torch.Tensor:
        """Divergence of the answers, per row."""
        task, family, source = self.job.task, self.job.family, self.job.source
        with torch.no_grad():
            wanted = task.outputs_from(family, source, part.wanted, part.rows)
        return task.divergence(wanted, task.outputs_from(family, source, out, part.rows))


class _State:
    """The weights of a layer that learn, and the best that they have been."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.weights = [p for p in layer.parameters() if p.is_floating_point()]
        self.asked = [p.requires_grad for p in self.weights]
        for weight in self.weights:
            weight.requires_grad_(True)
        self.keep()

    def run(self) -> State:
        """Before its first step, with steps in proportion to the size of what moves: the first are of full length."""
        sizes = [float(weight.detach().square().mean().sqrt()) for weight in self.weights]
        optimiser = RelativeAdam(self.weights, sizes, 0.0, (0.9, 0.95))
        return State(self.layer, optimiser, torch.zeros(2, device=self.weights[0].device))

    def keep(self) -> None:
        """What the weights are now is the best."""
        self.best = [weight.detach().clone() for weight in self.weights]

    @torch.no_grad()
    def restore(self) -> None:
        """Go back to the best."""
        for weight, best in zip(self.weights, self.best, strict=True):
            weight.copy_(best)

    def close(self) -> None:
        """Leave the layer as it was, but for what it learned."""
        for weight, asked in zip(self.weights, self.asked, strict=True):
            weight.requires_grad_(asked)
            weight.grad = None
