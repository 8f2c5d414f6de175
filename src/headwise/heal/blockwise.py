"""Blockwise: every layer learns by gradient to leave behind the residual stream that its source layer leaves, and the
last one to give the source's answers.

Layers learn one after the other, and no gradient crosses one: memory is that of a layer, and time that of a few passes
over the rows. A layer reads what the healed layers before it put out, so that it also learns to make up for them;
mixing in what the source's layers put out did not help the answers. It is checked on rows that it does not learn from,
goes back to its best state whenever a check finds it worse, and is left as it was if nothing found was better.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from headwise.data import count_tokens, mean_length
from headwise.families import Block
from headwise.heal._job import Job, origins
from headwise.heal._shelf import Shelf
from headwise.tasks import Prepared

NAME = "blockwise"
MEANING = "every layer learns to match its source layer; minutes, no backward pass through the whole model"
AFTER = "refit"

BATCH_TOKENS = 2048
PASSES = 4  # over the rows, where no number of steps is given
CHECKS = 5  # on held-out rows, evenly spaced
HELD = 8  # every so many rows one is for the checks
MIDDLE = 0.3  # weight of the stream after attention beside that after the layer
RATE = 0.01  # of a tensor's mean size per step, at most; lowered whenever a check finds the layer worse
LOWER = 0.3
LEAST = 1e-6  # gain that is no rounding
LOWEST = 3e-4  # below it a layer has nothing to learn


@dataclass(slots=True)
class _Part:
    """Some rows of one length between two layers: the streams of both models, and what the next layer should make."""

    rows: Prepared
    source: torch.Tensor
    cut: torch.Tensor
    contexts: list[dict[str, Any]]  # of the source's layers
    wanted: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    middle: torch.Tensor = field(default_factory=lambda: torch.zeros(0))  # wanted after attention


def heal(job: Job) -> tuple[nn.Module, dict[str, Any]]:
    """A copy of the cut model whose layers have learned, and what every one gained on rows it did not learn from."""
    healed = job.family.tailor(job.cut)
    rows = _chosen(job)
    held = torch.arange(len(rows)) % HELD == HELD - 1
    halves = (~held, held) if held.any() else (~held, ~held)  # too few to hold any out
    seen, checked = (_parts(job, healed, half) for half in halves)
    ours, theirs, kept = job.family.blocks(healed), job.family.blocks(job.source), origins(job.source, healed)
    steps = job.options.steps or PASSES * len(seen)
    shelf = Shelf(job.folder, NAME, json.dumps([steps, job.options.rate, job.seed]), rows)
    _lost(theirs, range(kept[0]), seen + checked)
    errors: list[list[float]] = []
    for index in job.track(range(len(ours)), NAME):
        end = kept[index + 1] if index + 1 < len(kept) else len(theirs)
        _look_ahead(theirs, range(kept[index], end), seen + checked)
        layer = job.family.layers(healed)[index]
        lesson = _Lesson(layer, ours[index], kept[index], seen, checked)
        if index == len(ours) - 1:
            lesson = _LastLesson(job, lesson)
        found = shelf.fetch(layer)
        if found is None:
            found = {"errors": lesson.learn(steps, job.options.rate or RATE, job.seed + index)}
            shelf.put(layer, found)
        errors.append(found["errors"])
        _move_on(ours[index], kept[index], seen + checked)
    return healed, {"tokens": count_tokens(rows, job.task.row_tokens), **_told(errors, steps)}


def _told(errors: list[list[float]], steps: int) -> dict[str, Any]:
    """Gains per layer, and at every check the mean of what is left of their errors, those before being 1."""
    layers = [
        {"answers" if found is errors[-1] else "stream": {"error_before": found[0], "error_after": found[-1]}}
        for found in errors
    ]
    marks = [round(steps * check / CHECKS) for check in range(CHECKS + 1)]
    shares = [[error / row[0] if row[0] > LEAST else 1.0 for error in row] for row in errors]
    means = (sum(at) / len(at) for at in zip(*shares, strict=True))
    return {"layers": layers, "curve": [{"step": s, "loss": e} for s, e in zip(marks, means, strict=True)]}


def _chosen(job: Job) -> torch.Tensor:
    """The rows to learn from and to check on."""
    rows = job.calibration.inputs
    if job.options.tokens is None:
        return rows
    return rows[: max(1, job.options.tokens // mean_length(rows, job.task.row_tokens))]


@torch.no_grad()
def _parts(job: Job, healed: nn.Module, chosen: torch.Tensor) -> list[_Part]:
    """Chosen rows in batches, before the first layer."""
    rows, chosen = job.calibration, chosen.nonzero().flatten()
    some = rows._replace(inputs=rows.inputs[chosen], labels=rows.labels[chosen], truth=None)
    parts = [part.to(healed.device) for part in some.batches(BATCH_TOKENS)]
    contexts = job.family.contexts(job.source, [part.inputs for part in parts])
    embed = job.family.embed
    return [
        _Part(part, embed(job.source, part.inputs), embed(healed, part.inputs), context)
        for part, context in zip(parts, contexts, strict=True)
    ]


@torch.no_grad()
def _lost(theirs: list[Block], indices: Sequence[int], parts: list[_Part]) -> None:
    """Bring the source's streams past layers that the cut model does not have."""
    for part in parts:
        for index in indices:
            part.source = theirs[index](part.source, part.contexts[index])


@torch.no_grad()
def _look_ahead(theirs: list[Block], indices: Sequence[int], parts: list[_Part]) -> None:
    """What the source makes of its streams in a layer, and in those lost behind it."""
    for part in parts:
        part.middle, part.wanted = _through(theirs[indices[0]], part.source, part.contexts[indices[0]])
        for index in indices[1:]:
            part.wanted = theirs[index](part.wanted, part.contexts[index])


def _through(block: Block, stream: torch.Tensor, context: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's own tokens after attention, and the stream after the layer."""
    own = block.own(stream, context)
    middle = block.middle(own, block.attended(*block.heads(stream, context), context))
    end = block.end(middle, block.channels(own, middle)) if block.down else middle
    return middle, block.joined(stream, end, context)


@torch.no_grad()
def _move_on(block: Block, index: int, parts: list[_Part]) -> None:
    """Bring both streams past a layer."""
    for part in parts:
        part.cut = block(part.cut, part.contexts[index])
        part.source = part.wanted


class _Lesson:
    """One layer that learns, which was number `index` of the source's."""

    aside = MIDDLE

    def __init__(self, layer: nn.Module, block: Block, index: int, seen: list[_Part], checked: list[_Part]) -> None:
        self.layer, self.block, self.index, self.seen, self.checked = layer, block, index, seen, checked
        self.power = self._mean(lambda part: (part.wanted - part.source).square())

    def _mean(self, of: Any) -> float:
        """Mean over all held-out places."""
        found = [(float(values.double().sum()), values.numel()) for values in map(of, self.checked)]
        return max(0.0, sum(total for total, _ in found) / max(1, sum(count for _, count in found)))

    def distance(self, part: _Part, out: torch.Tensor) -> torch.Tensor:
        """Squared, to the source's stream, relative to what the source's layer changes."""
        return (out - part.wanted).square() / max(self.power, 1e-30)

    @torch.no_grad()
    def error(self) -> float:
        """On the held-out rows, as the layer will read them."""
        return self._mean(lambda part: self.distance(part, self.block(part.cut, part.contexts[self.index])))

    def _loss(self, part: _Part) -> torch.Tensor:
        """What is made less."""
        middle, out = _through(self.block, part.cut, part.contexts[self.index])
        aside = (middle - part.middle).square().mean() / max(self.power, 1e-30)
        return self.distance(part, out).mean() + self.aside * aside

    def learn(self, steps: int, rate: float, seed: int) -> list[float]:
        """Train the layer in place; returns the least error found until each check. Ends in the best state."""
        state = _State(self.layer)
        errors, draw = [self.error()], torch.Generator().manual_seed(seed)
        marks = [round(steps * check / CHECKS) for check in range(CHECKS + 1)]
        optimiser = state.optimiser()
        try:
            for first, last in zip(marks, marks[1:], strict=False):
                if rate >= LOWEST:
                    self._train(optimiser, range(first, last), steps, rate, draw)
                    found = self.error()
                    if found < errors[-1] - LEAST:
                        state.keep()
                        errors.append(found)
                        continue
                    state.restore()
                    rate, optimiser = rate * LOWER, state.optimiser()
                errors.append(errors[-1])
        finally:
            state.restore()
            state.close()
        return errors

    def _train(
        self, optimiser: torch.optim.Optimizer, numbers: range, steps: int, rate: float, draw: torch.Generator
    ) -> None:
        """Some steps, at a rate that rises within each stretch and falls over all of them."""
        for number in numbers:
            part = self.seen[int(torch.randint(len(self.seen), (), generator=draw))]
            rise = min(1.0, (number - numbers.start + 1) / 4)
            for group in optimiser.param_groups:
                group["lr"] = rate * rise * (1 - number / steps) * group["size"]
            optimiser.zero_grad()
            self._loss(part).backward()
            optimiser.step()


class _LastLesson(_Lesson):
    """The last layer, which learns to give the source's answers: what its task measures damage in."""

    aside = 0.0

    def __init__(self, job: Job, lesson: _Lesson) -> None:
        super().__init__(lesson.layer, lesson.block, lesson.index, lesson.seen, lesson.checked)
        self.job = job

    def distance(self, part: _Part, out: torch.Tensor) -> torch.Tensor:
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

    def optimiser(self) -> torch.optim.Optimizer:
        """Adam, with steps in proportion to the size of what moves: its first steps are of full length."""
        sizes = [float(weight.detach().square().mean().sqrt()) for weight in self.weights]
        groups = [{"params": [w], "size": s} for w, s in zip(self.weights, sizes, strict=True)]
        return torch.optim.Adam(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-12)

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
