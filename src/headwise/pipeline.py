"""The line of a run: probe, allocate, reshape, heal, verify, report. Each stage reads only the files before it."""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch.nn.attention import SDPBackend, sdpa_kernel

from headwise import budgets as prices
from headwise import families, preflight, processes
from headwise.errors import BudgetError, HeadwiseError
from headwise.latency import measured
from headwise.preflight import memory_needed as memory_needed
from headwise.progress import Track, silently, stage
from headwise.runs.dossier import Dossier
from headwise.runs.folder import RunFolder
from headwise.runs.settings import Settings
from headwise.stages import rounds, sharing
from headwise.stages.allocate import plan_for
from headwise.stages.in_memory import InMemory as InMemory
from headwise.stages.in_memory import load_source as load_source
from headwise.stages.probe import probe as probe
from headwise.stages.probe import probe_in as probe_in
from headwise.stages.report import write_report
from headwise.stages.source import Fitted, Probed, Source, refuse_rounds
from headwise.stages.verify import verify as verify
from headwise.stream.source import is_streamed, load_streaming
from headwise.types import Budget, Plan, Readings


def run(settings: Settings, out: Path | str, track: Track = silently, overwrite: bool = False) -> Dossier:
    """All six stages; a run that was killed resumes at the first that is not finished."""
    folder = RunFolder(out)
    if not settings.budgets:
        raise BudgetError("no budget was given; add one, such as --budget kv=75%.")
    with claimed(settings, folder, "run", overwrite):
        source = source_of(settings, folder, track)
        if processes.agrees(folder.finished("model", settings)):
            processes.by_first(partial(source.clear, settings, folder))
        else:
            source = sharing.chosen(settings, source, folder, _timed, track)
            build(settings, folder, source, track)
        if not processes.agrees(folder.finished("verdict")):
            processes.by_first(partial(verify, folder, source, track))
        with stage(track, "writing the report"):
            return processes.by_first(partial(write_report, folder)) or folder.dossier()


def build(settings: Settings, folder: RunFolder, source: Source, track: Track = silently) -> None:
    """Probe, allocate, reshape, heal and save."""
    source.expect_judgement(folder)
    fitted = fit(settings, source, folder, track=track)
    with stage(track, "saving the model"):
        processes.by_first(partial(folder.write_plan, fitted.plan, settings))
        processes.by_first(partial(source.save, settings, folder, fitted))


def _timed(settings: Settings, source: Source, readings: Readings) -> Plan:
    """A plan that was timed."""
    return allocate(settings, source, readings, budgets_of(settings, source), timed=True)


def carry_out(settings: Settings, folder: RunFolder, source: Source, plan: Plan, track: Track = silently) -> None:
    """Reshape, heal and save by a given plan; the model is probed first where it was not."""
    fitted = source.fit(settings, source.probe(settings, folder, track), plan, folder, track)
    with stage(track, "saving the model"):
        processes.by_first(partial(source.save, settings, folder, fitted))


def fit(
    settings: Settings,
    source: Source,
    folder: RunFolder | None = None,
    first: Probed | None = None,
    track: Track = silently,
) -> Fitted:
    """Probe, allocate, reshape and heal, in as many rounds as the settings say.

    Results of the probing and of long healings are kept in the folder; without one, `first` is what a probing of the
    source found.
    """
    refuse_rounds(settings, source.shape)
    limits = budgets_of(settings, source, folder, track)
    if settings.rounds == 1:
        return fit_once(settings, source, limits, folder, first, track)
    parts = [rounds.budgets_of_round(limits, source.shape, n + 1, settings.rounds) for n in range(settings.rounds)]
    fitted = fit_once(settings, source, parts[0], folder, first, track)
    for number, part in enumerate(parts[1:], 2):
        shrunk = replace(source, shrunk=fitted.model)
        fitted = rounds.joined(fitted, fit_once(settings, shrunk, part, folder, None, track, number))
    return fitted


def fit_once(
    settings: Settings,
    source: Source,
    limits: tuple[Budget, ...],
    folder: RunFolder | None,
    probed: Probed | None,
    track: Track,
    number: int = 1,
) -> Fitted:
    """Probe, allocate, reshape and heal the source's current model once, as the round of this number."""
    here = folder and folder.round(number)
    if probed is None:
        probed = source.probe(settings, here, track, number == 1) if here else probe(settings, source, track, False)
    timed = number == settings.rounds and any(limit.workload for limit in limits)
    with stage(track, "planning"):
        plan = allocate(settings, source, probed.readings, limits, timed, folder)
    return source.fit(settings, probed, plan, here, track)


def allocate(
    settings: Settings,
    source: Source,
    readings: Readings,
    limits: tuple[Budget, ...],
    timed: bool = False,
    folder: RunFolder | None = None,
) -> Plan:
    """The plan for some limits, the same in all processes.

    `timed`: it is confirmed on the device before it is built, and the tables in the folder are corrected.
    """
    if timed and processes.index() == 0:
        clock = measured.clock_of(source.family, source.model)
        keep = measured.keep_in(folder)
        plan = measured.confirmed(partial(plan_for, settings, readings), limits, source.shape, clock, keep)
    else:
        plan = plan_for(settings, readings, limits)
    if processes.count() == 1:
        return plan
    return Plan.from_json(json.loads(processes.agreed_text(json.dumps(plan.to_json()))))


def budgets_of(
    settings: Settings, source: Source, folder: RunFolder | None = None, track: Track = silently
) -> tuple[Budget, ...]:
    """The budgets, read against the source's sizes; where they limit time, the source is timed first."""
    works = prices.workloads(settings.budgets, source.shape)
    if not works:
        return prices.parse_all(settings.budgets, source.shape)
    tables = measured.tables(works, source.family, source.model, settings.allow, folder, track)
    return prices.parse_all(settings.budgets, source.shape, tables)


def measure(settings: Settings, folder: RunFolder, latency: tuple[str, ...], track: Track = silently) -> Readings:
    """The probe stage alone: readings, and tables of what is to be timed."""
    if latency and folder.finished("probe"):
        if is_streamed(settings, folder):
            raise HeadwiseError("a model that is streamed is too large to be timed; leave out --latency.")
        model, _ = families.load(settings.model, processes.begin(settings.device), settings.trust_remote_code)
        family, readings = families.family_of(model.config), Readings.read(folder.readings_file)
        model = family.tailor(model, max(layer.pooled for layer in readings.source.layers))
    else:
        source = source_of(settings, folder, track)
        family, model, readings = source.family, source.model, source.probe(settings, folder, track).readings
    shape = family.shape_of(model.config)
    works = (*prices.workloads(settings.budgets, shape), *(prices.workload(text, shape) for text in latency))
    if works:
        measured.tables(tuple(dict.fromkeys(works)), family, model, settings.allow, folder, track)
    return readings


def source_of(settings: Settings, folder: RunFolder, track: Track = silently) -> Source:
    """The model that is cut, in memory or streamed, with its rows."""
    if is_streamed(settings, folder):
        return load_streaming(settings, track)
    return sharing.settled(settings, load_source(settings, track), folder)


@contextmanager
def claimed(
    settings: Settings, folder: RunFolder, command: str, overwrite: bool, latency: tuple[str, ...] = ()
) -> Iterator[None]:
    """Check a command, lock its folder and take it for a run: nothing is moved before the first two succeed."""
    preflight.note_all(settings, folder.path, latency)
    where = families.locate(settings.model)[0]
    folder.refuse(settings, where)
    device = processes.begin(settings.device)
    with folder.held(command, new=True), _attention(device):
        processes.by_first(partial(folder.claim, settings, where, overwrite))
        with folder.replacing():
            yield


@contextmanager
def resumed(folder: RunFolder, command: str, trust_remote_code: bool = False) -> Iterator[Settings]:
    """Lock the folder of an existing run, whose inputs must be those that it began with; gives its settings.

    Trust belongs to the command: the value in run.json is never believed.
    """
    with folder.held(command):
        settings = replace(folder.require(), trust_remote_code=trust_remote_code)
        device = processes.begin(settings.device)
        processes.wait()
        folder.same_inputs(families.locate(settings.model)[0])
        with _attention(device):
            yield settings


def _attention(device: str) -> AbstractContextManager[None]:
    """No attention by cuDNN on CUDA: it plans for every new length, and a text that grows has one at every step."""
    if not device.startswith("cuda"):
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
