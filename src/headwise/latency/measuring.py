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
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

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
        cache = filled_cache(family, model, work)
        return TimedStep(lambda: model(input_ids=rows, past_key_values=cache, use_cache=True))
    if family.shape_of(model.config).cached:
        return TimedStep(lambda: model(**family.first_step(rows), use_cache=True))
    return TimedStep(lambda: family.call(model, rows))


class FullLayer(DynamicLayer):
    """A cache of one layer that is full but for the last token, at every step again."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        super().__init__()
        self.keys: torch.Tensor = keys
        self.values: torch.Tensor = values
        self.length = length
        self.is_sliding = keys.shape[-2] < length  # masks are made for each kind of layer
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Write the new token to the end."""
        self.keys[:, :, -1:].copy_(key_states)
        self.values[:, :, -1:].copy_(value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Tokens before the new one."""
        return self.length - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Tokens that are kept, and how many came before them."""
        kept = self.keys.shape[-2]
        return kept, self.length - kept


def filled_cache(family: Family, model: Any, work: Workload) -> DynamicCache:
    """Random keys and values of every layer at the workload's length; a sliding window keeps only what it sees."""
    weight = next(model.parameters())
    kinds, cache = DynamicCache(config=model.config), DynamicCache()
    for index, block in enumerate(family.blocks(model)):
        part, kind = block.attention, kinds.layers[index] if index < len(kinds.layers) else None
        window = getattr(kind, "sliding_window", None) if getattr(kind, "is_sliding", False) else None
        kept = min(work.length, window or work.length)
        keys, values = (
            torch.randn(work.batch, part.kv_heads, kept, dim, dtype=weight.dtype, device=weight.device)
            for dim in (part.qk_dim, part.v_dim)
        )
        cache.layers.append(FullLayer(keys, values, work.length))
    return cache


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
