"""Blockwise: every layer is trained to leave the residual stream that its source layer leaves, and the last one to give
the source's answers.

No gradient crosses a layer: memory is that of one layer, and time that of a few passes over the rows. A layer reads
what the healed layers before it put out, so that it also learns to make up for them. It is checked on held-out rows,
goes back to its best state whenever a check finds it worse, and stays as it was if nothing better was found.

Text beyond the calibration's is read in portions whose streams fit into memory: all layers are trained on the first
portion, then all of them on the next.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from headwise import processes
from headwise.data import count_tokens, mean_length
from headwise.errors import HeadwiseError
from headwise.families import Block, set_format, widened
from headwise.heal._checkpoints import LayerCheckpoints
from headwise.heal._job import Job, gradients, origins, rows_of, together, with_removed
from headwise.heal._layer import (
    LEAST,
    RATE,
    AnswerTrainer,
    LayerBatch,
    LayerTrainer,
    checks_of,
    in_full,
    mean_of,
    passed,
)
from headwise.runs.heal_options import Options
from headwise.tasks import Prepared
from headwise.training.captured import WORTH, CapturedStep
from headwise.training.loop import move
from headwise.types import Gain, Healing, LossPoint

T = TypeVar("T")

NAME = "blockwise"
MEANING = "every layer is trained to match its source layer; no backward pass through the whole model"
AFTER = "refit"
OPTIONS = ("tokens", "steps", "rate", "batch")

BATCH_TOKENS = {"cpu": 512, "cuda": 2048}  # of a step: small ones learn more per token, large ones keep a GPU busy
PASSES = 4  # over the calibration's rows, where no number of steps is given; further text is read once
HELD = 8  # one of so many calibration rows is held out
ROOM = {"cpu": 2 << 30, "cuda": 16 << 30}  # bytes for the streams of a portion, at most
SHARE = 1 / 8  # of a GPU's memory, at most
STREAMS = 4  # in memory at a time: both models' before a layer, and the source's within and behind it


def heal(job: Job) -> tuple[nn.Module, Healing]:
    """A copy of the cut model with trained layers, and what every layer gained on held-out rows."""
    healed, text = job.family.tailor(job.cut, share="ends"), _text(job)
    settings = json.dumps([text.steps, job.options.rate, job.options.batch, job.seed, len(text.portions)])
    checkpoints = LayerCheckpoints(job.folder, NAME, settings, text.rows.inputs)
    tokens = count_tokens(text.rows.inputs, text.rows.row)
    errors = []
    try:
        with gradients(job.source, False):
            for portion, rows in enumerate(text.portions):
                walk = _Walk(job, healed, rows, text.held_out)
                errors.append(_trained(walk, checkpoints, text, portion))
    except torch.OutOfMemoryError:
        raise HeadwiseError(
            f"the device has too little memory to train layers; add --heal-option batch={_batch_tokens(job) // 4} "
            f"or --heal-option tokens={tokens // 4}."
        ) from None
    steps = _chained([checks_of(text.numbers(portion)) for portion in range(len(text.portions))])
    return healed, record(tokens, steps, [_chained(of_layer) for of_layer in zip(*errors, strict=True)])


class _Text(NamedTuple):
    """All rows; those that are held out, and the others in portions that fit into memory."""

    rows: Prepared
    held_out: Prepared
    portions: list[Prepared]
    steps: int  # of every layer, on all portions together

    def numbers(self, portion: int) -> range:
        """The steps, of all, that every layer is trained for on one portion."""
        count = len(self.portions)
        return range(self.steps * portion // count, self.steps * (portion + 1) // count)


@torch.no_grad()
def _text(job: Job) -> _Text:
    """The calibration's rows or, with the option `tokens`, so many tokens of them and of the further rows.

    Only rows of the calibration are held out. Portions are of equal size.
    """
    rows, known = job.calibration, len(job.calibration.inputs)
    if job.options.tokens is not None:
        count = max(1, job.options.tokens // mean_length(rows.inputs, rows.row))
        rows = rows if job.more is None or count <= known else together(rows, job.more)
        rows = rows_of(rows, torch.arange(min(count, len(rows.inputs))))
    learned, held_out = halves(rows, known)
    first = rows_of(rows, torch.arange(1)).batches()[0]
    row = job.family.embed(job.source, first.to(job.device).inputs)
    most = max(known, _room(row.device) // (row.nbytes * STREAMS))
    parts = torch.arange(len(learned.inputs)).tensor_split(ceil(len(learned.inputs) / most))
    passes = max(1.0, PASSES * min(1.0, known / len(rows.inputs)))
    steps = job.options.steps or round(passes * len(learned.batches(_batch_tokens(job))))
    return _Text(rows, held_out, [rows_of(learned, part) for part in parts], steps)


def halves(rows: Prepared, known: int) -> tuple[Prepared, Prepared]:
    """The rows to learn from, and some of the first `known` that are held out; few rows are both."""
    every = torch.arange(len(rows.inputs))
    held = (every % HELD == HELD - 1) & (every < known)
    return rows_of(rows, every[~held]), rows_of(rows, every[held if held.any() else ~held])


def batch_tokens(options: Options, device: torch.device) -> int:
    """Tokens of a step."""
    return options.batch or BATCH_TOKENS.get(device.type, 512)


def _batch_tokens(job: Job) -> int:
    return batch_tokens(job.options, job.device)


def _room(device: torch.device) -> int:
    """Bytes for streams; the same however full the device is, so that a resumed run finds the same portions."""
    room = ROOM.get(device.type, ROOM["cpu"])
    if device.type != "cuda":
        return room
    return min(room, int(SHARE * torch.cuda.get_device_properties(device).total_memory))


@dataclass(slots=True)
class _Streams:
    """The residual streams of both models before a layer, for rows of one length."""

    rows: Prepared
    source: torch.Tensor
    cut: torch.Tensor
    contexts: list[dict[str, Any]]  # of the source's layers
    target: torch.Tensor = field(default_factory=lambda: torch.zeros(0))  # the source's, behind the layer


class _Walk:
    """Takes both models' streams from layer to layer."""

    def __init__(self, job: Job, healed: nn.Module, learned: Prepared, held_out: Prepared) -> None:
        self.job, self.layers = job, job.family.layers(healed)
        self.ours, self.theirs = job.family.blocks(healed), job.family.blocks(job.source)
        self.spans = with_removed(origins(job.source, healed), len(self.theirs))
        self.learned, self.held_out = self._start(healed, learned), self._start(healed, held_out)

    @torch.no_grad()
    def _start(self, healed: nn.Module, rows: Prepared) -> list[_Streams]:
        """Streams before the first layer that is left."""
        family, source = self.job.family, self.job.source
        parts = [part.to(self.job.device) for part in rows.batches(_batch_tokens(self.job))]
        contexts = family.contexts(source, [part.inputs for part in parts])
        found = [
            _Streams(part, family.embed(source, part.inputs), family.embed(healed, part.inputs), context)
            for part, context in zip(parts, contexts, strict=True)
        ]
        for streams in found:
            for index in range(self.spans[0].start):
                streams.source = self.theirs[index](streams.source, streams.contexts[index])
        return found

    def trainer(self, index: int, captured: bool) -> LayerTrainer:
        """The trainer of a layer."""
        span = self.spans[index]
        learned, held_out = ([self._batch(s, span) for s in part] for part in (self.learned, self.held_out))
        power = mean_of((streams.target - streams.source).square() for streams in self.held_out)
        set_format(self.layers[index], widened(self.learned[0].cut).dtype)  # steps are smaller than bfloat16 resolves
        rows, last = (learned, held_out), index == len(self.ours) - 1
        return trainer_of(self.job, self.layers[index], self.ours[index], rows, power, last, captured)

    @torch.no_grad()
    def _batch(self, streams: _Streams, span: range) -> LayerBatch:
        """What a layer reads and should put out: what the source does in it and in the removed layers behind it."""
        context = streams.contexts[span.start]
        middle, streams.target = passed(self.theirs[span.start], streams.source, context)
        for index in span[1:]:
            streams.target = self.theirs[index](streams.target, streams.contexts[index])
        cut, target, middle = in_full((streams.cut, streams.target, middle))
        return LayerBatch(streams.rows, cut, target, middle, in_full(context))

    @torch.no_grad()
    def advance(self, index: int) -> None:
        """Take both streams past a layer."""
        set_format(self.layers[index], self.job.cut.dtype)
        for streams in self.learned + self.held_out:
            streams.cut = self.ours[index](streams.cut, streams.contexts[self.spans[index].start])
            streams.source = streams.target


def trainer_of(
    job: Job,
    layer: nn.Module,
    block: Block,
    rows: tuple[Sequence[LayerBatch], Sequence[LayerBatch]],
    power: float,
    last: bool,
    captured: bool,
) -> LayerTrainer:
    """The trainer of a layer on rows to learn from and held-out ones; the `last` layer learns the answers."""
    kind = AnswerTrainer if last else LayerTrainer
    return kind(job, layer, block, *rows, power, CapturedStep if captured else lambda: move)


def captures(device: torch.device, steps: int) -> bool:
    """Whether steps are captured and replayed."""
    return device.type == "cuda" and steps >= WORTH


def _trained(walk: _Walk, checkpoints: LayerCheckpoints, text: _Text, portion: int) -> list[list[float]]:
    """Train layer after layer on one portion and return their errors; the main process trains for the others too."""
    job, numbers, count, errors = walk.job, text.numbers(portion), len(text.portions), []
    captured = captures(job.device, len(numbers))
    label = NAME if count == 1 else f"{NAME}, portion {portion + 1} of {count}"
    for index in job.track(range(len(walk.layers)), label):
        trainer = walk.trainer(index, captured)
        found = torch.zeros(len(checks_of(numbers)), dtype=torch.float64)
        if processes.index() == 0:
            known = checkpoints.load(trainer.layer)
            if known is None:
                seed = job.seed + portion * len(walk.layers) + index
                known = {"errors": trainer.train(numbers, text.steps, job.options.rate or RATE, seed)}
                checkpoints.save(trainer.layer, known)
            found += torch.tensor(known["errors"], dtype=torch.float64)
        errors.append(processes.agreed(found).tolist())
        with torch.no_grad():
            for weight in trainer.layer.parameters() if processes.count() > 1 else ():
                weight.copy_(processes.agreed(weight))
        walk.advance(index)
    return errors


def record(tokens: int, steps: list[int], errors: list[list[float]]) -> Healing:
    """Gains and curves per layer; as the loss, at every check, the mean share that is left of the layers' errors."""
    parts = [LayerTrainer.part] * (len(errors) - 1) + [AnswerTrainer.part]
    layers = tuple({part: Gain(row[0], row[-1], tuple(row))} for part, row in zip(parts, errors, strict=True))
    shares = [[error / row[0] if row[0] > LEAST else 1.0 for error in row] for row in errors]
    means = (sum(at) / len(at) for at in zip(*shares, strict=True))
    curve = tuple(LossPoint(step, loss) for step, loss in zip(steps, means, strict=True))
    return Healing(NAME, tokens, layers=layers, curve=curve)


def _chained(parts: Sequence[list[T]]) -> list[T]:
    """The curves of all portions as one; each begins where the one before ended."""
    return [*parts[0], *(value for part in parts[1:] for value in part[1:])]
