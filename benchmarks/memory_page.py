"""Write the tables of docs/MEMORY.md from the results of benchmarks/memory.py."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from memory_parts import model_name, parts, table

from headwise.files.disk import write_atomically

RESULTS = Path(__file__).parent / "results"
START, END = "<!-- memory: printed by benchmarks/memory.py -->", "<!-- end of memory -->"
OURS = ("joint", "each_head")
NAMES = {"joint": "ours", "each_head": "ours, per head", "cuts": "cuts alone"}
MORE = {"uniform": "uniform bits", "weights": "bits of weights alone"}  # other sections of a result, in words
Row = dict[str, Any]


def write_page(path: Path, folder: Path = RESULTS) -> None:
    """Rewrite what lies between the page's marks."""
    before, _, rest = path.read_text().partition(START)
    _, _, after = rest.partition(END)
    write_atomically(path, f"{before}{START}\n\n{tables(folder)}\n\n{END}{after}")


def tables(folder: Path = RESULTS) -> str:
    """One section for every result, in the order of their file names."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("memory-*.json"))]
    if not results:
        return "No results yet: see benchmarks/memory.py."
    lines = [line for result in results for line in _section(result)]
    return "\n".join([*lines, *parts(folder)]).rstrip()


def _section(result: dict[str, Any]) -> list[str]:
    rows, at = result["rows"], next(row["at"] for row in result["rows"] if "at" in row)
    length, _, batch = at.partition(",b")
    source = next(row["bytes_before"] for row in rows if "cache" in row.get("bytes_before", {}))
    sizes = f"{source['weights'] / 1e6:.1f} MB of weights and {source['cache'] / 1e6:.1f} MB of cache"
    sizes += " with 16 bits per number."
    lines = [f"## {model_name(result['name'])}", "", f"{batch} texts of {int(length):,} tokens: {sizes}", ""]
    lines += [*table(_heads(rows), _shares(rows)), "", *_behind(rows)]
    lines += _rivals(rows) + _predictions(rows)
    made: dict[str, list[str]] = {}
    for row in rows:
        read = f"{row['tokens']:,} calibration tokens in rows of {row['length']:,}"
        read += f", {row['swap_tokens']:,} for measured damage" if "swap_tokens" in row else ""
        read += f", {row['eval_rows']} evaluation texts" if "eval_rows" in row else ""
        read += f", of {row['data']} and {row['eval']}" if row.get("data") and row.get("eval") else ""
        about = f"{read}; {row['hardware']}, {row['date']}, commit {row['commit']}"
        made.setdefault(about, []).append({**NAMES, **MORE}[row["section"]])
    return [*lines, *(f"- {'; '.join(dict.fromkeys(names))}: {about}." for about, names in made.items()), ""]


def _heads(rows: list[Row]) -> list[str]:
    ways = [NAMES[name] for name in NAMES if any(row["method"] == name for row in rows)]
    return ["share", *ways, "best uniform bits that fit", "less damage than these"]


def _shares(rows: list[Row]) -> list[list[str]]:
    """A line for every share: each way, and the best of the rivals that take no more bytes."""
    found = []
    for share in dict.fromkeys(row["asked_share"] for row in rows if row["method"] == "joint"):
        ways = [name for name in NAMES if any(row["method"] == name for row in rows)]
        mine = {name: _one(rows, name, share) for name in ways}
        uniform, best = [row for row in rows if row["method"] == "uniform"], _best(rows, share)
        less = f"{1 - mine['joint']['kl'] / best['kl']:.0%}" if best and "kl" in mine["joint"] else ""
        told = "none fits" if any(row["weight_bits"] == 2 for row in uniform) else "not measured"
        told = told if best is None else f"{_measured(best)}, {_uniform(best)}, {best['share']:.1%}"
        found.append([f"{share}%", *(_measured(mine[name], True) for name in ways), told, less])
    return found


def _best(rows: list[Row], share: int) -> Row | None:
    """The uniform bits of least damage that take no more than this share."""
    fitting = [row for row in rows if row["method"] == "uniform" and row["share"] <= share / 100]
    return min(fitting, key=lambda row: row["kl"], default=None)


def _behind(rows: list[Row]) -> list[str]:
    """Where uniform bits do less damage than ours, in a sentence."""
    mine = [row for row in rows if row["method"] == "joint" and "kl" in row]
    found = [row for row in mine if (best := _best(rows, row["asked_share"])) and best["kl"] < row["kl"]]
    shares = " and ".join(f"{row['asked_share']}%" for row in found)
    return [f"At {shares} the best uniform bits do less damage than ours.", ""] if found else []


def _one(rows: list[Row], method: str, share: int) -> Row:
    return next((row for row in rows if row["method"] == method and row.get("asked_share") == share), {})


def _measured(row: Row, whole: bool = False) -> str:
    if "kl" not in row:
        return "out of reach" if "refused" in row else ""
    bits = f", {row['bits']:.1f} bits per weight" if whole and row["method"] in OURS else ""
    half, digits = (row["kl_high"] - row["kl_low"]) / 2, 4 if row["kl"] >= 0.001 else 6
    return f"{row['kl']:.{digits}f} ± {half:.{digits}f} ({math.expm1(row['damage']):+.1%}){bits}"


def _uniform(row: Row) -> str:
    return f"{row['weight_bits']}-bit weights by {row['rounding']}, int{row['cache_bits']} cache"


def _rivals(rows: list[Row]) -> list[str]:
    found = [row for row in rows if row["method"] == "uniform"]
    if not found:
        return []
    cells = []
    for row in sorted(found, key=lambda row: -row["share"]):
        widths = str(row["weight_bits"]), f"int{row['cache_bits']}"
        cells.append([f"{row['share']:.1%}", *widths, row["rounding"], _measured(row)])
    heads = ["share", "weight bits", "cache", "rounding", "measured damage"]
    return ["All uniform rivals:", "", *table(heads, cells), ""]


def _predictions(rows: list[Row]) -> list[str]:
    found = sorted((row for row in rows if row["method"] == "weights"), key=lambda row: -row["asked_share"])
    if not found:
        return []
    cells = [
        [f"{row['asked_share']}%", f"{row['bits']:.2f}", f"{row['predicted']:.4f}", _measured(row),
         f"{row['kl'] / row['predicted']:.2f}" if row["predicted"] else ""] for row in found
    ]  # fmt: skip
    heads = ["weights kept", "bits per weight", "predicted damage", "measured damage", "measured / predicted"]
    return ["Bits of weights alone, not healed:", "", *table(heads, cells), ""]


def named(folder: Path = RESULTS) -> str:
    """For the page of results: every share, and for every model the best uniform bits that fit beside ours."""
    found = [json.loads((folder / f"memory-{name}.json").read_text()) for name in ("smollm2", "stories15M", "embedded")]
    heads, notes = ["weights and cache kept"], []
    for result in found:
        name = model_name(result["name"]).partition(" (")[0]
        heads += [f"{name}: uniform bits", "Headwise"]
        mine = [row for row in result["rows"] if row["method"] in ("joint", "uniform")]
        made = sorted({f"{row['hardware']}, {row['date']}, commit {row['commit']}" for row in mine})
        length, _, batch = next(row["at"] for row in mine if "at" in row).partition(",b")
        notes.append(f"- {model_name(result['name'])}, {batch} texts of {int(length):,} tokens: {'; '.join(made)}.")
    shares = dict.fromkeys(row["asked_share"] for row in found[0]["rows"] if row["method"] == "joint")
    lines = []
    for share in shares:
        cells = [f"{share}%"]
        for result in found:
            best = _best(result["rows"], share)
            cells += [_measured(best) if best else "none fits", _measured(_one(result["rows"], "joint", share))]
        lines.append(cells)
    return "\n".join([*table(heads, lines), "", *notes])
