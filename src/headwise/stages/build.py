"""Reshape, heal and save a model in memory."""

from __future__ import annotations

from pathlib import Path

from headwise import families, heal, strategies
from headwise.checks import exactness
from headwise.cuts import blind_moments, reshape
from headwise.cuts import save as save_model
from headwise.files import disk
from headwise.progress import Track, silently
from headwise.runs.folder import RunFolder
from headwise.runs.settings import Settings
from headwise.stages.source import Fitted, Probed, Source
from headwise.types import Plan


def fit_model(
    settings: Settings, source: Source, probed: Probed, plan: Plan, work: Path | None, track: Track = silently
) -> Fitted:
    """Reshape the current model by a plan and heal it; `work` is the folder that keeps what takes long."""
    blind = strategies.blind(plan.strategy)
    moments = blind_moments(source.family, source.current) if blind else probed.moments
    model = reshape(source.family, source.current, plan, moments)
    if settings.heal == "none":
        return Fitted(model, plan, [], source.rehearse(model).expected_damage())
    job = source.job(settings, model, track, work)
    model, healing = heal.healed(settings.heal, job, source.rehearse)
    return Fitted(model, plan, [healing], healing["rehearsed"])


def save_fitted(settings: Settings, folder: RunFolder, source: Source, fitted: Fitted) -> None:
    """Write the model with what was done to it, and record it."""
    last = fitted.healings[-1] if fitted.healings else {"method": "none"}
    folder.write_json(folder.heal_file, {**last, "rehearsed": fitted.rehearsed, "rounds": fitted.healings[:-1]})
    with families.quietly():
        rounded = save_model(source.family, fitted.model, source.tokenizer, folder.model, fitted.plan.portable)
    if source.task.name == "embedding":
        families.accompany(settings.model, folder.model)
    disk.write_file(folder.proof_file, lambda new: exactness.write_proof(rounded, source.evaluation, new))
    folder.record_model(settings, ("model", "heal.json", "proof.safetensors"))
    clear_healing(settings, folder)


def clear_healing(settings: Settings, folder: RunFolder) -> None:
    """Delete what an unfinished healing would need."""
    for number in range(1, settings.rounds + 1):
        disk.remove(folder.round(number).healing)
