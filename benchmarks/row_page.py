"""The part of docs/SPEED.md about ways to build kernels for rows that heads share: the result of `row_variants.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "row-variants.json"
GONE = {"early": False, "columns": 256, "registers": None}  # settings when it was measured -> what kernels do now
KERNELS = (
    "_queries", "_beside", "_scores", "_scores_ahead", "_attend_rows", "_sums", "_sums_ahead", "_combine",
)  # fmt: skip


def present(row: dict[str, Any]) -> bool:
    """Whether kernels can still be built in this way."""
    return all(row["how"].get(name, x) == x for name, x in GONE.items())


def plain(row: dict[str, Any]) -> bool:
    """Whether all its kernels are in plain Triton."""
    return not row["how"].get("ahead") and not row["how"].get("sum_ahead")


def fastest(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The fastest of some ways."""
    return min(rows, key=lambda row: row["ms"])


def line(case: str, own: list[dict[str, Any]]) -> str:
    """A line of the table: the fastest way of a case, and how long kernels in plain Triton take at best."""
    row, other = fastest(own), fastest([row for row in own if plain(row)])
    how = ", ".join(f"{name}={x}" for name, x in row["how"].items() if name not in GONE) or "defaults"
    parts = ", ".join(f"{name} {row['stages'][name]:.3f}" for name in KERNELS if name in row["stages"])
    times = f"{row['ms']:.3f} ({row['low']:.3f} to {row['high']:.3f}) | {row['times_uncut']:.2f}"
    return f"| {case} | {how} | {times} | {other['ms']:.3f} | {row['error']:.2%} | {parts} |"


def variants() -> list[str]:
    """Lines of Markdown."""
    if not RESULT.exists():
        return []
    result = json.loads(RESULT.read_text())
    ways = [row for row in result["rows"] if "how" in row and "ms" in row]
    cases = {row["case"]: [one for one in ways if one["case"] == row["case"]] for row in ways}
    kept = {case: [row for row in own if present(row)] for case, own in cases.items()}
    lost = all(fastest(cases[case]) == fastest(kept[case]) for case in cases)
    uncut = [row["ms"] for row in result["rows"] if row.get("way", "").startswith("uncut")]
    size = f"{result['texts']} x {result['places'] // 1024}k"
    told = [
        f"Ways to build these kernels: `python benchmarks/row_variants.py`, {result['hardware']}, {result['date']},",
        f"commit {result['commit']}, torch {result['versions']['torch']}, {size} tokens; no other size was measured.",
        "A code of up to 2, 4 or 8 bits has a field of that size, a longer one two fields. Segments of 16, 32 or 64",
        "coefficients share a scale; a row has the largest size that padding allows, here 64. Each kernel was built in",
        "several ways, and the fastest of each case is shown by its settings. Where they name `ahead` and `sum_ahead`,",
        "kernels are written in Gluon, for GPUs with compute capability 9 and segments of 64. Elsewhere those in plain",
        "Triton are used: a column has their shortest time in the same rounds. `optimise=True` measures the fastest",
        "ways on first use and takes the best. Uncut attention took",
        f"{min(uncut):.3f} to {max(uncut):.3f} ms in the same rounds.",
        "The last column has milliseconds of each kernel by the profiler; `_beside` runs beside others.",
        f"Ways with settings that were removed since ({', '.join(GONE)}) are not in the table;",
        f"{'none of them was the fastest' if lost else 'one of them was the fastest'} of its case.",
    ]
    head = "| | fastest way | ms | times uncut's speed | ms in plain Triton | error | ms by kernel |"
    return ["", *told, "", head, "| " + " | ".join(["---"] * 7) + " |", *(line(case, kept[case]) for case in kept)]
