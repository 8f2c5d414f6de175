"""A source that is held in memory, as nearly every one is."""

from __future__ import annotations

from dataclasses import dataclass

from headwise import families, processes, tasks
from headwise.memory import fits
from headwise.progress import Track, silently, stage
from headwise.runs.folder import RunFolder
from headwise.runs.settings import Settings
from headwise.stages.build import clear_healing, fit_model, save_fitted
from headwise.stages.probe import probe_in
from headwise.stages.source import Compared, Fitted, Probed, Source, pooled_heads, refuse_bound, refuse_units
from headwise.stages.texts import read_texts
from headwise.stages.verify import compare_models
from headwise.types import Plan


@dataclass(frozen=True)
class InMemory(Source):
    """A source whose model is an `nn.Module` on our modules."""

    def probe(self, settings: Settings, folder: RunFolder, track: Track = silently, diagnose: bool = True) -> Probed:
        """See `Source`."""
        return probe_in(folder, settings, self, track, diagnose)

    def fit(self, settings: Settings, probed: Probed, plan: Plan, folder: RunFolder | None, track: Track) -> Fitted:
        """See `Source`."""
        return fit_model(settings, self, probed, plan, None if folder is None else folder.healing, track)

    def save(self, settings: Settings, folder: RunFolder, fitted: Fitted) -> None:
        """See `Source`."""
        save_fitted(settings, folder, self, fitted)

    def compare(self, settings: Settings, folder: RunFolder, plan: Plan, track: Track = silently) -> Compared:
        """See `Source`."""
        return compare_models(settings, folder, self, plan, track)

    def clear(self, settings: Settings, folder: RunFolder) -> None:
        """See `Source`."""
        clear_healing(settings, folder)


def load_source(settings: Settings, track: Track = silently) -> InMemory:
    """Load the model and read the rows."""
    device = processes.begin(settings.device)
    with stage(track, "loading the model"):
        model, tokenizer = families.load(settings.model, "cpu", settings.trust_remote_code, settings.task)
    alone = settings.device == "auto" and device == "cuda" and processes.count() == 1
    large = alone and not fits(sum(parameter.numel() for parameter in model.parameters()), device)
    model = model if large else model.to(device)  # a large one stays in host memory and borrows the GPUs
    task = tasks.of(model, tokenizer, settings.model)
    refuse_bound(settings, task)
    family = families.family_of(model.config)
    refuse_units(settings, family)
    texts = read_texts(settings, family, model.config, tokenizer, task, model, track)
    return InMemory(
        family,
        family.tailor(model, pooled_heads(settings, family, model)),
        tokenizer,
        *texts,
        task=task,
        context=settings.served(family.longest(model.config)),
        seed=settings.seed,
        spread=large,
    )
