"""Results of quality.py that were measured side by side, some plans in each, put together.

They must be of the same model, text, settings and machine. Of the healing options `batch` and `micro` may differ, as
what fits depends on what else runs: rows that learned by others than the first result's name them. Where two
results have the same row, that of the later one stands.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SHARED = ", shared with other work"  # behind the name of a machine that did not do this alone
SAME = ("evaluation", "evaluation_tokens", "calibration_tokens", "healing_tokens", "versions")
FREE = ("batch", "micro")  # healing options that may differ
LEARNED = ("blockwise", "distill")  # healings that mind them

Result = dict[str, Any]


def joined(files: Sequence[Path], plans: Sequence[str], heals: Sequence[str]) -> Result:
    """One result of several files, its rows in the order of budgets, plans and healings."""
    results = [_read(file) for file in files]
    first, budgets = results[0], dict.fromkeys(b for result in results for b in result["settings"]["budgets"])
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for file, result in zip(files, results, strict=True):
        for name, one, other in _facts(first, result):
            if one != other:
                sys.exit(f"{files[0]} and {file} cannot be joined: {name} is {one} in one and {other} in the other.")
        for row in result["rows"]:
            if (key := (row["budget"], row["method"])) in rows:
                print(f"{' '.join(key)}: as in {file}, instead of an earlier file's")
            rows[key] = row | _options(row, result, first)
    bars = {budget: row["measured"] for (budget, method), row in rows.items() if method == "published"}
    for (budget, _), row in rows.items():
        row["of_published"] = row["measured"] / bars[budget] if bars.get(budget) else None

    def place(row: dict[str, Any]) -> tuple[int, ...]:
        plan, _, heal = row["method"].partition(" + ")
        return list(budgets).index(row["budget"]), plans.index(plan), heals.index(heal or "none")

    found = {name: value for result in reversed(results) for name, value in result.items()}  # the first one's, if it is
    note = SHARED if any(result["hardware"].endswith(SHARED) for result in results) else ""
    return found | {
        "settings": first["settings"] | {"budgets": list(budgets)},
        "probe_seconds": max(result["probe_seconds"] for result in results),
        "hardware": first["hardware"].removesuffix(SHARED) + note,
        "date": max(result["date"] for result in results),
        "rows": sorted(rows.values(), key=place),
    }


def _read(file: Path) -> Result:
    try:
        found: Result = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"{file} is no result of quality.py: {error}")
    return found


def _facts(one: Result, other: Result) -> list[tuple[str, Any, Any]]:
    """What two results must agree in."""
    settings = [
        result["settings"] | {"heal_options": sorted(o for o in _told(result) if o.partition("=")[0] not in FREE)}
        for result in (one, other)
    ]
    found = [(name, *(each.get(name) for each in settings)) for name in settings[0] | settings[1] if name != "budgets"]
    found += [(name, one[name], other[name]) for name in SAME]
    found.append(("hardware", *(result["hardware"].removesuffix(SHARED) for result in (one, other))))
    if "zero_shot" in one and "zero_shot" in other:
        items = ({task: said["items"] for task, said in result["zero_shot"].items()} for result in (one, other))
        found.append(("the zero-shot items", *items))
    return found


def _told(result: Result) -> list[str]:
    return list(result["settings"].get("heal_options", ()))


def _options(row: dict[str, Any], result: Result, first: Result) -> dict[str, Any]:
    """What a row is to say of the options that it learned by, where they are not those of the whole."""
    known = "heal_options" in row or row["method"].partition(" + ")[2] not in LEARNED
    return {} if known or _told(result) == _told(first) else {"heal_options": _told(result)}
