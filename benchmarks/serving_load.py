"""How many tokens a second vLLM writes where the cache limits the batch, and where it does not: a source and its cuts.

    python benchmarks/serving_load.py --work runs/kinds

More requests come than the cache holds, so that some wait; engines write by turns. Processor time is counted on a CPU,
so that what else the machine does counts for neither. Results: benchmarks/results/serving-load.json, which
`python benchmarks/serving.py` prints.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kinds
from provenance import commit
from serving_vllm import PACKAGES, prompts_of

from headwise.engines.process import Engine
from headwise.files.disk import write_atomically

RESULT = Path(__file__).parent / "results" / "serving-load.json"
REQUESTS, NEW, LENGTH, TURNS = 16, 224, 256, 11  # tokens of a prompt: those of serving_vllm.py
CACHES = {"limits the batch": 16 << 20, "holds all requests": 1 << 30}  # bytes
ASKED = ("pooled, --serve vllm", "per-head, --serve vllm", "parameters", "portable")


def started(folder: Path, cache_bytes: int) -> Engine:
    """An engine with so much cache."""
    trust = "auto_map" in json.loads((folder / "config.json").read_text())
    settings = {"dtype": "float32", "length": LENGTH, "batch": REQUESTS, "trust": trust}
    return Engine("vllm", str(folder), cache_bytes=cache_bytes, **settings)


def by_turns(engines: list[Engine], prompts: list[list[int]]) -> list[list[float]]:
    """Tokens per second of every engine, one after the other again and again, the first turn left out."""
    speeds: list[list[float]] = [[] for _ in engines]
    for turn in range(TURNS + 1):
        for place, engine in enumerate(engines):
            took = engine.ask("seconds", prompts=prompts, tokens=NEW)
            if turn:
                speeds[place].append(len(prompts) * NEW / took)
    return speeds


def measured(model: str, kind: str, work: Path, cache: str) -> dict[str, Any]:
    """One kind of cut beside its source, with a cache of some size."""
    folders = kinds.source(model), kinds.made(model, kind, work)
    prompts = prompts_of(model)[:REQUESTS]
    with started(folders[0], CACHES[cache]) as source, started(folders[1], CACHES[cache]) as own:
        theirs, ours = by_turns([source, own], prompts)
        held = {"source_cache_tokens": source.facts["tokens"], "cache_tokens": own.facts["tokens"]}
    return {
        "model": Path(model).name, "kind": kind, "cache": cache, "cache_memory": CACHES[cache], "requests": REQUESTS,
        "new_tokens": NEW, **held, "tokens_per_second": ours, "source_tokens_per_second": theirs,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"), "commit": commit(),
    }  # fmt: skip


def main() -> None:
    """Measure what was asked for and write after every row, beside those that are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/kinds"), help="where models are made")
    parser.add_argument("--models", nargs="+", default=["embedded"], help="'embedded' or folders")
    parser.add_argument("--kinds", nargs="+", default=list(ASKED))
    parser.add_argument("--caches", nargs="+", default=list(CACHES))
    asked = parser.parse_args()
    rows = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    for model, kind, cache in ((m, k, c) for m in asked.models for k in asked.kinds for c in asked.caches):
        new = measured(model, kind, asked.work, cache)
        print(json.dumps(new), flush=True)
        names = ("model", "kind", "cache")
        rows = [row for row in rows if any(row[name] != new[name] for name in names)] + [new]
        hardware = f"{platform.machine()} CPU, {os.cpu_count()} cores, one thread, shared with other work"
        versions = {name: version(name) for name in PACKAGES}
        whole = {"engine": "vllm under load", "hardware": hardware, "versions": versions, "rows": rows}
        write_atomically(RESULT, json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
