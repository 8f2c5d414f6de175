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

from lengths_page import PAGE, SPENT, page, spend_of

BUDGETS = ("kv=90%", "kv=75%", "kv=50%")
HEALINGS = ("refit", "none")
FIRST = 512  # the shortest length, unless rows of the calibration are shorter
PASSAGES = 128  # of every distance


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
    return any({**row, "spend": spend_of(row)} | wanted == {**row, "spend": spend_of(row)} for row in found["rows"])


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
    return f"{spend_of(row)} {row['pool']:5} {row['way']:18} {row['budget']} {row['heal']:6} {damages}"


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
