"""Blockwise: every layer learns by gradient to leave behind the residual stream that its source layer leaves, and the
last one to give the source's answers.

No gradient crosses a layer: memory is that of a layer, and time that of a few passes over the rows. One after the
other, a layer reads what the healed layers before it put out, so that it also learns to make up for them; side by
side, layers read what the refitted ones before them put out, so that they do not wait for each other. A layer is
checked on rows that it does not learn from, goes back to its best state whenever a check finds it worse, and is left as
it was if nothing found was better.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from headwise import processes
from headwise.data import count_tokens, mean_length
from headwise.heal._job import Job, origins
from headwise.heal._layer import CHECKS, LEAST, QUERIES, RATE, AnswerLesson, LayerLesson, Part, attention_of, passage
from headwise.heal._shelf import Place, Shelf

NAME = "blockwise"
MEANING = "every layer learns to match its source layer; minutes, no backward pass through the whole model"
AFTER = "refit"
TOGETHER = True  # side by side every process keeps its own layers

BATCH_TOKENS = {"cpu": 512, "cuda": 2048}  # of a step: small ones teach more by the token, large ones keep a GPU busy
PASSES = 4  # over the rows, where no number of steps is given
HELD = 8  # every so many rows one is for the checks


def heal(job: Job) -> tuple[nn.Module, dict[str, Any]]:
    """A copy of the cut model whose layers have learned, and what every one gained on rows it did not learn from."""
    healed, rows = job.family.tailor(job.cut), _chosen(job)
    walk = _Walk(job, healed, rows)
    steps = job.options.steps or PASSES * len(walk.seen)
    at_once = job.options.side_by_side
    asked = json.dumps([steps, job.options.rate, job.options.batch, job.seed, bool(at_once), job.options.attention])
    alone = at_once is None and processes.index() > 0  # the same work as the first process's
    shelf = Shelf(None if alone else job.folder, NAME, asked, rows)
    with _frozen(job.source):
        if at_once is None:
            errors = _in_turn(job, walk, shelf, steps)
        else:
            errors = _side_by_side(job, walk, shelf, steps, at_once)
    return healed, {"tokens": count_tokens(rows, job.task.row_tokens), **_told(errors, steps)}


def _in_turn(job: Job, walk: _Walk, shelf: Shelf, steps: int) -> list[list[float]]:
    """Layer after layer, each on what the healed ones before it put out."""
    errors = []
    for index in job.track(range(len(walk.ours)), NAME):
        lesson = walk.lesson(index)
        errors.append(_learned(job, lesson, shelf.place(lesson.layer), steps, index))
        walk.move_on(index)
    return errors


def _side_by_side(job: Job, walk: _Walk, shelf: Shelf, steps: int, at_once: int) -> list[list[float]]:
    """Several layers at once in this process, and others in every other, all on what the refitted model puts out."""
    errors: list[list[float]] = []
    count, size = len(walk.ours), at_once * processes.count()
    for first in job.track(range(0, count, size), NAME):
        group = []
        for index in range(first, min(first + size, count)):
            lesson = walk.lesson(index)
            group.append((lesson, shelf.place(lesson.layer), index))
            walk.move_on(index)
        with _threads(at_once, walk.healed.device) as pool:
            own = list(pool.map(lambda task: _learned(job, task[0], task[1], steps, task[2]), processes.mine(group)))
        found = torch.zeros(len(group), CHECKS + 1, dtype=torch.float64)
        found[processes.index() :: processes.count()] = torch.tensor(own, dtype=torch.float64).view(-1, CHECKS + 1)
        errors += processes.total(found).tolist()
        for number, (lesson, _, _) in enumerate(group):
            _share(lesson.layer, number % processes.count())
    return errors


def _learned(job: Job, lesson: LayerLesson, place: Place, steps: int, index: int) -> list[float]:
    """The errors of a layer that has learned, now or before a kill."""
    found = place.fetch(lesson.layer)
    if found is None:
        found = {"errors": lesson.learn(steps, job.options.rate or RATE, job.seed + index)}
        place.put(lesson.layer, found)
    errors: list[float] = found["errors"]
    return errors


@torch.no_grad()
def _share(layer: nn.Module, owner: int) -> None:
    """Give all processes the layer that one of them taught."""
    if processes.count() > 1:
        for weight in layer.parameters():
            weight.copy_(processes.total(weight if processes.index() == owner else torch.zeros_like(weight)))


@contextmanager
def _threads(count: int, device: torch.device) -> Iterator[ThreadPoolExecutor]:
    """Threads that share the cores that torch may use."""
    cores = torch.get_num_threads()

    def begin() -> None:
        torch.set_num_threads(max(1, cores // count))
        if device.type == "cuda":
            torch.cuda.set_device(device)

    try:
        with ThreadPoolExecutor(count, initializer=begin) as pool:
            yield pool
    finally:
        torch.set_num_threads(cores)


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No gradients for a model's own weights, while others learn from it."""
    asked = [p for p in model.parameters() if p.requires_grad]
    for parameter in asked:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in asked:
            parameter.requires_grad_(True)


def _told(errors: list[list[float]], steps: int) -> dict[str, Any]:
    """Gains and curves per layer, and at every check the mean of what is left of their errors, those before being 1."""
    layers = [
        {
            AnswerLesson.name if found is errors[-1] else LayerLesson.name: {
                "error_before": found[0],
                "error_after": found[-1],
                "curve": found,
            }
        }
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


class _Walk:
    """Both models' streams, brought from layer to layer."""

    def __init__(self, job: Job, healed: nn.Module, rows: torch.Tensor) -> None:
        self.job, self.healed = job, healed
        held = torch.arange(len(rows)) % HELD == HELD - 1
        halves = (~held, held) if held.any() else (~held, ~held)  # too few to hold any out
        self.seen, self.checked = (self._parts(half) for half in halves)
        self.ours, self.theirs = job.family.blocks(healed), job.family.blocks(job.source)
        self.kept = origins(job.source, healed)
        self._past_lost(range(self.kept[0]))

    @torch.no_grad()
    def _parts(self, chosen: torch.Tensor) -> list[Part]:
        """Chosen rows in batches, before the first layer."""
        job, rows, chosen = self.job, self.job.calibration, chosen.nonzero().flatten()
        some = rows._replace(inputs=rows.inputs[chosen], labels=rows.labels[chosen], truth=None)
        tokens = job.options.batch or BATCH_TOKENS.get(self.healed.device.type, 512)
        parts = [part.to(self.healed.device) for part in some.batches(tokens)]
        contexts = job.family.contexts(job.source, [part.inputs for part in parts])
        embed = job.family.embed
        return [
            Part(part, embed(job.source, part.inputs), embed(self.healed, part.inputs), context)
            for part, context in zip(parts, contexts, strict=True)
        ]

    @torch.no_grad()
    def _past_lost(self, indices: Sequence[int]) -> None:
        """Bring the source's streams past layers that the cut model does not have."""
        for part in self.seen + self.checked:
            for index in indices:
                part.source = self.theirs[index](part.source, part.contexts[index])

    def lesson(self, index: int) -> LayerLesson:
        """What a layer has to learn, with parts of its own: the walk goes on without them."""
        kept = self.kept[index]
        end = self.kept[index + 1] if index + 1 < len(self.kept) else len(self.theirs)
        weight = self.job.options.attention or 0.0
        same = self.ours[index].attention.query_heads == self.theirs[kept].attention.query_heads
        for number, part in enumerate(self.seen + self.checked):
            self._look_ahead(part, range(kept, end), number if weight and same else None)
        layer = self.job.family.layers(self.healed)[index]
        seen, checked = ([replace(part) for part in parts] for parts in (self.seen, self.checked))
        lesson = LayerLesson(layer, self.ours[index], kept, seen, checked, weight)
        return AnswerLesson(self.job, lesson) if index == len(self.ours) - 1 else lesson

    @torch.no_grad()
    def _look_ahead(self, part: Part, indices: range, number: int | None) -> None:
        """What the source makes of its stream in a layer, and in those lost behind it."""
        block, context = self.theirs[indices[0]], part.contexts[indices[0]]
        found = passage(block, part.source, context)
        part.middle, part.wanted, part.weights = found.middle, found.out, None
        if number is not None:
            draw = torch.Generator().manual_seed(self.job.seed + number)
            part.queries = torch.randperm(found.q.shape[2], generator=draw)[:QUERIES].sort().values.to(found.q.device)
            part.weights = attention_of(block, found, context, part.queries)
        for index in indices[1:]:
            part.wanted = self.theirs[index](part.wanted, part.contexts[index])

    @torch.no_grad()
    def move_on(self, index: int) -> None:
        """Bring both streams past a layer."""
        for part in self.seen + self.checked:
            part.cut = self.ours[index](part.cut, part.contexts[self.kept[index]])
            part.source = part.wanted
