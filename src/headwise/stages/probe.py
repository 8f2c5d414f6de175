"""The probe stage: everything that allocation and reshaping need to know about a model in memory."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from headwise import __version__, data, families, memory, probes, processes, strategies
from headwise.cuts import Moments, reshape_layer
from headwise.files import disk
from headwise.heal.refit import LayerHealer, refit
from headwise.probes import depth, fisher, gram, sensitivity, spectrum, swap, weights
from headwise.probes._backward import way
from headwise.probes._magnitude import Orders
from headwise.progress import Track, note, silently
from headwise.runs.folder import RunFolder
from headwise.runs.moments import as_stored, read_moments, write_moments
from headwise.runs.settings import Settings
from headwise.runs.unfinished import Progress
from headwise.stages import packing
from headwise.stages.allocate import units_to_measure
from headwise.stages.source import Probed, Source, codes_alone, codes_rows, packs_weights
from headwise.tasks.causal import Causal
from headwise.types import DAMAGE, GONE, LayerShape, ModelShape, Reading, Readings
from headwise.types.weights import ENDS

T = TypeVar("T")
MOMENTS = "moments.safetensors"
HEALING_TOKENS = 8_192  # at least, to heal a single layer on before it is priced
SPECTRUM_TOKENS = 4_096  # where only a reader of the report wants to know
MEASURED_LENGTH = 2_048  # tokens of a row on which codes are measured, at most: in longer texts more is read from codes
NARROW = 256  # numbers of a row whose spectrum takes no time
SENSITIVITY_TOKENS = 32_768  # gradients cost three times a forward pass, and their prices settle early


def probe_in(
    folder: RunFolder, settings: Settings, source: Source, track: Track = silently, diagnose: bool = True
) -> Probed:
    """Probe the current model into a folder, or read what an earlier probing of the same run left there."""
    if not processes.agrees(folder.finished("probe")):
        readings, _ = probe(settings, source, track, diagnose, folder.probing)
        processes.by_first(partial(_write, settings, folder, readings))
    processes.by_first(partial(disk.remove, folder.probing))
    layers = source.family.shape_of(source.current.config).layers
    return Probed(Readings.read(folder.readings_file), read_moments(folder.moments_file, source.current.device, layers))


def _write(settings: Settings, folder: RunFolder, readings: Readings) -> None:
    readings.save(folder.readings_file)
    os.replace(folder.probing / MOMENTS, folder.moments_file)
    folder.ledger.record("probe", ("readings.json", "moments.safetensors"))
    if "" in folder.ledger.read().inputs.values():  # of a hub, known since it was fetched
        folder.ledger.begin(settings.inputs(families.locate(settings.model)[0]))


def probe(
    settings: Settings, source: Source, track: Track = silently, diagnose: bool = True, work: Path | None = None
) -> Probed:
    """Everything that allocation and reshaping need to know about the current model.

    `diagnose` also measures what its layers do, for the reader of the report. With a folder `work`, results are kept
    there piece by piece, so that a probing that was killed resumes.
    """
    return _Probing(settings, source, track, work).run(diagnose)


class _Probing:
    """One probing of one model: what all its probes share."""

    def __init__(self, settings: Settings, source: Source, track: Track, work: Path | None) -> None:
        self.settings, self.source, self.track, self.work = settings, source, track, work
        self.family, self.task, self.model = source.reader, source.task, source.current
        self.shape = self.family.shape_of(self.model.config)
        self.mlp = not settings.only_kv and "mlp" in settings.allow
        self.coded = codes_rows(settings, self.shape, self.task)
        self.bits_alone = codes_alone(settings, self.shape, self.task)
        self.packed = packs_weights(settings, self.shape, self.task)
        self.ranked = "rank" in settings.allow and type(self.task) is Causal
        self.ranked &= not (settings.only_kv or self.packed or settings.portable)
        self.bits_alone |= self.packed and set(settings.allow) <= {"bits", "weights"}
        self.heals = settings.heal != "none"

    def run(self, diagnose: bool) -> Probed:
        """Every probe, in order; pieces that an interrupted probing left are not measured again."""
        settings, source, start = self.settings, self.source, time.perf_counter()
        self.progress = Progress(self.work, _key(settings, source, diagnose))
        self.moments = self._moments()
        diagnosed = self.progress.piece("diagnosed", lambda: _plain(self._diagnosed() if diagnose else []))
        curves, self.orders = self._predicted()
        few, others = data.measured_and_others(
            source.calibration, settings.swap_tokens, HEALING_TOKENS, self.task.row_tokens, self._joined()
        )
        others = source.inputs(others)
        curves += self._measured(curves, few, others)
        order: tuple[int, ...] = ()
        if "depth" in settings.allow and not settings.portable:
            found, order = self._depth(few, others)
            curves.append(found)
        readings = Readings(
            model=settings.model,
            shape=self.shape,
            curves=(*curves, *(Reading.from_json(reading) for reading in diagnosed)),
            depth=order,
            orders=tuple(self.orders),
            tokens=data.count_tokens(source.calibration, self.task.row_tokens),
            seed=settings.seed,
            context=source.context,
            seconds=time.perf_counter() - start,
        )
        return Probed(readings, self.moments)

    def _joined(self) -> int:
        """How many calibration rows are read as one where codes are measured."""
        rows = self.source.calibration
        return min(MEASURED_LENGTH, self.source.context) // rows.shape[1] if self.coded and rows.dim() == 2 else 1

    def _moments(self) -> list[Moments]:
        """What cuts go by, as it is in a file: from the one that an interrupted probing left, or measured now.

        Second moments; where rows are coded, their bases and prices; where nothing but bits can be chosen, these alone.
        """
        file = self.work and self.work / MOMENTS
        if file and processes.agrees("moments" in self.progress.known and file.exists()):
            return read_moments(file, self.model.device, self.shape.layers)
        found: list[Moments] = [{} for _ in self.shape.layers]
        if not self.bits_alone:
            found = self._grams(self.source.calibration)
        if self.coded:
            found = _merged(found, self._with_less_memory(self._fisher))
        if self.packed:
            found = _merged(found, self._with_less_memory(self._weights))
        if self.ranked:
            weighed = self._with_less_memory(self._weights)
            found = _merged(found, [{name: one[name] for name in ("w_in", "g_q")} for one in weighed])
        if file:
            processes.by_first(partial(write_moments, file, found))
        self.progress.piece("moments", lambda: True)
        return as_stored(found, self.model.device)

    def _grams(self, rows: torch.Tensor) -> list[Moments]:
        return gram.collect(self.family, self.model, self.source.inputs(rows), self.mlp, self.track)

    def _fisher(self, recompute: bool | None) -> list[Moments]:
        """Of all rows: few tokens matter much more than others."""
        rows, seed = self.source.calibration, self.settings.seed
        if recompute is None:
            recompute = way(self.family, self.model, rows, self.task).recompute
        less_memory = bool(recompute), self.source.spread
        return fisher.collect(self.family, self.model, rows, seed, self.track, self.task, *less_memory)

    def _weights(self, recompute: bool | None) -> list[Moments]:
        some, seed = self._some(packing.TOKENS), self.settings.seed
        return weights.collect(self.family, self.model, some, seed, self.track, self.task, recompute)

    def _with_less_memory(self, work: Callable[[bool | None], T]) -> T:
        """Work that takes gradients, as the settings say; once more with layers computed twice if memory runs out."""
        try:
            return work(self.settings.recompute)
        except torch.cuda.OutOfMemoryError:
            if self.settings.recompute:
                raise
        memory.emptied()
        note("the device ran out of memory; gradients are computed again with layers computed twice.")
        return work(True)

    def _diagnosed(self) -> list[Reading]:
        """Readings that are no damage: spectra, conditioning; of decoders also saturation and lags."""
        family, model, seed = self.source.family, self.model, self.settings.seed
        rows, spectra = self.source.calibration, list[Reading]()
        if not self.bits_alone:
            spectra = spectrum.measure(family, model, self.moments, data.places(rows, self.task.row_tokens), seed)
        elif self._narrow():
            few = self._some(SPECTRUM_TOKENS)
            spectra = spectrum.measure(family, model, self._grams(few), data.places(few, self.task.row_tokens), seed)
        spectra += probes.describe(family, model, rows, seed, self.track)
        past = probes.describe(family, model, rows, seed, self.track, past=True) if self.task.has_past else []
        return [*past, *spectra]

    def _predicted(self) -> tuple[list[Reading], list[Orders]]:
        """Damage by gradients, and the order in which units go."""
        nothing: list[Any] = [[], [{} for _ in self.shape.layers]]
        curves, orders = nothing if self.bits_alone else self.progress.piece("sensitivity", self._sensitivity)
        known = [{name: tuple(map(tuple, rows)) for name, rows in layer.items()} for layer in orders]
        found = [Reading.from_json(reading) for reading in curves]
        if self.coded:
            read = data.places(self.source.calibration)
            bits, codes = fisher.measure(self.shape.layers, self.moments, read, self.settings.seed)
            found, known = [*found, *bits], _merged(known, codes)
        if self.packed:
            widths = self.progress.piece("weights", lambda: _plain(weights.measure(*self._weighed(), self.track)))
            found += [Reading.from_json(reading) for reading in widths]
        if self.ranked:
            found.append(weights.measure_ranks(*self._weighed()))
        return found, known

    def _weighed(self) -> tuple[families.Family, Any, list[Moments], ModelShape, int, int]:
        """What prices of weights are computed from."""
        read = data.count_tokens(self._some(packing.TOKENS), self.task.row_tokens)
        return self.family, self.model, self.moments, self.shape, read, self.settings.seed

    def _sensitivity(self) -> list[Any]:
        read, how = (
            (self.family, self.model, self._some(SENSITIVITY_TOKENS)),
            (self.settings.seed, self.track, self.task),
        )
        curves, orders = self._with_less_memory(
            lambda recompute: sensitivity.measure(*read, self.moments, self.mlp, *how, recompute, self.source.spread)
        )
        return [_plain(curves), orders]

    def _some(self, tokens: int) -> torch.Tensor:
        """Calibration rows of about so many tokens, evenly spaced."""
        rows = self.source.calibration
        count = max(1, tokens // data.mean_length(rows, self.task.row_tokens))
        return rows[:: max(1, len(rows) // count)]

    def _narrow(self) -> bool:
        """Whether spectra of cached rows are cheap to come by."""
        return max(max(layer.qk_width, layer.v_dim) for layer in self.shape.layers) <= NARROW

    def _measured(self, curves: list[Reading], few: torch.Tensor, others: torch.Tensor) -> list[Reading]:
        """Damage of some sizes as measured, one layer cut at a time."""
        settings = self.settings
        self.units = units_to_measure(settings, self.shape.grain.folds, self.coded, self.packed)
        if not (settings.swap_tokens and self.units):
            return []
        healed = [kind for kind, unit in self.units.items() if unit.allow not in ("bits", "weights")]
        strength = self.task.refit_strength
        self.healer = LayerHealer(self.family, self.model, others, strength) if self.heals and healed else None
        found = swap.measure(
            self.family, self.model, few, curves, self.units, self._sized, self._cut, settings.seed, self.track,
            healed if self.heals else (), self.task, self.progress,
        )  # fmt: skip
        return found + (self._tables(few, curves) if self.packed else [])

    def _tables(self, few: torch.Tensor, curves: list[Reading]) -> list[Reading]:
        """Damage of tables of words in few bits as measured."""
        known = {curve.kind: curve for curve in curves}
        measured = partial(
            weights.measured_table, self.family, self.model, few, self.moments[0], self.shape.tied_embeddings,
            self.settings.seed,
        )  # fmt: skip
        found = []
        for end in (end for end in ENDS if DAMAGE + end in known):
            damages = self.progress.piece(end, partial(measured, end))
            at = {int(bits): tuple(damage) for bits, damage in damages.items()}
            curve = known[DAMAGE + end]
            read = data.places(few, self.task.row_tokens)
            how = f"{self.task.divergence_name} to the source"
            found.append(swap.corrected(curve, {(curve.kind, 0): at}, read, self.settings.seed, how))
        return found

    def _sized(self, kind: str, index: int, size: int) -> LayerShape:
        """One layer of another size. Keys and values are coded together: the others then have their finest code."""
        unit, shape, order = self.units[kind], self.shape.layers[index], self.orders[index]
        found = unit.shape(shape, size, self.shape.grain.folds, order)
        if not found.coded:
            return found
        finest = {name: order[name][0] for name in ("k_bits", "v_bits")}
        keys, values = found.k_code or finest["k_bits"], found.v_code or finest["v_bits"]
        return replace(found, k_code=keys, v_code=values)

    def _cut(self, index: int, target: LayerShape) -> nn.Module:
        """One layer cut to a size, and healed where the run heals and no bits are cut: a refit hardly mends those."""
        keep = strategies.keep_for(self.shape.layers[index], target, self.orders[index])
        layer = reshape_layer(self.family, self.model, index, target, keep, self.moments[index])
        if target.packed:
            weights.round_layer(self.family, layer, target, self.moments[index])
            return layer
        return layer if self.healer is None or target.coded else self.healer.heal(index, layer)

    def _depth(self, few: torch.Tensor, others: torch.Tensor) -> tuple[Reading, tuple[int, ...]]:
        """Damage of leaving out whole layers, and their order."""
        return depth.measure(
            self.family, self.model, few, len(self.shape.layers) // 2, partial(self._without, others),
            self.settings.seed, self.track, self.task, self.progress,
        )  # fmt: skip

    def _without(self, rows: torch.Tensor, gone: tuple[int, ...]) -> nn.Module:
        """The model without some layers, healed on rows where the run heals."""
        left = tuple(GONE if index in gone else layer for index, layer in enumerate(self.shape.layers))
        shorter = self.family.build(self.model, left, self.family.state_of(self.model, clone=False))
        return refit(self.family, self.model, shorter, rows, self.task.refit_strength)[0] if self.heals else shorter


def _merged(some: Sequence[dict[str, T]], more: Sequence[dict[str, T]]) -> list[dict[str, T]]:
    """What two probes found, layer by layer."""
    return [one | other for one, other in zip(some, more, strict=True)]


def _plain(readings: Sequence[Reading]) -> list[dict[str, Any]]:
    return [reading.to_json() for reading in readings]


def _key(settings: Settings, source: Source, diagnose: bool) -> str:
    """What stands for a probing: settings, rows and version."""
    free = {"heal_options": (), "recompute": None}  # which change no reading
    asked = {**settings.to_json(), **free, "diagnose": diagnose, "headwise": __version__}
    found = hashlib.sha256(json.dumps(asked, sort_keys=True).encode())
    found.update(source.calibration.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
