"""Decode attention over rows that query heads share, against uncut attention.

python benchmarks/rows.py     # on a CUDA device; writes benchmarks/results/rows.json

32 query heads; uncut: 8 key/value heads of 128, bfloat16, by PyTorch's kernels and ours. Pooled: rows of 512 keys and
512 values of 16 bits for all heads. Coded: rows of 1,024 keys and 1,024 values in bits, first and newest tokens apart.
Both by the kernels that `optimise=True` uses. All are timed in turns; each is checked against plain attention first.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from provenance import commit
from row_page import variants
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from headwise.fast.choice import case_of, quickest
from headwise.fast.code_layout import CodeLayout
from headwise.fast.paths import Seen
from headwise.runtime.cache_headwise import NEAR, WHOLE
from headwise.runtime.coder_headwise import RowCoder

RESULT = Path(__file__).parent / "results" / "rows.json"
PROTOTYPE = RESULT.with_name("rows-prototype.json")  # of CUDA kernels for a few widths, in the history of this file
SIZES = ((32, 32768), (16, 32768), (8, 8192), (1, 2048))  # texts, places
CODES = {  # how many of 1,024 coefficients, of keys and of values, have how many bits
    "coded 25%": {"8": 128, "4": 512, "2": 384},
    "coded 25%, all widths": {"8": 64, "7": 44, "6": 84, "5": 128, "4": 192, "3": 192, "2": 192, "1": 96},
    "coded 12.5%": {"8": 64, "4": 192, "2": 256},
}
POOLED, HEADS, ROW, SCALING = 512, 32, 1024, 128**-0.5
CALLS, ROUNDS = 5, 5
UNCUT = 8 * 128 * 2 * 2  # bytes of a place
made = partial(torch.randn, device="cuda", dtype=torch.bfloat16)


def captured(work: Callable[[], Any]) -> Any:
    """A graph of some calls, as a decode step runs them."""
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            work()
    graph.replay()
    return graph


def in_turns(ways: dict[str, Callable[[], Any]]) -> dict[str, dict[str, float]]:
    """Milliseconds per call by the device's own clock: median, low and high; one that fails is left out."""
    graphs: dict[str, Any] = {}
    for name, work in ways.items():
        try:
            graphs[name] = captured(work)
        except Exception as error:  # what compiling may raise is not listed anywhere
            print(f"  {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / CALLS)
    return {name: {"ms": statistics.median(x), "low": min(x), "high": max(x)} for name, x in times.items()}


def limits(texts: int, places: int) -> tuple[torch.Tensor, torch.Tensor]:
    ends = torch.full((texts,), places, dtype=torch.int32, device="cuda")
    return ends, torch.zeros_like(ends)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Attention (P, H, V) of rows (P, L, K) in double precision."""
    place = torch.arange(k.shape[1], device=k.device)
    seen = (place >= starts[:, None]) & (place < ends[:, None])
    logits = (q.double() @ k.double().mT) * SCALING
    return logits.masked_fill(~seen[:, None], -math.inf).softmax(-1) @ v.double()


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    error = ((found.double() - wanted).norm() / wanted.norm()).item()
    if not error < 0.01:
        raise AssertionError(f"a kernel is wrong by {error:.2g}")
    return error


def drawn(layout: Any, keys: bool, texts: int, places: int) -> Any:
    """A cache of keys or values with random rows."""
    from headwise.fast.coded import CodedSide

    side = CodedSide(layout, keys, texts, 1, places, made(1))
    side.words.random_(-(2**15), 2**15)
    side.scales.view(torch.float16).uniform_(4.0, 32.0)
    side.side.normal_()
    return side


def numbers(side: Any, ends: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """What a cache holds (P, L, K)."""
    rows = side.layout.read(side.words, side.scales, side.by_place)[:, 0]
    for text, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        near = torch.arange(end - NEAR, end, device=rows.device)
        rows[text, near] = side.side[text, 0, WHOLE + near % NEAR].float()
        rows[text, start : start + WHOLE] = side.side[text, 0, :WHOLE].float()
    return rows


def checks() -> dict[str, float]:
    """How far kernels are off plain attention, relatively, at odd lengths and starts."""
    from headwise.fast.code_beside import CodeDecode
    from headwise.fast.row_decode import row_decode

    texts, places, found = 3, 1024, {}
    ends, starts = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ((1024, 700, 321), (0, 5, 70)))
    q, k, v = made(texts, HEADS, POOLED), made(texts, 1, places, POOLED), made(texts, 1, places, POOLED)
    found["pooled 50%"] = off(row_decode(q, k, v, ends, starts, SCALING), plain(q, k[:, 0], v[:, 0], ends, starts))
    for name, counts in CODES.items():
        layout = CodeLayout(RowCoder(counts, ROW))
        keys, values = (drawn(layout, keys, texts, places) for keys in (True, False))
        q = made(texts, HEADS, ROW) * 0.1
        wanted = plain(q, numbers(keys, ends, starts), numbers(values, ends, starts), ends, starts)
        decode = CodeDecode(layout, layout, WHOLE, NEAR)
        found[name] = off(decode(q, keys, values, ends, starts, SCALING), wanted)
    return found


def uncut_ways(texts: int, places: int) -> dict[str, Callable[[], Any]]:
    from torch.nn.attention.flex_attention import flex_attention

    from headwise.fast.flash_decode import Tile, flash_decode
    from headwise.fast.paths import side_by_side

    q, (k, v) = made(texts, HEADS, 128), side_by_side(made, texts, 8, places, 128, 128)
    tile = Tile(places=128, warps=4, stages=3)
    found: dict[str, Callable[[], Any]] = {
        "uncut, ours": partial(flash_decode, q, k, v, *limits(texts, places), SCALING, tile=tile)
    }
    k, v = made(2, texts, 8, places, 128).unbind()

    def fused(backend: SDPBackend) -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)

    found["uncut, cuDNN"] = partial(fused, SDPBackend.CUDNN_ATTENTION)
    found["uncut, flash"] = partial(fused, SDPBackend.FLASH_ATTENTION)
    flex = torch.compile(flex_attention, dynamic=False)
    found["uncut, flex"] = lambda: flex(q[:, :, None], k, v, enable_gqa=True)
    return found


def measure(texts: int, places: int) -> list[dict[str, Any]]:
    """Rows of the result, one per way."""
    from headwise.fast.code_beside import CodeDecode

    whole = texts * places * UNCUT
    ways, sizes = uncut_ways(texts, places), {}
    k, v = made(texts, 1, places, 2 * POOLED).split(POOLED, -1)
    given = (made(texts, HEADS, 1, POOLED), k, v, Seen(*limits(texts, places), scaling=SCALING))
    ways["pooled 50%"] = partial(quickest(case_of(*given)), *given)
    sizes["pooled 50%"] = texts * places * POOLED * 4
    for name, counts in CODES.items():
        layout = CodeLayout(RowCoder(counts, ROW))
        sides = [drawn(layout, keys, texts, places) for keys in (True, False)]
        decode, wide = CodeDecode(layout, layout, WHOLE, NEAR), made(texts, HEADS, ROW) * 0.1
        ways[name] = partial(decode, wide, *sides, *limits(texts, places), SCALING)
        sizes[name] = sum(x.nbytes for side in sides for x in side.buffers())
    times = in_turns(ways)
    best = min(found["ms"] for name, found in times.items() if name.startswith("uncut"))
    return [
        {
            "way": name, "texts": texts, "places": places, "bytes": sizes.get(name, whole), **found,
            "times_uncut": best / found["ms"],
        }
        for name, found in times.items()
    ]  # fmt: skip


def section(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    lines = []
    for row in result["rows"]:
        if row["way"].startswith("copy"):  # of an older result: copies that are no measure of what memory can do
            continue
        share = row["bytes"] / (row["texts"] * row["places"] * UNCUT)
        speed = row["bytes"] / row["ms"] / 1e9
        lines.append(
            f"| {row['texts']} x {row['places'] // 1024}k | {row['way']} | {share:.1%} | {row['ms']:.3f} "
            f"({row['low']:.3f} to {row['high']:.3f}) | {row['times_uncut']:.2f} | {speed:.2f} |"
        )
    errors = ", ".join(f"{name} {error:.2%}" for name, error in result["errors"].items())
    told = [
        f"`python benchmarks/rows.py`, {result['hardware']}, {result['date']}, commit {result['commit']}, torch",
        f"{result['versions']['torch']}. Attention of one new token, 32 query heads. Uncut: 8 key/value heads of 128",
        "in bfloat16. Pooled: rows of 512 keys and 512 values for all heads. Coded: rows of 1,024 keys and 1,024",
        "values in codes of 8, 4 and 2 bits (all widths: of 8 to 1) with their scales, and the first 4 and newest 32",
        f"tokens. Both as `optimise=True` reads them. Low and high over {result['rounds']} rounds,",
        "all ways alternating; the fastest uncut way is the baseline. The section above has the speed of a copy.",
        "At short contexts most of the time goes into starting kernels: coded rows need five. Bytes are those of the",
        f"cache. Difference from plain attention in double precision: {errors}.",
        *_prototype(),
    ]
    head = "| texts x tokens | | bytes | ms | times uncut's speed | TB/s |"
    table = [head, "| " + " | ".join(["---"] * 6) + " |", *lines]
    return "\n".join(["## Rows that heads share", "", *told, "", *table, *variants()]) + "\n"


def _prototype() -> list[str]:
    """What CUDA kernels reached that took neither all widths nor first and newest tokens apart."""
    if not PROTOTYPE.exists():
        return []
    old = json.loads(PROTOTYPE.read_text())
    size = SIZES[0]
    rows = [row for row in old["rows"] if (row["texts"], row["places"]) == size]
    reached = ", ".join(f"{row['way']} {row['times_uncut']:.2f} times uncut's speed" for row in rows)
    return [
        f"A prototype in CUDA of {old['date']} (commit {old['commit']}) was faster, but read codes of 8, 4 and 2 bits",
        f"only, in whole groups, and no first or newest tokens: at {size[0]} x {size[1] // 1024}k {reached}.",
    ]


def main() -> None:
    """Measure, print and record after every size."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args()
    result: dict[str, Any] = {
        "hardware": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "versions": {"torch": torch.__version__},
        "rounds": ROUNDS,
        "errors": checks(),
        "rows": [],
    }
    print(result["errors"], flush=True)
    for texts, places in SIZES:
        result["rows"] += measure(texts, places)
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
        torch.cuda.empty_cache()
    print(section(result))


if __name__ == "__main__":
    main()
