"""Writes docs/HEALING.md and its picture from the committed results of quality.py: every plan, healed in every way.

python benchmarks/field.py          # rewrite docs/HEALING.md and docs/healing.svg
python benchmarks/field.py --check  # exit 1 if they are not what the results say
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tables import in_rows

ROOT = Path(__file__).parents[1]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
SECTIONS = {  # heading -> result of one model and one kind of budget
    "The embedded model: KV cache, per head": "field-embedded-kv",
    "The embedded model: KV cache, pooled": "field-embedded-pooled",
    "The embedded model: parameters": "field-embedded-params",
    "stories15M: KV cache, per head": "field-stories15M-kv",
    "stories15M: KV cache, pooled": "field-stories15M-pooled",
    "SmolLM2-135M (Q4_1, dequantised): KV cache, per head": "field-smollm2-kv",
    "SmolLM2-135M (Q4_1, dequantised): KV cache, pooled": "field-smollm2-pooled",
    "TinyLlama-1.1B (IQ2_XXS, dequantised): KV cache, per head": "quality-tinyllama",
    "TinyLlama-1.1B (IQ2_XXS, dequantised): KV cache, pooled": "quality-tinyllama-pooled",
    "TinyLlama-1.1B (IQ2_XXS, dequantised): KV cache in bits, the default": "quality-tinyllama-bits",
}
DRAWN = ["field-embedded-kv"]
KINDS = {"kv": "KV cache", "params": "parameters"}
PLANS = {
    "svd": "#7a7a7a",
    "published": "#c0392b",
    "magnitude": "#8e6bbf",
    "uniform": "#d98b00",
    "depth": "#4d9a51",
    "exact": "#0b62a8",
    "exact, 3 rounds": "#0fa3b1",
}
HEALS = {"none": "no healing", "refit": "refit", "blockwise": "blockwise", "distill": "distillation"}
ONE, ROUNDS = "exact", "exact, 3 rounds"
INTRO = """All plans for a budget on the same text, not healed and healed in every way. A cell is the measured damage:
the increase of perplexity on held-out text, with half of its 95% interval. Bold: the lowest of a column, and its ties.

- **Plans**: `exact` is the solver's. The others give all layers equal sizes: `published` by the recipe of A3 (arXiv
  2505.12942) in our implementation, `svd` by weights without data, `magnitude` without the heads of the smallest
  weights, `uniform` with our directions.
- **Per head, pooled**: with pooled heads (`--pool all`), the key/value heads of a layer share cached rows. There
  distillation starts from the model that was healed blockwise, elsewhere from the refitted one (`blockwise=0`).
- **Ties**: two plans tie if they differ by no more than the root of the sum of their squared half intervals. This is
  strict, because both read the same text.
- **Below zero**: better than the source on this text. Healing also adapts a model to the kind of text it is trained on.
- **Tokens; seconds**: tokens of training text, in distillation every pass over it and the search for the learning rate.
  Seconds begin with the cut and leave out the probing, which all plans share."""


class Change(NamedTuple):
    """Of perplexity, in percent, with half its 95% interval."""

    value: float
    half: float

    def __str__(self) -> str:
        digits = 0 if abs(self.value) >= 100 else 1 if abs(self.value) >= 1 or self.half >= 0.5 else 2
        return f"{self.value:+.{digits}f}% ± {self.half:.{digits}f}"

    def ties(self, other: Change) -> bool:
        """Whether the two cannot be told apart."""
        return abs(self.value - other.value) <= math.hypot(self.half, other.half)


Column = dict[str, Change]  # plan -> change, of one budget and healing


def change(row: dict[str, Any]) -> Change:
    """What a row of a result says."""
    low, value, high = (math.expm1(row[name]) * 100 for name in ("measured_low", "measured", "measured_high"))
    return Change(value, (high - low) / 2)


def read(files: list[str], folder: Path) -> list[dict[str, Any]]:
    """The results that there are."""
    return [json.loads(path.read_text()) for name in files if (path := folder / f"{name}.json").exists()]


def budgets(rows: list[dict[str, Any]]) -> list[str]:
    """Largest first."""
    return sorted({row["budget"] for row in rows}, key=lambda text: -float(text.partition("=")[2].rstrip("%")))


def columns(rows: list[dict[str, Any]], budget: str) -> dict[str, Column]:
    """Healing -> plan -> change."""
    found: dict[str, Column] = {heal: {} for heal in HEALS}
    for row in rows:
        if row["budget"] == budget:
            found[row["heal"]][row["plan"]] = change(row)
    return {heal: column for heal, column in found.items() if column}


def table(rows: list[dict[str, Any]], budget: str) -> list[str]:
    """Plans down, healings across; at the foot what a healing took."""
    found = columns(rows, budget)
    kind, _, size = budget.partition("=")
    lines = [f"| {size} of the {KINDS.get(kind, kind)} | {' | '.join(HEALS[heal] for heal in found)} |"]
    lines += ["| --- |" + " --- |" * len(found)]
    best = {heal: min(column.values(), key=lambda cell: cell.value) for heal, column in found.items()}
    for plan in PLANS:
        if any(plan in column for column in found.values()):
            cells = [_cell(column.get(plan), best[heal]) for heal, column in found.items()]
            lines.append(f"| {plan} | {' | '.join(cells)} |")
    took = [[row for row in rows if (row["budget"], row["heal"]) == (budget, heal)] for heal in found]
    lines.append(f"| tokens; seconds (medians) | {' | '.join(_took(some) for some in took)} |")
    return lines


def _cell(found: Change | None, best: Change) -> str:
    return "" if found is None else f"**{found}**" if found.ties(best) else str(found)


def _took(rows: list[dict[str, Any]]) -> str:
    tokens, seconds = (median(row[name] for row in rows) for name in ("heal_tokens", "seconds"))
    return f"{tokens:,.0f}; {seconds:,.0f}"


def against_exact(rows: list[dict[str, Any]]) -> list[str]:
    """Where the solver's plan in one cut is not the best, and how many times it is or ties."""
    alone = ties = 0
    worse: list[str] = []
    for budget in budgets(rows):
        for heal, column in columns(rows, budget).items():
            rivals = {plan: found for plan, found in column.items() if plan not in (ONE, ROUNDS)}
            if ONE not in column or not rivals:
                continue
            ours, rival = column[ONE], min(rivals, key=lambda plan: rivals[plan].value)
            if ours.ties(rivals[rival]):
                ties += 1
            elif ours.value < rivals[rival].value:
                alone += 1
            else:
                worse.append(f"{budget}, {HEALS[heal]}: {rival} is better, {rivals[rival]} against {ours}.")
    if not alone + ties + len(worse):
        return []
    total = alone + ties + len(worse)
    head = f"In {total} comparisons (budget and healing) `exact` is better than every other plan in {alone}, ties"
    head += f" with the best in {ties}, and is behind in {len(worse)}{':' if worse else '.'}"
    return [head, *(f"  - {text}" for text in worse)]


def against_rounds(rows: list[dict[str, Any]]) -> list[str]:
    """Three rounds against one cut, for the same budget."""
    found = []
    for budget in budgets(rows):
        for heal, column in columns(rows, budget).items():
            if ONE in column and ROUNDS in column:
                one, three = column[ONE], column[ROUNDS]
                said = "a tie" if one.ties(three) else "rounds are better" if three.value < one.value else "one cut is"
                found.append(f"  - {budget}, {HEALS[heal]}: {three} in rounds, {one} in one cut: {said}.")
    return ["Three rounds against one cut:", *found] if found else []


def same_models(rows: list[dict[str, Any]]) -> list[str]:
    """Where a smaller budget got the very model of a larger one, of which then a part was left unused."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for row in (row for row in rows if row["heal"] == "none"):
        key = row["plan"], row["measured"], row.get("kl"), row.get("sum_of_prices"), row.get("parameters")
        found.setdefault(key, []).append(row["budget"])
    said = "got the same plan: a part of the larger budget was left unused, and these rows are one measurement."
    return [f"{key[0]}: {' and '.join(same)} {said}" for key, same in found.items() if len(same) > 1]


def zero_shot(results: list[dict[str, Any]]) -> list[str]:
    """Average accuracy over the tasks, and its change with half the 95% interval, in points."""
    lines: list[str] = []
    for result in results:
        rows = [row for row in result["rows"] if "zero_shot" in row]
        if not rows:
            continue
        lines = lines or [
            "| zero-shot average | plan | healing | accuracy | change, points |",
            "| --- |" + " --- |" * 4,
        ]
        tasks = list(result["zero_shot"])
        lines.append(f"| source | | | {_average(result['zero_shot'], tasks)[0]:.1f}% | |")
        for row in rows:
            accuracy, moved, half = _average(row["zero_shot"], tasks)
            heal = HEALS[row["heal"]]
            lines.append(f"| {row['budget']} | {row['plan']} | {heal} | {accuracy:.1f}% | {moved:+.1f} ± {half:.1f} |")
    return lines


def _average(said: dict[str, Any], tasks: list[str]) -> tuple[float, float, float]:
    """Accuracy, its change and half the change's interval, in percent; normed by length where a task has that."""
    names = ["acc_norm" if "acc_norm" in said[task] else "acc" for task in tasks]
    pairs = list(zip(tasks, names, strict=True))
    accuracy = sum(said[task][name] for task, name in pairs) / len(tasks)
    moved = sum(said[task].get(f"{name}_change", 0.0) for task, name in pairs) / len(tasks)
    spread = math.hypot(*(said[task].get(f"{name}_change_se", 0.0) for task, name in pairs)) / len(tasks)
    return 100 * accuracy, 100 * moved, 196 * spread


def about(result: dict[str, Any]) -> str:
    """On what, where and when, in a line."""
    told = result["settings"]
    options = _options(told.get("heal_options", ()), result["rows"])
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return (
        f"{result['evaluation_tokens']:,} evaluation tokens{in_rows(result)} ({result['evaluation']}; perplexity "
        f"{result['perplexity_before']:.2f} before), {result['calibration_tokens']:,} calibration tokens, "
        f"{result['healing_tokens']:,} different ones to train on ({told['data'] or 'default text'}); healing options "
        f"{options}; probing {result['probe_seconds']:.0f} s; random seed {told['seed']}; {result['hardware']}, "
        f"{result['date']}; {versions}."
    )


def _options(usual: list[str], rows: list[dict[str, Any]]) -> str:
    """Those of all rows, and beside them which rows had others."""
    others: dict[str, list[str]] = {}
    for row in rows:
        if "heal_options" in row:
            named = f"{row['budget']} {row['plan']} by {HEALS[row['heal']]}"
            others.setdefault(", ".join(row["heal_options"]), []).append(named)
    aside = "".join(f"; {told} for {', '.join(names)}" for told, names in others.items())
    return (", ".join(usual) or "as they are") + (f" ({aside[2:]})" if aside else "")


def section(heading: str, results: list[dict[str, Any]]) -> list[str]:
    """One model and one kind of budget."""
    rows = [row for result in results for row in result["rows"]]
    lines = [f"## {heading}", ""]
    for budget in budgets(rows):
        lines += [*table(rows, budget), ""]
    for text in (against_exact(rows), against_rounds(rows)):
        lines += [f"- {text[0]}", *text[1:]] if text else []
    lines += [f"- {text}" for text in same_models(rows)]
    idle = [row for row in rows if row["heal"] == "distill" and not row["rate"]]
    if idle:
        named = ", ".join(f"{row['budget']} {row['plan']}" for row in idle)
        lines.append(f"- No learning rate of distillation helped, so these models are as they were before it: {named}.")
    tasks = zero_shot(results)
    lines += ["", *tasks] if tasks else []
    return [*lines, "", *(f"- {about(result)}" for result in results), ""]


def page(folder: Path = RESULTS) -> str:
    """The whole page."""
    found = {heading: read([file], folder) for heading, file in SECTIONS.items()}
    parts = [section(heading, results) for heading, results in found.items() if any(r["rows"] for r in results)]
    lines = ["# Healing", "", INTRO, ""]
    if picture(folder):
        lines += ["![Measured damage against the kept cache, per plan and healing](healing.svg)", ""]
    if not parts:
        lines += ["No results yet: run `benchmarks/quality.py`.", ""]
    lines += ["Printed by `python benchmarks/field.py`; nothing here is typed by hand.", ""]
    text = "\n".join([*lines, *(line for part in parts for line in part)]).rstrip() + "\n"
    return re.sub(r"\n{3,}", "\n\n", text)


WIDTH, TOP, HEIGHT, FLOOR = 250, 40, 260, 1e-3  # of the picture


def picture(folder: Path = RESULTS) -> str:
    """Damage in nats per token against the kept share of the cache: a panel per healing, a line per plan."""
    rows = [row for result in read(DRAWN, folder) for row in result["rows"]]
    heals = [heal for heal in HEALS if any(row["heal"] == heal for row in rows)]
    sizes = [float(budget.partition("=")[2].rstrip("%")) for budget in budgets(rows)]
    if len(sizes) < 2:
        return ""
    most = max(FLOOR * 10, *(row["measured"] for row in rows))
    span = math.log(most / FLOOR)

    def up(value: float) -> float:
        return TOP + HEIGHT * (1 - math.log(min(most, max(FLOOR, value)) / FLOOR) / span)

    def across(size: float) -> float:
        return 20 + (WIDTH - 60) * (size - min(sizes)) / (max(sizes) - min(sizes))

    body = [_panel(number, heal, rows, sizes, up, across) for number, heal in enumerate(heals)]
    marks = [10.0**power for power in range(-3, 2) if FLOOR <= 10.0**power <= most]
    scale = "".join(f'<text x="52" y="{up(mark) + 4:.1f}" text-anchor="end">{mark:g}</text>' for mark in marks)
    plans = [plan for plan in PLANS if any(row["plan"] == plan for row in rows)]
    key = "".join(
        f'<text x="{60 + 130 * n}" y="{TOP + HEIGHT + 52}" fill="{PLANS[plan]}">{plan}</text>'
        for n, plan in enumerate(plans)
    )
    wide, high = 60 + WIDTH * len(heals), TOP + HEIGHT + 66
    title = "Measured damage in nats per token (logarithmic) against the share of the cache that is kept"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" viewBox="0 0 {wide} {high}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="13" fill="#333"><title>{title}</title>'
        f'<rect width="{wide}" height="{high}" fill="#fff"/>{scale}{"".join(body)}{key}</svg>\n'
    )


def _panel(
    number: int,
    heal: str,
    rows: list[dict[str, Any]],
    sizes: list[float],
    up: Callable[[float], float],
    across: Callable[[float], float],
) -> str:
    left = 60 + WIDTH * number
    parts = [f'<text x="{left + 20}" y="24" font-weight="bold">{HEALS[heal]}</text>']
    for size in sizes:
        x = left + across(size)
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{TOP + HEIGHT}" stroke="#d9dce1"/>')
        parts.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 20}" text-anchor="middle">{size:g}%</text>')
    for plan, colour in PLANS.items():
        own = [row for row in rows if (row["heal"], row["plan"]) == (heal, plan)]
        points = sorted((float(row["budget"].partition("=")[2].rstrip("%")), row["measured"]) for row in own)
        dots = [(left + across(size), up(value)) for size, value in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>' if path else "")
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in dots]
    return "".join(parts)


def main() -> None:
    """Rewrite or check."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    wanted = {DOCS / "HEALING.md": page(), DOCS / "healing.svg": picture()}
    if parser.parse_args().check:
        stale = [path.name for path, text in wanted.items() if (path.read_text() if path.exists() else "") != text]
        sys.exit(f"docs/{stale[0]} is not what the results say; run python benchmarks/field.py" if stale else 0)
    for path, text in wanted.items():
        if text:
            path.write_text(text)
    print(wanted[DOCS / "HEALING.md"])


if __name__ == "__main__":
    main()
