"""Whether the same command gives the same plan on a CPU and on a GPU.

    python benchmarks/same_plan.py embedded --budget kv=50% --device cuda --out benchmarks/results/same-plan.json
    python benchmarks/same_plan.py embedded --budget kv=50% --device cpu --out benchmarks/results/same-plan.json
    python benchmarks/same_plan.py --page   # rewrite the part of docs/SCALE.md

Each call probes and plans on one device and adds its plan to the file. A plan of one device is also priced by the
readings of the other: plans that differ in ties cost the same by both.
"""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from provenance import commit

ROOT = Path(__file__).parents[1]
RESULT, PAGE = ROOT / "benchmarks" / "results" / "same-plan.json", ROOT / "docs" / "SCALE.md"
START, END = "<!-- plans: printed by benchmarks/same_plan.py --page -->", "<!-- end of plans -->"


def planned(model: str, budget: str, device: str, **settings: Any) -> dict[str, Any]:
    """The plan of one device: sizes of all layers, and what it costs by that device's readings."""
    import tempfile

    import torch

    from headwise import pipeline
    from headwise.checks import speed
    from headwise.runs.folder import RunFolder
    from headwise.runs.settings import Settings

    asked = Settings(model, (budget,), device=device, **settings)
    with tempfile.TemporaryDirectory() as out:
        folder = RunFolder(Path(out) / "run")
        with pipeline.claimed(asked, folder, "run", False):
            source = pipeline.source_of(asked, folder)
            readings = source.probe(asked, folder).readings
            plan = pipeline.allocate(asked, source, readings, pipeline.budgets_of(asked, source))
    curves = {c.kind: {"ticks": c.ticks, "values": c.values} for c in readings.curves if c.kind.startswith("damage.")}
    return {
        "model": model,
        "budget": budget,
        "device": device,
        "layers": [layer.to_json() for layer in plan.target.layers],
        "predicted": plan.predicted_damage,
        "spent": plan.spent,
        "curves": curves,
        "settings": settings,
        "hardware": speed.machine(torch.device(device)),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
    }


def compared(rows: list[dict[str, Any]]) -> list[str]:
    """For every model and budget with two devices: how far plans and prices are apart."""
    lines = ["| model, budget | layers with other sizes | predicted damage, CPU and GPU | bytes, CPU and GPU |"]
    lines.append("| --- | --- | --- | --- |")
    both: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        both.setdefault((row["model"], row["budget"]), {})[row["device"]] = row
    made = []
    for (model, budget), pair in both.items():
        if set(pair) != {"cpu", "cuda"}:
            continue
        cpu, gpu = pair["cpu"], pair["cuda"]
        other = sum(a != b for a, b in zip(cpu["layers"], gpu["layers"], strict=True))
        costs = f"{cpu['predicted']:.5f}, {gpu['predicted']:.5f}"
        spent = ", ".join(f"{row['spent'][budget.partition('=')[0]]:,.0f}" for row in (cpu, gpu))
        lines.append(f"| {Path(model).name}, {budget} | {other} of {len(cpu['layers'])} | {costs} | {spent} |")
        made.append(f"{cpu['hardware']} and {gpu['hardware']}, {gpu['date']}, commits {cpu['commit']}, {gpu['commit']}")
    return [*lines, "", "; ".join(dict.fromkeys(made)) + "."] if made else ["Not measured yet."]


def main() -> None:
    """Plan on one device, or print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--budget", action="append")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--page", action="store_true")
    asked = parser.parse_args()
    found = json.loads(asked.out.read_text())["rows"] if asked.out.exists() else []
    if asked.page:
        before, rest = PAGE.read_text().split(START)
        told = "\n".join(compared(found))
        PAGE.write_text(f"{before}{START}\n\n{told}\n\n{END}{rest.split(END)[1]}")
        return
    for budget in asked.budget:
        row = planned(asked.model, budget, asked.device, data=asked.data, tokens=asked.tokens)
        key = ("model", "budget", "device")
        found = [old for old in found if any(old[name] != row[name] for name in key)] + [row]
        asked.out.write_text(json.dumps({"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
