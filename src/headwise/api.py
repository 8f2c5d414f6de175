"""The Python interface: the stages as functions on a run folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from headwise import families, pipeline, preflight, processes
from headwise.errors import HeadwiseError
from headwise.heal import check as check_options
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


def probe(
    model: str,
    out: Path | str,
    track: Track = silently,
    overwrite: bool = False,
    latency: str | Sequence[str] = (),
    **settings: Any,
) -> Readings:
    """Measure a model into a new run folder.

    `latency` names what to time on this device, such as "decode,32k,b8"; it can be added to any run of the same model.
    """
    asked, folder = Settings(model=model, **settings), RunFolder(out)
    preflight.told(asked, out, _texts(latency))
    processes.begin(asked.device)
    if latency and not overwrite and folder.readings_file.exists() and folder.require().model == model:
        asked = replace(folder.require(), device=asked.device, allow=asked.allow)
    else:
        processes.by_first(lambda: folder.claim(asked, families.locate(model)[0], overwrite))
    if stream.wanted(asked, folder):
        if latency:
            raise HeadwiseError("a model that is streamed is too large to be timed; leave out --latency.")
        return stream.probe(asked, folder, stream.bench_for(asked, track), track)
    return pipeline.looked_at(asked, folder, _texts(latency), track)


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
    check_options(heal, heal_options)
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


def load(
    folder: Path | str, device: str = "cpu", optimise: bool = False, dtype: torch.dtype | str | None = None
) -> nn.Module:
    """A reshaped (or any supported) model, ready to generate; with `optimise` its `generate` takes the fast way.

    `dtype` is what it computes in, "auto" for that of the file. Without one: float32, but an optimised model on CUDA
    computes in that of the file.
    """
    if not optimise:
        return families.load(str(folder), device, dtype=dtype)[0]
    from headwise.fast.model import optimise as make_fast

    if dtype is None and torch.device(device).type == "cuda":
        dtype = "auto"
    model = families.load(str(folder), device, dtype=dtype)[0]
    family = families.family_of(model.config)
    if not family.is_tailored(model) and family.shape_of(model.config).cached:
        tensors = family.apart(family.state_of(model, clone=False), model.config)  # shared, not copied
        model = family.build(model, family.shape_of(model.config).layers, tensors)
    return cast(nn.Module, make_fast(model))
