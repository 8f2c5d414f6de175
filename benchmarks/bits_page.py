"""Write the tables of docs/BITS.md from the results of benchmarks/bits.py.

python benchmarks/bits_page.py          # rewrite what lies between the page's marks
python benchmarks/bits_page.py --check  # exit 1 if the page is not what the results say

Zero-shot rows (zero-shot-*-bits.json) are of a source and of its model at a quarter of the cache:

headwise run MODEL --budget kv=25% --data mix.txt --eval wikitext-eval.txt --out RUN
python benchmarks/zero_shot.py MODEL RUN/model --data DATA --out benchmarks/results/zero-shot-smollm2-bits.json
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "BITS.md"
MARKS = {
    name: (f"<!-- {name}: printed by benchmarks/bits_page.py -->", f"<!-- end of {name} -->")
    for name in ("overview", "bits")
}
SHARES = ("50%", "25%", "12.5%")  # of the overview
OURS = "ours, pooled"
MOST, FACTOR = 0.3, 1.5  # predictions are judged up to so many nats, and by this factor
KEPT = ("rivals", "library", "rank")  # groups whose rows may be of an earlier commit
NAMED = {  # rivals as the field calls them -> rows of a result; the first 4 and newest 32 tokens stay in 16 bits
    "[KIVI](https://arxiv.org/abs/2402.02750), 4 bits": "KIVI int4, newest 32, first 4 whole",
    "[QuaRot](https://arxiv.org/abs/2404.00456), 4 bits": "QuaRot int4, first 4 and newest 32 whole",
    "[TurboQuant](https://arxiv.org/abs/2504.19874), 4 bits": "TurboQuant 4 bits, first 4 and newest 32 whole",
    "rounding to 4-bit integers": "int4 by token, first 4 and newest 32 whole",
    "KIVI, 2 bits": "KIVI int2, newest 32, first 4 whole",
    "QuaRot, 2 bits": "QuaRot int2, first 4 and newest 32 whole",
    "TurboQuant, 2 bits": "TurboQuant 2 bits, first 4 and newest 32 whole",
}
Row = dict[str, Any]


def tables(folder: Path = RESULTS) -> str:
    """One section for every result, in the order of their file names."""
    results = _results(folder)
    if not results:
        return "No results yet: see benchmarks/bits.py."
    lines = [line for result in results for line in _section(result)]
    ways = folder / "coded-healing.json"
    lines += [*_ways(json.loads(ways.read_text())), ""] if ways.exists() else []
    zero_shot = [json.loads(path.read_text())["rows"] for path in sorted(folder.glob("zero-shot-*-bits.json"))]
    return "\n".join([*lines, *(line for rows in zero_shot for line in _answers(rows))]).rstrip()


def _results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("bits-*.json"))]


def _format(result: dict[str, Any]) -> str:
    """What the name of a model adds where it was computed in another format than float32."""
    dtype = result["settings"]["dtype"]
    return "" if dtype == "float32" else f" in {dtype}"


def overview(folder: Path = RESULTS) -> str:
    """One line for every model and length: what shares of the cache lose, and how many other caches are worse."""
    cells = []
    for result in _results(folder):
        for length in sorted({row["length"] for row in result["rows"]}):
            rows = [row for row in result["rows"] if row["length"] == length]
            ours = {row["asked"]: row for row in _there(rows, "ours") if row["method"] == OURS}
            pairs = [(row, own) for row in _there(rows, "rivals", "library") if (own := _match(rows, row))]
            won = f"{len(pairs) - len(_behind(pairs))} of {len(pairs)}" if pairs else "not measured"
            name = f"{result['name'].split(' (')[0]}{_format(result)}, {length:,}"
            cells.append((name, *(_told(ours.get(share)) or "not measured" for share in SHARES), won))
    titles = ("model, tokens of a text", *(f"{share} of the cache" for share in SHARES), "ours is closer than")
    return "\n".join(_table(titles, cells)).rstrip() if cells else "No results yet: see benchmarks/bits.py."


def _answers(rows: Sequence[Row]) -> list[str]:
    """Zero-shot accuracy of a source and of its coded model, all items of every task."""
    source, coded = rows[:2]
    cells, changes = [], []
    for task, found in coded["tasks"].items():
        before = source["tasks"][task]
        name = "acc_norm" if "acc_norm" in found else "acc"
        change, error = found[f"{name}_change"], found[f"{name}_change_se"]
        told = (f"{before[name]:.1%}", f"{found[name]:.1%}", f"{100 * change:+.2f} ± {100 * 1.96 * error:.2f}")
        cells.append((f"{task}, {name}", f"{found['items']:,}", *told))
        changes.append(change)
    mean = 100 * sum(changes) / len(changes)
    titles = ("zero-shot", "items", "source", "ours, kv=25%", "change in points, 95%")
    made = f"{coded['hardware']}, {coded['date']}, commit {coded['commit']}"
    return [
        f"## Zero-shot, {source['model']}", "", *_table(titles, cells),
        f"- Mean change: {mean:+.2f} points. Scored as lm-eval defines it; {made}.", "",
    ]  # fmt: skip


def _ways(found: dict[str, Any]) -> list[str]:
    """Healing with rounded rows, and with noise of the same size in their place: means over random seeds."""
    rows, cells = found["rows"], []
    for share, healing in dict.fromkeys((row["share"], row["healing"]) for row in rows):
        own = [row for row in rows if (row["share"], row["healing"]) == (share, healing)]
        ways = {way: [row["damage"] for row in own if row["way"] == way] for way in ("rounded", "noise", "")}
        means = [f"{sum(x) / len(x):.4f}" if x else "" for x in (ways["rounded"] or ways[""], ways["noise"])]
        apart = ", ".join(f"{b - a:+.4f}" for a, b in zip(ways["rounded"], ways["noise"], strict=False))
        cells.append((share, healing, *means, apart))
    titles = ("cache", "healing", "rounded", "noise", "noise less rounded, by random seed")
    half = max(row["half"] for row in rows)
    about = (
        f"- {found['model']}: damage on {found['rows_read']} held-out texts of {found['length']:,} tokens; half of the "
        f"95% interval is at most {half:.4f}. A healing that does not help is not kept: its damage is then that of the "
        f"refit before it. {found['hardware']}, {found['date']}, commit {found['commit']}."
    )
    return ["## Healing by rounded rows or by noise", "", *_table(titles, cells), about]


def _section(result: dict[str, Any]) -> list[str]:
    lines = [f"## {result['name']}{_format(result)}", ""]
    for length in sorted({row["length"] for row in result["rows"]}):
        rows = [row for row in result["rows"] if row["length"] == length]
        lines += [f"### {length:,} tokens", ""]
        lines += [*_rivals(rows), *_ours(rows), *_left_out(rows), *_beside(rows), *_missing(rows)]
    return [*lines, *_about(result), ""]


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    head = [f"| {' | '.join(titles)} |", "| --- |" + " --- |" * (len(titles) - 1)]
    return [*head, *(f"| {' | '.join(row)} |" for row in rows), ""]


def _method(row: Row) -> str:
    """How a cache is stored, in the words of the page; result files keep theirs."""
    name = row["method"].replace(" by token", " per token").replace("each head", "per head")
    name = re.sub(r"(KIVI int\d), newest", r"\1, residual", name.replace("first 0 whole, ", ""))
    return name.replace(" whole", " in 16 bits")


def _measured(row: Row | None) -> str:
    if row is None or "why" in row:
        return ""
    half = (row["measured_high"] - row["measured_low"]) / 2
    return f"{row['measured']:.4f} ± {half:.4f}"


def _perplexity(row: Row | None) -> str:
    return "" if row is None or "why" in row else f"{row['perplexity_change']:+.2%}"


def _predicted(row: Row, name: str = "predicted") -> str:
    return "" if row.get(name) is None else f"{row[name]:.4f}"


def _there(rows: Sequence[Row], *groups: str) -> list[Row]:
    """Rows of some groups that were measured, most bytes first."""
    found = [row for row in rows if row["group"] in groups and "why" not in row]
    return sorted(found, key=lambda row: (-row["share"], row["method"]))


def _match(rows: Sequence[Row], row: Row) -> Row | None:
    """Our plan for the bytes of a row; where none was made for it, the largest of ours that takes no more."""
    exact = [other for other in _there(rows, "match") if other["asked"] == row["method"]]
    less = [other for other in _there(rows, "ours") if other["method"] == OURS and other["share"] <= row["share"]]
    return next(iter([*exact, *less]), None)


def _rivals(rows: Sequence[Row]) -> list[str]:
    """Every rival, and our plan in its bytes."""
    cells, pairs = [], []
    for row in _there(rows, "rivals", "library"):
        ours = _match(rows, row)
        own = ("", "", "") if ours is None else (f"{ours['share']:.1%}", _measured(ours), f"{ours['kl']:.6f}")
        theirs = (f"{row['share']:.1%}", _measured(row), f"{row['kl']:.6f}", _perplexity(row))
        cells.append((_method(row), *theirs, *own))
        pairs += [] if ours is None else [(row, ours)]
    if not cells:
        return []
    titles = ("cache", "bytes", "damage", "KL", "perplexity", "ours: bytes", "damage", "KL")
    return [*_table(titles, cells), *_ahead(pairs)]


def _ahead(pairs: Sequence[tuple[Row, Row]]) -> list[str]:
    """How often ours is closer to the source in no more bytes."""
    behind = _behind(pairs)
    told = f"- By KL ours is closer to the source than {len(pairs) - len(behind)} of {len(pairs)}"
    return [f"{told}{'; not than ' + ', '.join(behind) if behind else ''}.", ""]


def _behind(pairs: Sequence[tuple[Row, Row]]) -> list[str]:
    """Caches that are at least as close to the source as ours, by KL."""
    return [_method(theirs) for theirs, ours in pairs if ours["kl"] >= theirs["kl"]]


def _ours(rows: Sequence[Row]) -> list[str]:
    """Plans for shares of the cache: ours, and rank cuts."""
    found = sorted(_there(rows, "ours", "rank"), key=lambda row: -float(row["asked"].rstrip("%")))
    cells = [
        (row["asked"], _method(row), f"{row['share']:.1%}", _predicted(row), _predicted(row, "rehearsed"),
         _measured(row), f"{row['kl']:.6f}", _perplexity(row))
        for row in found
    ]  # fmt: skip
    titles = ("budget", "plan", "bytes", "predicted", "calibration", "damage", "KL", "perplexity")
    return [*_table(titles, cells), *_foretold(found)]


def _foretold(rows: Sequence[Row]) -> list[str]:
    """How often prediction and measurement agree, up to a damage of 0.3 nats."""
    found = [row for row in rows if row["group"] == "ours" and row.get("predicted") and abs(row["measured"]) <= MOST]
    if not found:
        return []
    ratios = {f"{row['asked']} {_method(row).removeprefix('ours, ')}": row["kl"] / row["predicted"] for row in found}
    far = [f"{name} {ratio:.2f}" for name, ratio in ratios.items() if not 1 / FACTOR <= ratio <= FACTOR]
    told = f"- KL by predicted damage: within a factor of {FACTOR} in {len(ratios) - len(far)} of {len(ratios)} plans"
    return [f"{told}{'; not: ' + ', '.join(far) if far else ''}.", ""]


def _left_out(rows: Sequence[Row]) -> list[str]:
    """Plans of equal bytes in the same basis, by a simpler rule than the exact program."""
    cells = []
    for row in _there(rows, "ablations"):
        ours = _match(rows, row) or _asked(rows, row)
        best = ("", "", "") if ours is None else (f"{ours['share']:.1%}", _predicted(ours), _measured(ours))
        cells.append((_method(row), f"{row['share']:.1%}", _predicted(row), _measured(row), *best))
    titles = ("same basis, simpler rule", "bytes", "predicted", "damage", "exact plan: bytes", "predicted", "damage")
    return _table(titles, cells)


def _beside(rows: Sequence[Row]) -> list[str]:
    """What it brings to store first and newest tokens in more bits."""
    cells = [
        (row["asked"], _method(row), f"{row['share']:.1%}", _measured(row))
        for row in sorted(_there(rows, "beside"), key=lambda row: row["share"])
    ]
    return _table(("budget", "tokens also stored in more bits", "bytes", "damage"), cells)


def _asked(rows: Sequence[Row], row: Row) -> Row | None:
    """Our plan for the share that an ablation was given."""
    same = [other for other in _there(rows, "ours") if other["asked"] == row["asked"] and other["method"] == OURS]
    return next((other for other in same if other["share"] <= 1.01 * row["share"]), None)


def _missing(rows: Sequence[Row]) -> list[str]:
    """What could not be measured, and why."""
    found = [
        f"- Not measured: {_method(row)} {row['asked']}".rstrip() + f": {row['why']}" for row in rows if "why" in row
    ]
    return [*found, ""] if found else []


def _about(result: dict[str, Any]) -> list[str]:
    settings = result["settings"]
    made = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    texts = max(row.get("texts", 0) for row in result["rows"])
    return [
        f"- {texts} held-out texts of each length ({result['evaluation']}), 95% intervals over texts of the difference "
        f"to the source; calibrated on {settings['tokens']:,} tokens in rows of {settings['length']:,}, "
        f"{settings['dtype']}; {result['hardware']}, {result['date']}, {commits_of(result)}; {made}."
    ]


def named(files: Sequence[str] = ("bits-smollm2-1024.json", "bits-tinyllama.json"), folder: Path = RESULTS) -> str:
    """For the first page: named rivals, each beside our plan in no more bytes."""
    results = [json.loads((folder / file).read_text()) for file in files]
    pairs = [cell for result in results for cell in (f"{result['name'].split(' (')[0]}: theirs", "Headwise")]
    cells = []
    for name, method in NAMED.items():
        found = []
        for result in results:
            theirs = next((row for row in result["rows"] if row["method"] == method), None)
            found += [_told(theirs), _told(theirs and _match(result["rows"], theirs))]
        cells.append((name, *found))
    made = [
        f"{result['name']}: {result['rows'][0]['texts']} texts of {result['rows'][0]['length']:,} tokens; "
        f"{result['hardware']}, {result['date']}, {commits_of(result)}"
        for result in results
    ]
    notes = ["- Half of the 95% interval. An empty cell was not measured.", *(f"- {text}." for text in made)]
    return "\n".join([*_table(("KV cache", *pairs), cells), *notes])


def commits_of(result: dict[str, Any]) -> str:
    """The commits that rows were measured with; those of others may be earlier, as our code does not change them."""
    rows = result["rows"]
    own = dict.fromkeys(row["commit"] for row in rows if row["group"] not in KEPT)
    others = dict.fromkeys(row["commit"] for row in rows if row["group"] in KEPT)
    told = f"commit {', '.join(own or others)}"
    return f"{told} (the others: {', '.join(others)})" if own and others and own != others else told


def summary(folder: Path = RESULTS) -> str:
    """Shares of ours, and the best of the others in about as many bits, per model and length."""
    titles = ("model, tokens", "25%", "12.5%", "6.25%", "best other cache in 4 bits", "best other cache in 2 bits")
    cells, made = [], []
    for result in _results(folder):
        for length in sorted({row["length"] for row in result["rows"]}):
            rows = [row for row in result["rows"] if row["length"] == length]
            ours = {row["asked"]: row for row in _there(rows, "ours") if row["method"] == OURS}
            name = f"{result['name'].removesuffix(f', {length:,} tokens')}{_format(result)}, {length:,}"
            best = (_best(rows, bits) for bits in (4, 2))
            cells.append((name, *(_told(ours.get(share)) for share in titles[1:4]), *best))
        made.append(f"{result['hardware']}, {result['date']}, {commits_of(result)}")
    return "\n".join([*_table(titles, cells), f"- {'; '.join(dict.fromkeys(made))}."])


def _told(row: Row | None) -> str:
    if row is None or "why" in row:
        return ""
    half = 100 * (row["measured_high"] - row["measured_low"]) / 2
    return f"{row['perplexity_change']:+.2%} ± {half:.2f} ({row['share']:.1%})"


def _best(rows: Sequence[Row], bits: int) -> str:
    """The least damage of the other caches with this number of bits."""
    those = [
        row
        for row in _there(rows, "rivals", "library")
        if f"int{bits}" in row["method"] or f"{bits} bits" in row["method"]
    ]
    if not those:
        return ""
    best = min(those, key=lambda row: float(row["measured"]))
    return f"{_told(best)}: {_method(best)}"


def filled(page: str, folder: Path = RESULTS) -> str:
    """The page with its tables as the results say."""
    for (start, end), made in zip(MARKS.values(), (overview(folder), tables(folder)), strict=True):
        before, rest = page.split(start)
        page = f"{before}{start}\n\n{made}\n\n{end}{rest.split(end)[1]}"
    return page


def main() -> None:
    """Rewrite or check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true")
    old = PAGE.read_text()
    if parser.parse_args().check:
        sys.exit(0 if filled(old) == old else "docs/BITS.md is stale; run benchmarks/bits_page.py")
    PAGE.write_text(filled(old))


if __name__ == "__main__":
    main()
