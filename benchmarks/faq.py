"""Tables of docs/faq.md, from committed results; benchmarks/tables.py writes them into the page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import bits_page

RESULTS = Path(__file__).parent / "results"
SHARES = {  # methods of the bits result at a quarter and an eighth of the bytes -> their names here
    "rank cut, 16 bits": "fewer dimensions, 16 bits a number",
    "rank cut, int8 by token": "fewer dimensions, rounded to 8 bits",
    "rank cut, int4 by token": "fewer dimensions, rounded to 4 bits",
    bits_page.OURS: "Headwise: bits by direction and layer",
}


def read(file: str) -> dict[str, Any]:
    """A committed result."""
    return dict(json.loads((RESULTS / file).read_text()))


def change(row: dict[str, Any], low: str = "measured_low", high: str = "measured_high", of: str = "measured") -> str:
    """Increase of perplexity with half its 95% interval."""
    half = (math.expm1(row[high]) - math.expm1(row[low])) * 50
    return f"{math.expm1(row[of]):+.2%} ± {half:.2f}"


def rows_of(titles: tuple[str, ...], cells: list[tuple[str, ...]]) -> list[str]:
    """A table in Markdown."""
    head = [f"| {' | '.join(titles)} |", "| --- |" + " --- |" * (len(titles) - 1)]
    return [*head, *(f"| {' | '.join(row)} |" for row in cells)]


def quantise() -> str:
    """Dimensions, bits, and both, at about the same bytes."""
    result = read("bits-embedded.json")
    found = {(row["method"], row["asked"]): row for row in result["rows"] if row["group"] in ("ours", "rank")}
    cells = [
        (name, *(f"{change(row)} ({row['share']:.1%})" for share in ("25%", "12.5%") if (row := found[method, share])))
        for method, name in SHARES.items()
    ]
    note = f"- Embedded model, 1,024 tokens, nothing healed; {result['hardware']}, {result['date']}"
    lines = rows_of(("a cache in about", "a quarter of the bytes", "an eighth"), cells)
    return "\n".join([*lines, "", f"{note}, {bits_page.commits_of(result)}."])


def calibration() -> str:
    """Damage by the number of calibration tokens."""
    result = read("calibration.json")
    budgets = list(dict.fromkeys(row["budget"] for row in result["rows"]))
    found = {(row["tokens"], row["budget"]): row for row in result["rows"]}
    cells = [
        (f"{tokens:,}", *(change(found[tokens, budget]) if (tokens, budget) in found else "" for budget in budgets))
        for tokens in sorted({row["tokens"] for row in result["rows"]})
    ]
    names = {"kv=12.5%": "an eighth of the cache, in bits", "kv=75%": "75% of the cache, fewer dimensions"}
    commits = ", ".join(dict.fromkeys(row["commit"] for row in result["rows"]))
    note = (
        f"- Embedded model, increase of perplexity on {result['evaluation_tokens']:,} tokens of other files in rows of "
        f"{result['rows'][0]['evaluated']:,}, the full context, nothing healed, one seed; {result['hardware']}, "
        f"{result['date']}, commit {commits}."
    )
    return "\n".join([*rows_of(("calibration tokens", *(names[budget] for budget in budgets)), cells), "", note])


def longest() -> str:
    """Damage of SmolLM2 by length, for a cache in bits and for fewer dimensions."""
    cells, notes = [], []
    for file, length in (("bits-smollm2-1024.json", 1_024), ("bits-smollm2-8192.json", 8_192)):
        result = read(file)
        for row in result["rows"]:
            if row["group"] == "ours" and row["method"] == bits_page.OURS and row["asked"] in ("25%", "12.5%"):
                cells.append((f"in bits, {row['asked']}", f"{length:,}", change(row)))
        notes.append(f"{result['hardware']}, {result['date']}, commit {result['commit']}")
    result = read("lengths-smollm2-all.json")
    for row in result["rows"]:
        if (row["budget"], row["heal"]) == ("kv=75%", "refit"):
            cells += [
                ("dimensions, pooled, refit, 75%", f"{one['length']:,}", change(one, "low", "high", "damage"))
                for one in row["lengths"]
            ]
    notes.append(f"{result['hardware']}, {result['date']}, commit {result['commit']}")
    table = rows_of(
        ("SmolLM2-135M, cache", "tokens of the text", "perplexity"),
        sorted(cells, key=lambda cell: (cell[0], len(cell[1]), cell[1])),
    )
    return "\n".join([*table, "", f"- {'; '.join(dict.fromkeys(notes))}."])
