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
        rows = family.example(source.config, 1, min(prompt, family.longest(source.config))).to(source.device)
        return _reading(source, cut, rows, family.row_tokens(source.config, rows), repeats)
    limit = int(getattr(source.config, "max_position_embeddings", None) or prompt + steps + 1)
    prompt = min(prompt, limit - steps - 1)
    for _ in range(repeats + 1):
        for name, model in (("before", source), ("after", cut)):
            prefill, decode = _one(family, model, prompt, steps)
            times.setdefault(f"prefill_ms_per_token_{name}", []).append(prefill)
            times.setdefault(f"decode_ms_per_token_{name}", []).append(decode)
    return {**_summary(times), "prompt_tokens": float(prompt), "decoded_tokens": float(steps)}


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
