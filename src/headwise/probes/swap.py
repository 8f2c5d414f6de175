"""The measured damage of one layer's options: replace the layer, run the layers after it, compare with the source.

The stream before every layer is cached, so an option costs half a forward pass on average. Damage is the divergence
from the source's own answers: where that is a KL, its expectation is the loss increase, with far less noise than a
difference of losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence

import torch
from torch import nn

from headwise import processes
from headwise.data import places
from headwise.families import Family
from headwise.probes._layers import LayerRunner, reading
from headwise.progress import Track, silently
from headwise.runs.unfinished import Progress
from headwise.tasks import Task
from headwise.types import UNIT_OF, LayerShape, Reading

NAME = "swap"
MEANING = "measured damage of some sizes, one layer replaced at a time"
CODED = ("damage.k_bits", "damage.v_bits")  # whose finest sizes do no harm that matters
Cut = Callable[[int, LayerShape], nn.Module]  # a layer, cut


class Swapper(LayerRunner):
    """Measures any layer's option on the same few tokens."""

    def __init__(
        self, family: Family, model: nn.Module, tokens: torch.Tensor, task: Task | None = None, seed: int = 0
    ) -> None:
        super().__init__(family, model, tokens, task, seed)
        self.streams: list[list[torch.Tensor]] = [[] for _ in self.batches]  # before every layer
        self.reference = [self.answers(n, range(len(self.shapes)), seen=seen) for n, seen in enumerate(self.streams)]

    def damage(self, layer: int, option: nn.Module) -> tuple[float, float]:
        """Mean divergence with one layer replaced by `option`, and its standard error over sequences."""
        rest = range(layer, len(self.shapes))
        with self.family.replaced(self.model, layer, option):
            return self.divergence(lambda batch: self.answers(batch, rest, self.streams[batch][layer]))


def measure(
    family: Family,
    model: nn.Module,
    tokens: torch.Tensor,
    predicted: Sequence[Reading],
    options: Container[str],
    sized: Callable[[str, int, int], LayerShape],
    cut: Cut,
    seed: int,
    track: Track = silently,
    healed: Container[str] = (),
    task: Task | None = None,
    progress: Progress | None = None,
) -> list[Reading]:
    """Predicted curves, corrected where they were measured.

    `options` names the curves that are measured; `sized(kind, layer, size)` is the layer to try.
    `healed` names those whose layers `cut` heals, which the readings then state.
    """
    swapper, progress = Swapper(family, model, tokens, task, seed), progress or Progress()
    shapes = swapper.shapes
    jobs = [
        (curve, layer, size)
        for curve in predicted
        if curve.kind in options
        for layer in range(len(shapes))
        for size in _tried(curve, layer)
    ]
    damages = torch.zeros(len(jobs), 2, dtype=torch.float64)
    for number in track(processes.mine(range(len(jobs))), "measured damage"):
        curve, layer, size = jobs[number]

        def measured(kind: str = curve.kind, layer: int = layer, size: int = size) -> tuple[float, float]:
            return swapper.damage(layer, cut(layer, sized(kind, layer, size)))

        damages[number] = torch.tensor(progress.piece(f"{curve.kind} {layer} {size}", measured))
    found: dict[tuple[str, int], dict[int, tuple[float, float]]] = {}
    for (curve, layer, size), (damage, error) in zip(jobs, processes.total(damages).tolist(), strict=True):
        found.setdefault((curve.kind, layer), {})[size] = (damage, error)
    read = places(tokens, swapper.task.row_tokens)
    how = f"{swapper.task.divergence_name} to the source"
    named = {curve.kind: f"{how}, the layer healed" if curve.kind in healed else how for curve in predicted}
    return [corrected(curve, found, read, seed, named[curve.kind]) for curve in predicted if curve.kind in options]


def probe_sizes(ticks: tuple[int, ...], count: int = 3) -> tuple[int, ...]:
    """A few sizes that span the curve, the full size left out.

    >>> probe_sizes((64, 56, 48, 40, 32, 24, 16))
    (56, 40, 16)
    """
    cuts = ticks[1:]
    if len(cuts) <= count:
        return cuts
    return tuple(cuts[round(i * (len(cuts) - 1) / (count - 1))] for i in range(count))


def _tried(curve: Reading, layer: int) -> tuple[int, ...]:
    """The sizes of a layer that are measured."""
    ticks, wanted = curve.ticks[layer], UNIT_OF[curve.kind].tried
    return tuple(size for size in wanted if size in ticks) if wanted else probe_sizes(ticks)


def corrected(
    before: Reading, found: dict[tuple[str, int], dict[int, tuple[float, float]]], tokens: int, seed: int, how: str
) -> Reading:
    """A predicted curve with what was `found` by measuring, by kind and layer, at some sizes."""
    coded = before.kind in CODED
    rows = []
    for layer, (ticks, values) in enumerate(zip(before.ticks, before.values, strict=True)):
        measured = found.get((before.kind, layer), {})
        measured = above_noise(ticks, values, measured) if coded else measured
        rows.append((ticks, *correct_curve(ticks, values, measured)))
    meaning = before.meaning.replace("Predicted loss increase", f"Measured damage ({how}, interpolated)")
    return reading(NAME, before.kind, before.axis, rows, before.unit, meaning, tokens, seed)


def above_noise(
    ticks: tuple[int, ...], predicted: tuple[float, ...], measured: dict[int, tuple[float, float]]
) -> dict[int, tuple[float, float]]:
    """Damages of codes less what the finest code shows; those that are not well above it are left out.

    Keys are measured with values in their finest code and the other way round, and rounding in a model's own number
    format makes any change of a layer look like damage. The finest code shows both, as its own damage is negligible.
    Otherwise all fine codes would seem to be equally bad, and a plan would take the cheapest of them.

    >>> above_noise((16, 8, 4, 2), (0.0, 0.0, 0.25, 8.0), {8: (1.0, 0.1), 4: (1.25, 0.1), 2: (9.0, 0.1)})
    {2: (8.0, 0.1)}
    """
    if len(ticks) < 2 or ticks[1] not in measured:
        return measured
    noise = max(0.0, measured[ticks[1]][0] - predicted[1])
    return {tick: (damage - noise, error) for tick, (damage, error) in measured.items() if damage > 2 * noise}


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
