"""Is the plan the same on a CPU, on a GPU, and in two processes? The same seed, text and settings, each in its own run.

    python benchmarks/same_plan.py --case embedded code.txt --case MODEL text.txt --budget kv=50%

Every run is `headwise probe` by itself, followed by the allocation. Plans are compared with that of one process on the
CPU: how many sizes differ, and what a plan costs by the prices of the other's probing. A plan that costs no more than
the best one by these prices ties with it. The damage of all plans is measured on one device, on the same held-out text,
with 95% intervals over rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from provenance import commit, hardware

WAYS = {  # name -> device and processes
    "CPU": ("cpu", 1),
    "CPU, two processes": ("cpu", 2),
    "GPU": ("cuda", 1),
    "GPU again": ("cuda", 1),
}
FIRST = "CPU"
ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "same-plan.json"
ABOUT = """The same random seed, text and settings; every row is a probing and an allocation of its own, compared with
the plan of one process on the CPU. Extra cost: of the row's plan by the prices that the CPU found, over the CPU's own
plan; blank where the plan has a code that the CPU's probing did not price, so that it is not known whether the two tie.
The rows of the GPU were not compared with each other."""


def start(way: str, folder: Path, model: str, text: str, budget: str, sizes: list[str]) -> subprocess.Popen[str]:
    """A probing of its own."""
    device, count = WAYS[way]
    many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command = [sys.executable, *(many if count > 1 else []), "-m", "headwise", "probe", model]
    command += ["--budget", budget, "--data", text, "--device", device, "--out", str(folder), *sizes]
    log = folder.with_suffix(".log").open("w")
    told = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "3")}
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True, env=told)


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every number in nested lists and dictionaries, with its place."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, f"{name}.{key}")
    else:
        yield name, value


def differing(one: Any, other: Any) -> tuple[int, int]:
    """How many sizes of the layers differ, and how many there are."""
    ours, theirs = (dict(leaves([layer.to_json() for layer in plan.target.layers])) for plan in (one, other))
    places = ours.keys() | theirs.keys()
    return sum(ours.get(place) != theirs.get(place) for place in places), len(places)


def cost(plan: Any, readings: Any, allow: tuple[str, ...]) -> float | None:
    """The damage of a plan by the prices of another probing; none where that did not price one of its sizes."""
    from headwise.strategies._options import menus, ways

    total = 0.0
    for target, menu in zip(plan.target.layers, menus(readings.source, readings, allow, ways(readings)), strict=True):
        for choices in (menu.qk, menu.v, menu.mlp):
            fitting = [c.damage for c in choices if all(getattr(target, name) == size for name, size in c.sizes)]
            if not fitting:
                return None
            total += min(fitting)
    return total


def measured(plans: dict[str, tuple[Path, Any]], settings: Any) -> dict[str, dict[str, float]]:
    """The damage of every plan, cut by its own probing's moments, on one device and the same rows."""
    from headwise import pipeline
    from headwise.checks import quality
    from headwise.progress import silently
    from headwise.runs.folder import RunFolder
    from headwise.runs.moments import read_moments
    from headwise.stages.source import Probed
    from headwise.types import Readings

    source, found = pipeline.load_source(settings), {}
    for way, (path, plan) in plans.items():
        folder = RunFolder(path)
        moments = read_moments(folder.moments_file, source.model.device, source.shape.layers)
        fitted = source.fit(settings, Probed(Readings.read(folder.readings_file), moments), plan, None, silently)
        found[way] = quality.compare(source.family, source.model, fitted.model, source.evaluation).damage()
    return found


def probed(model: str, text: str, budget: str, sizes: list[str], work: Path) -> tuple[dict[str, Path], list[Any]]:
    """The folders of all ways, side by side, and rows for those that did not end well."""
    import torch

    wanted = [way for way, (device, _) in WAYS.items() if device == "cpu" or torch.cuda.is_available()]
    folders = {way: work / f"{Path(model).name}-{number}" for number, way in enumerate(wanted)}
    running = {way: start(way, folder, model, text, budget, sizes) for way, folder in folders.items()}
    failed = [way for way in wanted if running[way].wait() != 0]
    told = {way: folders[way].with_suffix(".log").read_text().strip().splitlines() or ["no output"] for way in failed}
    rows = [{"way": way, "why": lines[-1][:300]} for way, lines in told.items()]
    return {way: folder for way, folder in folders.items() if way not in failed}, rows


def case(model: str, text: str, budgets: list[str], tokens: int, swap_tokens: int) -> Iterator[dict[str, Any]]:
    """All ways for one model: a comparison for every budget."""
    import torch

    from headwise.budgets import parse_all
    from headwise.runs.folder import RunFolder
    from headwise.runs.settings import Settings
    from headwise.stages.allocate import plan_for
    from headwise.types import Readings

    about = {"model": Path(model).name, "text": Path(text).name, "tokens": tokens, "swap_tokens": swap_tokens}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = ["--tokens", str(tokens), "--swap-tokens", str(swap_tokens)]
    with tempfile.TemporaryDirectory() as work:
        folders, failed = probed(model, text, budgets[0], sizes, Path(work))
        readings = {way: Readings.read(RunFolder(folder).readings_file) for way, folder in folders.items()}
        for budget in budgets:
            settings = Settings(model, (budget,), data=text, device=device, tokens=tokens, heal="none")
            plans = {
                way: plan_for(settings, found, parse_all((budget,), found.source)) for way, found in readings.items()
            }
            damage = measured({way: (folders[way], plan) for way, plan in plans.items()}, settings)
            rows = [_row(way, plans, readings, settings.units) | damage[way] for way in plans if FIRST in plans]
            yield {**about, "budget": budget, "rows": [*rows, *failed]}


def _row(way: str, plans: dict[str, Any], readings: dict[str, Any], allow: tuple[str, ...]) -> dict[str, Any]:
    """One plan beside the CPU's."""
    apart, count = differing(plans[way], plans[FIRST])
    costs = {
        "by_first": cost(plans[way], readings[FIRST], allow),
        "first_by_own": cost(plans[FIRST], readings[way], allow),
    }
    return {"way": way, "differing": apart, "sizes": count, "predicted": plans[way].predicted_damage, **costs}


def section(file: Path = RESULT) -> list[str]:
    """What the page says of it, once it was measured."""
    if not file.exists():
        return []
    results = json.loads(file.read_text())
    lines = ["", "## The same plan on a CPU and on a GPU", ""]
    lines += [ABOUT, ""]
    lines += ["| model, budget | computed on | sizes that differ | extra cost | damage, nats per token |"]
    lines += ["| --- |" + " --- |" * 4]
    lines += [_line(found, row) for found in results["cases"] for row in found["rows"]]
    sizes = "; ".join(dict.fromkeys(f"{c['model']}: {c['tokens']:,} tokens of {c['text']}" for c in results["cases"]))
    where = f"{results['gpu']}; {results['cores']} cores of {results['processor']}"
    note = f"{sizes}. Damage before healing, on held-out text, all plans on one device; 95% intervals over rows."
    return [*lines, "", f"{note} {where}, {results['date']}, commit {results['commit']}."]


def _line(found: dict[str, Any], row: dict[str, Any]) -> str:
    name = f"| {found['model']}, {found['budget']} | {row['way']} |"
    if "why" in row:
        return f"{name} not finished: {row['why']} | | |"
    base = next((other["by_first"] for other in found["rows"] if other["way"] == FIRST and "why" not in other), None)
    extra = f"{row['by_first'] / base - 1:+.4%}" if base and row["by_first"] is not None else ""
    half = (row["measured_high"] - row["measured_low"]) / 2
    return f"{name} {row['differing']} of {row['sizes']} | {extra} | {row['measured']:.5f} ± {half:.5f} |"


def main() -> None:
    """Measure every case; write after each."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", nargs=2, action="append", required=True, metavar=("MODEL", "TEXT"))
    parser.add_argument("--budget", action="append")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--swap-tokens", type=int, default=2_048)
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args()
    found: dict[str, Any] = {"cases": [], **hardware(), "commit": commit()}
    found["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    found["date"] = datetime.now(UTC).strftime("%Y-%m-%d")
    for model, text in asked.case:
        for row in case(model, text, asked.budget or ["kv=50%"], asked.tokens, asked.swap_tokens):
            found["cases"].append(row)
            asked.out.write_text(json.dumps(found, indent=1) + "\n")
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
