"""The verify stage: prove on the saved model, reloaded, against the source, on held-out rows, what was done."""

from datetime import UTC, datetime

from headwise import data
from headwise.checks import exactness
from headwise.progress import Track, silently
from headwise.runs.folder import RunFolder
from headwise.stages.source import Source
from headwise.types import Verdict
from headwise.types.verdict import MAX_LOSS, damage_limit


def verify(folder: RunFolder, source: Source, track: Track = silently, max_loss: str | None = None) -> Verdict:
    """Judge the model of a run folder and record the verdict; `max_loss` is another limit than the run's."""
    plan, settings = folder.read_plan(), folder.require()
    folder.require_model()
    found = source.compare(settings, folder, exactness.priced_again(plan, source.shape), track)
    max_loss = max_loss or settings.max_loss or MAX_LOSS
    verdict = Verdict.of(
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
