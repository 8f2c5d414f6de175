"""Time per token before and after, measured side by side: reading a prompt and, if the model can, writing on."""

from __future__ import annotations

import copy
import gc
import platform
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from headwise import families
from headwise.latency import measuring
from headwise.latency.measuring import FAST, fast_twin
from headwise.types import Budget, Check, Plan, Workload


def runtime(source: nn.Module, cut: nn.Module) -> str:
    """How both models are run: decoders on CUDA as `optimise=True` makes them, if there is room for joined weights."""
    device: Any = source.device
    if device.type != "cuda" or measuring.PLAIN in (measuring.runtime_of(source), measuring.runtime_of(cut)):
        return measuring.PLAIN
    gc.collect()  # models that were timed before
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    free -= torch.cuda.memory_allocated(device)
    joined = sum(tensor.nbytes for model in (source, cut) for tensor in model.parameters())
    return measuring.FAST if 1.2 * joined < free else measuring.PLAIN


@torch.no_grad()
def measure(
    source: nn.Module,
    cut: nn.Module,
    prompt: int = 256,
    steps: int = 24,
    repeats: int = 3,
    runtime: str = measuring.PLAIN,
) -> dict[str, float]:
    """Median milliseconds per token of prefill and decode; the models take turns, so that both see the same machine.

    Models that keep no cache only read.
    """
    if runtime == FAST:
        source, cut = fast_twin(source), fast_twin(cut)
    times: dict[str, list[float]] = {}
    family = families.family_of(source.config)
    if not family.shape_of(source.config).cached:
        rows = family.example(source.config, 1, min(prompt, family.longest(source.config))).to(source.device)
        return _reading(source, cut, rows, family.row_tokens(source.config, rows), repeats)
    limit = int(getattr(source.config, "max_position_embeddings", None) or prompt + steps + 1)
    prompt = min(prompt, limit - steps - 1)
    for _ in range(repeats + 1):
        for name, model in (("before", source), ("after", cut)):
            prefill, decode = _one(family, model, prompt, steps)
            times.setdefault(f"prefill_ms_per_token_{name}", []).append(prefill)
            times.setdefault(f"decode_ms_per_token_{name}", []).append(decode)
    read = family.read_tokens(family.example(source.config, 1, prompt))
    return {**_summary(times), "prompt_tokens": float(read), "decoded_tokens": float(steps)}


def _reading(
    source: nn.Module, cut: nn.Module, rows: torch.Tensor, image: int | None, repeats: int
) -> dict[str, float]:
    """Median milliseconds per token to read a text as a whole, or per image; `image` is how many tokens it makes."""
    times: dict[str, list[float]] = {}
    what, count = ("prefill_ms_per_token", rows.shape[1]) if image is None else ("ms_per_image", 1)
    for _ in range(repeats + 1):
        for name, model in (("before", source), ("after", cut)):
            _, seconds = _timed(lambda model=model: model(rows), model.device)  # type: ignore[misc]
            times.setdefault(f"{what}_{name}", []).append(seconds / count * 1e3)
    tokens = {"prompt_tokens" if image is None else "tokens_per_image": float(image or count)}
    return {**_summary(times), **tokens}


def _summary(times: dict[str, list[float]]) -> dict[str, float]:
    """Median, least and most of every phase; the first turn warms up."""
    ends = {"": statistics.median, "_low": min, "_high": max}
    return {f"{key}{end}": float(of(values[1:])) for key, values in times.items() for end, of in ends.items()}


def _one(family: families.Family, model: nn.Module, prompt: int, steps: int) -> tuple[float, float]:
    device = model.device
    rows = family.example(model.config, 1, prompt).to(device)
    given: dict[str, Any] = {"use_cache": True}
    if hasattr(model, "headwise_fast"):
        given["past_key_values"] = model.headwise_fast.cache(model, 1, prompt + steps)
    out, prefill = _timed(lambda: model(**family.first_step(rows), **given), device)
    cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)

    def write() -> None:
        nonlocal token
        for _ in range(steps):
            found = model(**family.next_step(token, out), past_key_values=cache, use_cache=True)
            token = found.logits[:, -1:].argmax(-1)

    _, decode = _timed(write, device)
    return prefill / family.read_tokens(rows) * 1e3, decode / steps * 1e3


def _timed(work: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - start


def machine(device: torch.device, runtime: str = measuring.PLAIN) -> str:
    """The hardware in words, and how models are run there if not as they are."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device) + (", with optimise=True" if runtime == FAST else "")
    return f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"


SLACK = 0.05  # by which a measured time may exceed its limit: times of the same model differ by about as much


def latencies(source: nn.Module, cut: nn.Module, plan: Plan) -> tuple[dict[str, float], list[Check]]:
    """Time of source and cut under every limit on time, predicted and measured, and whether the limit is kept."""
    found: dict[str, float] = {}
    checks = []
    for budget in (b for b in plan.budgets if b.workload is not None):
        here = measuring.device_name(source.device)
        if budget.device != here:
            seen = f"planned on {budget.device}, this is {here}: verify there"
            checks.append(Check(f"measured {budget.text}", False, seen, f"at most {budget.limit:.4g} ms"))
            continue
        try:
            took = side_by_side(source, cut, budget.workload)
        except torch.cuda.OutOfMemoryError:
            seen = "source and cut do not fit side by side: use a smaller batch or length"
            checks.append(Check(f"measured {budget.text}", False, seen, f"at most {budget.limit:.4g} ms"))
            continue
        stem = f"{budget.workload.phase}_ms_at_{budget.workload.length}_batch_{budget.workload.batch}"
        predicted = {"after": plan.spent[budget.key]}
        if budget.table is not None:
            predicted = {"after": budget.table.model_ms(plan.target), "before": budget.table.model_ms(plan.source)}
        found |= {f"{stem}_predicted_{end}": value for end, value in predicted.items()}
        found |= {f"{stem}_{end}": value for end, value in took.items()}
        checks.append(kept(budget, took, measuring.runtime_of(source)))
    return found, checks


def kept(budget: Budget, took: dict[str, float], runtime: str) -> Check:
    """Whether a limit on time holds as measured: a percentage is of the source as measured beside it."""
    percent = re.search(r"=([0-9.]+)%", budget.text)
    limit = float(percent[1]) / 100 * took["before"] if percent else budget.limit
    seen = f"{took['after']:.4g} ms, {took['after'] / took['before']:.1%} of the source's {took['before']:.4g}"
    seen += ", both with optimise=True" if runtime == FAST else ", both as they are"
    return Check(f"measured {budget.text}", took["after"] <= limit * (1 + SLACK), seen, f"at most {limit:.4g} ms + 5%")


@torch.no_grad()
def side_by_side(source: nn.Module, cut: nn.Module, work: Workload, repeats: int = 7) -> dict[str, float]:
    """Milliseconds of both models under a workload, in the number format that they are meant to run in, in turns."""
    family = families.family_of(source.config)
    ready = []
    for model in (source, cut):
        copied = (
            copy.deepcopy(model).to(measuring.timed_dtype(model))
            if measuring.timed_dtype(model) != model.dtype
            else model
        )
        ready.append(measuring.prepare(family, copied, work))
    found = measuring.timed(ready, source.device, repeats)
    spreads = {name: measuring.spread(times) for name, times in zip(("before", "after"), found, strict=True)}
    ends = ("", "_low", "_high")
    return {f"{name}{end}": value for name, row in spreads.items() for end, value in zip(ends, row, strict=True)}
