"""Time per token before and after, measured side by side: reading a prompt and, if the model can, writing on."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from headwise import families


@torch.no_grad()
def measure(
    source: nn.Module, cut: nn.Module, prompt: int = 256, steps: int = 24, repeats: int = 3
) -> dict[str, float]:
    """Median milliseconds per token of prefill and decode; the models take turns, so that both see the same machine.

    Models that keep no cache only read.
    """
    times: dict[str, list[float]] = {}
    family = families.family_of(source.config)
    if not family.shape_of(source.config).cached:
        return _reading(source, cut, min(prompt, family.longest(source.config)), repeats)
    limit = int(getattr(source.config, "max_position_embeddings", None) or prompt + steps + 1)
    prompt = min(prompt, limit - steps - 1)
    for _ in range(repeats + 1):
        for name, model in (("before", source), ("after", cut)):
            prefill, decode = _one(family, model, prompt, steps)
            times.setdefault(f"prefill_ms_per_token_{name}", []).append(prefill)
            times.setdefault(f"decode_ms_per_token_{name}", []).append(decode)
    found = {key: statistics.median(values[1:]) for key, values in times.items()}  # the first turn warms up
    return {**found, "prompt_tokens": float(prompt), "decoded_tokens": float(steps)}


def _reading(source: nn.Module, cut: nn.Module, prompt: int, repeats: int) -> dict[str, float]:
    """Median milliseconds per token to read a text as a whole."""
    times: dict[str, list[float]] = {}
    ids = torch.full((1, prompt), 3, device=source.device)  # any token but padding, which some models count out
    for _ in range(repeats + 1):
        for name, model in (("before", source), ("after", cut)):
            _, seconds = _timed(lambda model=model: model(ids), model.device)  # type: ignore[misc]
            times.setdefault(f"prefill_ms_per_token_{name}", []).append(seconds / prompt * 1e3)
    return {**{k: statistics.median(v[1:]) for k, v in times.items()}, "prompt_tokens": float(prompt)}


def _one(family: families.Family, model: nn.Module, prompt: int, steps: int) -> tuple[float, float]:
    device = model.device
    ids = torch.ones((1, prompt), dtype=torch.long, device=device)
    out, prefill = _timed(lambda: model(**family.first_step(ids), use_cache=True), device)
    cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)

    def write() -> None:
        nonlocal token
        for _ in range(steps):
            found = model(**family.next_step(token, out), past_key_values=cache, use_cache=True)
            token = found.logits[:, -1:].argmax(-1)

    _, decode = _timed(write, device)
    return prefill / prompt * 1e3, decode / steps * 1e3


def _timed(work: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - start


def machine(device: torch.device) -> str:
    """The hardware in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"
