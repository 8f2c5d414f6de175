"""Runs a training step many times; on a GPU as a captured graph, since steps of small tensors are mostly launches."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch

WARM_UP = 3  # steps before a capture


def repeat(step: Callable[[], None], steps: int, device: torch.device) -> float:
    """Run `step` so often; seconds of one step, those before and during the capture left out where it was captured."""
    again, left = step, steps
    if device.type == "cuda" and steps > WARM_UP:
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                step()
        torch.cuda.current_stream(device).wait_stream(side)
        left -= WARM_UP
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                step()
            again = graph.replay
        except RuntimeError as error:
            warnings.warn(f"training goes on step by step, which is slower: {error}", stacklevel=2)
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(left):
        again()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / max(1, left)
