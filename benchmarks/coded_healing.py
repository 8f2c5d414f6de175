"""Does healing of a coded cache learn more from rounded rows, or from rows with noise of the same size?

    python benchmarks/coded_healing.py --out benchmarks/results/coded-healing.json
    python benchmarks/bits_page.py   # print it into docs/BITS.md

Both ways pass gradients as if nothing had been coded. `rounded` reads rows as the cache will give them back. `noise`
adds the error of another token of the same text in place of a token's own. Healed models are always measured with
rounded rows, on held-out text, beside the model that is not healed. Random seeds differ in the order of the text.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from bits_bench import Bench, _damage, say
from provenance import commit

from headwise.checks import _lengths as lengths
from headwise.checks import speed
from headwise.runs.settings import Settings
from headwise.runtime.coder_headwise import RowCoder
from headwise.types import write_atomically

HEALINGS = {"blockwise": (), "distill": ("tokens=1000000", "blockwise=0")}
RESULT = Path(__file__).parent / "results" / "coded-healing.json"


@contextmanager
def noisy() -> Iterator[None]:
    """Until the end, rows that gradients pass through get the error of another token in place of their own."""
    rounded = RowCoder.rounded

    def with_noise(coder: RowCoder, x: torch.Tensor) -> torch.Tensor:
        found = rounded(coder, x)
        if not x.requires_grad:
            return found
        error = (found - x).detach()
        return x + error[:, :, torch.randperm(x.shape[2], device=x.device)]

    RowCoder.rounded = with_noise  # type: ignore[method-assign]
    try:
        yield
    finally:
        RowCoder.rounded = rounded  # type: ignore[method-assign]


def measured(bench: Bench, model: Any, rows: torch.Tensor) -> dict[str, float]:
    """Damage on held-out rows, with half of its 95% interval."""
    damage, kl = _damage(bench, lambda ids: lengths.last_stream(bench.family, model, ids), model, rows)
    low, high = lengths.interval(damage)
    return {"damage": float(damage.mean()), "half": (high - low) / 2, "kl": kl}


def rows_of(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All rows of the result, one by one."""
    settings = Settings(
        model=asked.model, budgets=("kv=50%",), heal="distill", tokens=asked.tokens, device=asked.device,
        eval_tokens=(asked.rows + 1) * asked.length,
    )  # fmt: skip
    bench = Bench(settings, asked.out.parent / f".{asked.out.stem}", torch.float32)
    text = bench.rows(asked.length, asked.rows)
    for share in asked.share:
        fitted = bench.fitted(bench.plan(share))
        yield {"share": share, "healing": "none", "way": "", "seed": 0, **measured(bench, fitted.model, text)}
        for healing, options in HEALINGS.items():
            for seed in range(asked.seeds):
                bench.settings = replace(settings, seed=seed)
                for way in ("rounded", "noise"):
                    say(f"{share}, {healing}, {way}, random seed {seed}")
                    with noisy() if way == "noise" else torch.enable_grad():
                        model, _ = bench.healed(healing, options, copy.deepcopy(fitted.model))
                    yield {"share": share, "healing": healing, "way": way, "seed": seed, **measured(bench, model, text)}


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--share", action="append")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=114_688)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args()
    asked.share = asked.share or ["6.25%"]
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {
        "model": asked.model, "length": asked.length, "rows_read": asked.rows, "tokens": asked.tokens,
        "commit": commit(), "date": datetime.now(UTC).strftime("%Y-%m-%d"), "rows": [],
    }  # fmt: skip
    device = "cuda" if torch.cuda.is_available() and asked.device != "cpu" else "cpu"
    found["hardware"] = speed.machine(torch.device(device)) + ", shared with other work"
    for row in rows_of(asked):
        found["rows"].append(row)
        write_atomically(asked.out, json.dumps(found, indent=1) + "\n")
        say(json.dumps(row))


if __name__ == "__main__":
    main()
