"""Attention kernels against the ideal, by sizes of heads: decode against copying bytes, prefill against a product.

python benchmarks/attention.py            # on a CUDA device; writes benchmarks/results/attention.json
python benchmarks/attention.py --sweep    # tries how our kernel may be built

Decode: 32 rows of 32k places; prefill: 4 rows of 8k tokens; 32 query heads share 8 key/value heads, bfloat16. Our
decode kernel reads keys and values side by side in one buffer, as our cache has them; the others get each contiguous,
which suits them best.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from headwise.devices import timed
from headwise.fast.paths import TILES, Seen, _split, decode_paths, prefill_paths, side_by_side

RESULT = Path(__file__).parent / "results" / "attention.json"
EQUAL = (128, 120, 112, 104, 96, 88, 80, 72, 64, 48, 56)
SIZES = [(d, d) for d in EQUAL] + [(48, 80), (64, 128), (128, 64), (80, 48), (56, 72), (96, 48), (48, 96)]
SIZES += [(72, 56), (56, 64), (120, 112)]
HEADS, GROUPS, DTYPE = 32, 8, torch.bfloat16
DECODE, PREFILL = (32, 32768), (4, 8192)  # rows, places
REPEATS = 5


def clock(work: Any, calls: int, captured: bool = False) -> dict[str, float]:
    """Milliseconds per call: median, low and high over repeats."""
    work()
    torch.cuda.synchronize()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                work()
        run = graph.replay
    else:

        def run() -> None:
            for _ in range(calls):
                work()

    run()
    times = []
    for _ in range(REPEATS):
        times.append(timed(run, torch.device("cuda"))[1] * 1e3 / calls)
    return {"ms": statistics.median(times), "low": min(times), "high": max(times)}


def ideal() -> dict[str, float]:
    """What the device does at best: bytes per second of a copy (read and written), and products per second."""
    x = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    copy = clock(partial(y.copy_, x), 5)["low"]
    del x, y
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=DTYPE) for _ in range(2))
    product = clock(lambda: a @ b, 10)["low"]
    return {"copy_bytes_per_s": 2 * 2**32 / copy * 1e3, "product_flops_per_s": 2 * 8192**3 / product * 1e3}


def drawn(rows: int, places: int, tokens: int, qk_dim: int, v_dim: int) -> tuple[Any, Any, Any, Seen]:
    made = partial(torch.randn, device="cuda", dtype=DTYPE)
    q, (k, v) = made(rows, HEADS, tokens, qk_dim), side_by_side(made, rows, GROUPS, places, qk_dim, v_dim)
    ends = torch.full((rows,), places, dtype=torch.int32, device="cuda")
    return q, k, v, Seen(ends, ends * 0, None if tokens == 1 else places, scaling=qk_dim**-0.5)


def decode(qk_dim: int, v_dim: int, ours: bool = False) -> dict[str, Any]:
    """Every path on one size; a path that refuses is left out."""
    q, k, v, seen = drawn(*DECODE, 1, qk_dim, v_dim)
    found, apart = {}, (k.contiguous(), v.contiguous())
    for name, path in decode_paths(q.device, qk_dim, v_dim).items():
        read = (k, v) if name.startswith("split") else apart
        if name in ("eager", "efficient") or (ours and not name.startswith("split")):  # the first two are far behind
            continue
        try:
            found[name] = clock(partial(path, q, *read, seen), 5, captured=True)
        except RuntimeError as error:
            print(f"  {name}: {str(error)[:90]}", flush=True)
    if ours:
        return found
    full = Seen(seen.ends_B, seen.starts_B, DECODE[1], scaling=seen.scaling)
    for name in ("cudnn", "flash"):  # without a mask, as if all rows were full: the rivals at their best
        try:
            found[f"{name}-unmasked"] = clock(partial(decode_paths(q.device, qk_dim, v_dim)[name], q, *apart, full), 5)
        except RuntimeError:
            continue
    return found


def prefill(qk_dim: int, v_dim: int) -> dict[str, Any]:
    """Times of every size for a prompt."""
    q, k, v, seen = drawn(*PREFILL, PREFILL[1], qk_dim, v_dim)
    k, v, found = k.contiguous(), v.contiguous(), {}
    for name, path in prefill_paths(q.device, qk_dim, v_dim).items():
        if name == "eager" or "efficient" in name:
            continue
        try:
            found[name] = clock(partial(path, q, k, v, seen), 3)
        except RuntimeError as error:
            print(f"  {name}: {str(error)[:90]}", flush=True)
    return found


def kv_bytes(qk_dim: int, v_dim: int) -> int:
    return DECODE[0] * DECODE[1] * GROUPS * (qk_dim + v_dim) * 2


def flops(qk_dim: int, v_dim: int) -> float:
    return PREFILL[0] * HEADS * PREFILL[1] ** 2 * (qk_dim + v_dim)  # causal: half of 2 * 2


def compile_one(size: tuple[int, int], tile: dict[str, Any]) -> None:
    """Build our kernel for a size, in a process of its own; Triton keeps it on disk."""
    q, k, v, seen = drawn(1, 8192, 1, *size)
    q, k, v = (x.expand(DECODE[0], -1, -1, -1) for x in (q, k, v))
    _split(q, k, v, Seen(*(x.repeat(DECODE[0]) for x in (seen.ends_B, seen.starts_B)), scaling=seen.scaling), **tile)


def _quietly(job: Any) -> None:
    try:
        compile_one(*job)
    except Exception as error:
        print(f"  {job}: {str(error)[:200]}", flush=True)


def compile_all(jobs: list[Any]) -> None:
    with multiprocessing.get_context("spawn").Pool(12) as pool:
        pool.map(_quietly, jobs, chunksize=3)


def sweep(compiled: bool, only_compile: bool) -> None:
    """Shares of copying that our kernel reaches by how it is built."""
    sizes = [(128, 128), (120, 120), (112, 112), (72, 72), (56, 72), (80, 48), (64, 64), (56, 56), (48, 48)]
    shapes = [(32, 2, 4), (64, 2, 3), (64, 2, 4), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 4, 3), (128, 8, 3)]
    every = [dict(places=n, warps=w, stages=s, cut=c) for (n, w, s), c in product(shapes, (True, False))]
    jobs = [(size, {**tile, "programs": p}) for size in sizes for tile in every for p in (4, 8, 16)]
    if not compiled:
        compile_all(jobs)
    if only_compile:
        return
    copy = ideal()["copy_bytes_per_s"]
    for size in sizes:
        q, k, v, seen = drawn(*DECODE, 1, *size)
        rows = []
        for tile in (tile for one, tile in jobs if one == size):
            try:
                ms = clock(partial(_split, q, k, v, seen, **tile), 3, captured=True)["ms"]
            except Exception as error:  # too large for the device
                print(size, tile, str(error)[:80])
                continue
            rows.append((kv_bytes(*size) / ms * 1e3 / copy, tile))
        for share, tile in sorted(rows, key=lambda row: -row[0])[:5]:
            print(size, f"{share:.3f}", tile, flush=True)


def best(times: dict[str, Any]) -> tuple[str, dict[str, float]]:
    """The quickest path that fast inference may take: one that it has, and that works where rows end anywhere."""
    able = {name: time for name, time in times.items() if name in TILES or not name.startswith("split")}
    return min(((n, t) for n, t in able.items() if "unmasked" not in n), key=lambda item: item[1]["ms"])


def findings(result: dict[str, Any]) -> list[str]:
    """What the rows say as a whole, for better or worse."""
    copy = result["ideal"]["copy_bytes_per_s"]
    times = {(row["qk_dim"], row["v_dim"]): best(row["decode"])[1]["ms"] for row in result["rows"]}
    shares = {size: kv_bytes(*size) / ms * 1e3 / copy for size, ms in times.items()}
    worst = min(shares, key=lambda size: shares[size])
    halves = {size: times[128, 128] / ms for size, ms in times.items() if sum(size) == 128}
    slower = [
        f"{k} / {v}"
        for (k, v), ms in times.items()
        if any(k <= more_k and v <= more_v and ms > 1.01 * other for (more_k, more_v), other in times.items())
    ]
    gains = halves.values() or [1.0]
    return [
        f"Half the cache: {min(gains):.2f} to {max(gains):.2f} times faster than 128 / 128.",
        f"Least of the ideal: {shares[worst]:.0%}, at {worst[0]} / {worst[1]}.",
        f"Sizes slower than a larger one, by more than 1%: {', '.join(slower) or 'none'}.",
    ]


def section(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    copy, product_rate = result["ideal"]["copy_bytes_per_s"], result["ideal"]["product_flops_per_s"]
    how, made = result["settings"], f"torch {result['versions']['torch']}"
    (rows, places), (prompts, tokens) = how["decode"], how["prefill"]
    full = next(row for row in result["rows"] if (row["qk_dim"], row["v_dim"]) == (128, 128))
    lines = []
    for row in result["rows"]:
        (name, ours), (read, prompt) = best(row["decode"]), best(row["prefill"])
        sizes = (row["qk_dim"], row["v_dim"])
        faster = best(full["decode"])[1]["ms"] / ours["ms"]
        lines.append(
            f"| {sizes[0]} / {sizes[1]} | {sum(sizes) / 256:.0%} | {ours['ms']:.3f} ({ours['low']:.3f} to "
            f"{ours['high']:.3f}) | {name} | {kv_bytes(*sizes) / ours['ms'] * 1e3 / copy:.0%} | {faster:.2f} | "
            f"{prompt['ms']:.2f} ({prompt['low']:.2f} to {prompt['high']:.2f}) | {read} | "
            f"{flops(*sizes) / prompt['ms'] * 1e3 / product_rate:.0%} |"
        )
    told = [
        f"`python benchmarks/attention.py`, {result['hardware']}, {result['date']}, {made}; bfloat16,",
        f"{how['query_heads']} query heads share {how['kv_heads']} key/value heads. Decode: {rows} rows of {places}",
        f"tokens; prefill: {prompts} rows of {tokens} tokens. The fastest of the kernels that fast inference measures;",
        f"low and high over {how['repeats']} repeats. The ideal time of decode is that of copying the same bytes",
        f"({copy / 1e12:.2f} TB/s read and written), that of prefill is that of a large matrix product",
        f"({product_rate / 1e12:.0f} TFLOP/s).",
        *findings(result),
    ]
    head = "queries and keys / values | cache | decode, ms | path | of ideal | times faster | prefill, ms | path"
    table = [f"| {head} | of ideal |", "| " + " | ".join(["---"] * 9) + " |", *lines]
    return "\n".join(["## Attention kernels", "", *told, "", *table]) + "\n"


def main() -> None:
    """Measure, print, write after every size."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--ours", action="store_true", help="measure our kernel anew where a result is there")
    parser.add_argument("--compile", action="store_true", help="only build kernels")
    parser.add_argument("--compiled", action="store_true", help="they are built")
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args()
    if asked.sweep:
        return sweep(asked.compiled, asked.compile)
    new: dict[str, Any] = {
        "hardware": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "settings": {"decode": DECODE, "prefill": PREFILL, "query_heads": HEADS, "kv_heads": GROUPS,
                     "dtype": "bfloat16", "repeats": REPEATS},
    }  # fmt: skip
    result = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    if any(result.get(key) != new[key] for key in ("hardware", "versions")):
        result = {**new, "ideal": ideal(), "rows": []}
    done = {(row["qk_dim"], row["v_dim"]) for row in result["rows"]}  # before a kill
    left = [size for size in SIZES if size not in done]
    for row in result["rows"] if asked.ours else []:
        row["decode"] |= decode(row["qk_dim"], row["v_dim"], ours=True)
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    if not asked.compiled:
        compile_all([(size, tile) for size in left for tile in TILES.values()])
    for qk_dim, v_dim in [] if asked.compile else left:
        row = {"qk_dim": qk_dim, "v_dim": v_dim, "decode": decode(qk_dim, v_dim), "prefill": prefill(qk_dim, v_dim)}
        result["rows"].append(row)
        share = kv_bytes(qk_dim, v_dim) / result["ideal"]["copy_bytes_per_s"] * 1e3
        print(qk_dim, v_dim, {n: f"{t['ms']:.3f} ({share / t['ms']:.2f})" for n, t in row["decode"].items()},
              {n: f"{t['ms']:.2f}" for n, t in row["prefill"].items()}, flush=True)  # fmt: skip
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
