"""Ways to build the kernels for rows that query heads share, side by side, and where their time goes.

python benchmarks/row_variants.py --out FOLDER     # on a CUDA device; writes FOLDER/row-variants.json

Each way is checked against plain attention in double precision first. `stages` has milliseconds of every kernel by the
profiler, `without` those of all calls if one kernel is left out. A way that fails is recorded with its error.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from provenance import commit
from row_page import RESULT
from rows import CODES, HEADS, POOLED, ROW, SCALING, drawn, in_turns, limits, made, numbers, off, plain, uncut_ways

from headwise.fast.code_layout import CodeLayout
from headwise.runtime.cache_headwise import NEAR, WHOLE
from headwise.runtime.coder_headwise import RowCoder

TEXTS, PLACES, WORKERS, TIMES = 32, 32768, 12, 3
LONGEST = 60.0  # seconds for building
KERNELS = ("_queries", "_beside", "_combine")
PLAIN: dict[str, Any] = {"places": 64, "warps": 4, "programs": 2}
AHEAD: dict[str, Any] = {**PLAIN, "ahead": 4, "sum_ahead": 3}  # the fastest way so far
WAYS: list[dict[str, Any]] = [  # the first is what others are compared with; then the most wanted
    PLAIN,
    AHEAD,
    {**AHEAD, "programs": 3},
    {**PLAIN, "ahead": 4},
    {**PLAIN, "sum_ahead": 3},
    {**PLAIN, "stages": 3},
    {},
]
POOLED_TILES: list[dict[str, Any]] = [
    {"places": 32, "warps": 4, "stages": 2, "programs": 8},
    {"places": 32, "warps": 4, "stages": 2, "programs": 2, "even": True},
]


def named(how: dict[str, Any]) -> str:
    return " ".join(f"{name}={x}" for name, x in how.items()) or "as it is"


def coded_way(name: str, how: dict[str, Any], texts: int, places: int, held: dict[str, Any]) -> Callable[[], Any]:
    """A call of all kernels for rows in bits; `held` keeps the cache of each case."""
    from headwise.fast.code_beside import CodeDecode
    from headwise.fast.code_decode import CodeTile

    layout = CodeLayout(RowCoder(CODES[name], ROW))
    if name not in held:
        held[name] = [drawn(layout, keys, texts, places) for keys in (True, False)], made(texts, HEADS, ROW) * 0.1
    sides, q = held[name]
    decode = CodeDecode(layout, layout, WHOLE, NEAR, CodeTile(**how))
    return partial(decode, q, *sides, *limits(texts, places), SCALING)


def coded_error(name: str, how: dict[str, Any], held: dict[str, Any]) -> float:
    """How far a way is off plain attention, relatively, at odd lengths and starts."""
    from headwise.fast.code_beside import CodeDecode
    from headwise.fast.code_decode import CodeTile

    texts, places = 3, 1024
    ends, starts = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ((1024, 700, 321), (0, 5, 70)))
    layout = CodeLayout(RowCoder(CODES[name], ROW))
    if name not in held:
        sides, q = [drawn(layout, keys, texts, places) for keys in (True, False)], made(texts, HEADS, ROW) * 0.1
        held[name] = sides, q, plain(q, *(numbers(side, ends, starts) for side in sides), ends, starts)
    sides, q, wanted = held[name]
    return off(CodeDecode(layout, layout, WHOLE, NEAR, CodeTile(**how))(q, *sides, ends, starts, SCALING), wanted)


def pooled_way(how: dict[str, Any], texts: int, places: int, held: dict[str, Any]) -> Callable[[], Any]:
    from headwise.fast.flash_decode import Tile
    from headwise.fast.row_decode import row_decode

    if not held:
        held["rows"] = *made(texts, 1, places, 2 * POOLED).split(POOLED, -1), made(texts, HEADS, POOLED)
    k, v, q = held["rows"]
    return partial(row_decode, q, k, v, *limits(texts, places), SCALING, tile=Tile(**how))


def pooled_error(how: dict[str, Any]) -> float:
    held: dict[str, Any] = {}
    found, (k, v, q) = pooled_way(how, 3, 1024, held)(), held["rows"]
    return off(found, plain(q, k[:, 0], v[:, 0], *limits(3, 1024)))


def stages(ways: dict[str, Callable[[], Any]]) -> dict[str, dict[str, Any]]:
    """Milliseconds of every kernel of ways that have run before, by the profiler. Each call ends with `_combine`."""
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for work in ways.values():
                for _ in range(TIMES):
                    work()
            torch.cuda.synchronize()
        kernels = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        calls: list[Counter[str]] = [Counter()]
        for event in sorted(kernels, key=lambda event: event.time_range.start):
            name = event.name.split("(")[0][:40]
            calls[-1][name] += event.device_time_total / 1000
            if name == "_combine":
                calls.append(Counter())
        if len(calls) != TIMES * len(ways) + 1:
            raise RuntimeError(f"{len(calls) - 1} calls were seen, not {TIMES * len(ways)}")
    except Exception as error:
        return {name: {"failed": f"{type(error).__name__}: {str(error)[-300:]}"} for name in ways}
    own = [calls[i * TIMES : (i + 1) * TIMES] for i in range(len(ways))]
    return {
        name: {kernel: round(statistics.median(call[kernel] for call in some), 4) for kernel in some[0]}
        for name, some in zip(ways, own, strict=True)
    }


def without(work: Callable[[], Any]) -> dict[str, Callable[[], Any]]:
    """The same call with one kernel left out: its results are wrong, its time says what the kernel takes."""
    import headwise.fast.code_beside as module

    def less(kernel: str) -> Any:
        kept = getattr(module, kernel)
        setattr(module, kernel, _Nothing())
        try:
            return work()
        finally:
            setattr(module, kernel, kept)

    return {f"without {kernel}": partial(less, kernel) for kernel in KERNELS}


class _Nothing:
    """A kernel that does nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *given, **more: None


def probe(out: Path) -> None:
    """Times of kernels that take words as numbers, without unpacking: what reading and products take by themselves."""
    import triton
    import triton.language as tl
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    from headwise.fast import code_ahead, code_decode, code_sums

    @triton.jit
    def raw(words, scale, KIND: tl.constexpr, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
        return words.to(tl.float16, bitcast=True)

    @gluon.jit
    def raw_ahead(words, scale, KIND: gl.constexpr):  # type: ignore[no-untyped-def]
        return words.to(gl.float16, bitcast=True)

    code_decode._scaled = code_sums._scaled = raw
    code_ahead._scaled = raw_ahead
    held: dict[str, Any] = {}
    ways = {named(how): coded_way("coded 25%", how, TEXTS, PLACES, held) for how in (AHEAD, PLAIN)}
    for work in ways.values():
        work()
    out.write_text(json.dumps(stages(ways)))


def probed() -> Any:
    """What `probe` found, in a process of its own."""
    out = Path(tempfile.mkdtemp()) / "probe.json"
    try:
        subprocess.run([sys.executable, __file__, "--probe", str(out)], check=True, timeout=40)
    except (subprocess.SubprocessError, OSError) as error:
        return f"failed: {error}"
    return json.loads(out.read_text())


def tasks() -> list[tuple[str, dict[str, Any]]]:
    """All ways: a case and how its kernels are built, the most wanted first."""
    coded = [(name, how) for how in WAYS for name in CODES]
    return [("pooled 50%", how) for how in POOLED_TILES] + coded


def warm(folder: Path, part: int, first: int) -> None:
    """Build kernels for some ways, which leaves them in Triton's cache, and run them once.

    What fails is written into a file. A kernel that broke the device's state is behind us in a fresh process.
    """
    held: dict[str, Any] = {}
    own = tasks()[part::WORKERS]
    for number in range(first, len(own)):
        name, how = own[number]
        note = folder / f"way-{part}-{number}.txt"
        note.write_text("it was begun and did not end")
        try:
            pooled_error(how) if name.startswith("pooled") else coded_error(name, how, held)
            torch.cuda.synchronize()
            note.unlink()
        except Exception as error:
            note.write_text(f"{type(error).__name__}: {str(error)[-600:]}")
            print(name, named(how), type(error).__name__, str(error)[:200], file=sys.stderr, flush=True)
            if "CUDA error" in str(error):
                again = ["--warm", str(part), "--first", str(number + 1), "--out", str(folder)]
                os.execv(sys.executable, [sys.executable, __file__, *again])


def built() -> dict[tuple[str, str], str]:
    """Build everything in parallel; by case and way, what failed."""
    folder = Path(tempfile.mkdtemp())
    command = [sys.executable, __file__, "--out", str(folder), "--warm"]
    workers = [subprocess.Popen([*command, str(i)]) for i in range(WORKERS)]
    ends_at = time.time() + LONGEST
    for worker in workers:
        try:
            worker.wait(max(1.0, ends_at - time.time()))
        except subprocess.TimeoutExpired:
            worker.kill()
    failed = {}
    for part in range(WORKERS):
        for number, (name, how) in enumerate(tasks()[part::WORKERS]):
            note = folder / f"way-{part}-{number}.txt"
            if note.exists():
                failed[name, named(how)] = note.read_text()
    return failed


def checked(name: str, how: dict[str, Any], held: dict[str, Any], failed: dict[tuple[str, str], str]) -> dict[str, Any]:
    if (name, named(how)) in failed:
        return {"failed": failed[name, named(how)]}
    try:
        error = pooled_error(how) if name.startswith("pooled") else coded_error(name, how, held)
        return {"error": error}
    except Exception as error:  # what compiling may raise is not listed anywhere
        torch.cuda.synchronize()
        return {"failed": f"{type(error).__name__}: {str(error)[-600:]}"}


def measure(
    result: dict[str, Any], case: str, failed: dict[tuple[str, str], str], ends_at: float, save: Callable[[], None]
) -> None:
    """All ways of a case in turns, beside uncut attention, and the stages of coded ones."""
    small: dict[str, Any] = {}
    large: dict[str, Any] = {}
    ways = {name: way for name, way in uncut_ways(TEXTS, PLACES).items() if name in ("uncut, ours", "uncut, cuDNN")}
    rows = []
    for how in [how for name, how in tasks() if name == case]:
        row = {"case": case, "how": how, **checked(case, how, small, failed)}
        rows.append(row)
        if "failed" not in row and time.time() < ends_at:
            pooled = case.startswith("pooled")
            way = pooled_way(how, TEXTS, PLACES, large) if pooled else coded_way(case, how, TEXTS, PLACES, large)
            try:
                found = way().double()
                large.setdefault("found", found)
                row["like the first"] = off(found, large["found"])  # at full size: of a race, both are not alike
                ways[named(how)] = way
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {str(error)[-300:]}"
        result["rows"] = [old for old in result["rows"] if old["case"] != case] + rows
        save()
    own = {named(row["how"]): row for row in rows if named(row["how"]) in ways}
    for name, found in stages({name: ways[name] for name in own}).items():
        own[name]["stages"] = found
    if not case.startswith("pooled") and named(AHEAD) in own:
        ways |= without(ways[named(AHEAD)])
    times = in_turns(ways)
    best = min((x["ms"] for name, x in times.items() if name.startswith("uncut")), default=float("nan"))
    for row in rows:
        if found := times.get(named(row["how"])):
            row |= {**found, "times_uncut": best / found["ms"]}
    result["rows"] += [
        {"case": case, "way": name, **x} for name, x in times.items() if name[:6] in ("uncut,", "withou")
    ]
    save()
    for row in sorted(rows, key=lambda row: row.get("ms", 1e9)):
        told = (
            row.get("failed", "")[-150:]
            or f"{row.get('ms', 0):.3f} ms {row.get('times_uncut', 0):.2f} off {row['error']:.2%}"
        )
        print(f"{case} | {named(row['how'])} | {told} | {row.get('stages')}", flush=True)
    for name, x in times.items():
        if name[:6] in ("uncut,", "withou"):
            print(f"{case} | {name} | {x['ms']:.3f} ms", flush=True)


def main() -> None:
    """Build all kernels in parallel, then check and time case by case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--warm", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--probe", type=Path)
    parser.add_argument("--seconds", type=float, default=100.0, help="after which no more ways are begun")
    asked = parser.parse_args()
    if asked.warm is not None:
        return warm(asked.out, asked.warm, asked.first)
    if asked.probe is not None:
        return probe(asked.probe)
    start = time.time()
    failed = built()
    asked.out.mkdir(parents=True, exist_ok=True)
    print(f"built in {time.time() - start:.0f} s", flush=True)
    result: dict[str, Any] = {
        "hardware": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"), "commit": commit(),
        "versions": {"torch": torch.__version__}, "texts": TEXTS, "places": PLACES,
        "built_seconds": time.time() - start, "rows": [],
    }  # fmt: skip

    def save() -> None:
        made = asked.out / f"{RESULT.name}.new"
        made.write_text(json.dumps(result, indent=1) + "\n")
        os.replace(made, asked.out / RESULT.name)

    for case in ("coded 25%", "coded 12.5%", "pooled 50%", "coded 25%, all widths"):
        measure(result, case, failed, start + asked.seconds, save)
        torch.cuda.empty_cache()
    result["without unpacking"] = probed()
    save()
    print("without unpacking:", result["without unpacking"], flush=True)
    print(f"all in {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
