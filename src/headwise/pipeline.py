"""The straight line: probe, allocate, reshape, heal, verify, report. Each stage reads only the files before it."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from headwise import budgets as prices
from headwise import data, families, heal, latencies, processes, rounds, strategies
from headwise.checks import exactness, quality, speed
from headwise.cuts import Moments, blind_moments, reshape, reshape_layer, save
from headwise.errors import BudgetError, PlanError
from headwise.heal.refit import LayerHealer, refit
from headwise.keeping import disk
from headwise.keeping.progress import Progress
from headwise.moments import as_stored, read_moments, write_moments
from headwise.planning import sizes_to_measure
from headwise.probes import conditioning, depth, gram, lags, saturation, sensitivity, spectrum, swap
from headwise.probes._magnitude import Orders
from headwise.probes._watch import Track, silently
from headwise.runfolder import RunFolder, Settings, budgets_for, write_report
from headwise.stream import line as stream
from headwise.types import GONE, Budget, Dossier, LayerShape, Plan, Reading, Readings, Verdict
from headwise.workbench import Workbench as Workbench
from headwise.workbench import pooled_heads
from headwise.workbench import workbench as workbench

MOMENTS = "moments.safetensors"
HEALING_TOKENS = 8_192  # at least, to heal a single layer on before it is priced
SENSITIVITY_TOKENS = 32_768  # gradients cost three times a forward pass, and their prices settle early


def run(settings: Settings, out: Path | str, track: Track = silently, overwrite: bool = False) -> Dossier:
    """All six stages; a run that was killed resumes where it stopped."""
    folder = RunFolder(out)
    if not settings.budgets:
        raise BudgetError("no budget was given; add one, such as --budget kv=75%.")
    with claimed(settings, folder, "run", overwrite):
        if stream.wanted(settings, folder):
            stream.run(settings, folder, track)
            return write_report(folder)
        bench = workbench(settings, track)
        if processes.agrees(folder.has_built(settings)):
            processes.by_first(lambda: _clear_healing(settings, folder))
        else:
            build(settings, folder, bench, track)
        if not processes.agrees(folder.ledger.current("verdict")):
            processes.by_first(lambda: verify(folder, bench, track))
        return processes.by_first(lambda: write_report(folder)) or folder.dossier()


def validated(settings: Settings) -> str:
    """Refuse what cannot work before a folder is touched; returns where the model is."""
    return families.locate(settings.model)[0]


@contextmanager
def claimed(settings: Settings, folder: RunFolder, command: str, overwrite: bool) -> Iterator[None]:
    """Validate a command, lock its folder and take it for a run: nothing is moved before the first two succeed."""
    source = validated(settings)
    folder.refuse(settings, source)
    processes.begin(settings.device)
    with folder.held(command, new=True):
        processes.by_first(lambda: folder.claim(settings, source, overwrite))
        with folder.replacing():
            yield


@contextmanager
def resumed(folder: RunFolder, command: str) -> Iterator[Settings]:
    """Lock the folder of an existing run, with the inputs that it began with; gives its settings."""
    with folder.held(command):
        settings = folder.require()
        processes.begin(settings.device)
        processes.wait()
        folder.same_inputs(validated(settings))
        yield settings


def probe(
    settings: Settings,
    bench: Workbench,
    model: nn.Module,
    track: Track = silently,
    diagnose: bool = True,
    folder: Path | None = None,
) -> tuple[Readings, list[Moments]]:
    """Everything that allocation and reshaping need to know about a tailored model.

    `diagnose` also measures what its layers do: for the reader of the report, and for the strategy `bound`. With a
    folder what is found is kept there piece by piece, so that a probing that was killed resumes.
    """
    start = time.perf_counter()
    family, task, mlp = bench.family, bench.task, not settings.only_kv and "mlp" in settings.allow
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
        shape=shape.to_json(),
        curves=(*curves, *seen),
        depth=order,
        orders=tuple(orders),
        tokens=data.count_tokens(bench.calibration, task.row_tokens),
        seed=settings.seed,
        seconds=time.perf_counter() - start,
    )
    return readings, moments


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
        return read_moments(file, model.device)
    found = gram.collect(bench.family, model, bench.inputs(bench.calibration, settings.seed), mlp, track)
    if file:
        processes.by_first(lambda: write_moments(file, found))
    progress.piece("moments", lambda: True)
    return as_stored(found, model.device)


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
    rows = max(1, SENSITIVITY_TOKENS // data.mean_length(bench.calibration, bench.task.row_tokens))
    some = bench.calibration[:: max(1, len(bench.calibration) // rows)]
    less = (settings.recompute, bench.spread)  # memory

    def measured() -> list[Any]:
        found = sensitivity.measure(bench.family, model, some, moments, mlp, settings.seed, track, bench.task, *less)
        return [_plain(found[0]), found[1]]

    curves, orders = progress.piece("sensitivity", measured)
    known = [{name: tuple(map(tuple, rows)) for name, rows in layer.items()} for layer in orders]
    return [Reading.from_json(reading) for reading in curves], known


def _cutting(
    settings: Settings,
    bench: Workbench,
    model: nn.Module,
    moments: list[Moments],
    orders: list[Orders],
    rows: torch.Tensor,
) -> Callable[[int, LayerShape], nn.Module]:
    """What cuts one layer to a size, and heals it on rows where the run heals."""
    family, shapes = bench.family, bench.family.shape_of(model.config).layers
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
    family, shapes = bench.family, bench.family.shape_of(model.config).layers

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
    spectra += conditioning.measure(family, model, tokens, seed, track)
    if not bench.task.has_past:
        return spectra
    past = [reading for probe in (saturation, lags) for reading in probe.measure(family, model, tokens, seed, track)]
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
            folder.ledger.record("probe", ("readings.json", "moments.safetensors"))
            if "" in folder.ledger.read().inputs.values():  # of a hub, known since it was fetched
                folder.ledger.begin(settings.inputs(validated(settings)))
            disk.remove(folder.probing)

        processes.by_first(write)
    return Readings.read(folder.readings_file), read_moments(folder.moments_file, model.device)


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
    latencies.tables(works, family, source, settings.allow, folder, track)
    return readings


class Fitted(NamedTuple):
    """A model that meets its budgets, the plan from the source to it, and what each healing did."""

    model: nn.Module
    plan: Plan
    healings: list[dict[str, Any]]
    rehearsed: float  # damage to expect, from text of the calibration's kind that nothing was fitted to


def fit(
    settings: Settings,
    bench: Workbench,
    look: Callable[[int, nn.Module], tuple[Readings, list[Moments]]],
    plan: Plan | None = None,
    track: Track = silently,
    folder: RunFolder | None = None,
) -> Fitted:
    """Allocate, reshape and heal, in as many rounds as asked, or carry out one given plan.

    `look(number, model)` gives the readings and moments of the model that round `number` starts from. With a folder
    healings that take long keep their work there.
    """
    shape = bench.family.shape_of(bench.source.config)
    budgets: tuple[Budget, ...] = ()
    if plan is None:
        works = prices.workloads(settings.budgets, shape)
        times = latencies.tables(works, bench.family, bench.source, settings.allow, folder, track)
        budgets = budgets_for(settings, shape, times)
    model, total, healings = bench.source, plan, []
    for number in range(1, (settings.rounds if plan is None else 1) + 1):
        readings, moments = look(number, model)
        step = plan or _allocated(settings, bench, readings, budgets, number, folder)
        if plan is None and processes.count() > 1:
            step = Plan.from_json(json.loads(processes.agreed_text(json.dumps(step.to_json()))))
        if strategies.blind(step.strategy):
            moments = blind_moments(bench.family, model)
        model = reshape(bench.family, model, step, moments)
        if settings.heal != "none":
            work, before = folder and folder.round(number).healing, _rehearsed(settings, bench, model)
            model, healing = heal.healed(settings.heal, bench.job(settings, model, track, work))
            healings.append({**healing, "rehearsed_before": before})
        total = step if total is None else total if total is step else rounds.compose(total, step)
    if total is None:
        raise PlanError("there is nothing to build.")
    return Fitted(model, total, healings, _rehearsed(settings, bench, model))


def _rehearsed(settings: Settings, bench: Workbench, model: nn.Module) -> float:
    """Damage to expect of a model, from text of the calibration's kind that nothing was fitted to."""
    found = quality.compare(bench.family, bench.source, model, bench.rehearsal, task=bench.task, seed=settings.seed)
    return found.expected_damage()


def _allocated(
    settings: Settings,
    bench: Workbench,
    readings: Readings,
    budgets: tuple[Budget, ...],
    number: int,
    folder: RunFolder | None,
) -> Plan:
    """The plan of a round; the last one is looked at on the device where time is limited."""
    shape = bench.family.shape_of(bench.source.config)

    def plan_for(limits: tuple[Budget, ...]) -> Plan:
        return strategies.allocate(
            readings, limits, settings.strategy, settings.allow, settings.portable, settings.seed
        )

    limits = rounds.budgets_of_round(budgets, shape, number, settings.rounds)
    if number < settings.rounds or processes.index() > 0:
        return plan_for(limits)
    clock_for = latencies.clock_of(bench.family, bench.source)
    return latencies.confirmed(plan_for, limits, shape, clock_for, latencies.keep_in(folder))


def build(
    settings: Settings, folder: RunFolder, bench: Workbench, track: Track = silently, plan: Plan | None = None
) -> None:
    """Probe, allocate, reshape, heal and save; with a given plan, carry out that one."""

    def look(number: int, model: nn.Module) -> tuple[Readings, list[Moments]]:
        diagnose = number == 1 or settings.strategy == "bound"  # which plans by what the layers do
        return probed(settings, folder.round(number), bench, model, track, diagnose)

    fitted = fit(settings, bench, look, plan, track, folder)
    processes.by_first(lambda: _write(settings, folder, bench, fitted, plan is None))


def _write(settings: Settings, folder: RunFolder, bench: Workbench, fitted: Fitted, planned: bool) -> None:
    """Save the model with what was done to it; what was said of an older one goes."""
    if planned:
        folder.write_plan(fitted.plan, settings)
    last = fitted.healings[-1] if fitted.healings else {"method": "none"}
    folder.write_json(folder.heal_file, {**last, "rehearsed": fitted.rehearsed, "rounds": fitted.healings[:-1]})
    with families.quietly():
        rounded = save(bench.family, fitted.model, bench.tokenizer, folder.model, fitted.plan.portable)
    if bench.task.name == "embedding":
        families.accompany(settings.model, folder.model)
    disk.write_file(folder.proof_file, lambda new: exactness.write_proof(rounded, bench.evaluation, new))
    folder.record_model(settings, ("model", "heal.json", "proof.safetensors"))
    _clear_healing(settings, folder)


def _clear_healing(settings: Settings, folder: RunFolder) -> None:
    """The model is recorded: what a resumed healing would have needed goes."""
    for number in range(1, settings.rounds + 1):
        disk.remove(folder.round(number).healing)


def verify(folder: RunFolder, bench: Workbench, track: Track = silently) -> Verdict:
    """Prove what was done: on the saved model, reloaded, against the source, on held-out text."""
    plan, settings = folder.read_plan(), folder.require()
    folder.require_model()
    stock, _ = families.load(str(folder.model), str(bench.source.device))
    cut = bench.family.tailor(stock)
    planned = tuple(layer for layer in plan.target.layers if not layer.gone)
    if not plan.portable and bench.family.shape_of(cut.config).layers != planned:
        raise PlanError(
            f"{folder.model} does not follow {folder.plan_file.name}; run headwise reshape {folder.path} again."
        )
    rows, seed = bench.evaluation, settings.seed
    found = quality.compare(bench.family, bench.source, cut, rows, track, bench.task, seed, bench.truth)
    checks = exactness.count_checks(cut, plan)
    checks.append(exactness.reload_check(folder.model, folder.proof_file, plan.portable))
    took, kept = speed.latencies(bench.source, cut, plan)
    runtime = speed.runtime(bench.source, cut)
    verdict = Verdict(
        quality=found.summary(settings.seed),
        size=exactness.sizes(cut, plan.source),
        speed={**speed.measure(bench.source, cut, runtime=runtime), **took},
        damage={
            "predicted": json.loads(folder.heal_file.read_text())["rehearsed"],
            "sum_of_prices": plan.predicted_damage,
            **found.damage(settings.seed),
        },
        checks=(*checks, *kept),
        samples=quality.samples(bench.source, cut, bench.tokenizer, bench.evaluation) if bench.task.generates else (),
        evaluation=bench.described,
        tokens=data.count_tokens(bench.evaluation, bench.task.row_tokens),
        machine=speed.machine(bench.source.device, runtime),
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
    )
    folder.record_verdict(verdict)
    return verdict
