"""Weights in few bits on CUDA: our products with what is packed beside PyTorch's with bfloat16, and a decode step.

    python benchmarks/packed_cuda.py

Matrices have the shapes of an 8B model and random numbers, groups of 64 share a scale. Every product is captured in a
CUDA graph with several copies of its matrix, used in turn, so that none is read from the device's cache. Both ways take
turns. A ratio is PyTorch's time over ours next to it. The step is that of a random model of Llama 3.2 1B's shape after
1,024 tokens, all of whose matrices have 4 bits, beside the same model in bfloat16, both with `optimise=True`.
Results are medians with the lowest and the highest. `--tiny` only tries that it runs, also without a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from latency_models import stock
from provenance import commit
from torch import nn

from headwise import families
from headwise.fast.model import optimise
from headwise.fast.packed_cuda import attach
from headwise.files.disk import write_atomically
from headwise.latency.measuring import filled, repeated
from headwise.runtime.packed_headwise import KINDS

RESULT = Path(__file__).parent / "results" / "packed-cuda.json"
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096))  # rows and columns of a matrix
COUNTS, BITS, GROUP = (1, 4, 16), (2, 3, 4, 8), 64
CALLS, ROUNDS = 8, 9
CACHED = 2**27  # bytes: more than the cache of a GPU holds
LENGTH = 1024


def pack(module: Any, bits: int, like: torch.Tensor) -> None:
    """Let a product or a table have random numbers in few bits instead of its weight."""
    (rows, columns), device = module.weight.shape, like.device
    del module.weight
    words = torch.randint(-(2**31), 2**31 - 1, (rows, columns * bits // 32), dtype=torch.int32, device=device)
    scale = torch.rand(rows, columns // GROUP, device=device) * 0.04 / 2**bits
    module.register_buffer("weight_packed", words)
    module.register_buffer("weight_scale", scale.bfloat16())
    module.register_buffer("like", like)
    module.bits, module.sizes, module.__class__ = bits, (rows, columns), KINDS[type(module)]


class Lone(nn.Module):
    """A product alone, as a model whose products are made ready."""

    def __init__(self, rows: int, columns: int, bits: int, like: torch.Tensor) -> None:
        super().__init__()
        self.product = nn.Linear(columns, rows, bias=False, device="meta")
        self.device, self.dtype = like.device, like.dtype
        pack(self.product, bits, like)
        attach(self)


def timing(works: list[Callable[[], Any]], device: torch.device) -> Callable[[], float]:
    """What replays some calls and tells microseconds for each."""
    if device.type != "cuda":
        return partial(waited, works[0], device)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        works[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(CALLS):
            works[number % len(works)]()

    def once() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / CALLS

    once()
    return once


def side_by_side(ways: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Times of all ways in turns."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            found[name].append(ways[name]())
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def products(shape: tuple[int, int], counts: tuple[int, ...], bits: tuple[int, ...], like: torch.Tensor) -> list[Any]:
    """Rows of the result for a shape of matrix."""
    (rows, columns), made = shape, []
    plain = [torch.randn(shape, device=like.device, dtype=like.dtype) for _ in range(copies(rows * columns * 2))]
    for width in bits:
        lone = [Lone(*shape, width, like) for _ in range(copies(rows * columns * width // 8))]
        size = sum(x.nbytes for x in (lone[0].product.weight_packed, lone[0].product.weight_scale))
        for count in counts:
            x = torch.randn(count, columns, device=like.device, dtype=like.dtype)
            want = nn.functional.linear(x.float(), lone[0].product.weight.float())
            off = float((lone[0].product(x).float() - want).norm() / want.norm())
            ways = {
                "ours": timing([partial(one.product, x) for one in lone], like.device),
                "torch": timing([partial(nn.functional.linear, x, matrix) for matrix in plain], like.device),
            }
            found = side_by_side(ways, ROUNDS)
            ratios = [theirs / ours for ours, theirs in zip(found["ours"], found["torch"], strict=True)]
            row = {"rows": rows, "columns": columns, "count": count, "bits": width, "bytes": size, "error": off}
            row |= {f"{name}_us": spread(times) for name, times in found.items()} | {"ratio": spread(ratios)}
            row["bytes_per_s"] = size / row["ours_us"]["median"] * 1e6
            print(row, flush=True)
            made.append(row)
    return made


def copies(size: int) -> int:
    """How many matrices of so many bytes are used in turn."""
    return max(1, min(CALLS, -(-CACHED // size)))


def decoder(bits: int | None, device: torch.device, tiny: bool) -> Any:
    """A random, optimised model, packed if it has bits."""
    made = stock(device.type, tiny)
    model: Any = families.family_of(made.config).tailor(made)
    if bits is not None:
        for module in list(model.modules()):
            if type(module) in KINDS and module is not model.lm_head:
                pack(module, bits, torch.empty(0, device=device, dtype=torch.bfloat16))
        head, table = model.lm_head, model.model.embed_tokens
        pack(head, bits, table.like)  # the same numbers as those of the table
        head.weight_packed, head.weight_scale = table.weight_packed, table.weight_scale
    return optimise(model)


@torch.no_grad()
def steps(counts: tuple[int, ...], length: int, device: torch.device, tiny: bool) -> list[Any]:
    """Rows of the result for decode steps of several texts."""
    models = {name: decoder(bits, device, tiny) for name, bits in (("ours", 4), ("bfloat16", None))}
    made = []
    for count in counts:
        token = torch.full((count, 1), 5, device=device)
        ways: dict[str, Callable[[], float]] = {}
        for name, model in models.items():
            run = partial(repeated, model, filled(model, count, length), token, torch.full_like(token, length - 1))
            run()
            ways[name] = partial(waited, run, device)
        found = side_by_side(ways, ROUNDS)
        ratios = [theirs / ours for ours, theirs in zip(found["ours"], found["bfloat16"], strict=True)]
        row: dict[str, Any] = {"texts": count, "length": length, "bits": 4, "ratio": spread(ratios)}
        row |= {f"{name}_us": spread(times) for name, times in found.items()}
        print(row, flush=True)
        made.append(row)
    return made


def waited(run: Callable[[], Any], device: torch.device) -> float:
    """Microseconds of a step."""
    begun = time.perf_counter()
    for _ in range(CALLS):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) * 1e6 / CALLS


def main() -> None:
    """Measure, print and record after every shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="small sizes, of which nothing is recorded")
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda" and not asked.tiny:
        raise SystemExit("This needs a GPU; --tiny only tries that it runs.")
    torch.manual_seed(0)
    rows: list[Any] = []
    result: dict[str, Any] = {
        "hardware": torch.cuda.get_device_name() if device.type == "cuda" else "none",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "rounds": ROUNDS,
        "rows": rows,
    }
    if device.type == "cuda":
        import triton

        result["versions"]["triton"] = triton.__version__
    shapes = ((256, 128), (192, 256)) if asked.tiny else SHAPES
    for shape in shapes:
        with torch.no_grad():
            rows += products(shape, COUNTS, BITS, torch.empty(0, device=device, dtype=torch.bfloat16))
        record(result, asked)
    result["steps"] = steps((1, 4), 32 if asked.tiny else LENGTH, device, asked.tiny)
    record(result, asked)


def record(result: dict[str, Any], asked: Any) -> None:
    """Write what there is so far."""
    if not asked.tiny:
        write_atomically(asked.out or RESULT, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
