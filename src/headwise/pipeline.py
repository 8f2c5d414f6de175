"""The straight line: probe, allocate, reshape, heal, verify, report. Each stage reads only the files before it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from torch import nn

from headwise import budgets as prices
from headwise import data, families, heal, preflight, processes, strategies
from headwise.checks import certificate, exactness, quality, speed
from headwise.cuts import Moments, blind_moments, reshape, save
from headwise.errors import BudgetError, PlanError
from headwise.files import disk
from headwise.latency import measured
from headwise.progress import Track, silently, stage
from headwise.runs import rounds
from headwise.runs.dossier import Dossier
from headwise.runs.folder import RunFolder, budgets_for
from headwise.runs.healing import rehearsed_damage
from headwise.runs.settings import Settings
from headwise.stages.probe import looked_at as looked_at
from headwise.stages.probe import probe as probe
from headwise.stages.probe import probed as probed
from headwise.stages.report import write_report
from headwise.stages.source import Workbench as Workbench
from headwise.stages.source import workbench as workbench
from headwise.stream import line as stream
from headwise.types import Budget, Healing, Plan, Readings, Verdict
from headwise.types.verdict import MAX_LOSS, damage_limit


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
        with stage(track, "writing the report"):
            return processes.by_first(lambda: write_report(folder)) or folder.dossier()


def validated(settings: Settings) -> str:
    """Refuse what cannot work before a folder is touched; returns where the model is."""
    return families.locate(settings.model)[0]


@contextmanager
def claimed(
    settings: Settings, folder: RunFolder, command: str, overwrite: bool, latency: tuple[str, ...] = ()
) -> Iterator[None]:
    """Validate a command, lock its folder and take it for a run: nothing is moved before the first two succeed."""
    preflight.told(settings, folder.path, latency)
    source = validated(settings)
    folder.refuse(settings, source)
    processes.begin(settings.device)
    with folder.held(command, new=True):
        processes.by_first(lambda: folder.claim(settings, source, overwrite))
        with folder.replacing():
            yield


@contextmanager
def resumed(folder: RunFolder, command: str, trust_remote_code: bool = False) -> Iterator[Settings]:
    """Lock the folder of an existing run, with the inputs that it began with; gives its settings.

    Trust belongs to the command: what run.json says of it counts for nothing.
    """
    with folder.held(command):
        settings = replace(folder.require(), trust_remote_code=trust_remote_code)
        processes.begin(settings.device)
        processes.wait()
        folder.same_inputs(validated(settings))
        yield settings


class Fitted(NamedTuple):
    """A model that meets its budgets, the plan from the source to it, and what each healing did."""

    model: nn.Module
    plan: Plan
    healings: list[Healing]
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
        times = measured.tables(works, bench.family, bench.source, settings.allow, folder, track)
        budgets = budgets_for(settings, shape, times)
    model, total, healings = bench.source, plan, []
    for number in range(1, (settings.rounds if plan is None else 1) + 1):
        readings, moments = look(number, model)
        with stage(track, "planning"):
            step = plan or _allocated(settings, bench, readings, budgets, number, folder)
        if plan is None and processes.count() > 1:
            step = Plan.from_json(json.loads(processes.agreed_text(json.dumps(step.to_json()))))
        if strategies.blind(step.strategy):
            moments = blind_moments(bench.family, model)
        model = reshape(bench.family, model, step, moments)
        if settings.heal != "none":
            work = folder and folder.round(number).healing
            job = bench.job(settings, model, track, work)
            model, healing = heal.healed(settings.heal, job, lambda found: _rehearsed(settings, bench, found))
            healings.append(healing)
        total = step if total is None else total if total is step else rounds.compose(total, step)
    if total is None:
        raise PlanError("there is nothing to build.")
    last = healings[-1].rehearsed if healings else None
    if last is None:
        last = _rehearsed(settings, bench, model).expected_damage()
    return Fitted(model, total, healings, last)


def _rehearsed(settings: Settings, bench: Workbench, model: nn.Module) -> quality.Comparison:
    """How a model does on text of the calibration's kind that nothing was fitted to."""
    family, seed = bench.reader(settings.seed), settings.seed
    return quality.compare(family, bench.source, model, bench.rehearsal, task=bench.task, seed=seed)


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
    clock_for = measured.clock_of(bench.family, bench.source)
    return measured.confirmed(plan_for, limits, shape, clock_for, measured.keep_in(folder))


def build(
    settings: Settings, folder: RunFolder, bench: Workbench, track: Track = silently, plan: Plan | None = None
) -> None:
    """Probe, allocate, reshape, heal and save; with a given plan, carry out that one."""

    def look(number: int, model: nn.Module) -> tuple[Readings, list[Moments]]:
        return probed(settings, folder.round(number), bench, model, track, diagnose=number == 1)

    fitted = fit(settings, bench, look, plan, track, folder)
    with stage(track, "saving the model"):
        processes.by_first(lambda: _write(settings, folder, bench, fitted, plan is None))


def _write(settings: Settings, folder: RunFolder, bench: Workbench, fitted: Fitted, planned: bool) -> None:
    """Save the model with what was done to it; what was said of an older one goes."""
    if planned:
        folder.write_plan(fitted.plan, settings)
    last = fitted.healings[-1] if fitted.healings else Healing("none")
    found = replace(last, rehearsed=fitted.rehearsed, rounds=tuple(fitted.healings[:-1]))
    folder.write_json(folder.heal_file, found.to_json())
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


def verify(folder: RunFolder, bench: Workbench, track: Track = silently, max_loss: str | None = None) -> Verdict:
    """Prove what was done: on the saved model, reloaded, against the source, on held-out text."""
    plan, settings = folder.read_plan(), folder.require()
    folder.require_model()
    with stage(track, "loading the new model"):
        stock, _ = families.load(str(folder.model), str(bench.source.device))
    cut = bench.family.tailor(stock)
    planned = tuple(layer for layer in plan.target.layers if not layer.gone)
    if not plan.portable and bench.family.shape_of(cut.config).layers != planned:
        raise PlanError(
            f"{folder.model} does not follow {folder.plan_file.name}; run headwise reshape {folder.path} again."
        )
    rows, seed = bench.evaluation, settings.seed
    source = bench.family.shape_of(bench.source.config)
    plan = exactness.priced_again(plan, source)
    found = quality.compare(bench.family, bench.source, cut, rows, track, bench.task, seed, bench.truth)
    checks = exactness.count_checks(cut, plan, source)
    with stage(track, "reloading in a fresh process"):
        checks.append(exactness.reload_check(folder.model, folder.proof_file, plan.portable))
    took, kept = speed.latencies(bench.source, cut, plan)
    runtime = speed.runtime(bench.source, cut)
    max_loss = max_loss or settings.max_loss or MAX_LOSS
    verdict = Verdict.of(
        quality=found.summary(settings.seed),
        size=exactness.sizes(cut, source),
        speed={**speed.measure(bench.source, cut, runtime=runtime), **took},
        damage={
            "predicted": rehearsed_damage(folder.heal_file),
            "sum_of_prices": plan.predicted_damage,
            **found.damage(settings.seed),
        },
        checks=(*checks, *kept),
        samples=quality.samples(bench.source, cut, bench.tokenizer, bench.evaluation) if bench.task.generates else (),
        evaluation=bench.described,
        tokens=data.count_tokens(bench.evaluation, bench.task.row_tokens),
        machine=speed.machine(bench.source.device, runtime),
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        max_loss=max_loss,
        limit=damage_limit(max_loss, bench.task.divergence_name),
        **_by_length(settings, bench, cut, track)._asdict(),
    )
    folder.record_verdict(verdict)
    return verdict


def _by_length(settings: Settings, bench: Workbench, cut: nn.Module, track: Track) -> certificate.Found:
    """Quality and retrieval up to the context that will be served; nothing of models that read no growing text."""
    if not bench.task.has_past:
        return certificate.Found()
    config = bench.source.config
    length = bench.family.row_length(settings.length, bench.context)
    sizes = length, bench.context, settings.eval_tokens
    asked = certificate.rows_for(config, bench.tokenizer, bench.long, *sizes, settings.seed)
    return certificate.measure(bench.family, bench.source, cut, asked, settings.seed, track)
