"""The part of docs/SPEED.md about ways to build kernels for rows that heads share: the result of `row_variants.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "row-variants.json"
GONE = "folded"  # a setting that kernels had when they were measured, and have no more
KERNELS = ("_queries", "_beside", "_scores", "_attend_rows", "_sums", "_combine")


def fastest(rows: list[dict[str, Any]], case: str, gone: bool = False) -> dict[str, Any]:
    """The fastest way of a case; `gone`: whether ways count that no kernel has any more."""
    own = [row for row in rows if row["case"] == case and "how" in row and "ms" in row]
    return min((row for row in own if gone or GONE not in row["how"]), key=lambda row: row["ms"])


def variants() -> list[str]:
    """Lines of Markdown."""
    if not RESULT.exists():
        return []
    result = json.loads(RESULT.read_text())
    rows = result["rows"]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    lines, gained = [], 0.0
    for case in cases:
        row = fastest(rows, case)
        gained = max(gained, row["ms"] / fastest(rows, case, gone=True)["ms"] - 1)
        how = ", ".join(f"{name}={x}" for name, x in row["how"].items()) or "defaults"
        parts = ", ".join(f"{name} {row['stages'][name]:.3f}" for name in KERNELS if name in row["stages"])
        times = f"{row['ms']:.3f} ({row['low']:.3f} to {row['high']:.3f}) | {row['times_uncut']:.2f}"
        lines.append(f"| {case} | {how} | {times} | {row['error']:.2%} | {parts} |")
    uncut = [row["ms"] for row in rows if row.get("way", "").startswith("uncut")]
    size = f"{result['texts']} x {result['places'] // 1024}k"
    told = [
        f"Newer kernels: `python benchmarks/row_variants.py`, {result['hardware']}, {result['date']}, commit",
        f"{result['commit']}, torch {result['versions']['torch']}, {size} tokens. A code of up to 2, 4 or 8 bits has",
        "a field of that size, a longer one two fields. Segments of 16, 32 or 64 coefficients share a scale; a row has",
        "the largest size that padding allows. Each kernel was built in several ways, and the fastest of each case is",
        "shown by its settings. `optimise=True` measures such ways and takes the fastest. Uncut attention took",
        f"{min(uncut):.3f} to {max(uncut):.3f} ms in the same rounds. The last column has milliseconds of each kernel",
        "by the profiler; `_beside` runs beside others. Later changes to `_queries`, `_combine` and `_sums` are not in",
        "these figures, and decode steps on this page are of the earlier kernels.",
        f"Scales that were applied in fewer instructions made a way up to {gained:.1%} faster. It is not in the table",
        "and was removed: it overflowed at scales of 64 and more.",
    ]
    head = "| | fastest way | ms | times uncut's speed | error | ms by kernel |"
    return ["", *told, "", head, "| " + " | ".join(["---"] * 6) + " |", *lines]
