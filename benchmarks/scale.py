"""Time and memory of whole runs, from probe to report, by the size of the model. Needs a CUDA device.

    python benchmarks/scale.py --shape 8b --work /large/disk --out benchmarks/results/scale.json
    python benchmarks/scale.py --shape 8b --limit 24 --work /large/disk --out benchmarks/results/scale.json
    python benchmarks/scale.py --model embedded --out benchmarks/results/scale.json
    python benchmarks/scale.py --growth --work /large/disk --out benchmarks/results/scale.json
    python benchmarks/scale.py --demo   # seconds of `headwise demo` on this machine, five times
    python benchmarks/scale.py --page   # rewrite the table of docs/SCALE.md from the committed results

A shape is a checkpoint of random bf16 weights, made shard by shard: what is measured is time and memory, not quality.
Every run has the settings of a command without options but those that its row names, and a process of its own. Seconds
and peaks are by stage: allocated memory of the device as torch counts it, resident memory of the host. `--limit` lets
torch have so many GiB of the device. `--growth` times probing, planning, cutting and healing alone, by tokens, layers
and width, each size once in a process of its own, and fits straight lines through the logarithms.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import same_plan
from provenance import commit
from streaming import make

ROOT = Path(__file__).parents[1]
PAGE, RESULT = ROOT / "docs" / "SCALE.md", ROOT / "benchmarks" / "results" / "scale.json"
START, END = "<!-- scale: printed by benchmarks/scale.py --page -->", "<!-- end of scale -->"
GIB = 1 << 30
MOVING = ("loading the model", "saving the model", "loading the new model", "reloading in a fresh process")
LLAMA = dict(vocab_size=128_256, max_position_embeddings=8_192, rope_theta=500_000.0, tie_word_embeddings=False)
SHAPES: dict[str, dict[str, Any]] = {
    "1b": dict(hidden_size=2048, intermediate_size=5632, num_attention_heads=32, num_key_value_heads=4,
               num_hidden_layers=22) | LLAMA | {"vocab_size": 32_000},
    "8b": dict(hidden_size=4096, intermediate_size=14_336, num_attention_heads=32, num_key_value_heads=8,
               num_hidden_layers=32) | LLAMA,
    "70b": dict(hidden_size=8192, intermediate_size=28_672, num_attention_heads=64, num_key_value_heads=8,
                num_hidden_layers=80) | LLAMA,
}  # fmt: skip
GROWN_LAYERS, GROWN_WIDTH, GROWN_TOKENS = 4, 4096, 65_536  # where they do not grow
GROWTH = {
    "tokens": (16_384, 32_768, 65_536, 131_072, 262_144),
    "layers": (2, 4, 8, 16),
    "width": (1024, 2048, 4096, 8192),
}


def grown(layers: int, width: int) -> dict[str, Any]:
    """A decoder of some width in the proportions of Llama-3: heads of 128, four queries a group, MLP 3.5 times."""
    heads = width // 128
    sizes = dict(hidden_size=width, intermediate_size=7 * width // 2, num_attention_heads=heads)
    return sizes | dict(num_key_value_heads=heads // 4, num_hidden_layers=layers) | LLAMA | {"vocab_size": 32_000}


class Stages:
    """Progress of a run, as seconds and peaks of every stage."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []
        self.began = time.perf_counter()

    def __call__(self, items: Sequence[Any], label: Any) -> Iterable[Any]:
        import torch

        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        yield from items
        name = label if isinstance(label, str) else label()
        seconds = time.perf_counter() - start
        self.found.append({"stage": name, "from": start - self.began, "seconds": seconds, **peaks()})
        print(f"{start - self.began:7.1f} s: {name}, {seconds:.1f} s", file=sys.stderr, flush=True)


def peaks() -> dict[str, float]:
    """GiB of the device since the last stage began, and of the host since the start."""
    import torch

    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"device_gib": torch.cuda.max_memory_allocated() / GIB, "host_gib": host / GIB}


def allow(limit: float | None) -> None:
    """Let torch have so many GiB of the device; all of it where no limit is given."""
    import torch

    if limit:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit * GIB / whole)


def run(model: str, out: str, settings: dict[str, Any], limit: float | None) -> dict[str, Any]:
    """One run in this process."""
    import torch

    from headwise import pipeline
    from headwise.checks import speed
    from headwise.runs.settings import Settings

    allow(limit)
    stages, start = Stages(), time.perf_counter()
    dossier = pipeline.run(Settings(model, **settings), out, stages)
    found = {"seconds": time.perf_counter() - start, "stages": stages.found}
    found |= {name: max(stage[name] for stage in stages.found) for name in ("device_gib", "host_gib")}
    checks = dossier.verdict.checks if dossier.verdict else ()
    return found | {
        "checks": {check.name: check.passed for check in checks},
        "hardware": speed.machine(torch.device("cuda")),
    }


def build(model: str, out: str, settings: dict[str, Any], limit: float | None) -> dict[str, Any]:
    """Probing, planning, cutting, healing and saving of one model that is loaded, in this process."""
    import torch

    from headwise import pipeline
    from headwise.checks import speed
    from headwise.heal import refit
    from headwise.runs.folder import RunFolder
    from headwise.runs.settings import Settings

    allow(limit)
    refit.WORTHWHILE = None  # type: ignore[assignment]  # healed at every size
    asked, folder, stages = Settings(model, **settings), RunFolder(out), Stages()
    with pipeline.claimed(asked, folder, "run", False):
        source = pipeline.source_of(asked, folder)
        torch.cuda.synchronize()
        start = time.perf_counter()
        pipeline.build(asked, folder, source, stages)
    found = {"seconds": time.perf_counter() - start, "stages": stages.found}
    return found | {"hardware": speed.machine(torch.device("cuda"))}


def in_child(
    model: str, name: str, out: Path, settings: dict[str, Any], limit: float | None, what: str = "run"
) -> dict[str, Any]:
    """`run` or `build` in a process of its own."""
    told = json.dumps([model, str(out), settings, limit])
    code = f"import json, scale, sys; print('RESULT' + json.dumps(scale.{what}(*json.loads(sys.argv[1]))))"
    command = [sys.executable, "-c", code, told]
    start, errors = time.perf_counter(), out.parent / "errors.txt"
    out.parent.mkdir(parents=True, exist_ok=True)
    with errors.open("w") as file:
        done = subprocess.run(command, stdout=-1, stderr=file, text=True, check=False, cwd=Path(__file__).parent)
    told = errors.read_text().strip()
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    about = {"name": name, "settings": settings, "limit_gib": limit, "process_seconds": time.perf_counter() - start}
    about |= {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "commit": commit()}
    if not lines:
        return about | {"why": told.splitlines()[-1][:300] if told else "no output"}
    return about | json.loads(lines[0][6:])


def grow(work: Path, out: Path) -> None:
    """Time `build` at every size of every axis; sizes that are there already are left out."""
    found = json.loads(out.read_text()) if out.exists() else {"rows": []}
    known = found.setdefault("growth", [])
    for axis, values in GROWTH.items():
        for value in values:
            sizes = dict(tokens=GROWN_TOKENS, layers=GROWN_LAYERS, width=GROWN_WIDTH) | {axis: value}
            if any(row["sizes"] == sizes and "why" not in row for row in known):
                continue
            model = work / f"grown-{sizes['layers']}-{sizes['width']}"
            if not model.exists():
                make(model, sizes["layers"], grown(sizes["layers"], sizes["width"]))
            settings = {"budgets": ("kv=50%",), "device": "cuda", "data": "stdlib", "tokens": sizes["tokens"]}
            shutil.rmtree(work / "run", ignore_errors=True)
            row = in_child(str(model), f"{axis} {value}", work / "run", settings, None, "build")
            known.append({"sizes": sizes} | row)
            out.write_text(json.dumps(found, indent=1) + "\n")
            print(axis, value, row.get("seconds", row.get("why")), flush=True)


def line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """The slope of the straight line through the logarithms, and the largest ratio of a point to it."""
    xs, ys = ([math.log(value) for value in column] for column in zip(*points, strict=True))
    slope, start = statistics.linear_regression(xs, ys)
    return slope, math.exp(max(abs(y - start - slope * x) for x, y in zip(xs, ys, strict=True)))


def of_growth(rows: list[dict[str, Any]]) -> list[str]:
    """What the page says about how time grows."""
    base = dict(tokens=GROWN_TOKENS, layers=GROWN_LAYERS, width=GROWN_WIDTH)
    told = ["", "## How time grows", ""]
    told += ["| grows | seconds of probing, planning, cutting and healing | slope | farthest from the line |"]
    told += ["| --- | --- | --- | --- |"]
    done = [row for row in rows if "seconds" in row]
    for axis in GROWTH:
        mine = [row for row in done if all(row["sizes"][o] == v for o, v in base.items() if o != axis)]
        moved = {row["sizes"][axis]: sum(s["seconds"] for s in row["stages"] if s["stage"] in MOVING) for row in mine}
        points = sorted((row["sizes"][axis], row["seconds"] - moved[row["sizes"][axis]]) for row in mine)
        if len(points) < 3:
            continue
        slope, off = line(points)
        cells = ", ".join(f"{value:,}: {seconds:.1f}" for value, seconds in points)
        told.append(f"| {axis} | {cells} | {slope:.2f} | {off:.2f} times |")
    last = done[-1]
    fixed = f"{GROWN_TOKENS:,} calibration tokens, {GROWN_LAYERS} layers, width {GROWN_WIDTH:,}"
    return [*told, "", f"Where they do not grow: {fixed}; kv=50%, text from files, saving left out, each size once. "
            f"{last['hardware']}, {last['date']}, commit {last['commit']}."]  # fmt: skip


def demo(times: int = 5) -> dict[str, Any]:
    """Seconds of `headwise demo`, each in a process and a folder of its own."""
    from provenance import hardware

    found = []
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            subprocess.run([sys.executable, "-m", "headwise", "demo"], cwd=folder, stdout=-3, stderr=-3, check=True)
            found.append(time.perf_counter() - start)
    when = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "commit": commit()}
    return {"seconds": found, **hardware(), **when}


def of_demo(found: dict[str, Any]) -> str:
    """What the page says about it."""
    low, middle, high = (f"{pick(found['seconds']):.0f}" for pick in (min, statistics.median, max))
    return (
        f"`make demo`, once installed: {middle} s ({low} to {high}, {len(found['seconds'])} times) on "
        f"{found['cores']} cores of {found['processor']}, without a GPU; {found['date']}, commit {found['commit']}."
    )


def table(results: dict[str, Any]) -> str:
    """The page's table, and under it the stages of every run."""
    if not results["rows"]:
        return "No results yet: see benchmarks/scale.py."
    names = ("run", "seconds", "without reading and writing weights", "GiB on the device", "GiB on the host", "checks")
    lines = [f"| {' | '.join(names)} |", "| --- " * len(names) + "|"]
    for row in results["rows"]:
        if "why" in row:
            lines.append(f"| {row['name']} | not finished: {row['why']} | | | | |")
            continue
        passed = f"{sum(row['checks'].values())} of {len(row['checks'])} passed"
        moved = sum(stage["seconds"] for stage in row["stages"] if stage["stage"] in MOVING)
        seconds = f"{row['seconds']:.0f} | {row['seconds'] - moved:.0f}"
        lines.append(f"| {row['name']} | {seconds} | {row['device_gib']:.1f} | {row['host_gib']:.1f} | {passed} |")
    for row in results["rows"]:
        if "why" in row:
            continue
        long = [stage for stage in row["stages"] if stage["seconds"] >= 1]
        told = [f"{s['stage']} {s['seconds']:.0f} s ({s['device_gib']:.0f} GiB)" for s in long]
        lines += [
            "",
            f"- **{row['name']}**: {', '.join(told)}. {row['hardware']}, {row['date']}, commit {row['commit']}.",
        ]
    lines += of_layers(results["rows"])
    lines += ["", of_demo(results["demo"])] if "demo" in results else []
    lines += of_growth(results["growth"]) if results.get("growth") else []
    return "\n".join([*lines, *same_plan.section()])


def of_layers(rows: list[dict[str, Any]]) -> list[str]:
    """What the page says about shapes of which only some layers were there."""
    told, shapes = [], dict[str, list[tuple[int, dict[str, Any]]]]()
    for row in rows:
        if (match := re.match(r"(.+), (\d+) of (\d+) layers", row["name"])) and "why" not in row:
            shapes.setdefault(f"{match[1]}|{match[3]}", []).append((int(match[2]), row))
    for name, found in shapes.items():
        if len(found) < 2:
            continue
        (few, short), *_, (many, long) = sorted(found, key=lambda pair: pair[0])
        (shape, whole), each = name.split("|"), (long["seconds"] - short["seconds"]) / (many - few)
        all_of_it = short["seconds"] + (int(whole) - few) * each
        told += [
            "",
            f"{shape}: {each:.1f} s for every layer from {few} to {many} of them. Extrapolated to all {whole}: "
            f"{all_of_it / 60:.0f} minutes, with {long['device_gib']:.0f} GiB on the device "
            f"({short['device_gib']:.0f} GiB with {few} layers).",
        ]
    return told


def filled(page: str, results: dict[str, Any]) -> str:
    """The page with its table as the results say."""
    before, rest = page.split(START)
    return f"{before}{START}\n\n{table(results)}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Measure one run, or print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shape", choices=SHAPES)
    what.add_argument("--model")
    what.add_argument("--growth", action="store_true")
    what.add_argument("--demo", action="store_true")
    what.add_argument("--page", action="store_true")
    parser.add_argument("--name", help="of the row")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--budget", default="kv=50%")
    parser.add_argument("--heal")
    parser.add_argument("--data")
    parser.add_argument("--eval")
    parser.add_argument("--keep", type=Path, help="folder for all of the run but its weights")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--limit", type=float, help="GiB of the device")
    parser.add_argument("--work", type=Path, default=Path("scale-work"), help="folder for checkpoints and runs")
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args()
    if asked.page:
        results = json.loads(RESULT.read_text()) if RESULT.exists() else {"rows": []}
        PAGE.write_text(filled(PAGE.read_text(), results))
        return
    if asked.demo:
        found = json.loads(asked.out.read_text()) if asked.out.exists() else {"rows": []}
        asked.out.write_text(json.dumps(found | {"demo": demo()}, indent=1) + "\n")
        return
    if asked.growth:
        grow(asked.work, asked.out)
        return
    name, model = asked.name or f"{asked.shape or Path(asked.model).stem}, {asked.budget}", asked.model
    if asked.shape:
        shape = SHAPES[asked.shape] | ({"num_hidden_layers": asked.layers} if asked.layers else {})
        folder = asked.work / f"{asked.shape}-{shape['num_hidden_layers']}"
        if not folder.exists():
            make(folder, shape["num_hidden_layers"], shape)
        model = str(folder)
    settings = {"budgets": (asked.budget,), "device": "cuda"}
    settings |= {key: value for key in ("heal", "data", "eval", "stream") if (value := getattr(asked, key))}
    out = asked.work / "run"
    shutil.rmtree(out, ignore_errors=True)
    row = in_child(model, name, out, settings, asked.limit)
    found = json.loads(asked.out.read_text()) if asked.out.exists() else {"rows": []}
    found["rows"] = [*(other for other in found["rows"] if other["name"] != name), row]
    asked.out.write_text(json.dumps(found, indent=1) + "\n")
    if asked.keep and out.exists():
        shutil.copytree(out, asked.keep, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    shutil.rmtree(out, ignore_errors=True)


if __name__ == "__main__":
    main()
