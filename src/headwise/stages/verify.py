"""The verify stage: prove on the saved model, reloaded, against the source, on held-out rows, what was done."""

from __future__ import annotations

from datetime import UTC, datetime

from torch import nn

from headwise import data, families
from headwise.checks import certificate, exactness, quality, speed
from headwise.progress import Track, silently, stage
from headwise.runs.folder import RunFolder
from headwise.runs.healing import read_healing
from headwise.runs.settings import Settings
from headwise.stages.source import Compared, Source, refuse_other_plan
from headwise.types import Plan, Verdict
from headwise.types.verdict import MAX_LOSS, damage_limit


def verify(folder: RunFolder, source: Source, track: Track = silently, max_loss: str | None = None) -> Verdict:
    """Judge the model of a run folder and record the verdict; `max_loss` is another limit than the run's."""
    plan, settings = folder.read_plan(), folder.require()
    folder.require_model()
    found = source.compare(settings, folder, exactness.priced_again(plan, source.shape), track)
    max_loss = max_loss or settings.max_loss or MAX_LOSS
    verdict = Verdict(
        quality=found.quality.summary(settings.seed),
        size=found.size,
        speed=found.speed,
        damage={**found.expected, **found.quality.damage(settings.seed)},
        checks=found.checks,
        samples=found.samples,
        evaluation=source.described,
        tokens=data.count_tokens(source.evaluation, source.task.row_tokens),
        machine=found.machine,
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        max_loss=max_loss,
        limit=damage_limit(max_loss, source.task.divergence_name),
        **found.lengths._asdict(),
    )
    folder.record_verdict(verdict, found.files)
    return verdict


def compare_models(settings: Settings, folder: RunFolder, source: Source, plan: Plan, track: Track) -> Compared:
    """Load the saved model beside a source in memory: quality, sizes, speed and checks."""
    model, shape, rows = source.model, source.shape, source.evaluation
    with stage(track, "loading the new model"):
        stock, _ = families.load(str(folder.model), str(model.device))
    cut = source.family.tailor(stock)
    refuse_other_plan(folder, plan, source.family.shape_of(cut.config))
    found = quality.compare(source.family, model, cut, rows, track, source.task, settings.seed, source.truth)
    checks = exactness.count_checks(cut, plan, shape)
    with stage(track, "reloading in a fresh process"):
        checks.append(exactness.reload_check(folder.model, folder.proof_file, plan.portable))
    took, kept = speed.latencies(model, cut, plan)
    runtime = speed.runtime(model, cut)
    rehearsed = read_healing(folder.heal_file, "rehearsed")["rehearsed"]
    return Compared(
        quality=found,
        expected={"predicted": rehearsed, "sum_of_prices": plan.predicted_damage},
        size=exactness.sizes(cut, shape),
        speed={**speed.measure(model, cut, runtime=runtime), **took},
        checks=(*checks, *kept),
        samples=quality.samples(model, cut, source.tokenizer, rows) if source.task.generates else (),
        machine=speed.machine(model.device, runtime),
        lengths=_by_length(settings, source, cut, track),
    )


def _by_length(settings: Settings, source: Source, cut: nn.Module, track: Track) -> certificate.Found:
    """Quality and retrieval up to the context that is served; nothing of models that read no growing text."""
    if not source.task.has_past:
        return certificate.Found()
    rows = source.certificate_rows(settings)
    return certificate.measure(source.family, source.model, cut, rows, settings.seed, track)
