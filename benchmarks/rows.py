"""Decode attention over rows that query heads share, against uncut attention and against copying the bytes.

python benchmarks/rows.py            # on a CUDA device; writes benchmarks/results/rows.json
python benchmarks/rows.py --tune     # tries how our kernels may be built, at the largest size, and prints the best

32 query heads; uncut: 8 key/value heads of 128, bfloat16. Pooled rows at 50%: 512 keys and 512 values of 16 bits for
all heads. Coded rows: up to 1,024 keys and as many values in 1 to 8 bits, in about 25% and 12.5% of the uncut bytes;
`even` has only widths of 2, 4 and 8, `mixed` all of them. Every kernel is checked against plain attention first.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from provenance import commit
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from headwise.fast import row_decode as rows
from headwise.fast.flash_decode import Tile as UncutTile
from headwise.fast.flash_decode import flash_decode
from headwise.fast.paths import side_by_side
from headwise.fast.row_packing import Packing, packing, repacked

RESULT = Path(__file__).parent / "results" / "rows.json"
HEADS, GROUPS, WIDTH, DTYPE = 32, 8, 128, torch.bfloat16
SIZES = ((32, 32768), (16, 32768), (8, 8192), (1, 2048))  # texts, places
POOLED = 512
CODES = {
    "25% even": {8: 128, 4: 512, 2: 384},
    "25% mixed": {8: 48, 7: 61, 6: 117, 5: 151, 4: 203, 3: 187, 2: 131, 1: 66},
    "12.5% even": {8: 32, 4: 256, 2: 320},
    "12.5% mixed": {8: 16, 6: 32, 5: 48, 4: 128, 3: 128, 2: 192, 1: 128},
}
REPEATS, CALLS = 5, 5
UNCUT = (UncutTile(), UncutTile(places=64, warps=4, stages=3, programs=4), UncutTile(places=128, warps=8, stages=3))
ROW_TILES = [
    rows.Tile(places, warps, stages, programs, swap)
    for places, warps, stages, swap in (
        (32, 4, 2, False), (32, 4, 3, False), (32, 8, 2, False), (32, 8, 3, False), (64, 8, 2, False),
        (16, 4, 4, False), (16, 4, 3, False), (32, 8, 2, True), (32, 8, 3, True), (64, 8, 1, True),
    )
    for programs in (1, 2, 4)
]  # fmt: skip
SCORE_TILES = [rows.Tile(n, w, s, p) for (n, w), s, p in product(((64, 4), (128, 8)), (1, 2, 3), (1, 2, 4))]
SUM_TILES = [rows.Tile(64, 4, s, p, columns=c) for s, c, p in product((1, 2, 3, 4), (4, 8), (2, 3, 4))]


def clock(work: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds per call of a captured graph, by the device's own clock: median, low and high over repeats."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            work()
    graph.replay()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / CALLS)
    return {"ms": statistics.median(times), "low": min(times), "high": max(times)}


def tried(name: str, work: Callable[[], Any]) -> dict[str, Any]:
    """The times of one way, or why there are none: the others go on."""
    try:
        return clock(work)
    except Exception as error:
        torch.cuda.synchronize()
        print(f"  {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def copied(size: int) -> dict[str, Any]:
    """Copying so many bytes: half of them read and half written, which moves as many bytes as reading all."""
    x = torch.empty(size // 2, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return tried("copy", partial(y.copy_, x))


def limits(texts: int, places: int) -> tuple[torch.Tensor, torch.Tensor]:
    ends = torch.full((texts,), places, dtype=torch.int32, device="cuda")
    return ends, ends * 0


def queries(texts: int, width: int) -> torch.Tensor:
    return torch.randn(texts, HEADS, width, device="cuda", dtype=DTYPE)


def uncut(texts: int, places: int, flexible: bool) -> dict[str, dict[str, Any]]:
    """Attention over all keys and values of 8 heads: ours, and PyTorch's kernels at their best, without a mask."""
    made = partial(torch.randn, device="cuda", dtype=DTYPE)
    q, (k, v) = queries(texts, WIDTH), side_by_side(made, texts, GROUPS, places, WIDTH, WIDTH)
    found, seen = {}, limits(texts, places)
    for number, tile in enumerate(UNCUT):
        name = f"flash_decode {number}"
        found[name] = tried(name, partial(flash_decode, q, k, v, *seen, WIDTH**-0.5, tile=tile))
    k, v = k.contiguous(), v.contiguous()
    for name, backend in (("sdpa cudnn", SDPBackend.CUDNN_ATTENTION), ("sdpa flash", SDPBackend.FLASH_ATTENTION)):

        def run(backend: SDPBackend = backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)

        found[name] = tried(name, run)
    if flexible:
        found["flex"] = tried("flex", partial(flex(), q[:, :, None], k, v))
    return found


def flex() -> Callable[..., Any]:
    """PyTorch's flex attention, compiled; one that cannot be had raises when it is called."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        from torch.nn.attention.flex_attention import flex_attention

        if not made:
            made.append(torch.compile(flex_attention, dynamic=False))
        return made[0](q, k, v, enable_gqa=True)

    made: list[Any] = []
    return run


def pooled(texts: int, places: int, apart: bool) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of 16 bits, side by side or apart."""
    made = partial(torch.randn, device="cuda", dtype=DTYPE)
    if apart:
        k, v = made(2, texts, 1, places, POOLED).unbind()
    else:
        k, v = made(texts, 1, places, 2 * POOLED).split(POOLED, -1)
    return queries(texts, POOLED), k, v


def code(name: str) -> Packing:
    return packing(tuple((str(bits), count) for bits, count in CODES[name].items()))


def coded(name: str, texts: int, places: int) -> tuple[torch.Tensor, rows.CodedRows]:
    """Queries and random codes: 4,096 places that were written, repeated."""
    packed = code(name)
    known = rows.coded_rows(packed, packed, texts, 1, places, "cuda")
    some = min(places, 4096)
    for words, scales in (known[2:4], known[4:6]):
        x = torch.randn(1, 1, some, packed.size, device="cuda", dtype=DTYPE)
        small = rows.coded_rows(packed, packed, 1, 1, some, "cuda")
        rows.write_rows(packed, x, small.k_words, small.k_scales, torch.arange(some, device="cuda"))
        words.unflatten(2, (-1, some)).copy_(small.k_words.unsqueeze(2))
        scales.unflatten(2, (-1, some // 64)).copy_(small.k_scales.unsqueeze(2))
    return queries(texts, packed.size), known


def whole_tokens(texts: int, width: int) -> rows.Whole:
    made = partial(torch.randn, device="cuda", dtype=DTYPE)
    return rows.Whole(made(texts, 1, 4, width), made(texts, 1, 32, width))


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: list[int], starts: list[int]) -> torch.Tensor:
    out = []
    for text, (start, end) in enumerate(zip(starts, ends, strict=True)):
        scores = q[text].double() @ k[text, 0, start:end].double().T * q.shape[2] ** -0.5
        out.append(scores.softmax(-1) @ v[text, 0, start:end].double())
    return torch.stack(out)


def checks() -> dict[str, Any]:
    """Largest errors relative to the largest output, on small texts; what fails to run says so."""
    ends, starts = [900, 513], [0, 70]
    seen: Any = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in (ends, starts)]

    def off(got: torch.Tensor, want: torch.Tensor) -> float:
        return ((got - want).abs().max() / want.abs().max()).item()

    def of_rows(swap: bool) -> float:
        q, k, v = pooled(2, 1024, apart=False)
        tile = rows.ROW_TILE._replace(swap=swap)
        return off(rows.row_decode(q, k, v, *seen, POOLED**-0.5, tile=tile), plain(q, k, v, ends, starts))

    def of_codes(name: str) -> float:
        packed = code(name)
        coder, known = packed.coder, rows.coded_rows(packed, packed, 2, 1, 1024, "cuda")
        k, v = (coder.encode(torch.randn(2, 1, 1024, packed.size, device="cuda")) for _ in range(2))
        for room, x in ((known[2:4], k), (known[4:6], v)):
            for target, source in zip(room, repacked(packed, x), strict=True):
                target.copy_(source)
        q = queries(2, packed.size)
        want = plain(q, *(coder.decode(x, torch.float32) for x in (k, v)), ends, starts)
        return off(rows.coded_decode(q, known, *seen, packed.size**-0.5), want)

    def of_writing(name: str) -> float:
        packed = code(name)
        x, known = (
            torch.randn(2, 1, 1024, packed.size, device="cuda"),
            rows.coded_rows(packed, packed, 2, 1, 1024, "cuda"),
        )
        rows.write_rows(packed, x, known.k_words, known.k_scales, torch.arange(1024, device="cuda"))
        words, scales = repacked(packed, packed.coder.encode(x))
        return max((words != known.k_words).float().mean().item(), (scales != known.k_scales).float().mean().item())

    every: dict[str, Callable[[], float]] = {f"rows, swap {swap}": partial(of_rows, swap) for swap in (False, True)}
    every |= {f"codes {name}": partial(of_codes, name) for name in CODES}
    every |= {f"writing {name}": partial(of_writing, name) for name in CODES}
    found: dict[str, Any] = {}
    for name, check in every.items():
        try:
            found[name] = check()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error)[:300]}"
        print(f"  error of {name}: {found[name]}", flush=True)
    return found


def ways(texts: int, places: int, flexible: bool) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Every way with the bytes that it reads and its times; one at a time is in memory."""
    everything = texts * places * GROUPS * 2 * WIDTH * 2
    yield "copy of uncut", everything, copied(everything)
    for name, times in uncut(texts, places, flexible).items():
        yield f"uncut {name}", everything, times
    seen = limits(texts, places)
    for apart in (False, True):
        q, k, v = pooled(texts, places, apart)
        work = partial(rows.row_decode, q, k, v, *seen, POOLED**-0.5)
        yield f"pooled 50%, {'apart' if apart else 'side by side'}", everything // 2, tried("pooled", work)
    del q, k, v, work
    for name in CODES:
        packed = code(name)
        size = texts * places * 2 * packed.bytes
        q, known = coded(name, texts, places)
        whole = whole_tokens(texts, 2 * packed.size)
        work = partial(rows.coded_decode, q, known, *seen, packed.size**-0.5, whole=whole)
        yield f"coded {name}", size, tried(name, work)
        yield f"copy of coded {name}", size, copied(size)
        x = torch.randn(texts, 1, 1, packed.size, device="cuda", dtype=DTYPE)
        at = torch.tensor([places - 1], device="cuda")
        write = partial(rows.write_rows, packed, x, known.k_words, known.k_scales, at)
        yield f"write of one token, {name}", 0, tried("write", write)
        del q, known, whole, work, write


def measured(texts: int, places: int, flexible: bool) -> list[dict[str, Any]]:
    """All ways at one size, told against the quickest uncut one and against a copy."""
    found = [{"way": way, "bytes": size, **times} for way, size, times in ways(texts, places, flexible)]
    best = min((row["ms"] for row in found if row["way"].startswith("uncut") and "ms" in row), default=None)
    speed = next((row["bytes"] / row["ms"] for row in found if row["way"] == "copy of uncut" and "ms" in row), None)
    for row in found:
        if "ms" in row and best and speed:
            row |= {"times_faster": best / row["ms"], "of_copy": row["bytes"] / row["ms"] / speed}
            span = f"{row['ms']:.4f} ms ({row['low']:.4f} to {row['high']:.4f})"
            print(f"  {row['way']}: {span}, {row['times_faster']:.2f}x, {row['of_copy']:.0%} of copy", flush=True)
    return found


def candidates() -> list[tuple[str, Any]]:
    """Ways to build kernels: of rows of 16 bits, and both kernels of coded ones."""
    built: list[tuple[str, Any]] = [("rows", tile) for tile in ROW_TILES]
    for name in ("25% mixed", "12.5% mixed"):
        built += [(f"score {name}", tile) for tile in SCORE_TILES]
        built += [(f"sum {name}", tile) for tile in SUM_TILES]
    return built


def work_of(kind: str, tile: Any, texts: int, places: int, held: dict[Any, Any]) -> Callable[[], Any]:
    """One call of a way to build a kernel; the other kernel of coded rows stays as it is."""
    seen = limits(texts, places)
    name = kind.partition(" ")[2]
    if (name, texts, places) not in held:
        held.clear()
        held[name, texts, places] = coded(name, texts, places) if name else pooled(texts, places, apart=False)
    given: Any = held[name, texts, places]
    decode: Any = rows.coded_decode
    if kind.startswith("code"):  # all that is measured of a code
        whole = whole_tokens(texts, 2 * code(name).size)
        return partial(decode, *given, *seen, code(name).size ** -0.5, whole=whole)
    if kind == "rows":
        decode = rows.row_decode
        return partial(decode, *given, *seen, POOLED**-0.5, tile=tile)
    chosen = {"score_tile" if kind.startswith("score") else "sum_tile": tile}
    return partial(decode, *given, *seen, code(name).size ** -0.5, **chosen)


def compile_one(job: tuple[str, Any]) -> None:
    """Build a kernel in a process of its own; Triton keeps it on disk."""
    try:
        work_of(*job, 2, 4096, {})()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"  {job}: {type(error).__name__}: {str(error)[:200]}", flush=True)


def compile_all(jobs: list[tuple[str, Any]]) -> None:
    """Build kernels side by side; how many programs run makes no difference to them."""
    distinct = dict.fromkeys((kind, tile and tile._replace(programs=2)) for kind, tile in jobs)
    with multiprocessing.get_context("spawn").Pool(min(12, os.cpu_count() or 1)) as pool:
        pool.map(compile_one, distinct, chunksize=1)


def tune(texts: int, places: int) -> list[dict[str, Any]]:
    """Times of all ways to build kernels, the quickest of every kind printed."""
    found: list[dict[str, Any]] = []
    held: dict[Any, Any] = {}
    for kind, tile in candidates():
        times = tried(f"{kind} {tile}", work_of(kind, tile, texts, places, held))
        found.append({"kind": kind, "tile": tile._asdict(), **times})
    for kind in dict.fromkeys(kind for kind, _ in candidates()):
        best = sorted((row for row in found if row["kind"] == kind and "ms" in row), key=lambda row: row["ms"])[:4]
        for row in best:
            print(f"  {kind}: {row['ms']:.4f} ms, {row['tile']}", flush=True)
    return found


def write(result: dict[str, Any], to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    new = to.with_suffix(".new")
    new.write_text(json.dumps(result, indent=1) + "\n")
    new.replace(to)


def main() -> None:
    """Check, measure, print, write after every size."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="how many of them, the largest first")
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args()
    torch.manual_seed(0)
    jobs: list[tuple[str, Any]] = [(f"code {name}", None) for name in CODES]
    jobs += [("rows", rows.ROW_TILE._replace(swap=swap)) for swap in (False, True)]
    compile_all(jobs + (candidates() if asked.tune else []))
    result: dict[str, Any] = {
        "hardware": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "settings": {"query_heads": HEADS, "kv_heads": GROUPS, "head_dim": WIDTH, "pooled": POOLED, "codes": CODES,
                     "bytes": {name: (code(name).bytes, code(name).coder.bytes) for name in CODES},
                     "repeats": REPEATS, "calls": CALLS},
        "errors": checks(),
        "sizes": [],
    }  # fmt: skip
    if asked.tune:
        result["tune"] = tune(*SIZES[0])
        write(result, asked.out)
    for number, (texts, places) in enumerate(SIZES[: asked.sizes]):
        print(f"{texts} x {places}", flush=True)
        torch.cuda.empty_cache()
        result["sizes"].append({"texts": texts, "places": places, "ways": measured(texts, places, number == 0)})
        write(result, asked.out)


if __name__ == "__main__":
    main()
