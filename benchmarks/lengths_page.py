"""The page docs/LENGTHS.md from the results of benchmarks/lengths.py: a summary first, then every plan."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "LENGTHS.md"
FACTOR, ABOVE = 1.25, 0.01  # damage at the full context may be so many times that at the first length, and so much more
NEAR = 2.0  # points of retrieval that a cut to 75% may lose
SPENT = {"bits": "bits", "dims": "dimensions"}  # what a plan saves, and how the page calls it
SUMMED = "kv=50%"  # the budget of the summary
KINDS = {  # rows of the summary: what is saved, --pool, calibrated for
    "fewer bits, heads share a row (the default)": ("bits", True, "whole context"),
    "fewer bits, each head has its own row": ("bits", False, "whole context"),
    "fewer dimensions, heads share a row": ("dims", True, "whole context"),
    "fewer dimensions, each head has its own row": ("dims", False, "whole context"),
    "fewer dimensions, heads share a row, calibrated on short texts only": ("dims", True, "calibrated length"),
}
TOP = """Does a smaller cache still work on long texts? Half of the cache was removed in five ways. The table shows how
much perplexity rises on the shortest and on the longest texts that were measured, after the refit (a repair of the
weights without training)."""
SUMMARY = """- A plan holds if the damage on the longest texts is at most {factor:g} times that on the shortest, plus
  {above:g} nats. With fewer bits, {bits} of {of_bits} plans on this page hold. With fewer dimensions,
  {dims} of {of_dims} hold; of those calibrated for short texts only, {short} of {of_short}.
- Budgets on this page are 50% and more, which is easy for bits. [Smaller budgets](faq.md#does-it-hold-at-32k)."""
READ = """Why length matters: queries and keys are rotated by their position (rotary embeddings), so a cut that was
calibrated on short rows can fail on long ones. Calibration rows therefore begin at random positions of the context that
will be served (`--context`, by default the model's own).

- **The numbers** are the increase of the loss in nats per token (0.01 is 1% more perplexity), on the same text at
  every length, with half of the 95% interval.
- **saves**: `bits` is the default, with more bits where an error does more damage. `dimensions` keeps some dimensions
  in 16 bits and drops the others (`--allow qk,v,mlp`).
- **heads**: `pooled` means that all key/value heads of a layer share one cached row; `per head`, that each has its own.
- **healing**: `refit` repairs the weights without training; `none` leaves them as they were cut.
- **calibrated for**: `whole context` is the default. `calibrated length` is a run with `--context` equal to `--length`,
  which is what earlier versions of Headwise did, and what other methods that project after rotary do.
- **Retrieval**: how often a model continues a random passage that it has read before. The table shows the distance at
  which most is lost, where the source can do it at all (at least 10%), and the farthest distance."""


def page(folder: Path = RESULTS) -> str:
    """The page, from all results."""
    results: dict[tuple[str, int], dict[str, Any]] = {}
    for path in sorted(folder.glob("lengths-*.json")):
        result = json.loads(path.read_text())
        known = results.setdefault((result["name"], result["length"]), {**result, "rows": [], "parts": []})
        known["parts"].append(result)
        known["rows"] += result["rows"]
    lines = ["# Lengths", "", TOP, "", *_summary(list(results.values())), "## How to read the tables", "", READ, ""]
    for result in results.values():
        lines += _section(result)
    for path in sorted(folder.glob("key-moments-*.json")):
        lines += _why(json.loads(path.read_text()))
    for path in sorted(folder.glob("key-cuts-*.json")):
        lines += _cuts(json.loads(path.read_text()))
    lines += ["Printed by `python benchmarks/lengths.py --print`; nothing here is typed by hand.", ""]
    return "\n".join(lines)


def spend_of(row: dict[str, Any]) -> str:
    """What a plan saves: bits, or dimensions, which is all that earlier results measured."""
    return str(row.get("spend", "dims"))


def _table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    head = [*titles]
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)] + [""]


def _kind(row: dict[str, Any]) -> tuple[str, bool, str]:
    return spend_of(row), row["pool"] != "none", row["way"]


def _summary(results: list[dict[str, Any]]) -> list[str]:
    """One budget at the shortest and the longest texts, for every model whose cache was also saved in bits."""
    both = [result for result in results if any(spend_of(row) == "bits" for row in result["rows"])]
    cells = [[name, *(_ends(result, kind) for result in both)] for name, kind in KINDS.items()]
    spans = [f"{result['name'].split(' (')[0]}, {' → '.join(f'{n:,}' for n in _span(result))}" for result in both]
    rows = [row for result in results for row in result["rows"] if _whole(result, row)]
    kinds = {
        "bits": [row for row in rows if spend_of(row) == "bits"],
        "dims": [row for row in rows if (spend_of(row), row["way"]) == ("dims", "whole context")],
        "short": [row for row in rows if row["way"] == "calibrated length"],
    }
    counts = {name: sum(map(_holds, found)) for name, found in kinds.items()}
    of = {f"of_{name}": len(found) for name, found in kinds.items()}
    told = SUMMARY.format(factor=FACTOR, above=ABOVE, **counts, **of)
    return [*_table((f"{SUMMED}, increase of perplexity", *(f"{span} tokens" for span in spans)), cells), told, ""]


def _span(result: dict[str, Any]) -> tuple[int, int]:
    sizes = sorted({found["length"] for row in result["rows"] for found in row["lengths"]})
    return sizes[0], sizes[-1]


def _whole(result: dict[str, Any], row: dict[str, Any]) -> bool:
    return bool(row["lengths"][-1]["length"] == _span(result)[1])


def _ends(result: dict[str, Any], kind: tuple[str, bool, str]) -> str:
    """The first and the last length of a plan after the refit, as changes of perplexity."""
    wanted = (SUMMED, "refit", *kind)
    found = [row for row in result["rows"] if (row["budget"], row["heal"], *_kind(row)) == wanted]
    if not found or not _whole(result, found[0]):
        return "not measured"
    return " → ".join(f"{math.expm1(found[0]['lengths'][end]['damage']):+.2%}" for end in (0, -1))


def _section(result: dict[str, Any]) -> list[str]:
    sizes = sorted({found["length"] for row in result["rows"] for found in row["lengths"]})
    title = f"{result['name']}, {sizes[-1]:,} tokens of context, calibrated on rows of {result['length']:,}"
    lines = [f"## {title}", ""]
    cells = []
    for row in sorted(result["rows"], key=_order):
        known = {found["length"]: _cell(found) for found in row["lengths"]}
        kept = row["budget"].removeprefix("kv=")
        told = (SPENT[spend_of(row)], _heads(row), kept, row["heal"], row["way"])
        cells.append((*told, *(known.get(size, "not measured") for size in sizes)))
    titles = ("saves", "heads", "cache kept", "healing", "calibrated for", *(f"{size:,}" for size in sizes))
    lines += [*_table(titles, cells), *_judged(result), "", *_retrieved(result)]
    return [*lines, *map(_measured, result["parts"]), ""]


def _measured(part: dict[str, Any]) -> str:
    """Which rows were measured where, on how much text, and by which code."""
    rows = " and ".join(dict.fromkeys(f"{SPENT[spend_of(row)]}, {_heads(row)}" for row in part["rows"]))
    return (
        f"- {rows[:1].upper() + rows[1:]}: {part['calibration_tokens']:,} calibration tokens in rows of "
        f"{part['length']:,}, {part['eval_tokens']:,} evaluation tokens; {part['evaluation']}; {_made(part)}."
    )


def _made(result: dict[str, Any]) -> str:
    made = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"{result['hardware']}, {result['date']}, commit {result['commit']}; {made}"


WHY = """Directions of keys are chosen by moments about the mean key of each calibration row, because softmax ignores
what is added to all keys of a text. Rotary pairs that rotate slowly hardly change within a short row, so they look
like a part of this mean; over a long text they do change. {name}, {rows} rows of {length:,} tokens that begin at
positions all over a context of {context:,}: {between:.0%} of the variance of the logits lies between rows, which
these moments do not see. The table shows the share of the variance that is lost, over the context and within rows,
when the given share of directions is kept in every head: by moments about the mean of each row, as now, and about the
mean of all rows. Means over layers."""


def _why(result: dict[str, Any]) -> list[str]:
    """What the moments of keys miss of a context."""
    layers = result["layers"]
    means = {key: sum(layer[key] for layer in layers) / len(layers) for key in layers[0]}
    lines = ["## Why damage grows with length when heads are cut per head", ""]
    lines += [WHY.format(**{**result, "between": means["between"]}), ""]
    lines += ["| directions kept | about each row: context | within rows | about all rows: context | within rows |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    for kept in dict.fromkeys(key.split(" ")[0] for key in means if key != "between"):
        cells = [means[f"{kept} by {by} in {where}"] for by in ("row", "all") for where in ("all", "row")]
        lines.append(f"| {float(kept):.1%} | {' | '.join(f'{cell:.2%}' for cell in cells)} |")
    return [*lines, "", f"- {result['data']}; {_made(result)}; measured by `benchmarks/key_moments.py`.", ""]


CUTS = """Does a model lose less with other moments? {name}, keys cut by the same share in all layers, values not cut,
with moments of {tokens:,} tokens in rows of {length:,} at random positions of a context of {context:,}. Nats per
token on {eval_tokens:,} tokens, ± one standard error over rows. Rows of the whole context see everything that is
served, so damage that remains with their moments has another cause than moments. In sections with longer calibration
rows (`--length`) plans, predicted damage and the refit see longer texts."""


def _cuts(result: dict[str, Any]) -> list[str]:
    """What other moments of keys do to a model, by length."""
    sizes = list(result["cuts"][0]["damage"])
    lines = [CUTS.format(**result), "", f"| directions kept | moments about | {' | '.join(sizes)} |"]
    lines += ["| --- | --- |" + " --- |" * len(sizes)]
    for row in result["cuts"]:
        cells = [f"{mean:.4f} ± {error:.4f}" for mean, error in row["damage"].values()]
        lines.append(f"| {row['kept']:.0%} | {row['about']} | {' | '.join(cells)} |")
    return [*lines, "", f"- {result['data']}; {_made(result)}; measured by `benchmarks/key_cuts.py`.", ""]


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    size = -float(row["budget"][3:-1])
    return spend_of(row), row["pool"] == "none", size, row["heal"] != "none", row["way"] != "whole context"


def _heads(row: dict[str, Any]) -> str:
    return "pooled" if row["pool"] != "none" else "per head"


def _cell(found: dict[str, Any]) -> str:
    return f"{found['damage']:.4f} ± {(found['high'] - found['low']) / 2:.4f}"


def _judged(result: dict[str, Any]) -> list[str]:
    """Where the damage at the full context stays near that at the first length, by what is spent and by way."""
    lines = []
    for spend, way in (("bits", "whole context"), ("dims", "whole context"), ("dims", "calibrated length")):
        rows = [row for row in result["rows"] if _whole(result, row) and (spend_of(row), row["way"]) == (spend, way)]
        what = f"- {SPENT[spend].capitalize()}, calibrated for the {way}:"
        if not rows:
            lines.append(f"{what} not measured.")
            continue
        held = [row for row in rows if _holds(row)]
        lost = [f"{_heads(row)} {row['budget']} {row['heal']}" for row in rows if row not in held]
        words = f"{what} {len(held)} of {len(rows)} plans have at most {FACTOR:g} times the damage"
        words += f" of the first length plus {ABOVE:g} nats at the full context"
        lines.append(words + (f"; not: {', '.join(lost)}." if lost and len(lost) < len(rows) else "."))
    return lines


def _holds(row: dict[str, Any]) -> bool:
    return bool(row["lengths"][-1]["damage"] <= FACTOR * max(0.0, row["lengths"][0]["damage"]) + ABOVE)


def _retrieved(result: dict[str, Any]) -> list[str]:
    """Retrieval of the refitted models: the largest loss at any distance, and the farthest distance."""
    cells = []
    for row in sorted(result["rows"], key=_order):
        able = [found for found in row["retrieval"] if found["accuracy_before"] >= 0.1]
        if row["heal"] != "refit" or not able:
            continue
        plan = (SPENT[spend_of(row)], _heads(row), row["budget"].removeprefix("kv="), row["way"])
        cells.append((*plan, *_found(min(able, key=_change), True), *_found(row["retrieval"][-1])))
    if not cells:
        return ["- Retrieval: the source does not continue a random passage at any distance."]
    titles = ("saves", "heads", "cache kept", "calibrated for", "largest loss at", "source", "change in points")
    return [
        "Retrieval, after the refit:",
        "",
        *_table((*titles, "farthest", "source", "change"), cells),
        *_near(result),
    ]


def _found(found: dict[str, Any], sure: bool = False) -> tuple[str, str, str]:
    """A distance, how often the source finds the passage there, and by how much less the cut model does."""
    half = 50 * (found["accuracy_change_high"] - found["accuracy_change_low"])
    change = f"{_change(found):+.1f}" + (f" ± {half:.1f} ({found['passages']} passages)" if sure else "")
    return f"{found['distance']:,} tokens", f"{found['accuracy_before']:.1%}", change


def _near(result: dict[str, Any]) -> list[str]:
    """Which plans for 75% lose little at every distance."""
    rows = [row for row in result["rows"] if (row["budget"], row["heal"]) == ("kv=75%", "refit")]
    near = [row for row in rows if min(map(_change, row["retrieval"])) >= -NEAR]
    if not rows:
        return []
    who = ", ".join(f"{SPENT[spend_of(row)]} {_heads(row)} ({row['way']})" for row in near)
    words = f"- At 75%, {len(near)} of {len(rows)} lose at most {NEAR:g} points at every distance"
    return [f"{words}{': ' + who if near else ''}."]


def _change(found: dict[str, Any]) -> float:
    return float(100 * (found["accuracy_after"] - found["accuracy_before"]))
