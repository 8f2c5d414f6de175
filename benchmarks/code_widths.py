"""What it would cost to give cached numbers only widths that are read fastest: predicted damage at equal bits.

python benchmarks/code_widths.py embedded ../shared/models/stories15M   # writes benchmarks/results/code_widths.json

Coefficients of all heads' rows get the widths that do least predicted damage, as plans give them: any width from 8 bits
to none for each, only some widths, or one width for whole runs of neighbours. Codes alone count, not scales. Also the
bytes of such rows in the cache that kernels read (`headwise.fast.code_layout`), where segments are filled up.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from provenance import commit
from solve import hardware

from headwise import data, families
from headwise.data.own_text import written_by
from headwise.fast.code_layout import CodeLayout
from headwise.probes import fisher
from headwise.probes.fisher import ERRORS, Costs
from headwise.runtime.coder_headwise import RowCoder
from headwise.types import BITS

RESULT = Path(__file__).parent / "results" / "code_widths.json"
ERROR = dict(zip((*BITS, 0), (*ERRORS, 1.0), strict=True))
EVERY, FAST = (8, 7, 6, 5, 4, 3, 2, 1, 0), (8, 4, 2, 0)
RULES = {  # widths that there are, and neighbours that share one
    "any width": (EVERY, 1),
    "any width, runs of 16": (EVERY, 16),
    "any width, runs of 32": (EVERY, 32),
    "any width, runs of 64": (EVERY, 64),
    "8, 4, 2 and none": (FAST, 1),
    "8, 4, 2 and none, runs of 32": (FAST, 32),
    "8, 4, 2 and none, runs of 64": (FAST, 64),
}
LENGTH, ROWS = 256, 16
MEAN_BITS = (4, 2)  # 25% and 12.5% of 16


def widths(costs: Costs, level: float, offered: tuple[int, ...], run: int) -> list[int]:
    """Bits of every coefficient if a bit may cost so much."""
    found: list[int] = []
    for first in range(0, len(costs.prices), run):
        own = costs.prices[first : first + run]
        found += [min(offered, key=lambda b: own.sum() * ERROR[b] / 2 + level * b * len(own))] * len(own)
    return found


def planned(every: list[Costs], mean: float, offered: tuple[int, ...], run: int) -> list[list[int]]:
    """The widths of all rows that do least damage with so many bits a number."""
    most = mean * sum(len(costs.prices) for costs in every)
    low, high = -60.0, 20.0  # of the level's logarithm
    for _ in range(60):
        level = (low + high) / 2
        taken = sum(sum(widths(costs, float(np.exp(level)), offered, run)) for costs in every)
        low, high = (level, high) if taken > most else (low, level)
    return [widths(costs, float(np.exp(high)), offered, run) for costs in every]


def told(every: list[Costs], plan: list[list[int]]) -> dict[str, float]:
    """Predicted damage, bits a number, and bytes as kernels read them, of those of 16 bits."""
    numbers = sum(len(row) for row in plan)
    damage = held = 0.0
    for costs, row in zip(every, plan, strict=True):
        code = tuple(row.count(bits) for bits in BITS)
        damage += costs.damage(code)
        if any(code):
            layout = CodeLayout(RowCoder({str(b): n for b, n in zip(BITS, code, strict=True) if n}, len(row)))
            held += 2 * layout.words + 4 * layout.pairs
    return {"damage": damage, "bits": sum(map(sum, plan)) / numbers, "fast_bytes": held / (2 * numbers)}


def measure(name: str) -> list[dict[str, Any]]:
    """Rows of the result, of one model."""
    stock, tokenizer = families.load(name)
    family = families.family_of(stock.config)
    if name == "embedded":
        tokens = data.blocks_of(data.documents("stdlib"), tokenizer, LENGTH, ROWS)
    else:
        tokens = written_by(stock, ROWS, LENGTH, 0)
    layers = family.shape_of(stock.config).layers
    found = fisher.collect(family, family.tailor(stock, layers[0].kv_heads), tokens, 0)
    every = [Costs.of(moments, side) for moments in found for side in "kv"]
    rows = []
    for mean in MEAN_BITS:
        for rule, how in RULES.items():
            one = told(every, planned(every, mean, *how))
            rows.append({"model": Path(name).name, "mean": mean, "rule": rule, "row": len(every[0].prices), **one})
            print(rows[-1], flush=True)
    return rows


def section(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    rows = {(row["model"], row["mean"], row["rule"]): row for row in result["rows"]}
    sizes = list(dict.fromkeys((row["model"], row["mean"]) for row in result["rows"]))
    lines = []
    for model, mean in sizes:
        for rule in RULES:
            row = rows[model, mean, rule]
            more = row["damage"] / rows[model, mean, "any width"]["damage"] - 1
            cells = f"{row['damage']:.2e} | {more:+.1%} | {row['fast_bytes']:.1%}"
            lines.append(f"| {model} | {mean / 16:.1%} | {rule} | {cells} |")
    told = [
        f"`python benchmarks/code_widths.py embedded stories15M`, {result['tokens']:,} tokens, {result['date']},",
        f"commit {result['commit']}. Plans may give a coefficient any width. The cache of `optimise=True` keeps codes",
        "of up to 2, 4 or 8 bits in fields of that size, so that other widths are rounded up there. The table shows",
        "the predicted damage at equal bits if only some widths were allowed, or one width for runs of neighbouring",
        "coefficients. The last column is the size of that cache as a share of 16 bits per number, with scales and",
        "padding. Rows of these small models are narrow, so part of it is padding.",
    ]
    head = "| model | codes, of 16 bits | widths | predicted damage | more than any width | fast cache |"
    return "\n".join(["## Widths of codes", "", *told, "", head, "| " + " | ".join(["---"] * 6) + " |", *lines]) + "\n"


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+")
    rows = [row for name in parser.parse_args().models for row in measure(name)]
    about = {"date": time.strftime("%Y-%m-%d"), "commit": commit(), "hardware": hardware(), "tokens": LENGTH * ROWS}
    RESULT.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
