"""The probe stage: everything that allocation and reshaping need to know about a model."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise import budgets as prices
from headwise import data, families, probes, processes, strategies
from headwise.cuts import Moments, reshape_layer
from headwise.files import disk
from headwise.heal.refit import LayerHealer, refit
from headwise.latency import measured
from headwise.probes import depth, gram, sensitivity, spectrum, swap
from headwise.probes._magnitude import Orders
from headwise.progress import Track, silently
from headwise.runs.folder import RunFolder
from headwise.runs.moments import as_stored, read_moments, write_moments
from headwise.runs.settings import Settings
from headwise.runs.unfinished import Progress
from headwise.stages.allocate import sizes_to_measure
from headwise.stages.source import Workbench as Workbench
from headwise.stages.source import pooled_heads
from headwise.stages.source import workbench as workbench
from headwise.types import GONE, LayerShape, Reading, Readings

MOMENTS = "moments.safetensors"
HEALING_TOKENS = 8_192  # at least, to heal a single layer on before it is priced
SENSITIVITY_TOKENS = 32_768  # gradients cost three times a forward pass, and their prices settle early


def probe(
    settings: Settings,
    bench: Workbench,
    model: nn.Module,
    track: Track = silently,
    diagnose: bool = True,
    folder: Path | None = None,
) -> tuple[Readings, list[Moments]]:
    """Everything that allocation and reshaping need to know about a tailored model.

    `diagnose` also measures what its layers do: for the reader of the report. With a
    folder what is found is kept there piece by piece, so that a probing that was killed resumes.
    """
    start = time.perf_counter()
    family, task = bench.reader(settings.seed), bench.task
    mlp = not settings.only_kv and "mlp" in settings.allow
    progress = Progress(folder, _probing_key(settings, bench, diagnose))
    moments = _moments(settings, bench, model, mlp, track, progress)
    told = progress.piece("diagnosed", lambda: _plain(_diagnosed(settings, bench, model, moments, track, diagnose)))
    seen = [Reading.from_json(reading) for reading in told]
    curves, orders = _predicted(settings, bench, model, moments, mlp, track, progress)
    shape = family.shape_of(model.config)
    few, others = data.measured_and_others(bench.calibration, settings.swap_tokens, HEALING_TOKENS, task.row_tokens)
    others = bench.inputs(others, settings.seed)
    options = sizes_to_measure(settings, shape.grain.folds)
    if settings.swap_tokens and options:
        cut, healed = _cutting(settings, bench, model, moments, orders, others), settings.heal != "none"
        curves += swap.measure(family, model, few, curves, options, cut, settings.seed, track, healed, task, progress)
    order: tuple[int, ...] = ()
    if "depth" in settings.allow and not settings.portable:
        most, remove = len(shape.layers) // 2, _removing(settings, bench, model, others)
        found, order = depth.measure(family, model, few, most, remove, settings.seed, track, task, progress)
        curves.append(found)
    readings = Readings(
        model=settings.model,
        shape=shape,
        curves=(*curves, *seen),
        depth=order,
        orders=tuple(orders),
        tokens=data.count_tokens(bench.calibration, task.row_tokens),
        seed=settings.seed,
        context=bench.context,
        seconds=time.perf_counter() - start,
    )
    return readings, moments


def _predicted(
    settings: Settings,
    bench: Workbench,
    model: nn.Module,
    moments: list[Moments],
    mlp: bool,
    track: Track,
    progress: Progress,
) -> tuple[list[Reading], list[Orders]]:
    """Damage by gradients, and the order in which units go."""
    family = bench.reader(settings.seed)
    rows = max(1, SENSITIVITY_TOKENS // data.mean_length(bench.calibration, bench.task.row_tokens))
    some = bench.calibration[:: max(1, len(bench.calibration) // rows)]
    less = (settings.recompute, bench.spread)  # memory

    def measured() -> list[Any]:
        found = sensitivity.measure(family, model, some, moments, mlp, settings.seed, track, bench.task, *less)
        return [_plain(found[0]), found[1]]

    curves, orders = progress.piece("sensitivity", measured)
    known = [{name: tuple(map(tuple, rows)) for name, rows in layer.items()} for layer in orders]
    return [Reading.from_json(reading) for reading in curves], known


def _plain(readings: Sequence[Reading]) -> list[dict[str, Any]]:
    return [reading.to_json() for reading in readings]


def _probing_key(settings: Settings, bench: Workbench, diagnose: bool) -> str:
    """What stands for a probing: settings, rows and version."""
    asked = {**settings.to_json(), "heal_options": (), "diagnose": diagnose, "headwise": metadata.version("headwise")}
    found = hashlib.sha256(json.dumps(asked, sort_keys=True).encode())
    found.update(bench.calibration.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def _moments(
    settings: Settings, bench: Workbench, model: nn.Module, mlp: bool, track: Track, progress: Progress
) -> list[Moments]:
    """Second moments, as they are in a file: from the one that an interrupted probing left, or measured now."""
    file = progress.folder and progress.folder / MOMENTS
    if file and processes.agrees("moments" in progress.known and file.exists()):
        return read_moments(file, model.device, bench.family.shape_of(model.config).layers)
    rows = bench.inputs(bench.calibration, settings.seed)
    found = gram.collect(bench.reader(settings.seed), model, rows, mlp, track)
    if file:
        processes.by_first(lambda: write_moments(file, found))
    progress.piece("moments", lambda: True)
    return as_stored(found, model.device)


def _cutting(
    settings: Settings,
    bench: Workbench,
    model: nn.Module,
    moments: list[Moments],
    orders: list[Orders],
    rows: torch.Tensor,
) -> Callable[[int, LayerShape], nn.Module]:
    """What cuts one layer to a size, and heals it on rows where the run heals."""
    family, shapes = bench.reader(settings.seed), bench.family.shape_of(model.config).layers
    healer = LayerHealer(family, model, rows, bench.task.refit_strength) if settings.heal != "none" else None

    def cut(index: int, target: LayerShape) -> nn.Module:
        keep = strategies.keep_for(shapes[index], target, orders[index])
        layer = reshape_layer(family, model, index, target, keep, moments[index])
        return layer if healer is None else healer.heal(index, layer)

    return cut


def _removing(
    settings: Settings, bench: Workbench, model: nn.Module, rows: torch.Tensor
) -> Callable[[tuple[int, ...]], nn.Module]:
    """What builds the model without some layers, and heals it on rows where the run heals."""
    family, shapes = bench.reader(settings.seed), bench.family.shape_of(model.config).layers

    def remove(gone: tuple[int, ...]) -> nn.Module:
        left = tuple(GONE if index in gone else layer for index, layer in enumerate(shapes))
        shorter = family.build(model, left, family.state_of(model))
        if settings.heal == "none":
            return shorter
        return refit(family, model, shorter, rows, bench.task.refit_strength)[0]

    return remove


def _diagnosed(
    settings: Settings, bench: Workbench, model: nn.Module, moments: list[Moments], track: Track, wanted: bool
) -> list[Reading]:
    """Readings that are no damage: spectra, conditioning, and of decoders saturation and lags, which mean a past."""
    if not wanted:
        return []
    family, tokens, seed = bench.family, bench.calibration, settings.seed
    spectra = spectrum.measure(family, model, moments, data.places(tokens, bench.task.row_tokens), seed)
    spectra += probes.describe(family, model, tokens, seed, track)
    past = probes.describe(family, model, tokens, seed, track, past=True) if bench.task.has_past else []
    return [*past, *spectra]


def probed(
    settings: Settings, folder: RunFolder, bench: Workbench, model: nn.Module, track: Track, diagnose: bool = True
) -> tuple[Readings, list[Moments]]:
    """Probe, or read what an earlier probing of the same run left in the folder."""
    if not processes.agrees(folder.has_probed()):
        readings, _ = probe(settings, bench, model, track, diagnose, folder.probing)

        def write() -> None:
            readings.save(folder.readings_file)
            os.replace(folder.probing / MOMENTS, folder.moments_file)
            folder.record_probe()
            if "" in folder.ledger.read().inputs.values():  # of a hub, known since it was fetched
                folder.ledger.begin(settings.inputs(families.locate(settings.model)[0]))

        processes.by_first(write)
    elif folder.ledger.stage("probe") is None:  # killed between the last file and its record
        processes.by_first(folder.record_probe)
    processes.by_first(lambda: disk.remove(folder.probing))
    return Readings.read(folder.readings_file), read_moments(
        folder.moments_file, model.device, bench.family.shape_of(model.config).layers
    )


def looked_at(settings: Settings, folder: RunFolder, latency: tuple[str, ...], track: Track = silently) -> Readings:
    """The probe stage alone: readings, and tables of what is to be timed."""
    if not (latency and folder.has_probed()):
        bench = workbench(settings, track)
        family, source = bench.family, bench.source
        readings, _ = probed(settings, folder, bench, source, track)
    else:
        source, _ = families.load(settings.model, processes.begin(settings.device), settings.trust_remote_code)
        family, readings = families.family_of(source.config), Readings.read(folder.readings_file)
        source = family.tailor(source, pooled_heads(settings, family, source))
    shape = family.shape_of(source.config)
    asked = [prices.workload(text, shape) for text in latency]
    works = tuple(dict.fromkeys((*prices.workloads(settings.budgets, shape), *asked)))
    measured.tables(works, family, source, settings.allow, folder, track)
    return readings
