"""Quality after cutting, without any training: every strategy on the same model, text and budgets.

    python benchmarks/quality.py embedded --budget kv=75% --budget kv=50% --out benchmarks/results/quality-embedded.json

Prints a table and writes it as JSON. Damage is the increase of the loss in nats per token on held-out text, with a 95%
bootstrap interval over blocks; `published` is the bar (its recipe has no refit), measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from headwise import pipeline
from headwise.checks import quality, speed
from headwise.cost import parameters
from headwise.errors import BudgetError
from headwise.runfolder import Settings
from headwise.types import LayerShape

METHODS: dict[str, dict[str, Any]] = {
    "published": dict(strategy="published", heal="none"),
    "uniform": dict(strategy="uniform", heal="none"),
    "uniform + refit": dict(strategy="uniform", heal="refit"),
    "depth + refit": dict(strategy="depth", heal="refit"),
    "exact": dict(strategy="exact", heal="none"),
    "exact + refit": dict(strategy="exact", heal="refit"),
    "exact + refit, 3 rounds": dict(strategy="exact", heal="refit", rounds=3),
}


DEFAULT_METHODS = [name for name in METHODS if name != "depth + refit"]  # which needs parameters or FLOPs to save


def measure(settings: Settings, methods: list[str], asked_samples: bool = False) -> dict[str, Any]:
    """Every method at every budget; the source is probed once."""
    bench = pipeline.workbench(settings)
    first = pipeline.probe(settings, bench, bench.source)
    rows = []
    for budget in settings.budgets:
        for name in methods:
            asked = replace(settings, budgets=(budget,), **METHODS[name])
            start = time.perf_counter()
            try:
                fitted = pipeline.fit(
                    asked,
                    bench,
                    lambda number, model, asked=asked: first if number == 1 else pipeline.probe(asked, bench, model),
                )
            except BudgetError as error:
                print(f"{budget:8} {name:24} {error}", flush=True)
                continue
            seconds = time.perf_counter() - start
            found = quality.compare(bench.family, bench.source, fitted.model, bench.evaluation)
            rows.append(_row(budget, name, fitted, found, seconds, rows))
            if asked_samples:
                texts = quality.samples(bench.source, fitted.model, bench.tokenizer, bench.evaluation)
                rows[-1]["samples"] = [text.to_json() for text in texts]
            print(_line(rows[-1]), flush=True)
    return {
        "settings": settings.to_json(),
        "evaluation": bench.described,
        "calibration_tokens": bench.calibration.numel(),
        "evaluation_tokens": bench.evaluation.numel(),
        "probe_seconds": first[0].seconds,
        "perplexity_before": math.exp(float(found.loss_before.mean())),
        "hardware": speed.machine(bench.source.device),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "rows": rows,
    }


def _row(
    budget: str,
    name: str,
    fitted: pipeline.Fitted,
    found: quality.Comparison,
    seconds: float,
    rows: list[dict[str, Any]],
) -> dict[str, Any]:
    damage = found.damage()
    bar = next((r["measured"] for r in rows if r["budget"] == budget and r["method"] == "published"), None)
    return {
        "budget": budget,
        "method": name,
        **damage,
        "kl": float(found.kl.mean()),
        "predicted": fitted.rehearsed,
        "sum_of_prices": fitted.plan.predicted_damage,
        "of_published": damage["measured"] / bar if bar else None,
        "next_token_agreement": float(found.agreement.mean()),
        "sizes": [_sizes(layer) for layer in fitted.plan.target.layers],
        "parameters": parameters(fitted.plan.target),
        "seconds": seconds,
    }


def _sizes(layer: LayerShape) -> list[int]:
    """Width and dimension of queries and keys, dimension of values, query heads, key/value heads, MLP width."""
    return [layer.qk_width, layer.qk_dim, layer.v_dim, layer.query_heads, layer.kv_heads, layer.mlp_width]


def _line(row: dict[str, Any]) -> str:
    change = math.expm1(row["measured"]) * 100
    half = (row["measured_high"] - row["measured_low"]) / 2
    bar = f"{row['of_published']:.3f}" if row["of_published"] else "-"
    return (
        f"{row['budget']:8} {row['method']:24} damage {row['measured']:.4f} ± {half:.4f}  perplexity {change:+.2f}%  "
        f"of published {bar}  predicted {row['predicted']:.4f}  {row['seconds']:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--budget", action="append", required=True)
    parser.add_argument("--method", action="append", choices=list(METHODS))
    parser.add_argument("--allow", help="units that may be cut, separated by commas")
    parser.add_argument("--samples", action="store_true", help="keep texts that source and cut model write")
    parser.add_argument("--data")
    parser.add_argument("--eval")
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--eval-tokens", type=int, default=65_536)
    parser.add_argument("--swap-tokens", type=int, default=8_192)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    asked = vars(parser.parse_args())
    out, methods, samples = asked.pop("out"), asked.pop("method") or DEFAULT_METHODS, asked.pop("samples")
    allow = asked.pop("allow")
    more = {"allow": tuple(allow.split(","))} if allow else {}
    settings = Settings(budgets=tuple(asked.pop("budget")), **asked, **more)
    result = measure(settings, methods, samples)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
