"""Blockwise: every layer learns by gradient to leave behind the residual stream that its source layer leaves, and the
last one to give the source's answers.

No gradient crosses a layer: memory is that of a layer, and time that of a few passes over the rows. One after the
other, a layer reads what the healed layers before it put out, so that it also learns to make up for them; side by
side, layers read what the refitted ones before them put out, so that they do not wait for each other. A layer is
checked on rows that it does not learn from, goes back to its best state whenever a check finds it worse, and is left as
it was if nothing found was better.

Text beyond the calibration's, where it is asked for, is read in portions whose streams fit into memory: all layers
learn from one, then all of them from the next.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from headwise import processes
from headwise.data import count_tokens, mean_length
from headwise.errors import HeadwiseError
from headwise.heal._job import Job, origins, rows_of, together
from headwise.heal._layer import (
    CHECKS,
    LEAST,
    QUERIES,
    RATE,
    AnswerLesson,
    LayerLesson,
    Part,
    attention_of,
    marks_of,
    passage,
)
from headwise.heal._replay import WORTH, Replay
from headwise.heal._shelf import Place, Shelf
from headwise.tasks import Prepared

T = TypeVar("T")

NAME = "blockwise"
MEANING = "every layer learns to match its source layer; minutes, no backward pass through the whole model"
AFTER = "refit"
OPTIONS = ("tokens", "steps", "rate", "batch", "side_by_side", "attention")
TOGETHER = True  # side by side every process keeps its own layers, else the first one

BATCH_TOKENS = {"cpu": 512, "cuda": 2048}  # of a step: small ones teach more by the token, large ones keep a GPU busy
PASSES = 4  # over the calibration's rows, where no number of steps is given; further text is read once
HELD = 8  # every so many of the calibration's rows one is for the checks
ROOM = {"cpu": 2 << 30, "cuda": 16 << 30}  # bytes for the streams of a portion of the text, at most
SHARE = 1 / 8  # of a GPU's memory, at most
STREAMS = 4  # of a layer that learns: both models' before it, and the source's within and behind it


def heal(job: Job) -> tuple[nn.Module, dict[str, Any]]:
    """A copy of the cut model whose layers have learned, and what every one gained on rows it did not learn from."""
    healed, text = job.family.tailor(job.cut), _text(job)
    stretches, options = _stretches(job, text), job.options
    asked = [stretches[-1].steps, options.rate, options.batch, job.seed, bool(options.side_by_side), options.attention]
    idle = options.side_by_side is None and processes.index() > 0  # the first process works for it
    shelf = Shelf(None if idle else job.folder, NAME, json.dumps([*asked, len(stretches)]), text.rows.inputs)
    found = []
    try:
        with _frozen(job.source):
            for portion, stretch in zip(text.portions, stretches, strict=True):
                found.append(_taught(job, _Walk(job, healed, portion, text.checked), shelf, stretch))
    except torch.OutOfMemoryError:
        raise HeadwiseError(
            f"the device has too little memory for layers to learn; add --heal-option batch={_batch_tokens(job) // 4} "
            f"or --heal-option tokens={count_tokens(text.rows.inputs, text.rows.row) // 4}."
        ) from None
    return healed, {"tokens": count_tokens(text.rows.inputs, text.rows.row), **_told(found, stretches)}


class _Text(NamedTuple):
    """All rows, those to check on, and the others in portions that there is room for."""

    rows: Prepared
    checked: Prepared
    portions: list[Prepared]
    steps: int  # where none are asked for


class _Stretch(NamedTuple):
    """The steps of every layer that are taken on one portion of the text, of all steps."""

    numbers: range
    steps: int
    seed: int
    label: str


@torch.no_grad()
def _text(job: Job) -> _Text:
    """The calibration's rows or as many tokens as are asked for, of the further rows too where there are any.

    Checks are on rows of the calibration; the portions are alike.
    """
    rows, known = job.calibration, len(job.calibration.inputs)
    if job.options.tokens is not None:
        count = max(1, job.options.tokens // mean_length(rows.inputs, rows.row))
        rows = rows if job.more is None or count <= known else together(rows, job.more)
        rows = rows_of(rows, torch.arange(min(count, len(rows.inputs))))
    every = torch.arange(len(rows.inputs))
    held = (every % HELD == HELD - 1) & (every < known)
    learned, checked = (rows_of(rows, every[half]) for half in ((~held, held) if held.any() else (~held, ~held)))
    row = job.family.embed(job.source, rows_of(rows, every[:1]).batches()[0].to(_device(job)).inputs)
    layers = job.options.side_by_side * processes.count() if job.options.side_by_side else 1
    most = max(known, _room(row.device) // (row.nbytes * STREAMS * layers))
    parts = torch.arange(len(learned.inputs)).tensor_split(ceil(len(learned.inputs) / most))
    passes = max(1.0, PASSES * min(1.0, known / len(every)))
    steps = round(passes * len(learned.batches(_batch_tokens(job))))
    return _Text(rows, checked, [rows_of(learned, part) for part in parts], steps)


def _batch_tokens(job: Job) -> int:
    return job.options.batch or BATCH_TOKENS.get(_device(job).type, 512)


def _room(device: torch.device) -> int:
    """The same on a device however full it is, so that a run that goes on finds the same portions."""
    room = ROOM.get(device.type, ROOM["cpu"])
    if device.type != "cuda":
        return room
    return min(room, int(SHARE * torch.cuda.get_device_properties(device).total_memory))


def _device(job: Job) -> torch.device:
    return next(job.cut.parameters()).device


def _stretches(job: Job, text: _Text) -> list[_Stretch]:
    """The same number of steps for every portion; the rate falls over all of them."""
    steps, count, layers = job.options.steps or text.steps, len(text.portions), len(job.family.layers(job.cut))
    return [
        _Stretch(
            range(steps * number // count, steps * (number + 1) // count),
            steps,
            job.seed + number * layers,
            NAME if count == 1 else f"{NAME}, portion {number + 1} of {count}",
        )
        for number in range(count)
    ]


def _taught(job: Job, walk: _Walk, shelf: Shelf, stretch: _Stretch) -> list[list[float]]:
    """All layers, on one portion of the text; what their checks found."""
    at_once = job.options.side_by_side
    return _in_turn(job, walk, shelf, stretch) if at_once is None else _side_by_side(job, walk, shelf, stretch, at_once)


def _in_turn(job: Job, walk: _Walk, shelf: Shelf, stretch: _Stretch) -> list[list[float]]:
    """Layer after layer, each on what the healed ones before it put out; the first process gives them to the others."""
    errors: list[list[float]] = []
    for index in job.track(range(len(walk.ours)), stretch.label):
        lesson = walk.lesson(index)
        found = torch.zeros(CHECKS + 1, dtype=torch.float64)
        if processes.index() == 0:
            found += torch.tensor(_learned(job, lesson, shelf.place(lesson.layer), stretch, index), dtype=torch.float64)
        errors.append(processes.total(found).tolist())
        _share(lesson.layer, 0)
        walk.move_on(index)
    return errors


def _side_by_side(job: Job, walk: _Walk, shelf: Shelf, stretch: _Stretch, at_once: int) -> list[list[float]]:
    """Several layers at once in this process, and others in every other, all on what the refitted model puts out."""
    errors: list[list[float]] = []
    count, size = len(walk.ours), at_once * processes.count()
    for first in job.track(range(0, count, size), stretch.label):
        group = []
        for index in range(first, min(first + size, count)):
            lesson = walk.lesson(index)
            group.append((lesson, shelf.place(lesson.layer), index))
            walk.move_on(index)
        with _threads(at_once, walk.healed.device) as pool:
            own = list(pool.map(lambda task: _learned(job, task[0], task[1], stretch, task[2]), processes.mine(group)))
        found = torch.zeros(len(group), CHECKS + 1, dtype=torch.float64)
        found[processes.index() :: processes.count()] = torch.tensor(own, dtype=torch.float64).view(-1, CHECKS + 1)
        errors += processes.total(found).tolist()
        for number, (lesson, _, _) in enumerate(group):
            _share(lesson.layer, number % processes.count())
    return errors


def _learned(job: Job, lesson: LayerLesson, place: Place, stretch: _Stretch, index: int) -> list[float]:
    """The errors of a layer that has learned, now or before a kill."""
    found = place.fetch(lesson.layer)
    if found is None:
        rate = job.options.rate or RATE
        if _replayable(job, stretch):
            lesson.move_by = Replay
        found = {"errors": lesson.learn(stretch.numbers, stretch.steps, rate, stretch.seed + index)}
        place.put(lesson.layer, found)
    errors: list[float] = found["errors"]
    return errors


def _replayable(job: Job, stretch: _Stretch) -> bool:
    """Whether to capture a step, on a GPU: threads cannot, as nothing else may be launched meanwhile."""
    alone = _device(job).type == "cuda" and job.options.side_by_side is None
    return alone and len(stretch.numbers) >= WORTH


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


def _told(found: list[list[list[float]]], stretches: list[_Stretch]) -> dict[str, Any]:
    """Gains and curves per layer, and at every check the mean of what is left of their errors, those before being 1."""
    errors = [_chained(of_layer) for of_layer in zip(*found, strict=True)]
    marks = _chained([marks_of(stretch.numbers) for stretch in stretches])
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
    shares = [[error / row[0] if row[0] > LEAST else 1.0 for error in row] for row in errors]
    means = (sum(at) / len(at) for at in zip(*shares, strict=True))
    return {"layers": layers, "curve": [{"step": s, "loss": e} for s, e in zip(marks, means, strict=True)]}


def _chained(parts: Sequence[list[T]]) -> list[T]:
    """Parts of a curve as one; each begins where the one before ended."""
    return [*parts[0], *(value for part in parts[1:] for value in part[1:])]


class _Walk:
    """Both models' streams, brought from layer to layer."""

    def __init__(self, job: Job, healed: nn.Module, seen: Prepared, checked: Prepared) -> None:
        self.job, self.healed = job, healed
        self.seen, self.checked = self._parts(seen), self._parts(checked)
        self.ours, self.theirs = job.family.blocks(healed), job.family.blocks(job.source)
        self.kept = origins(job.source, healed)
        self._past_lost(range(self.kept[0]))

    @torch.no_grad()
    def _parts(self, rows: Prepared) -> list[Part]:
        """Rows in batches, before the first layer."""
        job = self.job
        parts = [part.to(self.healed.device) for part in rows.batches(_batch_tokens(job))]
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
