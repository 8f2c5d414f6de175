"""Does a cut hold at every length that is served? Damage by length, and retrieval, with and without position offsets.

    python benchmarks/lengths.py embedded --out benchmarks/results/lengths-embedded.json
    python benchmarks/lengths.py --print   # rewrite docs/LENGTHS.md from the committed results
    python benchmarks/lengths.py --check   # exit 1 if the page is not what the results say

Every row is one plan, before or after the refit, made in one of two ways: for the whole context (calibration rows begin
at random positions of it) or for the calibrated length alone (`--context` equal to `--length`, as before offsets). Both
ways read the same calibration text. A result is written row by row: a run that was killed resumes.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "LENGTHS.md"
BUDGETS = ("kv=90%", "kv=75%", "kv=50%")
FACTOR, ABOVE = 1.25, 0.01  # damage at the full context may be so many times that at the first length, and so much more
FIRST = 512  # the shortest length, unless rows of the calibration are shorter
PASSAGES = 128  # of every distance
INTRO = """A cut that was calibrated on short rows can fail on long ones, because queries and keys after rotary depend
on the position. Calibration rows therefore begin at random positions of the context that will be served (`--context`,
by default the model's own). The tables show the increase of the loss in nats per token by length, on the same text at
every length, with half of the 95% interval; and how often the model continues a random passage that it has read
before, by the distance to it. `whole context` is the default. `calibrated length` is a run with `--context` equal to
`--length`: what Headwise did before, and what other methods that project after rotary do."""


def measure(asked: argparse.Namespace) -> None:
    """Every pooling, way, budget and healing that is not in the result yet."""
    from headwise import pipeline
    from headwise.runs.settings import Settings

    found: dict[str, Any] = json.loads(asked.out.read_text()) if asked.out.exists() else {"rows": []}
    settings = Settings(
        model=asked.model, data=asked.data, eval=asked.eval, tokens=asked.tokens, eval_tokens=asked.eval_tokens,
        swap_tokens=asked.swap_tokens, length=asked.length, heal="refit", device=asked.device, budgets=(BUDGETS[0],),
        allow=("qk", "v", "mlp"),
    )  # fmt: skip
    for pool in asked.pool or ("none", "all"):
        for way, context in (("whole context", None), ("calibrated length", asked.length)):
            wanted = replace(settings, pool=pool, context=context)
            left = [text for text in asked.budget or BUDGETS if not _known(found, pool, way, text)]
            if left:
                bench = pipeline.load_source(wanted)
                found |= _about(asked, settings, bench)
                _measure_way(asked, wanted, bench, way, left, found)


def _known(found: dict[str, Any], pool: str, way: str, budget: str) -> bool:
    rows = [(row["pool"], row["way"], row["budget"], row["heal"]) for row in found["rows"]]
    return (pool, way, budget, "refit") in rows


def _measure_way(
    asked: argparse.Namespace, settings: Any, bench: Any, way: str, budgets: list[str], found: dict[str, Any]
) -> None:
    """Probe once, then cut and refit to every budget."""
    from headwise import heal, pipeline
    from headwise.checks import certificate
    from headwise.types import write_atomically

    family, config = bench.family, bench.model.config
    seen = pipeline.probe(settings, bench, diagnose=False)
    rows = certificate.rows_for(
        config, bench.tokenizer, bench.long, min(FIRST, settings.length), family.longest(config), settings.eval_tokens,
        passages=PASSAGES,
    )  # fmt: skip
    for budget in budgets:
        one = replace(settings, budgets=(budget,), heal="none")
        fitted = pipeline.fit(one, bench, first=seen)
        refitted, _ = heal.healed("refit", bench.job(settings, fitted.model))
        for name, model in (("none", fitted.model), ("refit", refitted)):
            told = certificate.measure(family, bench.model, model, rows)
            row = {"pool": settings.pool, "way": way, "budget": budget, "heal": name}
            row["lengths"] = [length.to_json() for length in told.lengths]
            row["retrieval"] = [distance.to_json() for distance in told.retrieval]
            found["rows"].append(row)
            print(_line(row), flush=True)
        write_atomically(asked.out, json.dumps(found, indent=1) + "\n")


def _about(asked: argparse.Namespace, settings: Any, bench: Any) -> dict[str, Any]:
    """On what, where, when and by which code."""
    import torch
    import transformers
    from provenance import commit

    from headwise.checks import speed

    return {
        "name": asked.name or Path(asked.model).stem,
        "length": bench.calibration.shape[1],
        "calibration_tokens": bench.calibration.numel(),
        "evaluation": Path(bench.described).name,
        "eval_tokens": settings.eval_tokens,
        "hardware": speed.machine(bench.model.device) + (", shared with other work" if asked.shared else ""),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def _line(row: dict[str, Any]) -> str:
    damages = "  ".join(f"{found['length']}: {found['damage']:.4f}" for found in row["lengths"])
    return f"{row['pool']:5} {row['way']:18} {row['budget']} {row['heal']:6} {damages}"


def page(folder: Path = RESULTS) -> str:
    """The page, from all results."""
    results: dict[tuple[str, int], dict[str, Any]] = {}
    for path in sorted(folder.glob("lengths-*.json")):
        result = json.loads(path.read_text())
        known = results.setdefault((result["name"], result["length"]), result)
        if known is not result:  # measured in parts
            known["rows"] += result["rows"]
    lines = ["# Lengths", "", INTRO, ""]
    for result in results.values():
        lines += _section(result)
    lines += ["Printed by `python benchmarks/lengths.py --print`; nothing here is typed by hand.", ""]
    return "\n".join(lines)


def _section(result: dict[str, Any]) -> list[str]:
    sizes = sorted({found["length"] for row in result["rows"] for found in row["lengths"]})
    title = f"{result['name']}, {sizes[-1]:,} tokens of context, calibrated on rows of {result['length']:,}"
    lines = [f"## {title}", ""]
    lines += [f"| heads | cache kept | healing | calibrated for | {' | '.join(f'{size:,}' for size in sizes)} |"]
    lines += ["| --- |" + " --- |" * (3 + len(sizes))]
    for row in sorted(result["rows"], key=_order):
        known = {found["length"]: _cell(found) for found in row["lengths"]}
        cells = " | ".join(known.get(size, "not measured") for size in sizes)
        heads = "pooled" if row["pool"] != "none" else "by themselves"
        lines.append(f"| {heads} | {row['budget'].removeprefix('kv=')} | {row['heal']} | {row['way']} | {cells} |")
    lines += ["", *_judged(result, sizes[-1]), *_retrieved(result)]
    made = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines.append(
        f"- {result['calibration_tokens']:,} calibration tokens in rows of {result['length']:,}; "
        f"{result['evaluation']}; {result['hardware']}, {result['date']}, commit {result['commit']}; {made}."
    )
    return [*lines, ""]


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["pool"] == "none", -float(row["budget"][3:-1]), row["heal"] != "none", row["way"] != "whole context"


def _cell(found: dict[str, Any]) -> str:
    return f"{found['damage']:.4f} ± {(found['high'] - found['low']) / 2:.4f}"


def _judged(result: dict[str, Any], full: int) -> list[str]:
    """Where the damage at the full context stays near that at the first length, per way."""
    lines = []
    for way in ("whole context", "calibrated length"):
        rows = [row for row in result["rows"] if row["way"] == way and row["lengths"][-1]["length"] == full]
        if not rows:
            lines.append(f"- Calibrated for the {way}: not measured.")
            continue
        held = [row for row in rows if _holds(row)]
        lost = [f"{row['pool']} {row['budget']} {row['heal']}" for row in rows if row not in held]
        words = f"- Calibrated for the {way}: {len(held)} of {len(rows)} cuts have at most {FACTOR:g} times the damage"
        words += f" of the first length plus {ABOVE:g} nats at the full context"
        lines.append(words + (f"; not: {', '.join(lost)}." if lost and len(lost) < len(rows) else "."))
    return lines


def _holds(row: dict[str, Any]) -> bool:
    return bool(row["lengths"][-1]["damage"] <= FACTOR * max(0.0, row["lengths"][0]["damage"]) + ABOVE)


def _retrieved(result: dict[str, Any]) -> list[str]:
    """Retrieval of the refitted models at the farthest distance at which the source does it at all."""
    lines = []
    for row in sorted(result["rows"], key=_order):
        able = [found for found in row["retrieval"] if found["accuracy_before"] >= 0.1]
        if row["heal"] != "refit" or not able:
            continue
        far = able[-1]
        change = 100 * (far["accuracy_after"] - far["accuracy_before"])
        half = 50 * (far["accuracy_change_high"] - far["accuracy_change_low"])
        heads = "pooled" if row["pool"] != "none" else "by themselves"
        lines.append(
            f"- Retrieval over {far['distance']:,} tokens, heads {heads}, {row['budget']}, {row['way']}: "
            f"{100 * far['accuracy_before']:.1f}% before, {change:+.1f} points ± {half:.1f}."
        )
    return lines or ["- Retrieval: the source does not continue a random passage at any distance."]


def main() -> None:
    """Measure, print or check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--name", help="of the model on the page")
    parser.add_argument("--budget", action="append")
    parser.add_argument("--pool", action="append")
    parser.add_argument("--data")
    parser.add_argument("--eval")
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--eval-tokens", type=int, default=65_536)
    parser.add_argument("--swap-tokens", type=int, default=8_192)
    parser.add_argument("--length", type=int, default=512)
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
