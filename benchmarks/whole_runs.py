"""What whole runs of real models say of themselves: a section of docs/SCALE.md, from the verdicts that they wrote.

A run's verdict.json lies in benchmarks/results as run-MODEL-SHARE.json; `benchmarks/scale.py --keep` brings it there.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import same_plan

RESULTS = Path(__file__).parent / "results"
NAMES = {"tinyllama": "TinyLlama-1.1B (IQ2_XXS, dequantised)"}
MOST = 200  # characters of a text


def sections(folder: Path = RESULTS) -> list[str]:
    """Of every run, and whether plans are the same on all devices."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("run-*-*.json"), reverse=True)}
    return [*(_runs(found) if found else []), *same_plan.section(folder / same_plan.RESULT.name)]


def _runs(found: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["", "## What these runs of real models left", ""]
    lines += ["| run | cache, bytes a token | perplexity | same next token | checks | quality, limit |"]
    lines += ["| --- |" + " --- |" * 5]
    lines += [_line(_name(stem), verdict) for stem, verdict in found.items()]
    for stem, verdict in found.items():
        text = f"{verdict['tokens']:,} tokens of {Path(verdict['evaluation']).name} in rows of {verdict['length']:,}"
        when = f"{verdict['machine']}, {verdict['date']}"
        lines += ["", f"- {_name(stem)}: {text}; 95% intervals over rows. {when}."]
    lines += ["", "Greedy continuations of held-out beginnings, cut short:"]
    for stem, verdict in found.items():
        for sample in verdict["samples"][:2]:
            told = {"begins": sample["prompt"][-MOST:], "source": sample["before"], _name(stem): sample["after"]}
            lines += ["", *(f"- {name}: {_plain(text)}" for name, text in told.items())]
    return lines


def _name(stem: str) -> str:
    _, model, share = stem.split("-", 2)
    return f"{NAMES.get(model, model)}, kv={share}%"


def _line(name: str, verdict: dict[str, Any]) -> str:
    found, size = verdict["quality"], verdict["size"]
    before = found["perplexity_before"]
    low, middle, high = (found[f"perplexity_after{end}"] / before - 1 for end in ("_low", "", "_high"))
    kept = f"{size['kv_bytes_per_token_before']:,} to {size['kv_bytes_per_token_after']:,}"
    agreed = f"{found['next_token_agreement']:.1%}"
    passed = f"{sum(check['passed'] for check in verdict['checks'])} of {len(verdict['checks'])} passed"
    change = f"{before:.2f}, {100 * middle:+.2f}% ({100 * low:+.2f} to {100 * high:+.2f})"
    return f"| {name} | {kept} | {change} | {agreed} | {passed} | {math.expm1(verdict['limit']):.0%} |"


def _plain(text: str) -> str:
    """A text on one line, its marks as they are."""
    return f"`{' '.join(text.split())[:MOST].replace('`', chr(39))}`"
