"""How far a model's answers move when its cache has few bits, by the way in which the model is read.

    python benchmarks/streamed_bits.py              # minutes
    python benchmarks/streamed_bits.py --ways 0 1   # only some; others keep their committed results

The embedded model's cache is coded four times for each budget: streamed with every head's own rows, streamed with rows
that heads share, the same in memory, and streamed with layers that are trained. The saved model is loaded and compared
with the source on held-out text. Writes `benchmarks/results/streamed_bits.json` as results come.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from provenance import commit, hardware

RESULT = Path(__file__).parent / "results" / "streamed_bits.json"
LIMITS = ("kv=25%", "kv=12.5%")
WAYS = {  # streamed, heads that share rows, healing
    "streamed, every head's own rows": (True, "none", "refit"),
    "streamed, shared rows": (True, "auto", "refit"),
    "in memory, shared rows": (False, "auto", "refit"),
    "streamed, shared rows, blockwise": (True, "auto", "blockwise"),
}
SIZES = dict(tokens=8_192, eval_tokens=8_192, swap_tokens=1_024, length=256)


def measured(way: tuple[bool, str, str], work: Path) -> dict[str, Any]:
    """The divergence of the answers at every budget, read in one way."""
    from quality import full_rows

    from headwise import families, pipeline
    from headwise.budgets import parse
    from headwise.checks import quality
    from headwise.runs.folder import RunFolder
    from headwise.runs.settings import Settings
    from headwise.stream.source import load_streaming

    model, _ = families.load("embedded")
    family = families.family_of(model.config)
    source, found = family.tailor(model), {}
    streamed, pool, heal = way
    asked = Settings(
        "embedded", LIMITS[:1], device="cpu", data="stdlib", stream=streamed, pool=pool, heal=heal, **SIZES
    )
    folder = RunFolder(work)
    folder.claim(asked, "embedded")
    bench = load_streaming(asked) if streamed else pipeline.load_source(asked)
    evaluation = full_rows(bench, asked.eval_tokens)
    readings = bench.probe(asked, folder, diagnose=False).readings
    for limit in LIMITS:
        plan = pipeline.allocate(asked, bench, readings, (parse(limit, bench.shape),))
        folder.write_plan(plan)
        pipeline.carry_out(asked, folder, bench, plan)
        cut = family.tailor(families.load(str(folder.model))[0])
        told = quality.compare(family, source, cut, evaluation).summary()
        found[limit] = {key: told[key] for key in ("kl", "kl_low", "kl_high")}
        print(way, limit, found[limit], file=sys.stderr, flush=True)
    shutil.rmtree(work)
    return {
        **found,
        "evaluated": evaluation.shape[1],
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "hardware": hardware(),
        "threads": os.environ.get("OMP_NUM_THREADS", "all"),
        "torch": metadata.version("torch"),
    }


OWN = "every head's own rows"  # as results call it


def section(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    lines = [
        "## Models larger than memory, with a cache in few bits (`benchmarks/streamed_bits.py`)",
        "",
        "Measured damage of the embedded model (KL divergence from the source, nats per token), 95% intervals on "
        f"{result['sizes']['eval_tokens']:,} held-out tokens in rows of the full context "
        f"({result['sizes']['tokens']:,} of calibration; refitted, where nothing else is said):",
        "",
        "| cache | " + " | ".join(LIMITS) + " |",
        "| --- |" + " --- |" * len(LIMITS),
    ]
    for name, row in result["ways"].items():
        cells = [f"{row[at]['kl']:.4f} ({row[at]['kl_low']:.4f} to {row[at]['kl_high']:.4f})" for at in LIMITS]
        words = name.replace("shared rows", "pooled").replace(OWN, "per head")
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    said = (f"{row['hardware']['processor']}, {row['date']}, torch {row['torch']}, commit {row['commit']}"
            for row in result["ways"].values())  # fmt: skip
    return "\n".join([*lines, "", "; ".join(dict.fromkeys(said)) + ".", ""])


def main() -> None:
    """Measure the ways that are asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ways", nargs="+", type=int, default=[*range(len(WAYS))], help="their numbers, from 0")
    arguments = parser.parse_args()
    known = json.loads(RESULT.read_text())["ways"] if RESULT.exists() else {}
    with tempfile.TemporaryDirectory(prefix="streamed-bits-") as scratch:
        for number in arguments.ways:
            name = [*WAYS][number]
            known[name] = measured(WAYS[name], Path(scratch) / str(number))
            ordered = {name: known[name] for name in WAYS if name in known}
            RESULT.write_text(json.dumps({"sizes": SIZES, "ways": ordered}, indent=1) + "\n")


if __name__ == "__main__":
    main()
