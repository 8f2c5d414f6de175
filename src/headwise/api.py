"""The Python interface: the stages as functions on a run folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from headwise import families, pipeline, processes
from headwise.planning import allocate_in
from headwise.probes._watch import Track, silently
from headwise.runfolder import RunFolder, Settings
from headwise.stream import line as stream
from headwise.types import DEFAULT_UNITS, Dossier, Plan, Readings, Verdict


def _texts(budget: str | Sequence[str]) -> tuple[str, ...]:
    return (budget,) if isinstance(budget, str) else tuple(budget)


def run(
    model: str,
    budget: str | Sequence[str],
    out: Path | str,
    overwrite: bool = False,
    track: Track = silently,
    **settings: Any,
) -> Dossier:
    """Fit a model to a budget: all six stages. `settings` are the fields of `headwise.runfolder.Settings`."""
    return pipeline.run(Settings(model=model, budgets=_texts(budget), **settings), out, track, overwrite)


def probe(model: str, out: Path | str, track: Track = silently, overwrite: bool = False, **settings: Any) -> Readings:
    """Measure a model into a new run folder."""
    asked, folder = Settings(model=model, **settings), RunFolder(out)
    processes.begin(asked.device)
    processes.by_first(lambda: folder.claim(asked, families.locate(model)[0], overwrite))
    if stream.wanted(asked, folder):
        return stream.probe(asked, folder, stream.bench_for(asked, track), track)
    bench = pipeline.workbench(asked, track)
    return pipeline.probed(asked, folder, bench, bench.source, track)[0]


def allocate(
    out: Path | str,
    budget: str | Sequence[str],
    strategy: str = "exact",
    allow: tuple[str, ...] = DEFAULT_UNITS,
    portable: bool = False,
    seed: int = 0,
) -> Plan:
    """Decide every size for a budget, from what a run folder's probing found, and write plan.json. Needs no model."""
    return allocate_in(out, _texts(budget), strategy, allow, portable, seed)


def reshape(
    out: Path | str, heal: str = "none", track: Track = silently, heal_options: Sequence[str] = ()
) -> nn.Module | None:
    """Carry out plan.json: build, save and return the model, healed if asked; a streamed one is only saved."""
    folder = RunFolder(out)
    if stream.wanted(folder.require(), folder):
        stream.reshape(folder, heal, tuple(heal_options), track)
        return None
    settings = replace(folder.require(), heal=heal, heal_options=tuple(heal_options))
    plan = Plan.read(folder.plan_file)
    bench = pipeline.workbench(settings, track)
    pipeline.build(settings, folder, bench, track, plan)
    return load(folder.model)


def verify(out: Path | str, track: Track = silently) -> Verdict:
    """Prove what was done, on the saved model of a run folder."""
    folder = RunFolder(out)
    if stream.wanted(folder.require(), folder):
        return stream.verify(folder, stream.bench_for(folder.require(), track), track)
    bench = pipeline.workbench(folder.require(), track)
    return processes.by_first(lambda: pipeline.verify(folder, bench, track)) or Verdict.read(folder.verdict_file)


def load(folder: Path | str, device: str = "cpu") -> nn.Module:
    """A reshaped (or any supported) model, ready to generate."""
    return families.load(str(folder), device)[0]
