"""Probing a model that is larger than memory: one walk over its layers, one layer in memory, activations on disk.

At every layer: second moments on all calibration rows, and errors of all sizes on a few of them. The few rows also pass
the model once for every layer that is cut before; at the end they show what errors of that layer do to the answers.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from headwise import processes
from headwise.data import batches, count_tokens, places
from headwise.errors import PlanError
from headwise.families import repeated, rows_of_context
from headwise.families._watch import spaced, watching
from headwise.files.json import read_object
from headwise.heal._layer import in_full
from headwise.linalg import fast_products
from headwise.probes import fisher
from headwise.probes._layers import Row, reading
from headwise.probes._magnitude import Orders
from headwise.probes.gram import Sums
from headwise.probes.sensitivity import AXES
from headwise.progress import Track, silently
from headwise.runs.moments import read_layer
from headwise.stages.needed import FEW, followed_tokens
from headwise.stream._model import Streamed
from headwise.stream._store import AGAIN, StreamStore, checksum, write_tensors
from headwise.stream.prices import Curve, Priced, Pricing
from headwise.tasks.causal import Causal
from headwise.types import ModelShape, Reading, Readings, write_atomically

NAME = "stream"
TOGETHER = 4_096  # tokens of followed streams that pass a layer at a time
UNITLESS = "relative squared error of the residual stream"


class Wanted(NamedTuple):
    """What a probing should find."""

    model: str
    seed: int = 0
    mlp: bool = False  # also prices and moments of MLP channels
    pairs: bool = False  # also prices of rotary pairs
    bits: bool = False  # also bases and prices for codes of cached rows
    few: int = 4_096  # tokens that errors and gains are measured on; 0: no gains
    context: int = 0  # tokens over which rows begin
    sizes: bool = True  # also prices of dimensions and heads; without them bits alone can be chosen


class Walk:
    """The walk over the layers; `folder` keeps moments, prices and streams, so that it can be resumed."""

    def __init__(self, source: Streamed, tokens: torch.Tensor, wanted: Wanted, folder: Path) -> None:
        self.source, self.tokens, self.wanted, self.folder = source, tokens, wanted, folder
        pooled = [layer.pooled for layer in source.shape.layers]
        self.at_once = FEW // max(pooled)  # queries are as wide as the rows that heads share
        self.parts = batches(tokens, processes.batch_tokens(2 * self.at_once, places(tokens)))
        count = max(1, followed_tokens(wanted.few, len(source.layers)) // tokens.shape[1])
        self.few = batches(spaced(tokens, count), self.at_once)
        self.count = len(source.layers)
        key = {"rows": checksum(tokens), "pooled": pooled, **wanted._asdict()}
        self.store = StreamStore(folder / "probe", key, source.device)

    def run(self, track: Track = silently) -> None:
        """Measure every layer that is not done yet."""
        reader = self.source.family.offset(self.wanted.context, self.wanted.seed)
        contexts, few = self.source.contexts(self.parts, reader), self.source.contexts(self.few, reader, torch.float32)
        for index in self.store.walk(self.count, self._begin, track, "layers, one at a time"):
            with self.source.layer(index) as layer, torch.no_grad():
                self._layer(index, layer, [c[index] for c in contexts], [c[index] for c in few])

    def _begin(self) -> None:
        for number, part in enumerate(self.parts):
            self.store[0, f"rows.{number}"] = self.source.embed(part)
        for number, part in enumerate(self.few):
            self.store[0, f"few.0.{number}"] = self.source.embed(part).float()

    def _layer(self, index: int, layer: nn.Module, contexts: list[dict[str, Any]], few: list[dict[str, Any]]) -> None:
        block, sums, store = self.source.family.block(layer), Sums(1), self.store
        with watching([block], sums.attention, sums.channels if self.wanted.mlp else None):
            for number, context in enumerate(contexts):
                name = f"rows.{number}"
                store[index + 1, name] = self.source.run(index, store[index, name], context)
        layer.float()  # small errors are measured from here on
        moments = sums.means(0, places(self.tokens))
        shape = self.source.shape
        rows = [(store[index, f"few.0.{number}"], context) for number, context in enumerate(few)]
        pricing = Pricing(block, shape.layers[index], shape.grain, moments, rows)
        priced = pricing.measure(self.wanted.pairs, self.wanted.mlp, self.wanted.sizes)
        if self.wanted.bits:
            moments |= fisher.local(block, self._every_row(index, contexts), self.wanted.seed)
        if self.wanted.few:
            for number, (stream, context) in enumerate(rows):
                store[index + 1, f"few.{index + 1}.{number}"] = pricing.followed(stream, context)
        for number, context in enumerate(few):
            self._stacks_on(index, number, context)
        write_tensors(moments_file(self.folder, index), {name: t.float() for name, t in moments.items()})
        write_atomically(self._prices_file(index), json.dumps(priced._asdict()))

    def _every_row(self, index: int, contexts: list[dict[str, Any]]) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """All calibration rows before a layer in float32, a few tokens at a time: rows that are coded are wide."""
        for number, context in enumerate(contexts):
            stream = self.store[index, f"rows.{number}"]
            size = max(1, self.at_once // stream.shape[1])
            for start in range(0, len(stream), size):
                chosen = slice(start, start + size)
                yield stream[chosen].float(), in_full(rows_of_context(context, chosen))

    def _stacks_on(self, index: int, number: int, context: dict[str, Any]) -> None:
        """The few rows behind a layer: as the source reads them, and as it does with an earlier layer cut."""
        names = [f"few.{stack}.{number}" for stack in range(index + 1 if self.wanted.few else 1)]
        together = max(1, TOGETHER // self.few[number].numel())
        for start in range(0, len(names), together):
            some = names[start : start + together]
            streams = torch.cat([self.store[index, name] for name in some])
            with fast_products(streams.device):  # TF32: far finer than what a cut does
                stacks = self.source.run(index, streams, repeated(context, len(some)))
            for name, stream in zip(some, stacks.chunk(len(some)), strict=True):
                self.store[index + 1, name] = stream

    def _prices_file(self, index: int) -> Path:
        return self.folder / "prices" / f"{index:05d}.json"

    def priced(self) -> list[Priced]:
        """What was found of every layer."""
        found = []
        for index in range(self.count):
            path = self._prices_file(index)
            data = read_object(path, advice=AGAIN)
            try:
                errors: dict[str, Curve] = {name: (tuple(a), tuple(b)) for name, (a, b) in data["errors"].items()}
                orders: Orders = {name: tuple(tuple(row) for row in rows) for name, rows in data["orders"].items()}
                found.append(Priced(errors, orders, float(data["reference"])))
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                raise PlanError(f"{path} does not hold the prices of a layer; {AGAIN}.") from None
        return found

    @torch.no_grad()
    def divergences(self, track: Track = silently) -> list[float]:
        """What cutting each layer alone by the reference does to the answers, per token."""
        task, family, model = Causal(), self.source.family, self.source.model
        sums = [0.0] * self.count
        for number, part in enumerate(self.few):
            for row in track(range(len(part)), "gains"):
                batch = task.prepare(part[row : row + 1], self.wanted.seed).to(torch.device(self.source.device))
                files = (self.store[self.count, f"few.{stack}.{number}"] for stack in range(self.count + 1))
                answers = (task.outputs_from(family, model, stream[row : row + 1], batch) for stream in files)
                reference = next(answers)  # the others one by one: they are large
                for layer, found in enumerate(answers):
                    sums[layer] += float(task.divergence(reference, found).double())
        return [value / sum(map(len, self.few)) for value in sums]


def moments_file(folder: Path, index: int) -> Path:
    """Where the second moments of a layer lie."""
    return folder / "moments" / f"{index:05d}.safetensors"


def probe(source: Streamed, tokens: torch.Tensor, wanted: Wanted, folder: Path, track: Track = silently) -> Readings:
    """What allocation needs to know; moments stay in the folder, for the cuts."""
    start = time.perf_counter()
    walk = Walk(source, tokens, wanted, folder)
    walk.run(track)
    layers, gains = walk.priced(), [1.0] * walk.count
    if wanted.few:
        caused = walk.divergences(track)
        gains = [kl / max(layer.reference, 1e-30) for kl, layer in zip(caused, layers, strict=True)]
    walk.store.clear()
    unit = Causal.unit if wanted.few else UNITLESS
    kinds = [name for name in AXES if name in layers[0].errors]
    read, orders = sum(p.numel() for p in walk.few), [layer.orders for layer in layers]
    curves = [_reading(name, layers, gains, read, wanted.seed, unit) for name in kinds]
    if wanted.bits:
        bits, codes = fisher.measure(source.shape.layers, _row_prices(folder, source.shape, gains), read, wanted.seed)
        curves += [replace(reading, probe=NAME, unit=unit) for reading in bits]
        orders = [one | more for one, more in zip(orders, codes, strict=True)]
    return Readings(
        model=wanted.model,
        shape=source.shape,
        curves=tuple(curves),
        orders=tuple(orders),
        tokens=count_tokens(tokens),
        seed=wanted.seed,
        context=wanted.context,
        seconds=time.perf_counter() - start,
    )


def _row_prices(folder: Path, shape: ModelShape, gains: list[float]) -> list[dict[str, torch.Tensor]]:
    """Prices of the coefficients of every layer's rows: the error that they leave in the stream times its gain."""
    found = []
    for index, (layer, gain) in enumerate(zip(shape.layers, gains, strict=True)):
        moments = read_layer(moments_file(folder, index), layer, index)
        found.append(
            {name: 2 * gain * moments[name] for name in ("k_price", "v_price", "k_near", "v_near")}
        )  # half of a price is damage
    return found


def _reading(name: str, layers: list[Priced], gains: list[float], n: int, seed: int, unit: str) -> Reading:
    axis, what = AXES[name]
    rows: list[Row] = []
    for layer, gain in zip(layers, gains, strict=True):
        sizes, errors = layer.errors[name]
        rows.append((sizes, tuple(gain * error for error in errors), None))
    meaning = (
        f"Predicted without gradients, with {what}, by the size that is kept: the error left in the residual stream "
        "times what such errors of this layer do to the answers."
    )
    return reading(NAME, f"damage.{name}", axis, rows, unit, meaning, n, seed)
