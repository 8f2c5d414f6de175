"""Does a cut hold at every length that is served? Damage by length, and retrieval, with and without position offsets.

    python benchmarks/lengths.py embedded --out benchmarks/results/lengths-embedded.json
    python benchmarks/lengths.py --print   # rewrite docs/LENGTHS.md from the committed results
    python benchmarks/lengths.py --check   # exit 1 if the page is not what the results say

Every row is one plan, before or after the refit. A plan spends bits (the default: cached rows are coded) or drops whole
directions, and is made in one of two ways: for the whole context (calibration rows begin at random positions of it) or,
for directions only, for the calibrated length alone (`--context` equal to `--length`, as before offsets). Both ways
read the same calibration text. A result is written row by row: a run that was killed resumes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "LENGTHS.md"
BUDGETS = ("kv=90%", "kv=75%", "kv=50%")
HEALINGS = ("refit", "none")
FACTOR, ABOVE = 1.25, 0.01  # damage at the full context may be so many times that at the first length, and so much more
FIRST = 512  # the shortest length, unless rows of the calibration are shorter
PASSAGES = 128  # of every distance
NEAR = 2.0  # points of retrieval that a cut to 75% may lose
SPENT = {"bits": "bits", "dims": "directions"}  # what a plan drops, and how the page calls it
INTRO = """A cut that was calibrated on short rows can fail on long ones, because queries and keys after rotary depend
on the position. Calibration rows therefore begin at random positions of the context that will be served (`--context`,
by default the model's own). The tables show the increase of the loss in nats per token by length, on the same text at
every length, with half of the 95% interval; and how often the model continues a random passage that it has read
before, by the distance to it. Column `stores`: `bits` is the default, with more bits for directions whose errors do
more damage; `directions` keeps some directions in 16 bits and drops the others (`--allow qk,v,mlp`). Column
`calibrated for`: `whole context` is the default; `calibrated length` is a run with `--context` equal to `--length`,
which is what earlier versions of Headwise did, and what other methods that project after rotary do. Heads are cut
`per head`, or `pooled` (all key/value heads of a layer share a row). Rows of bits were measured when codes had at most
8 bits; since then they have up to 12."""


def measure(asked: argparse.Namespace) -> None:
    """Every pooling, way, budget and healing that is not in the result yet."""
    from headwise import pipeline
    from headwise.runs.settings import DEFAULT_UNITS, Settings

    found: dict[str, Any] = json.loads(asked.out.read_text()) if asked.out.exists() else {"rows": []}
    settings = Settings(
        model=asked.model, data=asked.data, eval=asked.eval, tokens=asked.tokens, eval_tokens=asked.eval_tokens,
        swap_tokens=asked.swap_tokens, length=asked.length, heal="refit", device=asked.device, budgets=(BUDGETS[0],),
    )  # fmt: skip
    ways: dict[str, int | None] = {"whole context": None, "calibrated length": asked.length}
    for spend, pool, way in itertools.product(asked.spend or SPENT, asked.pool or ("none", "all"), asked.way or ways):
        if spend == "bits" and way != "whole context":
            continue
        allow = DEFAULT_UNITS if spend == "bits" else ("qk", "v", "mlp")
        wanted = replace(settings, pool=pool, context=ways[way], allow=allow)
        made = {"spend": spend, "pool": pool, "way": way}
        left = [
            b for b in asked.budget or BUDGETS if not all(_known(found, {**made, "budget": b}, h) for h in HEALINGS)
        ]
        if left:
            bench = pipeline.load_source(wanted)
            found |= _about(asked, settings, bench)
            _measure_way(asked, wanted, bench, made, left, found)


def _known(found: dict[str, Any], plan: dict[str, str], healing: str) -> bool:
    wanted = {**plan, "heal": healing}
    return any({**row, "spend": _spend(row)} | wanted == {**row, "spend": _spend(row)} for row in found["rows"])


def _spend(row: dict[str, Any]) -> str:
    return str(row.get("spend", "dims"))  # all that earlier results measured


def _measure_way(
    asked: argparse.Namespace, settings: Any, bench: Any, way: dict[str, str], budgets: list[str], found: dict[str, Any]
) -> None:
    """Probe once, then cut and refit to every budget."""
    from headwise import heal, pipeline
    from headwise.checks import certificate
    from headwise.types import write_atomically

    family, config = bench.family, bench.model.config
    seen = pipeline.probe(settings, bench, diagnose=False)
    rows = certificate.rows_for(
        config, bench.tokenizer, bench.long, min(FIRST, settings.length), family.longest(config), settings.eval_tokens,
        passages=asked.passages,
    )  # fmt: skip
    for budget in budgets:
        one = replace(settings, budgets=(budget,), heal="none")
        fitted = pipeline.fit(one, bench, first=seen)
        refitted, _ = heal.healed("refit", bench.job(settings, fitted.model))
        for name, model in zip(HEALINGS, (refitted, fitted.model), strict=True):
            if _known(found, {**way, "budget": budget}, name):
                continue
            told = certificate.measure(family, bench.model, model, rows)
            row: dict[str, Any] = {**way, "budget": budget, "heal": name}
            row["lengths"] = [length.to_json() for length in told.lengths]
            row["retrieval"] = [distance.to_json() for distance in told.retrieval]
            found["rows"].append(row)
            print(_line(row), flush=True)
            write_atomically(asked.out, json.dumps(found, indent=1) + "\n")


def _about(asked: argparse.Namespace, settings: Any, bench: Any) -> dict[str, Any]:
    """On what, where, when and by which code."""
    return {
        "name": asked.name or Path(asked.model).stem,
        "length": bench.calibration.shape[1],
        "calibration_tokens": bench.calibration.numel(),
        "evaluation": Path(bench.described).name,
        "eval_tokens": settings.eval_tokens,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        **about_machine(bench.model.device, asked.shared),
    }


def about_machine(device: Any, shared: bool = True) -> dict[str, Any]:
    """Where and by which code."""
    import torch
    import transformers
    from provenance import commit

    from headwise.checks import speed

    return {
        "hardware": speed.machine(device) + (", shared with other work" if shared else ""),
        "commit": commit(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def _line(row: dict[str, Any]) -> str:
    damages = "  ".join(f"{found['length']}: {found['damage']:.4f}" for found in row["lengths"])
    return f"{_spend(row)} {row['pool']:5} {row['way']:18} {row['budget']} {row['heal']:6} {damages}"


def page(folder: Path = RESULTS) -> str:
    """The page, from all results."""
    results: dict[tuple[str, int], dict[str, Any]] = {}
    for path in sorted(folder.glob("lengths-*.json")):
        result = json.loads(path.read_text())
        known = results.setdefault((result["name"], result["length"]), {**result, "rows": [], "parts": []})
        known["parts"].append(result)
        known["rows"] += result["rows"]
    lines = ["# Lengths", "", INTRO, ""]
    for result in results.values():
        lines += _section(result)
    for path in sorted(folder.glob("key-moments-*.json")):
        lines += _why(json.loads(path.read_text()))
    for path in sorted(folder.glob("key-cuts-*.json")):
        lines += _cuts(json.loads(path.read_text()))
    lines += ["Printed by `python benchmarks/lengths.py --print`; nothing here is typed by hand.", ""]
    return "\n".join(lines)


def _section(result: dict[str, Any]) -> list[str]:
    sizes = sorted({found["length"] for row in result["rows"] for found in row["lengths"]})
    title = f"{result['name']}, {sizes[-1]:,} tokens of context, calibrated on rows of {result['length']:,}"
    lines = [f"## {title}", ""]
    lines += [
        f"| stores | heads | cache kept | healing | calibrated for | {' | '.join(f'{size:,}' for size in sizes)} |"
    ]
    lines += ["| --- |" + " --- |" * (4 + len(sizes))]
    for row in sorted(result["rows"], key=_order):
        known = {found["length"]: _cell(found) for found in row["lengths"]}
        cells = " | ".join(known.get(size, "not measured") for size in sizes)
        kept = row["budget"].removeprefix("kv=")
        lines.append(f"| {SPENT[_spend(row)]} | {_heads(row)} | {kept} | {row['heal']} | {row['way']} | {cells} |")
    lines += ["", *_judged(result, sizes[-1]), *_retrieved(result)]
    return [*lines, *map(_measured, result["parts"]), ""]


def _measured(part: dict[str, Any]) -> str:
    """Which rows were measured where, on how much text, and by which code."""
    rows = " and ".join(dict.fromkeys(f"{SPENT[_spend(row)]}, {_heads(row)}" for row in part["rows"]))
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
    return _spend(row), row["pool"] == "none", size, row["heal"] != "none", row["way"] != "whole context"


def _heads(row: dict[str, Any]) -> str:
    return "pooled" if row["pool"] != "none" else "per head"


def _cell(found: dict[str, Any]) -> str:
    return f"{found['damage']:.4f} ± {(found['high'] - found['low']) / 2:.4f}"


def _judged(result: dict[str, Any], full: int) -> list[str]:
    """Where the damage at the full context stays near that at the first length, by what is spent and by way."""
    lines = []
    for spend, way in (("bits", "whole context"), ("dims", "whole context"), ("dims", "calibrated length")):
        whole = [row for row in result["rows"] if row["lengths"][-1]["length"] == full]
        rows = [row for row in whole if row["way"] == way and _spend(row) == spend]
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
    """Retrieval of the refitted models: the largest loss at any distance, and where the source hardly does it."""
    lines = []
    for row in sorted(result["rows"], key=_order):
        able = [found for found in row["retrieval"] if found["accuracy_before"] >= 0.1]
        if row["heal"] != "refit" or not able:
            continue
        worst = min(able, key=_change)
        half = 50 * (worst["accuracy_change_high"] - worst["accuracy_change_low"])
        words = f"- Retrieval, {SPENT[_spend(row)]}, {_heads(row)}, {row['budget']}, {row['way']}: "
        words += f"largest loss over {worst['distance']:,} tokens, {100 * worst['accuracy_before']:.1f}% before, "
        words += f"{_change(worst):+.1f} points ± {half:.1f} ({worst['passages']} passages)"
        far = row["retrieval"][-1]
        if far not in able:
            words += f"; over {far['distance']:,} tokens {100 * far['accuracy_before']:.1f}%, {_change(far):+.1f}"
        if row["budget"] == "kv=75%":
            near = min(map(_change, row["retrieval"])) >= -NEAR
            words += f"; within {NEAR:g} points everywhere: {'yes' if near else 'no'}"
        lines.append(f"{words}.")
    return lines or ["- Retrieval: the source does not continue a random passage at any distance."]


def _change(found: dict[str, Any]) -> float:
    return float(100 * (found["accuracy_after"] - found["accuracy_before"]))


def main() -> None:
    """Measure, print or check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--name", help="of the model on the page")
    parser.add_argument("--budget", action="append")
    parser.add_argument("--pool", action="append")
    parser.add_argument("--spend", action="append", choices=list(SPENT))
    parser.add_argument("--way", action="append", choices=("whole context", "calibrated length"))
    parser.add_argument("--data")
    parser.add_argument("--eval")
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--eval-tokens", type=int, default=65_536)
    parser.add_argument("--swap-tokens", type=int, default=8_192)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--passages", type=int, default=PASSAGES, help="of retrieval, at every distance")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shared", action="store_true", help="note that the machine has other work meanwhile")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--print", action="store_true")
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    if asked.check:
        sys.exit(0 if PAGE.read_text() == page() else "docs/LENGTHS.md is stale; run benchmarks/lengths.py --print")
    if asked.print:
        PAGE.write_text(page())
        return
    if not (asked.model and asked.out):
        parser.error("give a model and --out, or --print")
    measure(asked)


if __name__ == "__main__":
    main()
