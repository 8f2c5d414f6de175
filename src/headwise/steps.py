"""One token more, or one prompt read, ready to be repeated: the one place where a model is run for its time.

A decode step on CUDA is captured as a graph, with caches of the full length in place, as launches would hide what a
smaller layer saves. Everything else runs as it is.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headwise.errors import BudgetError
from headwise.families import Family
from headwise.types import Workload

Step = Callable[[], object]
FOLDED = "headwise_folded"  # our attention of one token, by its name in a configuration
LEAST_SECONDS = {"cuda": 0.004, "cpu": 0.02}  # of one timing; shorter steps are repeated


@torch.no_grad()
def prepare(family: Family, model: Any, work: Workload) -> Step:
    """What runs a tailored model once under a workload, its caches filled to the length."""
    device = next(model.parameters()).device
    rows = family.example(model.config, work.batch, 1 if work.phase == "decode" else work.length).to(device)
    if work.phase == "prefill":
        if family.shape_of(model.config).cached:
            return lambda: model(**family.first_step(rows), use_cache=True)
        return lambda: family.call(model, rows)
    cache = filled_cache(family, model, work)

    def step() -> object:
        return model(input_ids=rows, past_key_values=cache, use_cache=True)

    return _captured(family, model, step) if device.type == "cuda" else step


class FullLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A cache of one layer that holds a whole text but the last token, again and again."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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
    """Keys and values of every layer for texts of the workload's length; sliding windows keep no more than they see."""
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


def _folded(
    module: Any, q_BHTK: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scaling: float, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Attention of one token: query heads that share keys stand as rows of one head, so that keys are read once."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    batch, heads, _, dim = q_BHTK.shape
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(kernels, set_priority=True):
        z = nn.functional.scaled_dot_product_attention(
            q_BHTK.reshape(batch, k.shape[1], heads // k.shape[1], dim), k, v, scale=scaling
        )
    return z.reshape(batch, 1, heads, v.shape[-1]), None


@contextmanager
def _folding(family: Family, model: Any) -> Iterator[None]:
    """Let a model attend by `_folded`; where logits are capped it cannot."""
    before = model.config._attn_implementation
    if before == "sdpa" and all(block.attention.attend.softcap is None for block in family.blocks(model)):
        ALL_ATTENTION_FUNCTIONS.register(FOLDED, _folded)
        model.config._attn_implementation = FOLDED  # with a name that has no mask of its own: all is attended to
    try:
        yield
    finally:
        model.config._attn_implementation = before


def _captured(family: Family, model: Any, step: Step) -> Step:
    """The step as a CUDA graph; as it is where it cannot be captured, as with positions that depend on values."""
    with _folding(family, model):
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                step()
        except RuntimeError as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            torch.cuda.synchronize()
            return step

    def replay() -> None:
        graph.replay()

    replay.graph = graph, step  # type: ignore[attr-defined]  # which hold what the graph reads
    return replay


@torch.no_grad()
def timed(steps: Sequence[Step], device: torch.device, repeats: int = 5) -> list[list[float]]:
    """Milliseconds of every step, once per repeat; the steps take turns, so that all see the same machine."""
    counts = []
    for step in steps:
        seconds(step, device, 1)  # warms up
        counts.append(max(1, round(LEAST_SECONDS[device.type] / max(seconds(step, device, 1), 1e-9))))
    found: list[list[float]] = [[] for _ in steps]
    for _ in range(repeats):
        for step, count, times in zip(steps, counts, found, strict=True):
            times.append(seconds(step, device, count) / count * 1e3)
    return found


def seconds(step: Step, device: torch.device, count: int) -> float:
    """How long so many runs take; of a single thread what it computes, not what it waits while others do."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    now = time.thread_time if alone else time.perf_counter
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = now()
    for _ in range(count):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return now() - start


def spread(times: Sequence[float]) -> tuple[float, float, float]:
    """Median, least and most."""
    return statistics.median(times), min(times), max(times)


def device_name(device: torch.device) -> str:
    """The hardware in words, so that times of another are not taken for its own."""
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
    stored = getattr(model.config, "dtype", None) or torch.float32
    stored = getattr(torch, stored) if isinstance(stored, str) else stored
    return stored if next(model.parameters()).device.type == "cuda" else torch.float32
