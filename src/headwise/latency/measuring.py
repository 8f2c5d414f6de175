"""How a model is run to be timed: one decode step or one prefill, prepared once and then repeated.

Decoders run as `headwise.load(..., optimise=True)` runs them: the quickest kernel for each size, and on CUDA decode
steps that are captured once and replayed, because kernel launches would hide what a smaller layer saves. Other models
run unchanged.
"""

import copy
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headwise.devices import timed
from headwise.errors import BudgetError
from headwise.families import Family
from headwise.families._config import stored_dtype
from headwise.fast import native, native_build
from headwise.fast.cache import FastCache
from headwise.fast.choice import Case, rounded
from headwise.fast.model import attentions, covers, decode_step, optimise
from headwise.types import LayerShape, Workload

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


def compiles(model: Any) -> bool:
    """Whether a model computes in C with `optimise=True`."""
    return bool(model.device.type == "cpu" and model.dtype == torch.float32 and native_build.runs())


def fast_twin(model: Any) -> Any:
    """An optimised copy of a tailored decoder. Only weights that it joins are copied; the model is not changed."""
    return optimise(_sharing(model))


def compiled_twin(model: Any) -> Any:
    """A copy of a decoder that computes in C on a CPU, as with `optimise=True`; all weights are the model's own."""
    twin = _sharing(model)
    native.attach(twin)
    return twin


def _sharing(model: Any) -> Any:
    """A copy of a model that has the same weights."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


@torch.no_grad()
def prepare(family: Family, model: Any, work: Workload) -> TimedStep:
    """The step of a tailored model under a workload, its caches filled to the length.

    It has run once: kernels are chosen, built and captured before the first timing.
    """
    rows = family.example(model.config, work.batch, 1 if work.phase == "decode" else work.length)
    rows = rows.to(next(model.parameters()).device)
    if covers(model):
        step = _fast(family, model, work, rows)
    else:  # rows in bits on a CPU: in C as `optimise=True` reads them, if it can be compiled
        coded = any(part.coders is not None for part in attentions(model))
        step = _plain(family, fast_twin(model) if coded else model, work, rows)
    step.run()
    return step


def _fast(family: Family, model: Any, work: Workload, rows: torch.Tensor) -> TimedStep:
    model = fast_twin(model)
    if work.phase == "decode":
        cache = filled(model, work.batch, work.length)
        positions = torch.full_like(rows, work.length - 1)
        repeated(model, cache, rows, positions)
        captured = cache.captured is not None and cache.captured.graph is not None
        return TimedStep(lambda: repeated(model, cache, rows, positions), FAST, captured)
    cache = model.headwise_fast.new_cache(work.length)

    def read() -> object:
        cache.reset()
        return model(**family.first_step(rows), past_key_values=cache, use_cache=True)

    return TimedStep(read, FAST)


def filled(model: Any, rows: int, length: int) -> FastCache:
    """A cache for texts of `length`, filled with random keys and values up to the last place."""
    cache, some = model.headwise_fast.new_cache(length), torch.empty(0, dtype=model.dtype, device=model.device)
    for part in attentions(model):
        layer: Any = cache.layers[part.layer_idx]
        if part.coders is not None:
            layer.allocate_codes(rows, part.kv_heads, some)
            _draw_codes(layer)
            continue
        layer.allocate(rows, *(some.new_empty(1, part.kv_heads, 1, dim) for dim in (part.qk_dim, part.v_dim)))
        for x in (layer.keys, layer.values):
            x.normal_()
    cache.rewind(length - 1)
    cache.batch, cache.starts_B = rows, torch.zeros(rows, dtype=torch.int32, device=some.device)
    return cache


def _draw_codes(layer: Any) -> None:
    """Random rows in bits."""
    for side in layer.sides:
        side.words.random_(-(2**15), 2**15)
        side.scales.view(torch.float16).uniform_(4.0, 32.0)
        side.side.normal_()


def cases(model: Any, sizes: Iterable[LayerShape], rows: int, length: int, dtype: torch.dtype) -> list[Case]:
    """The cases of decode steps of a model whose layers have these sizes."""
    kinds = {(part.attend.sliding_window, part.attend.softcap is not None) for part in attentions(model)}
    device, places = next(model.parameters()).device, rounded(FastCache(1, length).capacity)
    made = []
    for x in sizes:
        heads = (x.query_heads, x.kv_heads, x.qk_dim, x.v_dim)
        for window, capped in sorted(kinds, key=str):
            made.append(Case(device, dtype, "decode", *heads, places, rounded(rows), capped=capped, window=window))
    return made


@torch.no_grad()
def repeated(model: Any, cache: FastCache, token: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One step on a cache, which is rewound afterwards, so that every call times the same work."""
    length = cache.get_seq_length()
    try:
        if token.is_cuda:
            return replayed(model, cache, token, positions, 1)
        given = {"input_ids": token, "position_ids": positions, "past_key_values": cache}
        logits: torch.Tensor = model(**given, use_cache=True, logits_to_keep=1).logits
        return logits
    finally:
        cache.rewind(length)


@torch.no_grad()
def replayed(model: Any, cache: FastCache, token: torch.Tensor, positions: torch.Tensor, steps: int) -> torch.Tensor:
    """The `steps` tokens after `token`, on CUDA: nothing but replays of the captured step."""
    model.headwise_fast.switch.cache = cache
    try:
        step = decode_step(model, cache)
        step.set(token, positions)
        first = cache.get_seq_length() + 1
        for _ in range(steps):
            step.run()
        return step.tokens[:, first : first + steps].clone()
    finally:
        model.headwise_fast.switch.cache = None


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
