"""What each healing recovers of the damage that cutting did, and how long it takes: the embedded model on a CPU.

    python benchmarks/healing.py --out benchmarks/results/healing-cpu.json

Prints a table and writes it as JSON, row by row: a killed run resumes where it stopped. All methods start from the
same cut model; blockwise includes the refit. Then one cut at once is compared with three rounds, on less text and by
predicted prices. About seven minutes of one thread. Rows of options that headwise no longer has, because they gained
nothing (side_by_side, attention), stay in a file that holds them.
Damage is the increase of the loss in nats per token on held-out text, with a 95% bootstrap interval over blocks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from quality import plain
from torch import nn

from headwise import pipeline, strategies
from headwise.budgets import parse
from headwise.checks import quality, speed
from headwise.cuts import Moments, reshape
from headwise.registry import find
from headwise.runs.folder import RunFolder
from headwise.runs.settings import Settings
from headwise.types import VERSION, Readings, write_atomically

METHODS = ["refit", "blockwise"]  # the second after the first
ROUNDS = {"blockwise, at once": 1, "blockwise, 3 rounds": 3}
ALLOW = ("qk", "v", "mlp")  # the repair of cut dimensions is measured, and bits are not chosen in rounds
ROUNDS_BUDGETS = ("kv=50%", "kv=25%")
ROUNDS_TOKENS, ROUNDS_STEPS = 10_240, 36  # of calibration, and per layer


class Table:
    """Every method at every budget, then cuts at once and in rounds; written after each row, so a kill loses one."""

    def __init__(self, settings: Settings, out: Path) -> None:
        self.settings, self.out = settings, out
        self.found: dict[str, Any] = {"version": VERSION, "settings": plain(settings), "rows": []}
        if out.exists():
            self.found |= json.loads(out.read_text())
        if self.found["settings"] != plain(settings):
            sys.exit(f"{out} was measured with other settings; choose another --out, or delete it.")

    def measure(self, methods: list[str]) -> None:
        """Whatever is missing."""
        known = self.found.get("rounds", {"rows": []})["rows"]
        left = {text: _missing(self.found["rows"], text, ["none", *methods]) for text in self.settings.budgets}
        rounds = {text: _missing(known, text, list(ROUNDS)) for text in ROUNDS_BUDGETS}
        if not any((*left.values(), *rounds.values())):
            return
        self.bench = bench = pipeline.load_source(self.settings)
        readings, moments = self._probed(self.settings, "probe")
        print(f"probe {readings.seconds:.0f} s", flush=True)
        self.found |= {
            "evaluation": bench.described,
            "calibration_tokens": bench.calibration.numel(),
            "evaluation_tokens": bench.evaluation.numel(),
            "probe_seconds": readings.seconds,
            "hardware": speed.machine(bench.model.device),
            "torch": torch.__version__,
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        }
        for text in self.settings.budgets:
            if left[text]:
                self._budget(text, left[text], readings, moments)
        if any(rounds.values()):
            self._in_rounds(rounds)

    def _probed(self, settings: Settings, name: str) -> tuple[Readings, list[Moments]]:
        """What the source says, found once and kept in a hidden folder beside the file."""
        about = json.dumps(plain(settings), sort_keys=True)
        mark = hashlib.sha256(f"{about} {self.bench.calibration.shape}".encode()).hexdigest()[:8]
        folder = RunFolder(self.out.parent / f".{self.out.stem}-{name}-{mark}")
        return pipeline.probe_in(folder, settings, self.bench, diagnose=False)

    def _budget(self, text: str, methods: list[str], readings: Readings, moments: list[Moments]) -> None:
        """The missing methods at one budget: `none`, the refit, and what begins with the refitted model."""
        bench, settings = self.bench, self.settings
        budgets = (parse(text, bench.shape),)
        plan = strategies.allocate(readings, budgets, settings.strategy, settings.allow, seed=settings.seed)
        cut = reshape(bench.family, bench.model, plan, moments)
        refitted, base = self._healed("refit", cut) if methods != ["none"] else (cut, 0.0)
        for method in methods:
            if method in ("none", "refit"):
                model, seconds = (cut, 0.0) if method == "none" else (refitted, base)
            else:
                model, seconds = self._healed(method, refitted)
                seconds += base
            self._add(self.found["rows"], text, method, model, seconds, shares=True)

    def _healed(self, method: str, model: nn.Module) -> tuple[nn.Module, float]:
        """A model healed by a method with options, and the seconds of CPU that it took."""
        name, *options = method.split()
        job = self.bench.job(replace(self.settings, heal_options=(*self.settings.heal_options, *options)), model)
        start = time.process_time()
        healed, _ = find("headwise.heal", name).heal(job)
        return healed, time.process_time() - start

    def _in_rounds(self, missing: dict[str, list[str]]) -> None:
        """Blockwise healing after one cut at once, and after each of several cuts with the model probed in between."""
        whole = self.bench
        self.bench = bench = replace(
            whole, calibration=whole.calibration[: ROUNDS_TOKENS // whole.calibration.shape[1]]
        )
        options = [option for option in self.settings.heal_options if not option.startswith("steps=")]
        options.append(f"steps={ROUNDS_STEPS}")
        settings = replace(self.settings, swap_tokens=0, heal="blockwise", heal_options=tuple(options))
        first = self._probed(settings, "rounds")
        told = {"calibration_tokens": bench.calibration.numel(), "steps": ROUNDS_STEPS, "rows": []}
        rows = self.found.setdefault("rounds", told)["rows"]

        for text, methods in missing.items():
            for method in methods:
                start = time.process_time()
                fitted = pipeline.fit(replace(settings, budgets=(text,), rounds=ROUNDS[method]), bench, first=first)
                self._add(rows, text, method, fitted.model, time.process_time() - start)

    def _add(
        self,
        rows: list[dict[str, Any]],
        budget: str,
        method: str,
        model: nn.Module,
        seconds: float,
        shares: bool = False,
    ) -> None:
        """One line; with `shares`, what is `recovered` of the damage before any healing, and of the refit's `more`."""
        bench = self.bench
        found = quality.compare(bench.family, bench.model, model, bench.evaluation, task=bench.task)
        damage, left = found.damage(), [row["measured"] for row in rows if row["budget"] == budget]
        gains = {}
        if shares and left:
            recovered, more = (1 - damage["measured"] / before for before in (left[0], left[min(1, len(left) - 1)]))
            gains = {"recovered": recovered, "more": more}
        row = {"budget": budget, "method": method, **damage, "kl": float(found.kl.mean()), **gains}
        rows.append(row | {"cpu_seconds": seconds})  # the refit's included
        write_atomically(self.out, json.dumps(self.found, indent=1) + "\n")
        half = (damage["measured_high"] - damage["measured_low"]) / 2
        words = f"recovers {gains['recovered']:.0%}, {gains['more']:.0%} of what was left  " if gains else ""
        print(
            f"{budget:10} {method:24} damage {damage['measured']:.4f} ± {half:.4f}  {words}{seconds:.0f} s", flush=True
        )


def _missing(rows: list[dict[str, Any]], budget: str, methods: list[str]) -> list[str]:
    """Those of the methods that have no row."""
    done = [row["method"] for row in rows if row["budget"] == budget]
    return [method for method in methods if method not in done]


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
    out.parent.mkdir(parents=True, exist_ok=True)
    Table(Settings(budgets=budgets, heal_options=options, allow=ALLOW, **asked), out).measure(methods)


if __name__ == "__main__":
    main()
