"""Does a plan that was made under a limit on time keep it? Predicted and measured, source and cut side by side.

On a CPU: the embedded model, probed and cut. On CUDA: a random model of Llama 3.2 1B's shape in bf16 with invented
damages, as only time is looked at, and sizes in large steps (`latency_models`); whole layers may go. Heads are cut one
by one ("each"), share rows of the cache that are cut ("pooled"), or share rows that are coded in bits ("coded"); "any"
takes, of the plans of these three that keep the limit, the one with the least damage. Shares are of the time before
heads were pooled. Models run as with `headwise.load(..., optimise=True)`. Layers are timed afresh; nothing but the
choice of kernels comes from the user's cache. Results are written after every row; those of other devices and cases in
`benchmarks/results/latency.json` are kept.

    python benchmarks/latency.py --device cpu
    python benchmarks/latency.py --device cuda
    python benchmarks/latency.py --device cuda --cases pooled coded --missing --seconds 110   # repeat until nothing is
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from latency_models import CASES, Model, embedded, invented_model, stock
from provenance import commit

from headwise import budgets, strategies
from headwise.checks import speed
from headwise.cost import kv_bytes_per_token
from headwise.errors import HeadwiseError
from headwise.latency import lattice as latency
from headwise.latency import measured, measuring
from headwise.latency.stacks import Stacks
from headwise.stages import sharing
from headwise.types import PHASES, LatencyTable, LayerShape, Plan, Workload, write_atomically

RESULT = Path(__file__).parent / "results" / "latency.json"
SHARED = {"decode,32k,b16": (80, 60, 40), "decode,8k,b8": (80, 60, 40), "prefill,8k,b4": (80, 60, 40)}
ANY = "any"
TINY = {"decode,1k,b8": (75,), "prefill,64,b8": (95,)}
ASKED = {  # by device and case
    "cpu": {"each": {"decode,1k,b8": (80, 60), "prefill,256,b1": (80,)}},
    "cuda": {
        "each": {"decode,32k,b16": (80, 60), "decode,32k,b8": (80, 60), "prefill,8k,b4": (80, 60)},
        "pooled": SHARED,
        "coded": SHARED,
        ANY: SHARED,
    },
}
WORDS = {"each": "of each head, cut", "pooled": "of all heads, cut", "coded": "of all heads, in bits", ANY: "any"}
Wanted = Callable[[str, str], bool]  # by case and budget


@dataclass(frozen=True)
class Timed:
    """A model with the times of its layers, and how many seconds these took."""

    model: Model
    table: LatencyTable
    seconds: float


def table_of(model: Model, work: Workload, known: LatencyTable | None) -> tuple[LatencyTable, float]:
    """Layers timed afresh but for those in `known`, and how many seconds that took, with choosing kernels."""
    start, clock = time.perf_counter(), Stacks(model.family, model.source, work)
    facts = measuring.device_name(clock.device), None, known
    runtime = measuring.runtime_of(model.source)
    table = latency.measure(clock, model.readings.source, work, model.allow, clock.chain, *facts, runtime=runtime)
    return replace(table, captured=clock.captured), time.perf_counter() - start


def rows_of(device: str, asked: dict[str, dict[str, tuple[int, ...]]], wanted: Wanted, tiny: bool) -> Iterator[Any]:
    """One row per case, workload and limit that is wanted; a limit out of reach has none."""
    ours = device == "cpu" and not tiny
    random_model = None if ours else stock(device, tiny)
    needed = CASES if ANY in asked else asked
    models = {case: embedded() if ours else invented_model(random_model, case, tiny) for case in needed}
    known: dict[tuple[str, int], LatencyTable] = {}  # by workload and heads to a row: cases share what was timed
    for text in dict.fromkeys(text for works in asked.values() for text in works):
        shares = {
            case: [s for s in asked[case].get(text, ()) if wanted(case, f"latency={s}%@{text}")] for case in asked
        }
        timed: dict[str, Timed] = {}
        for case, model in models.items():
            if not shares.get(case) and not shares.get(ANY):
                continue
            try:
                place = (text, CASES[case][1])
                known[place], seconds = table_of(model, Workload.parse(text), known.get(place))
                timed[case] = Timed(model, known[place], seconds)
                _tell(case, timed[case])
            except (HeadwiseError, torch.cuda.OutOfMemoryError) as error:
                print(f"{case}, {text}: {error}", flush=True)
        for case, some in shares.items():
            ways = timed if case == ANY else {name: way for name, way in timed.items() if name == case}
            for share in some:
                yield from _row_of(case, ways, share, wanted)


def _tell(case: str, timed: Timed) -> None:
    """How long timing took, and what the smallest layers would take."""
    table, shape = timed.table, timed.model.readings.source
    least = sum(min(table.layer_ms(part) for part in _smallest(table)) for _ in shape.layers) + table.rest_ms
    whole = table.model_ms(shape.apart)
    print(
        f"{case}, {table.workload}: {len(table.times)} layers timed in {timed.seconds:.0f} s, off by up to "
        f"{table.error:.1%}, captured: {table.captured}; of the source's time {table.model_ms(shape) / whole:.1%} with "
        f"such rows uncut, {least / whole:.1%} at the smallest",
        flush=True,
    )


def _row_of(case: str, ways: dict[str, Timed], share: int, wanted: Wanted) -> Iterator[dict[str, Any]]:
    """The row of one limit, measured with the plan of least damage among those that keep it."""
    start, plans = time.perf_counter(), dict[str, Plan]()
    for name, way in ways.items():
        limit = budgets.parse(f"latency={share}%@{way.table.workload}", way.model.readings.source, (way.table,))
        if not wanted(case, limit.text):
            return
        try:
            plans[name] = _planned(way.model, limit)
        except HeadwiseError as error:
            print(f"{name}: {error}", flush=True)
    if not plans:
        return
    chosen = sharing.least(plans)
    way, plan = ways[chosen], plans[chosen]
    took = speed.side_by_side(way.model.source, way.model.build(plan), way.table.workload)
    check = speed.kept(plan.budgets[0], took, way.table.runtime)
    found = {name: round(one.predicted_damage, 6) for name, one in plans.items()}
    yield _row(plan, way, took, check.passed) | {"case": case, "chosen": chosen, "damages": found}
    print(f"  planned, built and measured in {time.perf_counter() - start:.0f} s", flush=True)


def _planned(model: Model, limit: Any) -> Plan:
    """The plan as a run makes it: confirmed on the device."""
    return measured.confirmed(
        lambda limits: strategies.allocate(model.readings, limits, allow=model.allow),
        (limit,),
        model.readings.source,
        measured.clock_of(model.family, model.source),
    )


def _smallest(table: LatencyTable) -> list[LayerShape]:
    """The smallest layer of every lattice."""
    small = [lattice.shape(table.base, *(axis[0] for axis in lattice.axes)) for lattice in table.lattices]
    small += [lattice.shape(lattice.bits[0], lattice.bits[0]) for lattice in table.codes]
    return [replace(layer, mlp_width=table.mlp[0]) for layer in small]


def _row(plan: Plan, timed: Timed, took: dict[str, float], met: bool) -> dict[str, Any]:
    limit, table = plan.budgets[0], timed.table
    predicted = {"before": table.model_ms(plan.source.apart), "after": plan.spent[limit.key]}
    return {
        "model": plan.model,
        "budget": limit.text,
        "predicted_ms": {end: round(value, 4) for end, value in predicted.items()},
        "measured_ms": {end: round(value, 4) for end, value in took.items()},
        "predicted_ratio": round(predicted["after"] / predicted["before"], 4),
        "measured_ratio": round(took["after"] / took["before"], 4),
        "met": met,
        "runtime": table.runtime,
        "captured": table.captured,
        "layers_timed": len(table.times),
        "timing_seconds": round(timed.seconds, 1),
        "held_out_error": round(table.error, 4),
        "different_layers": len(set(plan.target.layers)),
        "removed_layers": sum(layer.gone for layer in plan.target.layers),
        "unequal_dims": sum(layer.qk_dim != layer.v_dim for layer in plan.target.layers),
        "coded_layers": sum(layer.coded for layer in plan.target.layers),
        "cache_bytes": round(kv_bytes_per_token(plan.target) / kv_bytes_per_token(plan.source), 4),
    }


def section(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    lines = [
        "## Latency as a budget",
        "",
        "`benchmarks/latency.py`: layers are timed on the device, a plan is made under the limit, built, and measured "
        "beside its source. Met: within 5% of the limit. A limit out of reach has no row.",
    ]
    for device in result["devices"]:
        versions = ", ".join(f"{name} {version}" for name, version in device["versions"].items())
        days = sorted({device["date"], *(row["date"] for row in device["rows"] if "date" in row)})
        date = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        layers = "" if any("removed_layers" in row for row in device["rows"]) else " No plan could remove whole layers."
        lines += ["", f"{device['device']}, {device['dtype']}, {device['model']}; {date}, {versions}.{layers}", ""]
        head = "budget", "cached rows", "run", "predicted ms", "measured ms (low to high)"
        head = (*head, "of the source: predicted, measured", "met")
        lines += [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
        lines += [f"| {' | '.join(_cells(row))} |" for row in device["rows"]]
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    predicted, took = row["predicted_ms"], row["measured_ms"]
    measured = f"{took['before']:.3g} → {took['after']:.3g} ({took['after_low']:.3g} to {took['after_high']:.3g})"
    run = "optimise=True" if row.get("runtime") == measuring.FAST else "as it is"
    guess = f"{predicted['before']:.3g} → {predicted['after']:.3g}"
    both = f"{row['predicted_ratio']:.1%}, {row['measured_ratio']:.1%}"
    return row["budget"], _words(row), run, guess, measured, both, "yes" if row["met"] else "no"


def _words(row: dict[str, Any]) -> str:
    """Which rows of the cache a plan has."""
    case = row.get("case", "each")
    return f"any: {WORDS[row['chosen']]}" if case == ANY else WORDS[case]


def main() -> None:
    """Measure on one device and put its rows beside those of others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=sorted(ASKED), default="cpu")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--only", choices=PHASES, help="this phase alone; rows of the other are kept")
    parser.add_argument(
        "--cases", nargs="*", choices=sorted({**CASES, ANY: ()}), help="these alone; if not given, each"
    )
    parser.add_argument("--missing", action="store_true", help="only rows that the result does not have")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no more rows are begun")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model, to see that all of it runs")
    options, start = parser.parse_args(), time.perf_counter()
    asked = dict.fromkeys([*CASES, ANY], TINY) if options.tiny else ASKED[options.device]
    asked = {case: works for case, works in asked.items() if case in (options.cases or ["each"])}
    asked = {
        case: {text: shares for text, shares in works.items() if options.only in (None, text.partition(",")[0])}
        for case, works in asked.items()
    }
    done = _done(options.out, options.device) if options.missing else set()

    def wanted(case: str, budget: str) -> bool:
        return (case, budget) not in done and time.perf_counter() - start < options.seconds

    for row in rows_of(options.device, asked, wanted, options.tiny):
        print(json.dumps(row), flush=True)
        result = written(options.out, options.device, row)
        print(section(result), flush=True)


def _done(out: Path, device: str) -> set[tuple[str, str]]:
    """Case and budget of the rows that a result has of this device."""
    name = measuring.device_name(torch.device(device))
    found = json.loads(out.read_text())["devices"] if out.exists() else []
    return {_key(row) for one in found if one["device"] == name for row in one["rows"]}


def _key(row: dict[str, Any]) -> tuple[str, str]:
    return row.get("case", "each"), row["budget"]


def written(out: Path, device: str, row: dict[str, Any]) -> dict[str, Any]:
    """The result with one row more, or in place of an older one, in its file."""
    name = measuring.device_name(torch.device(device))
    here: dict[str, Any] = {
        "device": name,
        "dtype": "bfloat16" if device == "cuda" else "float32",
        "model": "a random model of Llama 3.2 1B's shape" if device == "cuda" else "the embedded model",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "python": platform.python_version(),
        "repeats": "table: median of 5 turns beside the base; models: median of 7 turns",
    }
    old = json.loads(out.read_text())["devices"] if out.exists() else []
    rows = [{"date": found["date"], **r} for found in old if found["device"] == name for r in found["rows"]]
    rows = [r for r in rows if _key(r) != _key(row)] + [row | {"date": here["date"], "commit": commit()}]
    here["rows"] = sorted(rows, key=lambda row: (row["budget"].partition("@")[2], [*CASES, ANY].index(_key(row)[0])))
    devices = [*(found for found in old if found["device"] != name), here]
    result = {"benchmark": "plans under a limit on time, predicted and measured", "devices": devices}
    write_atomically(out, json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
