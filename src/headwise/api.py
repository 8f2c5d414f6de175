"""The Python interface: the stages as functions on a run folder.

They show their progress as the command line does; `progress=False` is silent. With `track`, a function that wraps every
loop, you show it yourself.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack, cast

import torch
from torch import nn

from headwise import families, pipeline, processes
from headwise.engines.process import require
from headwise.exports import export as export
from headwise.fast import native_build
from headwise.heal import check as check_options
from headwise.progress import Track
from headwise.progress.shown import following
from headwise.runs.dossier import Dossier
from headwise.runs.folder import RunFolder
from headwise.runs.keywords import RunKeywords, with_keywords
from headwise.runs.settings import Settings
from headwise.stages.allocate import allocate_in
from headwise.stages.serving import refuse_coded
from headwise.stages.serving import serve as serve_in
from headwise.stream.source import Streaming
from headwise.types import DEFAULT_UNITS, Plan, Readings, Verdict, under_time
from headwise.types.served import Served
from headwise.types.verdict import MAX_LOSS, damage_limit

BUDGETS = ("budgets",)  # given as `budget`, one text or several


def _texts(budget: str | Sequence[str]) -> tuple[str, ...]:
    return (budget,) if isinstance(budget, str) else tuple(budget)


@with_keywords(Settings, BUDGETS)
def run(
    model: str,
    budget: str | Sequence[str],
    out: Path | str,
    overwrite: bool = False,
    track: Track | None = None,
    progress: bool = True,
    **settings: Unpack[RunKeywords],
) -> Dossier:
    """Fit a model to a budget: all six stages. `settings` are the fields of `headwise.runs.settings.Settings`."""
    asked = Settings(model=model, budgets=_texts(budget), **settings)
    with following(track, progress) as shown:
        return pipeline.run(asked, out, shown, overwrite)


@with_keywords(Settings, BUDGETS)
def memory_needed(model: str, budget: str | Sequence[str], **settings: Unpack[RunKeywords]) -> list[dict[str, Any]]:
    """About how many bytes of memory every stage of a run will take, and in which way; no weights are loaded."""
    asked = Settings(model=model, budgets=_texts(budget), **settings)
    return [stage._asdict() for stage in pipeline.memory_needed(asked)]


@with_keywords(Settings, BUDGETS)
def probe(
    model: str,
    out: Path | str,
    track: Track | None = None,
    overwrite: bool = False,
    latency: str | Sequence[str] = (),
    budget: str | Sequence[str] = (),
    progress: bool = True,
    **settings: Unpack[RunKeywords],
) -> Readings:
    """Measure a model into a new run folder; with a budget, only the units that it concerns.

    `latency` names what to time on this device, such as "decode,32k,b8"; it can be added to any run of the same model.
    """
    asked, folder, works = Settings(model=model, budgets=_texts(budget), **settings), RunFolder(out), _texts(latency)
    if works:
        asked = replace(asked, allow=under_time(asked.allow))
    with following(track, progress) as shown:
        if works and not overwrite and folder.finished("probe") and folder.require().model == model:
            with pipeline.resumed(folder, "probe", asked.trust_remote_code) as known:
                return pipeline.measure(replace(known, device=asked.device, allow=asked.allow), folder, works, shown)
        with pipeline.claimed(asked, folder, "probe", overwrite, works):
            return pipeline.measure(asked, folder, works, shown)


def allocate(
    out: Path | str,
    budget: str | Sequence[str],
    strategy: str = "exact",
    allow: tuple[str, ...] = DEFAULT_UNITS,
    portable: bool = False,
    seed: int = 0,
    **sizes: Any,
) -> Plan:
    """Decide every size for a budget, from what a run folder's probing found, and write plan.json. Needs no model.

    `sizes` limits them: `serve="vllm"`, `multiple=32`, `same_dims=True`.
    """
    return allocate_in(out, _texts(budget), strategy, allow, portable, seed, **sizes)


def reshape(
    out: Path | str,
    heal: str = "none",
    track: Track | None = None,
    heal_options: Sequence[str] = (),
    trust_remote_code: bool = False,
    progress: bool = True,
) -> nn.Module | None:
    """Carry out plan.json: reshape, heal, save and return the model; a streamed one is only saved.

    `trust_remote_code` lets code run that the source model brings; the value in run.json is never believed.
    """
    folder = RunFolder(out)
    check_options(heal, heal_options)
    command = "reshape" if heal == "none" else "heal"
    with following(track, progress) as shown, pipeline.resumed(folder, command, trust_remote_code) as known:
        settings = replace(known, heal=heal, heal_options=tuple(heal_options))
        plan = Plan.read(folder.plan_file)
        source = pipeline.source_of(settings, folder, shown)
        pipeline.carry_out(settings, folder, source, plan, shown)
    return None if isinstance(source, Streaming) else load(folder.model)


def verify(
    out: Path | str,
    track: Track | None = None,
    max_loss: str | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> Verdict:
    """Prove what was done, on the saved model of a run folder; `max_loss` is another limit than the run's.

    `trust_remote_code`: see `reshape`.
    """
    folder = RunFolder(out)
    with following(track, progress) as shown, pipeline.resumed(folder, "verify", trust_remote_code) as known:
        folder.require_model()
        limit = max_loss or known.max_loss or MAX_LOSS
        damage_limit(limit)
        source = pipeline.source_of(known, folder, shown)
        found = processes.by_first(partial(pipeline.verify, folder, source, shown, limit))
        return found or Verdict.read(folder.verdict_file)


def serve(
    out: Path | str,
    engine: str = "vllm",
    track: Track | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> Served:
    """Let an engine serve the saved model of a run folder and its source: same tokens, room in its cache, speed.

    What is found is also written to serving.json. `trust_remote_code`: see `reshape`.
    """
    require(engine)
    folder = RunFolder(out)
    with following(track, progress) as shown, pipeline.resumed(folder, "verify", trust_remote_code) as known:
        folder.require_model()
        refuse_coded(folder)
        return serve_in(folder, pipeline.source_of(known, folder, shown), engine, shown)


def _multiplies_packed(model: str) -> bool:
    """Whether a model has weights in few bits, and this machine multiplies with them as they are."""
    return hasattr(families.configuration(model), "quantization_config") and native_build.runs()


def load(
    folder: Path | str,
    device: str = "cpu",
    optimise: bool = False,
    dtype: torch.dtype | str | None = None,
    packed: bool | None = None,
) -> nn.Module:
    """A reshaped (or any supported) model, ready to generate; with `optimise` its `generate` takes the fast way.

    `dtype` is what it computes in, "auto" for that of the file. Without one: float32, but an optimised model on CUDA
    computes in that of the file. With `packed`, weights in few bits stay so in memory, and every product unpacks what
    it needs. That is slower. With `optimise`, few rows are multiplied with what is packed, so that fewer bytes are
    read: on a CPU that is the default, on CUDA (where it takes Triton) it must be asked for.
    """
    cuda = torch.device(device).type == "cuda"
    if packed is None:
        packed = optimise and not cuda and dtype in (None, torch.float32) and _multiplies_packed(str(folder))
    if not optimise:
        return families.load(str(folder), device, dtype=dtype, packed=packed)[0]
    from headwise.fast.model import optimise as make_fast

    model = families.load(str(folder), device, dtype="auto" if dtype is None and cuda else dtype, packed=packed)[0]
    family = families.family_of(model.config)
    if not family.is_tailored(model) and family.shape_of(model.config).cached:
        model = family.tailor(model)
    return cast(nn.Module, make_fast(model))
