"""What each healing recovers of the damage that cutting did, and how long it takes: the embedded model on a CPU.

    python benchmarks/healing.py --out benchmarks/results/healing-cpu.json

Prints a table and writes it as JSON. All methods start from the same cut model; blockwise includes the refit, and is
tried with layers in turn, side by side, and with attention matched too. Then one cut at once is compared with three
rounds, on less text and by predicted prices. About ten minutes of one thread.
Damage is the increase of the loss in nats per token on held-out text, with a 95% bootstrap interval over blocks.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise import pipeline, strategies
from headwise.checks import quality, speed
from headwise.cuts import reshape
from headwise.registry import find
from headwise.runfolder import Settings, budgets_for
from headwise.types import VERSION

METHODS = ["refit", "blockwise", "blockwise side_by_side=2", "blockwise attention=0.1"]  # all but the first after it
ROUNDS = 3
ROUNDS_BUDGETS = ("kv=50%", "kv=25%")
ROUNDS_TOKENS, ROUNDS_STEPS = 10_240, 36  # of calibration, and per layer


def measure(settings: Settings, methods: list[str]) -> dict[str, Any]:
    """Every method at every budget; the source is probed once."""
    bench = pipeline.workbench(settings)
    readings, moments = pipeline.probe(settings, bench, bench.source, diagnose=False)
    print(f"probe {readings.seconds:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    shape = bench.family.shape_of(bench.source.config)
    for text in settings.budgets:
        budgets = budgets_for(replace(settings, budgets=(text,)), shape)
        plan = strategies.allocate(readings, budgets, settings.strategy, settings.allow, seed=settings.seed)
        cut = reshape(bench.family, bench.source, plan, moments)
        found = quality.compare(bench.family, bench.source, cut, bench.evaluation, task=bench.task)
        rows.append(_row(text, "none", found, 0.0, rows))
        refitted, base = None, 0.0
        for method in methods:
            name, *options = method.split()
            job = bench.job(replace(settings, heal_options=(*settings.heal_options, *options)), refitted or cut)
            start = time.process_time()
            model, _ = find("headwise.heal", name).heal(job)
            seconds = base + time.process_time() - start
            if refitted is None:
                refitted, base = model, seconds
            found = quality.compare(bench.family, bench.source, model, bench.evaluation, task=bench.task)
            rows.append(_row(text, method, found, seconds, rows))
    return {
        "version": VERSION,
        "settings": settings.to_json(),
        "evaluation": bench.described,
        "calibration_tokens": bench.calibration.numel(),
        "evaluation_tokens": bench.evaluation.numel(),
        "probe_seconds": readings.seconds,
        "hardware": speed.machine(bench.source.device),
        "torch": torch.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "rows": rows,
        "rounds": measure_rounds(settings, bench),
    }


def measure_rounds(settings: Settings, bench: pipeline.Workbench) -> dict[str, Any]:
    """Blockwise healing after one cut at once, and after each of several cuts with the model probed in between."""
    bench = bench._replace(calibration=bench.calibration[: ROUNDS_TOKENS // bench.calibration.shape[1]])
    options = tuple(option for option in settings.heal_options if not option.startswith("steps="))
    options = (*options, f"steps={ROUNDS_STEPS}")
    settings = replace(settings, swap_tokens=0, heal="blockwise", heal_options=options)
    first = pipeline.probe(settings, bench, bench.source, diagnose=False)
    rows: list[dict[str, Any]] = []
    for text in ROUNDS_BUDGETS:
        for count in (1, ROUNDS):
            asked, start = replace(settings, budgets=(text,), rounds=count), time.process_time()

            def look(number: int, model: nn.Module) -> Any:
                return first if number == 1 else pipeline.probe(settings, bench, model, diagnose=False)

            fitted = pipeline.fit(asked, bench, look)
            seconds = time.process_time() - start
            found = quality.compare(bench.family, bench.source, fitted.model, bench.evaluation, task=bench.task)
            method = "blockwise, at once" if count == 1 else f"blockwise, {count} rounds"
            rows.append(_row(text, method, found, seconds, []))
    return {"calibration_tokens": bench.calibration.numel(), "steps": ROUNDS_STEPS, "rows": rows}


def _row(
    budget: str, method: str, found: quality.Comparison, seconds: float, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """One line of the table; `recovered` is of the damage before any healing, `more` of what the refit left."""
    damage = found.damage()
    left = [row["measured"] for row in rows if row["budget"] == budget]
    share = {}
    if left:
        share = {
            "recovered": 1 - damage["measured"] / left[0],
            "more": 1 - damage["measured"] / left[min(1, len(left) - 1)],
        }
    row = {
        "budget": budget,
        "method": method,
        **damage,
        "kl": float(found.kl.mean()),
        **share,
        "cpu_seconds": seconds,
    }  # the refit's included
    half = (damage["measured_high"] - damage["measured_low"]) / 2
    if not rows and method != "none":
        print(f"{budget:10} {method:24} damage {damage['measured']:.4f} ± {half:.4f}  {seconds:.0f} s", flush=True)
        return row
    words = f"recovers {share['recovered']:.0%}, {share['more']:.0%} of what was left" if share else "no healing"
    print(f"{budget:10} {method:24} damage {damage['measured']:.4f} ± {half:.4f}  {words}  {seconds:.0f} s", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--budget", action="append")
    parser.add_argument("--method", action="append", help=f"of those that heal; {' and '.join(METHODS)} if not given")
    parser.add_argument("--heal-option", action="append", help="steps=72, as in the demo, if none is given")
    parser.add_argument("--data")
    parser.add_argument("--tokens", type=int, default=24_576)  # these as in the demo
    parser.add_argument("--eval-tokens", type=int, default=12_288)
    parser.add_argument("--swap-tokens", type=int, default=2_048)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    asked = vars(parser.parse_args())
    out, methods = asked.pop("out"), asked.pop("method") or METHODS
    budgets, options = tuple(asked.pop("budget") or ["kv=50%"]), tuple(asked.pop("heal_option") or ["steps=72"])
    torch.set_num_threads(1)
    result = measure(Settings(budgets=budgets, heal_options=options, **asked), methods)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
