"""Does a plan that was made under a limit on time keep it? Predicted and measured, source and cut side by side.

On a CPU: the embedded model, probed and cut. On CUDA: a random model of Llama 3.2 1B's shape in bf16 with invented
damages, as only time is looked at, and sizes in steps of 16 (MLPs: 1024). Models run as with
`headwise.load(..., optimise=True)`. Layers are timed afresh; nothing but the choice of kernels comes from the user's
cache. Results are written after every row; the rows of other devices in `benchmarks/results/latency.json` are kept.

    python benchmarks/latency.py --device cpu
    python benchmarks/latency.py --device cuda
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from headwise import budgets, families, pipeline, strategies
from headwise.checks import speed
from headwise.cuts import reshape
from headwise.errors import HeadwiseError
from headwise.latency import lattice as latency
from headwise.latency import measured, measuring
from headwise.latency.stacks import Stacks
from headwise.runs.settings import Settings
from headwise.types import (
    PHASES,
    LatencyTable,
    LayerShape,
    ModelShape,
    Plan,
    Reading,
    Readings,
    Workload,
    write_atomically,
)

RESULT = Path(__file__).parent / "results" / "latency.json"
ALLOW = ("qk", "v", "mlp")
ASKED = {
    "cpu": {"decode,1k,b8": (80, 60), "prefill,256,b1": (80,)},
    "cuda": {"decode,32k,b16": (80, 60), "decode,32k,b8": (80, 60), "prefill,8k,b4": (80, 60)},
}
LLAMA_1B = dict(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
    head_dim=64, vocab_size=128256, max_position_embeddings=131072, tie_word_embeddings=True, dtype="bfloat16",
)  # fmt: skip


def embedded() -> tuple[Any, Any, Readings, Any]:
    """The embedded model, what a short probing found, and how a plan is carried out."""
    settings = Settings(model="embedded", tokens=4096, eval_tokens=1024, swap_tokens=0, allow=ALLOW, device="cpu")
    bench = pipeline.load_source(settings)
    readings, moments = pipeline.probe(settings, bench, diagnose=False)
    return bench.family, bench.model, readings, lambda plan: reshape(bench.family, bench.model, plan, moments)


def random_llama(device: str, **sizes: Any) -> tuple[Any, Any, Readings, Any]:
    """A random model in bf16 with invented damages: steep at small sizes, layers of different worth."""
    config = transformers.LlamaConfig(**{**LLAMA_1B, **sizes})
    with torch.device(device):
        stock = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    stock.config.dtype = torch.bfloat16
    family = families.family_of(config)
    source = family.tailor(stock.eval())
    del stock
    shape = family.shape_of(source.config)
    if not sizes:
        shape = replace(shape, grain=replace(shape.grain, qk_step=16, v_step=16, mlp_step=1024))

    def build(plan: Plan) -> Any:
        return Stacks(family, source, Workload()).model(plan.target.layers)

    return family, source, invented(shape), build


def invented(shape: ModelShape, seed: int = 0) -> Readings:
    """Curves of the kind that probes find."""
    draw, layer, grain, count = random.Random(seed), shape.layers[0], shape.grain, len(shape.layers)
    sizes = {
        "qk_projected": (1e-3, grain.qk_sizes(layer.qk_dim)),
        "qk_pairs": (3e-3, grain.qk_sizes(layer.qk_dim)),
        "v": (3e-3, grain.v_sizes(layer.v_dim)),
        "mlp": (1e-2, grain.mlp_sizes(layer.mlp_width)),
    }
    curves = []
    for kind, (scale, ticks) in sizes.items():
        worth = [scale * 10 ** draw.gauss(0.0, 0.4) for _ in range(count)]
        rows = tuple(tuple(w * ((ticks[0] / tick) ** 1.5 - 1) for tick in ticks) for w in worth)
        kinds = ("invented", f"damage.{kind}", kind, (ticks,) * count, rows, None, "nats per token", "Invented.", 0, 0)
        curves.append(Reading(*kinds))
    pairs = (tuple(range(layer.qk_width // 2)),) * layer.kv_heads
    orders = ({"qk_pairs": pairs, "mlp": (tuple(range(layer.mlp_width)),)},) * count
    return Readings("random", shape, tuple(curves), orders, tokens=0, seed=seed)


def table_of(family: Any, source: Any, shape: ModelShape, work: Workload) -> tuple[LatencyTable, float]:
    """Layers timed afresh, and how many seconds that took, with choosing kernels."""
    start, clock = time.perf_counter(), Stacks(family, source, work)
    name, runtime = measuring.device_name(clock.device), measuring.runtime_of(source)
    table = latency.measure(clock, shape, work, ALLOW, clock.chain, name, runtime=runtime)
    return replace(table, captured=clock.captured), time.perf_counter() - start


def rows_of(device: str, asked: dict[str, tuple[int, ...]], tiny: bool = False) -> Iterator[dict[str, Any]]:
    """One row per workload and limit; a limit out of reach has none."""
    small = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=16, vocab_size=128) if tiny else {}  # fmt: skip
    family, source, readings, build = embedded() if device == "cpu" and not tiny else random_llama(device, **small)
    shape = readings.source
    for text, shares in asked.items():
        work = Workload.parse(text)
        table, seconds = table_of(family, source, shape, work)
        least = min(table.layer_ms(layer) for layer in _corners(table)) * len(shape.layers) + table.rest_ms
        print(
            f"{text}: {len(table.times)} layers timed in {seconds:.0f} s, off by up to {table.error:.1%}, captured: "
            f"{table.captured}; at the smallest {least / table.model_ms(shape):.1%} remain",
            flush=True,
        )
        for share in shares:
            start = time.perf_counter()
            limit = budgets.parse(f"latency={share}%@{text}", shape, (table,))
            try:
                plan = measured.confirmed(
                    lambda limits: strategies.allocate(readings, limits, allow=ALLOW),
                    (limit,),
                    shape,
                    measured.clock_of(family, source),
                )
            except HeadwiseError as error:
                print(error, flush=True)
                continue
            took = speed.side_by_side(source, build(plan), work)
            check = speed.kept(limit, took, table.runtime)
            yield _row(plan, table, took, seconds, check.passed)
            print(f"  planned, built and measured in {time.perf_counter() - start:.0f} s", flush=True)


def _corners(table: LatencyTable) -> list[LayerShape]:
    """The smallest layer of every lattice."""
    small = [lattice.shape(table.base, *(axis[0] for axis in lattice.axes)) for lattice in table.lattices]
    return [replace(layer, mlp_width=table.mlp[0]) for layer in small]


def _row(plan: Plan, table: LatencyTable, took: dict[str, float], seconds: float, met: bool) -> dict[str, Any]:
    limit = plan.budgets[0]
    predicted = {"before": table.model_ms(plan.source), "after": plan.spent[limit.key]}
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
        "timing_seconds": round(seconds, 1),
        "held_out_error": round(table.error, 4),
        "different_layers": len(set(plan.target.layers)),
        "unequal_dims": sum(layer.qk_dim != layer.v_dim for layer in plan.target.layers),
    }


def section(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    lines = [
        "## Latency as a budget",
        "",
        "`benchmarks/latency.py`: layers are timed on the device, a plan is made under the limit, built, and measured "
        "beside its source. Met: within 5% of the limit.",
    ]
    for device in result["devices"]:
        versions = ", ".join(f"{name} {version}" for name, version in device["versions"].items())
        lines += ["", f"{device['device']}, {device['dtype']}, {device['model']}; {device['date']}, {versions}.", ""]
        head = (
            "budget",
            "run",
            "predicted ms",
            "measured ms (low to high)",
            "of the source: predicted, measured",
            "met",
        )
        lines += [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
        for row in device["rows"]:
            predicted, took = row["predicted_ms"], row["measured_ms"]
            measured = (
                f"{took['before']:.3g} → {took['after']:.3g} ({took['after_low']:.3g} to {took['after_high']:.3g})"
            )
            both = f"{row['predicted_ratio']:.1%}, {row['measured_ratio']:.1%}"
            run = "optimise=True" if row.get("runtime") == measuring.FAST else "as it is"
            cells = (row["budget"], run, f"{predicted['before']:.3g} → {predicted['after']:.3g}", measured, both)
            lines.append(f"| {' | '.join(cells)} | {'yes' if row['met'] else 'no'} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure on one device and put its rows beside those of others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=sorted(ASKED), default="cpu")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--only", choices=PHASES, help="this phase alone; rows of the other are kept")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model, to see that all of it runs")
    options = parser.parse_args()
    asked = {"decode,64,b2": (80,), "prefill,64,b8": (95,)} if options.tiny else ASKED[options.device]
    asked = {text: shares for text, shares in asked.items() if options.only in (None, text.partition(",")[0])}
    for row in rows_of(options.device, asked, options.tiny):
        print(json.dumps(row), flush=True)
        result = written(options.out, options.device, row)
        print(section(result), flush=True)


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
    rows = [r for found in old if found["device"] == name for r in found["rows"] if r["budget"] != row["budget"]]
    here["rows"] = sorted([*rows, row], key=lambda row: row["budget"].partition("@")[2])
    devices = [*(found for found in old if found["device"] != name), here]
    result = {"benchmark": "plans under a limit on time, predicted and measured", "devices": devices}
    write_atomically(out, json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
