"""How a model is run to be timed: one decode step or one prefill, prepared once and then repeated.

Decoders run as `headwise.load(..., optimise=True)` runs them: the quickest kernel for each size, and on CUDA decode
steps that are captured once and replayed, because kernel launches would hide what a smaller layer saves. Other models
run unchanged.
"""

from __future__ import annotations

import copy
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headwise.devices import timed
from headwise.errors import BudgetError
from headwise.families import Family
from headwise.families._config import stored_dtype
from headwise.fast import decode
from headwise.fast.cache import FastCache
from headwise.fast.model import covers, optimise
from headwise.types import Workload

FAST, PLAIN = "fast", "plain"  # runtimes: with `optimise=True`, and without
LEAST_SECONDS = {"cuda": 0.004, "cpu": 0.02}  # of one timing; shorter steps are repeated


@dataclass
class TimedStep:
    """Runs a model once, by which runtime, and whether it replays a captured CUDA graph."""

    run: Callable[[], object]
    runtime: str = PLAIN
    captured: bool = False


def runtime_of(model: Any) -> str:
    """The runtime with which a tailored model is timed."""
    return FAST if covers(model) else PLAIN


def fast_twin(model: Any) -> Any:
    """An optimised copy of a tailored decoder. Only weights that it joins are copied; the model is not changed."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return optimise(copy.deepcopy(model, shared))


@torch.no_grad()
def prepare(family: Family, model: Any, work: Workload) -> TimedStep:
    """The step of a tailored model under a workload, its caches filled to the length.

    It has run once: kernels are chosen, built and captured before the first timing.
    """
    rows = family.example(model.config, work.batch, 1 if work.phase == "decode" else work.length)
    rows = rows.to(next(model.parameters()).device)
    step = (_fast if covers(model) else _plain)(family, model, work, rows)
    step.run()
    return step


def _fast(family: Family, model: Any, work: Workload, rows: torch.Tensor) -> TimedStep:
    model = fast_twin(model)
    if work.phase == "decode":
        cache = decode.filled(model, work.batch, work.length)
        positions = torch.full_like(rows, work.length - 1)
        decode.repeated(model, cache, rows, positions)
        captured = cache.captured is not None and cache.captured.graph is not None
        return TimedStep(lambda: decode.repeated(model, cache, rows, positions), FAST, captured)
    cache = FastCache(model.headwise_fast.layers, work.length)

    def read() -> object:
        cache.reset()
        return model(**family.first_step(rows), past_key_values=cache, use_cache=True)

    return TimedStep(read, FAST)


def _plain(family: Family, model: Any, work: Workload, rows: torch.Tensor) -> TimedStep:
    if work.phase == "decode":
        before = family.example(model.config, work.batch, max(1, work.length - 1)).to(rows.device)
        cache = model(**family.first_step(before), use_cache=True).past_key_values

        def write() -> object:
            found = model(input_ids=rows, past_key_values=cache, use_cache=True)
            cache.crop(-1)  # the next step does the same work
            return found

        return TimedStep(write)
    if family.shape_of(model.config).cached:
        return TimedStep(lambda: model(**family.first_step(rows), use_cache=True))
    return TimedStep(lambda: family.call(model, rows))


@torch.no_grad()
def in_turns(steps: Sequence[TimedStep], device: torch.device, repeats: int = 5) -> list[list[float]]:
    """Milliseconds of every step, once per repeat. The steps take turns, so that all meet the same machine."""
    counts = []
    for step in steps:
        _, once = [timed(step.run, device)[1] for _ in range(2)]  # the first call warms up
        counts.append(max(1, round(LEAST_SECONDS[device.type] / max(once, 1e-9))))
    found: list[list[float]] = [[] for _ in steps]
    for _ in range(repeats):
        for step, count, times in zip(steps, counts, found, strict=True):
            times.append(timed(step.run, device, count)[1] / count * 1e3)
    return found


def spread(times: Sequence[float]) -> tuple[float, float, float]:
    """Median, minimum and maximum."""
    return statistics.median(times), min(times), max(times)


def device_name(device: torch.device) -> str:
    """The hardware in words: times that were measured on other hardware are refused by it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{named or platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def check_length(family: Family, config: Any, work: Workload) -> None:
    """Refuse a text that the model cannot hold."""
    most = family.longest(config)
    if work.length > most:
        shorter = Workload(work.phase, most, work.batch)
        raise BudgetError(f"{work} is longer than the {most:,} tokens that the model takes; use {shorter}.")


def timed_dtype(model: Any) -> torch.dtype:
    """The number format in which a model is timed: on CUDA that of its file, on a CPU single precision."""
    return stored_dtype(model.config) if next(model.parameters()).device.type == "cuda" else torch.float32
