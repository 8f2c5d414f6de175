"""Blockwise: every layer is trained to leave the residual stream that its source layer leaves, and the last one to give
the source's answers.

No gradient crosses a layer: memory is that of one layer, and time that of a few passes over the rows. A layer reads
what the healed layers before it put out, so that it also learns to make up for them. It is checked on held-out rows,
goes back to its best state whenever a check finds it worse, and stays as it was if nothing better was found.

Text beyond the calibration's is read in portions whose streams fit into memory: all layers are trained on the first
portion, then all of them on the next.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import ceil
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from headwise import processes
from headwise.data import count_tokens, mean_length
from headwise.errors import HeadwiseError
from headwise.families import Block, set_format, widened
from headwise.heal import _layer
from headwise.heal._checkpoints import LayerCheckpoints
from headwise.heal._job import Job, gradients, origins, rows_of, together, with_removed
from headwise.heal._layer import AnswerTrainer, LayerBatch, LayerTrainer, checks_of, in_full
from headwise.runs.heal_options import Options
from headwise.tasks import Prepared
from headwise.training.captured import WORTH, CapturedStep
from headwise.training.loop import move
from headwise.types import Gain, Healing, LossPoint

T = TypeVar("T")
Embed = Callable[[torch.Tensor], torch.Tensor]  # tokens -> the stream before the first layer

NAME = "blockwise"
MEANING = "every layer is trained to match its source layer; no backward pass through the whole model"
AFTER = "refit"
OPTIONS = ("tokens", "steps", "rate", "batch")

BATCH_TOKENS = {"cpu": 512, "cuda": 2048}  # of a step: small ones learn more per token, large ones keep a GPU busy
PASSES = 4  # over the calibration's rows, where no number of steps is given; further text is read once
HELD = 8  # one of so many calibration rows is held out
ROOM = {"cpu": 2 << 30, "cuda": 16 << 30}  # bytes for the streams of a portion, at most
SHARE = 1 / 8  # of a GPU's memory, at most
HALVES = ("learned", "held")  # rows to learn from, and rows that show whether it helped
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
            for portion in range(len(text.portions)):
                errors.append(_trained(job, healed, checkpoints, text, portion))
    except torch.OutOfMemoryError:
        raise HeadwiseError(
            "the device has too little memory to train layers; add --heal-option "
            f"batch={batch_tokens(job.options, job.device) // 4} or --heal-option tokens={tokens // 4}."
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
    steps = job.options.steps or round(passes * len(learned.batches(batch_tokens(job.options, job.device))))
    return _Text(rows, held_out, [rows_of(learned, part) for part in parts], steps)


def halves(rows: Prepared, known: int) -> tuple[Prepared, Prepared]:
    """The rows to learn from, and some of the first `known` that are held out; few rows are both."""
    every = torch.arange(len(rows.inputs))
    held = (every % HELD == HELD - 1) & (every < known)
    return rows_of(rows, every[~held]), rows_of(rows, every[held if held.any() else ~held])


def batch_tokens(options: Options, device: torch.device) -> int:
    """Tokens of a step."""
    return options.batch or BATCH_TOKENS.get(device.type, 512)


def _room(device: torch.device) -> int:
    """Bytes for streams; the same however full the device is, so that a resumed run finds the same portions."""
    room = ROOM.get(device.type, ROOM["cpu"])
    if device.type != "cuda":
        return room
    return min(room, int(SHARE * torch.cuda.get_device_properties(device).total_memory))


class LayerPair(NamedTuple):
    """A layer that is trained, and what it is to do: what the source does in some of its layers."""

    number: int
    span: range  # the source's layers: its own one, and those behind it that were removed
    theirs: Sequence[Block]  # of this span
    layer: nn.Module
    ours: Block  # of the layer
    last: bool  # it learns the answers


class LayerWalk:
    """Takes both models' streams from layer to layer and trains each layer in between.

    `whole` streams are the source's, `trained` ones those behind layers that are trained already. They wait in a store
    by layer and name: a dictionary or, where the model is larger than memory, what keeps them on disk.
    """

    def __init__(
        self,
        job: Job,
        device: torch.device,
        rows: Sequence[Prepared],  # to learn from, and held out
        contexts: Callable[[list[torch.Tensor]], list[list[dict[str, Any]]]],  # of the source's layers
        store: Any,
    ) -> None:
        self.job, self.store = job, store
        size = batch_tokens(job.options, device)
        self.parts = {half: [p.to(device) for p in x.batches(size)] for half, x in zip(HALVES, rows, strict=True)}
        self.contexts = {half: contexts([p.inputs for p in parts]) for half, parts in self.parts.items()}

    def _batches(self) -> Iterator[tuple[str, Prepared, list[dict[str, Any]]]]:
        """Name, rows and contexts of every batch."""
        for half, parts in self.parts.items():
            for number, both in enumerate(zip(parts, self.contexts[half], strict=True)):
                yield f"{half}.{number}", *both

    @torch.no_grad()
    def begin(self, whole: Embed, trained: Embed, removed: Sequence[Block] = ()) -> None:
        """Put both models' streams before the first layer; `removed` are the source's layers before it."""
        for name, rows, contexts in self._batches():
            stream = whole(rows.inputs)
            for block, context in zip(removed, contexts, strict=False):
                stream = block(stream, context)
            self.store[0, f"whole.{name}"] = stream
            self.store[0, f"trained.{name}"] = trained(rows.inputs)

    @torch.no_grad()
    def trainer(self, pair: LayerPair, captured: bool) -> LayerTrainer:
        """The trainer of a layer, in full precision: steps are smaller than bfloat16 resolves.

        The source's streams are taken past its layers first.
        """
        for name, _, contexts in self._batches():
            middle, target = _layer.passed(
                pair.theirs[0], self.store[pair.number, f"whole.{name}"], contexts[pair.span.start]
            )
            for block, at in zip(pair.theirs[1:], pair.span[1:], strict=True):
                target = block(target, contexts[at])
            self.store[pair.number, f"middle.{name}"] = middle
            self.store[pair.number + 1, f"whole.{name}"] = target
        names = [f"whole.held.{number}" for number in range(len(self.parts["held"]))]
        ends = ((self.store[pair.number, name], self.store[pair.number + 1, name]) for name in names)
        power = _layer.mean_of((after - before).square() for before, after in ends)
        set_format(pair.layer, widened(target).dtype)
        learned, held_out = (_Batches(self, pair, half) for half in HALVES)
        kind, step = AnswerTrainer if pair.last else LayerTrainer, CapturedStep if captured else lambda: move
        return kind(self.job, pair.layer, pair.ours, learned, held_out, power, step)

    @torch.no_grad()
    def advance(self, pair: LayerPair, dtype: torch.dtype) -> None:
        """Take the other streams past the trained layer, in its own format."""
        set_format(pair.layer, dtype)
        for name, _, contexts in self._batches():
            stream = self.store[pair.number, f"trained.{name}"]
            self.store[pair.number + 1, f"trained.{name}"] = pair.ours(stream, contexts[pair.span.start])


class _Batches(Sequence[LayerBatch]):
    """The batches of one half before a layer, each read when it is asked for."""

    def __init__(self, walk: LayerWalk, pair: LayerPair, half: str) -> None:
        self.walk, self.pair, self.half = walk, pair, half

    def __len__(self) -> int:
        return len(self.walk.parts[self.half])

    def __getitem__(self, number: Any) -> Any:
        walk, index, name = self.walk, self.pair.number, f"{self.half}.{number}"
        rows, contexts = walk.parts[self.half][number], walk.contexts[self.half][number]
        places = ((index, f"trained.{name}"), (index + 1, f"whole.{name}"), (index, f"middle.{name}"))
        cut, target, middle = (in_full(walk.store[place]) for place in places)
        return LayerBatch(rows, cut, target, middle, in_full(contexts[self.pair.span.start]))


def captures(device: torch.device, steps: int) -> bool:
    """Whether steps are captured and replayed."""
    return device.type == "cuda" and steps >= WORTH


def _trained(
    job: Job, healed: nn.Module, checkpoints: LayerCheckpoints, text: _Text, portion: int
) -> list[list[float]]:
    """Train layer after layer on one portion and return their errors; the main process trains for the others too."""
    numbers, count, errors = text.numbers(portion), len(text.portions), []
    captured, family = captures(job.device, len(numbers)), job.family
    label = NAME if count == 1 else f"{NAME}, portion {portion + 1} of {count}"
    layers, ours, theirs = family.layers(healed), family.blocks(healed), family.blocks(job.source)
    spans = with_removed(origins(job.source, healed), len(theirs))
    rows = text.portions[portion], text.held_out
    walk = LayerWalk(job, job.device, rows, partial(family.contexts, job.source), {})
    walk.begin(partial(family.embed, job.source), partial(family.embed, healed), theirs[: spans[0].start])
    for index in job.track(range(len(layers)), label):
        span = spans[index]
        pair = LayerPair(
            index, span, theirs[span.start : span.stop], layers[index], ours[index], index == len(layers) - 1
        )
        trainer = walk.trainer(pair, captured)
        found = torch.zeros(len(checks_of(numbers)), dtype=torch.float64)
        if processes.index() == 0:
            known = checkpoints.load(trainer.layer)
            if known is None:
                seed = job.seed + portion * len(layers) + index
                known = {"errors": trainer.train(numbers, text.steps, job.options.rate or _layer.RATE, seed)}
                checkpoints.save(trainer.layer, known)
            found += torch.tensor(known["errors"], dtype=torch.float64)
        errors.append(processes.agreed(found).tolist())
        with torch.no_grad():
            for weight in trainer.layer.parameters() if processes.count() > 1 else ():
                weight.copy_(processes.agreed(weight))
        walk.advance(pair, job.cut.dtype)
        walk.store = {place: stream for place, stream in walk.store.items() if place[0] > index}
    return errors


def record(tokens: int, steps: list[int], errors: list[list[float]]) -> Healing:
    """Gains and curves per layer; as the loss, at every check, the mean share that is left of the layers' errors."""
    parts = [LayerTrainer.part] * (len(errors) - 1) + [AnswerTrainer.part]
    layers = tuple({part: Gain(row[0], row[-1], tuple(row))} for part, row in zip(parts, errors, strict=True))
    shares = [[error / row[0] if row[0] > _layer.LEAST else 1.0 for error in row] for row in errors]
    means = (sum(at) / len(at) for at in zip(*shares, strict=True))
    curve = tuple(LossPoint(step, loss) for step, loss in zip(steps, means, strict=True))
    return Healing(NAME, tokens, layers=layers, curve=curve)


def _chained(parts: Sequence[list[T]]) -> list[T]:
    """The curves of all portions as one; each begins where the one before ended."""
    return [*parts[0], *(value for part in parts[1:] for value in part[1:])]
