"""The measured damage of one layer's options: replace the layer, run on from there, compare with the source.

The stream before every layer is cached, so an option costs half a forward pass on average. Damage is the divergence
from the source's own answers: where that is a KL, its expectation is the loss increase, with far less noise than a
difference of losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from headwise import processes
from headwise.data import places
from headwise.families import Family
from headwise.progress import Track, silently
from headwise.runs.unfinished import Progress
from headwise.tasks import Task
from headwise.tasks.causal import Causal
from headwise.types import LayerShape, Reading

NAME = "swap"
Cut = Callable[[int, LayerShape], nn.Module]  # a layer, cut


class Swapper:
    """Holds what is needed to measure any layer's option on the same few tokens."""

    def __init__(
        self, family: Family, model: nn.Module, tokens: torch.Tensor, task: Task | None = None, seed: int = 0
    ) -> None:
        self.family, self.model, self.task = family, model, task or Causal()
        self.batches = self.task.prepare(tokens, seed).to(model.device).batches(2048)
        self.contexts = family.contexts(model, [batch.inputs for batch in self.batches])
        self.streams: list[list[torch.Tensor]] = []
        self.reference: list[torch.Tensor] = []
        self._run_source()

    @torch.no_grad()
    def _run_source(self) -> None:
        for batch, contexts in zip(self.batches, self.contexts, strict=True):
            stream, seen = self.family.embed(self.model, batch.inputs), []
            for index, context in enumerate(contexts):
                seen.append(stream)
                stream = self.family.run_layer(self.model, index, stream, context)
            self.streams.append(seen)
            self.reference.append(self.task.outputs_from(self.family, self.model, stream, batch))

    @torch.no_grad()
    def damage(self, layer: int, option: nn.Module) -> tuple[float, float]:
        """Mean divergence with one layer replaced by `option`, and its standard error over sequences."""
        rows, parts = [], zip(self.batches, self.contexts, self.streams, self.reference, strict=True)
        with self.family.replaced(self.model, layer, option):
            for batch, contexts, seen, reference in parts:
                stream = seen[layer]
                for index in range(layer, len(contexts)):
                    stream = self.family.run_layer(self.model, index, stream, contexts[index])
                cut = self.task.outputs_from(self.family, self.model, stream, batch)
                rows.append(self.task.divergence(reference, cut))
        values = torch.cat(rows).double()
        error = values.std() / math.sqrt(len(values)) if len(values) > 1 else torch.tensor(float("nan"))
        return float(values.mean().clamp_min(0)), float(error)


def measure(
    family: Family,
    model: nn.Module,
    tokens: torch.Tensor,
    predicted: Sequence[Reading],
    options: dict[str, Callable[[LayerShape, int], LayerShape]],
    cut: Cut,
    seed: int,
    track: Track = silently,
    healed: bool = False,
    task: Task | None = None,
    progress: Progress | None = None,
) -> list[Reading]:
    """Correct predicted curves where they were measured. `options[kind](shape, size)` is the layer to try.

    `healed` says that `cut` heals what it cuts, so that the readings say so.
    """
    swapper, progress = Swapper(family, model, tokens, task, seed), progress or Progress()
    how = f"{swapper.task.divergence_name} to the source{', the layer healed' if healed else ''}"
    shapes = family.shape_of(model.config).layers
    jobs = [
        (reading, layer, size)
        for reading in predicted
        if reading.kind in options
        for layer in range(len(shapes))
        for size in probe_sizes(reading.ticks[layer])
    ]
    damages = torch.zeros(len(jobs), 2, dtype=torch.float64)
    for number in track(processes.mine(range(len(jobs))), "measured damage"):
        reading, layer, size = jobs[number]

        def measured(kind: str = reading.kind, layer: int = layer, size: int = size) -> tuple[float, float]:
            return swapper.damage(layer, cut(layer, options[kind](shapes[layer], size)))

        damages[number] = torch.tensor(progress.piece(f"{reading.kind} {layer} {size}", measured))
    found: dict[tuple[str, int], dict[int, tuple[float, float]]] = {}
    for (reading, layer, size), (damage, error) in zip(jobs, processes.total(damages).tolist(), strict=True):
        found.setdefault((reading.kind, layer), {})[size] = (damage, error)
    read = places(tokens, swapper.task.row_tokens)
    return [_corrected(reading, found, read, seed, how) for reading in predicted if reading.kind in options]


def probe_sizes(ticks: tuple[int, ...], count: int = 3) -> tuple[int, ...]:
    """A few sizes that span the curve, the full size left out.

    >>> probe_sizes((64, 56, 48, 40, 32, 24, 16))
    (56, 40, 16)
    """
    cuts = ticks[1:]
    if len(cuts) <= count:
        return cuts
    return tuple(cuts[round(i * (len(cuts) - 1) / (count - 1))] for i in range(count))


def _corrected(
    reading: Reading, found: dict[tuple[str, int], dict[int, tuple[float, float]]], tokens: int, seed: int, how: str
) -> Reading:
    rows = [
        correct_curve(ticks, values, found.get((reading.kind, layer), {}))
        for layer, (ticks, values) in enumerate(zip(reading.ticks, reading.values, strict=True))
    ]
    return Reading(
        probe=NAME,
        kind=reading.kind,
        axis=reading.axis,
        ticks=reading.ticks,
        values=tuple(row[0] for row in rows),
        standard_error=tuple(row[1] for row in rows),
        unit=reading.unit,
        meaning=reading.meaning.replace("Predicted loss increase", f"Measured damage ({how}, interpolated)"),
        tokens=tokens,
        seed=seed,
    )


def correct_curve(
    ticks: tuple[int, ...], predicted: tuple[float, ...], measured: dict[int, tuple[float, float]]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The predicted curve times measured/predicted, interpolated between measured sizes in the logarithm; monotone."""
    tiny = 1e-9
    knots = []
    for tick, value in zip(ticks, predicted, strict=True):
        if tick in measured:
            ratio = math.log(max(measured[tick][0], tiny) / max(value, tiny))
            knots.append((tick, ratio, measured[tick][1] / max(measured[tick][0], tiny)))
    if not knots:
        return predicted, tuple(0.0 for _ in predicted)
    values, errors, largest = [], [], 0.0
    for tick, value in zip(ticks, predicted, strict=True):
        if tick == ticks[0]:
            values.append(0.0)
            errors.append(0.0)
            continue
        ratio, relative = _interpolate(tick, knots)
        largest = max(largest, max(value, tiny) * math.exp(ratio))
        values.append(largest)
        errors.append(largest * relative if math.isfinite(relative) else 0.0)
    return tuple(values), tuple(errors)


def _interpolate(tick: int, knots: list[tuple[int, float, float]]) -> tuple[float, float]:
    above = min((k for k in knots if k[0] >= tick), key=lambda k: k[0], default=knots[0])
    below = max((k for k in knots if k[0] <= tick), key=lambda k: k[0], default=knots[-1])
    if above[0] == below[0]:
        return above[1], above[2]
    share = (tick - below[0]) / (above[0] - below[0])
    return below[1] + share * (above[1] - below[1]), max(above[2], below[2])
