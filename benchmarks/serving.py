"""Prints docs/SERVING.md: which engine serves which kind of cut, from every benchmarks/results/serving-*.json.

python benchmarks/serving.py
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from kinds import when

ROOT = Path(__file__).parents[1]
ORDER = ("source", "per-head", "pooled", "coded", "parameters", "portable")  # the first kinds; others follow
HEAD = """# Serving: what was tried

Printed by `python benchmarks/serving.py` from `benchmarks/results/serving-*.json`; do not edit.

Each model was cut in each way and given to each engine. "20/20" means: after 20 of 20 prompts the engine wrote the same
64 tokens by greedy decoding as transformers did, except for ties. "no" means that the engine does not run such a model;
the reason is below the table. An empty cell was not tried; `--serve vllm` is for vLLM alone.

The cuts were made from few calibration tokens: this page compares answers, cache size and speed, not quality.
`benchmarks/kinds.py` makes the models for all engines. Each row of a result file names the commit at which it was
measured; rows of one commit used the same models. Perplexities are of Python source text, on which stories15M was not
trained: what matters is that both are equal. Speeds were measured on a machine with much other work; the row of the
source against itself shows how much two measurements of one model differ. Quantised weights:
[quantisers](serving/quantisers.md).
"""
APART = ("quantised weights", "vllm under load")  # the first is printed by benchmarks/serving_weights.py
FIGURES = {  # an engine's own numbers -> their column
    "budget": ("budget", "{}"),
    "cache_bytes_per_token": ("cache bytes per token", "{:,.0f}"),
    "cache_tokens": ("tokens in the cache", "{:,.0f}"),
    "times_the_tokens_of_the_source": ("times the source's tokens", "{:.2f}"),
    "speed": ("times the source's speed, median and range", "{}"),
    "log_probability_error": ("largest error, nats", "{:.1e}"),
    "largest_difference": ("largest difference of log-probabilities", "{:.1e}"),
    "largest_difference_as_run": ("the same, each with its own rounding of codes", "{:.1e}"),
    "codes_that_differ": ("numbers whose codes differ", "{:,}"),
    "codes": ("coded numbers in all", "{:,}"),
    "perplexity": ("perplexity, transformers", "{:.4f}"),
    "perplexity_in_engine": ("perplexity, engine", "{:.4f}"),
}


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    """A table in Markdown."""
    return [f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *rows)]


def cell(row: dict[str, Any] | None) -> str:
    """What an engine made of a model, in a word."""
    if row is None:
        return ""
    return f"{row['same_tokens']}/{row['prompts']}" if row["works"] else "no"


def place(row: dict[str, Any]) -> tuple[str, int, str, str]:
    """Where a row stands among those of its engine, whenever it was measured."""
    return (
        row["model"],
        ORDER.index(row["kind"]) if row["kind"] in ORDER else len(ORDER),
        row["kind"],
        row.get("cache", ""),
    )


def overview(results: list[dict[str, Any]]) -> list[str]:
    """Engine and model down, kinds of cut across."""
    found = [(result["engine"], row) for result in results for row in sorted(result["rows"], key=place)]
    kinds = [*ORDER, *dict.fromkeys(row["kind"] for _, row in found if row["kind"] not in ORDER)]
    kinds = [kind for kind in kinds if any(row["kind"] == kind for _, row in found)]
    rows = []
    for engine, model in dict.fromkeys((engine, row["model"]) for engine, row in found):
        own = {row["kind"]: row for name, row in found if (name, row["model"]) == (engine, model)}
        rows.append([engine, model, *(cell(own.get(kind)) for kind in kinds)])
    return table(["engine", "model", *kinds], rows)


def with_speed(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its speed in words, where it was measured by turns with its source."""
    pairs = zip(row.get("tokens_per_second", []), row.get("source_tokens_per_second", []), strict=False)
    if not (ratios := sorted(own / other for own, other in pairs)):
        return row
    return {**row, "speed": f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"}


def figures(result: dict[str, Any]) -> list[str]:
    """What one engine reported, where it did, and its notes."""
    result = {**result, "rows": [with_speed(row) for row in sorted(result["rows"], key=place)]}
    names = [name for name in FIGURES if any(row.get(name) is not None for row in result["rows"])]
    shown = [row for row in result["rows"] if row["works"]]
    versions = ", ".join(f"{name} {version}" for name, version in result.get("versions", {}).items())
    made = f"{versions}; {result['hardware']}; {when(result['rows'])}."
    lines = [f"## {result['engine']}", "", made, ""]
    if names:
        rows = [
            [row["model"], row["kind"], *("" if row.get(n) is None else FIGURES[n][1].format(row[n]) for n in names)]
            for row in shown
        ]
        lines += [*table(["model", "kind", *(FIGURES[name][0] for name in names)], rows), ""]
    notes = [f"- {row['model']}, {row['kind']}: {row['note']}" for row in result["rows"] if row.get("note")]
    return [*lines, *notes, ""] if notes else lines


def under_load(result: dict[str, Any]) -> list[str]:
    """Where more requests come than a cache holds, and the same requests where it holds all."""
    shown = [{**row, "speed": with_speed(row).get("speed", "")} for row in sorted(result["rows"], key=place)]
    first, versions = shown[0], ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    heads = [
        "model",
        "kind",
        "the cache",
        "tokens in it",
        "of the source",
        "times the source's speed, median and range",
    ]
    rows = [
        [r["model"], r["kind"], r["cache"], f"{r['cache_tokens']:,}", f"{r['source_cache_tokens']:,}", r["speed"]]
        for r in shown
    ]
    asked = f"{first['requests']} requests, {first['new_tokens']} new tokens each, eager, both models alternating."
    made = f"{versions}; {result['hardware']}; {when(shown)}."
    return ["## vllm, more requests than the cache holds", "", asked, made, "", *table(heads, rows), ""]


def tests(found: list[dict[str, Any]]) -> list[str]:
    """What `make serve-test` found and how long it took."""
    heads = ["tests", "passed", "failed", "skipped", "seconds", "with", "at"]
    rows = [
        [
            one["file"], str(one["passed"]), str(one["failed"] + one["error"]), str(one["skipped"]),
            f"{one['seconds']:,.0f}", ", ".join(f"{name} {version}" for name, version in one["versions"].items()),
            f"{one['date']}, commit {one['commit']}",
        ]
        for one in found
    ]  # fmt: skip
    return ["## make serve-test", "", f"{found[0]['hardware']}.", "", *table(heads, rows), ""] if found else []


def read(pattern: str) -> list[dict[str, Any]]:
    """All results whose names fit."""
    return [json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks/results").glob(pattern))]


def main() -> None:
    """Write docs/SERVING.md."""
    every = [result for result in read("serving-*.json") if "engine" in result]  # others are of docs/MEMORY.md
    results = [result for result in every if result["engine"] not in APART]
    pages = sorted((ROOT / "docs" / "serving").glob("*.md"))
    lines = [HEAD, *overview(results), ""]
    if pages:
        lines += [f"How to use them: {', '.join(f'[{page.stem}](serving/{page.name})' for page in pages)}.", ""]
    for result in results:
        lines += figures(result)
    for result in (result for result in every if result["engine"] == APART[1]):
        lines += under_load(result)
    lines += tests(read("serve-test-*.json"))
    (ROOT / "docs" / "SERVING.md").write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
