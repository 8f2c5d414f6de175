"""Writes docs/PARAMETERS.md from the results of quality.py for parameters: `results/params-*.json`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from memory_parts import model_name, table

RESULTS = Path(__file__).parent / "results"
PLANS = ("exact", "exact, 3 rounds", "uniform", "depth", "svd", "magnitude")
HEALS = {"none": "no", "refit": "refit", "distill": "distilled"}
FREE = ("tokens", "batch", "micro", "blockwise", "rate")  # healing options that differ within a table
INTRO = """Models with fewer parameters: `--budget params=80%`. A cell is the increase of perplexity on the evaluation
text with half of its 95% interval; in brackets, the increase on held-out text of the calibration's kind.

- `exact` is the solver's plan. `uniform` cuts every layer alike, `depth` removes whole layers, `svd` cuts heads by the
  singular values of their weights and MLPs by the size of weights, `magnitude` removes the heads and channels with the
  smallest weights. Where a plan has several columns, they name the units that it could cut.
- Healed `no`: as it was cut. `refit`: least squares, no training. `distilled`: trained to give the source's answers,
  after the refit; the tokens include the search for the learning rate.
- `heal-other.txt` (`benchmarks/texts.py`): novels, reviews, news, advice, stories and code, none of WikiText. In
  `own-and-other.txt` text that the model wrote (`benchmarks/own_texts.py`) stands among these.
- Bold: the best of a line. One random seed."""
Row = dict[str, Any]


def page(folder: Path = RESULTS) -> str:
    """The whole page: a section for every model, a table for every pair of texts."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("params-*.json"))]
    models: dict[str, dict[str, list[Row]]] = {}
    for result in results:
        model = model_name(Path(result["settings"]["model"]).stem)
        models.setdefault(model, {}).setdefault(_texts(result), []).append(result)
    lines = ["# Fewer parameters", "", INTRO, ""]
    for model, groups in models.items():
        lines += [f"## {model}", ""]
        for about, group in groups.items():
            lines += [*_grid(group), "", *_behind(group), about, "", *_made(group), "", *_samples(group)]
    return "\n".join(lines).rstrip() + "\n"


def _texts(result: Row) -> str:
    """On what a result was calibrated and evaluated, and with which options of the healing."""
    settings = result["settings"]
    said = f"Calibrated on {result['calibration_tokens']:,} tokens of {settings['data'] or 'the default text'}, "
    said += f"evaluated on {result['evaluation_tokens']:,} tokens of {result['evaluation']} in rows of "
    said += f"{result['evaluation_length']:,}; perplexity of the source {result['perplexity_before']:.2f}."
    own = [option for option in settings["heal_options"] if option.partition("=")[0] not in FREE]
    return f"{said} Options of the healing: {', '.join(own)}." if own else said


def _units(result: Row, row: Row) -> str:
    """What a plan of the solver could cut."""
    return ", ".join(result.get("cut", result["settings"]["allow"])) if row["plan"] in ("exact", "uniform") else ""


def _healing(row: Row) -> str:
    named = HEALS.get(row["heal"], row["heal"])
    return f"{named}, {row['heal_tokens'] / 1e6:.1f}M tokens" if row["heal"] == "distill" else named


def _lines(group: list[Row]) -> dict[tuple[str, str], dict[tuple[str, str], Row]]:
    """By budget and healing, what every plan came to."""
    found: dict[tuple[str, str], dict[tuple[str, str], Row]] = {}
    rows = [(result, row) for result in group for row in result["rows"]]
    order = list(HEALS)
    rows.sort(key=lambda pair: (_kept(pair[1]), -order.index(pair[1]["heal"]), -pair[1]["heal_tokens"]), reverse=True)
    for result, row in rows:
        key = row["budget"].partition("=")[2], _near(found, row)
        found.setdefault(key, {})[row["plan"], _units(result, row)] = row
    return found


def _near(found: dict[tuple[str, str], Any], row: Row) -> str:
    """The name of a healing; distillations of nearly as many tokens have one line."""
    kept = row["budget"].partition("=")[2]
    for budget, named in found:
        if row["heal"] == "distill" and budget == kept and named.startswith("distilled"):
            count = float(named.split()[1].removesuffix("M"))
            if abs(math.log(max(count, 0.1) / max(row["heal_tokens"] / 1e6, 0.1))) < 0.5:
                return named
    return _healing(row)


def _kept(row: Row) -> float:
    return float(row["budget"].partition("=")[2].removesuffix("%"))


def _grid(group: list[Row]) -> list[str]:
    lines = _lines(group)
    columns = sorted({key for line in lines.values() for key in line}, key=lambda key: (PLANS.index(key[0]), key[1]))
    several = {plan for plan, units in columns if len({u for p, u in columns if p == plan}) > 1}
    heads = [f"{plan} ({units})" if plan in several else plan for plan, units in columns]
    cells = []
    for (kept, healing), line in lines.items():
        best = min(row["measured"] for row in line.values())
        cells.append([kept, healing, *(_cell(line.get(key), best) for key in columns)])
    return table(["kept", "healed", *heads], cells)


def _cell(row: Row | None, best: float) -> str:
    if row is None:
        return ""
    low, mean, high = (math.expm1(row[name]) * 100 for name in ("measured_low", "measured", "measured_high"))
    text = f"{mean:+.1f}% ± {(high - low) / 2:.1f}"
    text = f"**{text}**" if row["measured"] == best else text
    return f"{text} ({math.expm1(row['predicted']):+.1%})"


def _behind(group: list[Row]) -> list[str]:
    """Where the solver's plan is not the best of a line with other plans."""
    found = []
    for (kept, healing), line in _lines(group).items():
        ours = [row["measured"] for (plan, _), row in line.items() if plan.startswith("exact")]
        others = {plan: row["measured"] for (plan, _), row in line.items() if not plan.startswith("exact")}
        if ours and others and min(others.values()) < min(ours):
            found.append(f"{kept}, healed {healing} ({min(others, key=lambda plan: others[plan])})")
    return [f"Another plan than `exact` is best at: {'; '.join(found)}.", ""] if found else []


def _made(group: list[Row]) -> list[str]:
    """Where and when, each once."""
    said = [f"- {result['hardware']}, {result['date']}, commit {result['commit']}." for result in group]
    return list(dict.fromkeys(said))


def _samples(group: list[Row]) -> list[str]:
    """What models write after one held-out beginning, where that was kept."""
    rows = [row for result in group for row in result["rows"] if row.get("samples")]
    if not rows:
        return []
    first = rows[0]["samples"][0]
    lines = ["Greedy continuations of one held-out beginning, cut short:", "", f"> {_plain(first['prompt'])} ...", ""]
    lines += [f"- source: {_plain(first['before'])}"]
    told = ((row, _plain(row["samples"][0]["after"])) for row in rows)
    return [*lines, *(f"- {row['budget']}, {row['plan']}, healed {_healing(row)}: {text}" for row, text in told), ""]


def _plain(text: str) -> str:
    """A generated text on one line, its marks as they are."""
    words = " ".join(text.split())[:160]
    return f"`{words.replace('`', chr(39))}`"
