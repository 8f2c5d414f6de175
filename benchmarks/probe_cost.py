"""What probing costs beside plain passes over the same text in the same batches, and the stages after it, in seconds.

    python benchmarks/probe_cost.py --device cuda   # a Llama of 0.3B random parameters
    python benchmarks/probe_cost.py --device cuda --large 32   # Llama-3-8B's shape, in bf16
    python benchmarks/probe_cost.py --device cpu    # the embedded model

Repeats are interleaved; ratios are of medians over neighbours in time, with the lowest and highest repeat. There is a
row for all units, the MLP's among them, and one for those of the cache alone; a repeat measures both. Plain passes are
in the format of the weights up to the logits, as in training; their softmax is in float32. `agreement` compares moments
and prices with those of the same model run in double precision: the largest error of a layer, relative to its largest
value. Writes `benchmarks/results/probe_cost.json`, where rows of other devices stay.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from provenance import commit, hardware
from torch import nn

from headwise import budgets, cuts, data, families, strategies
from headwise.devices import timed
from headwise.families import Family
from headwise.probes import fisher, gram, sensitivity
from headwise.tasks.causal import Causal
from headwise.types import Readings, write_atomically

RESULT = Path(__file__).parent / "results" / "probe_cost.json"
SHAPE = dict(
    num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=64,
    intermediate_size=2816, vocab_size=32000, tie_word_embeddings=True,
)  # fmt: skip
LARGE = dict(
    hidden_size=4096, intermediate_size=14_336, num_attention_heads=32, num_key_value_heads=8, vocab_size=128_256,
    tie_word_embeddings=False, rope_theta=500_000.0,
)  # fmt: skip
LENGTH = 512
BATCH = 4096  # tokens, as the probes read them
BUDGET = "params=80%"
PROMISED = {"gram": 1.3, "sensitivity": 1.35}
UNITS = {"all": True, "of the cache": False}  # name -> with those of the MLP


class Bench(NamedTuple):
    """A model on our modules and the text that it reads."""

    name: str
    family: Family
    model: Any
    tokenizer: Any
    rows: torch.Tensor


def bench_on(device: str, tokens: int, large: int = 0) -> Bench:
    """The model of a device; weights and text are random where there is nothing to load. `large`: layers of an 8B."""
    torch.manual_seed(0)
    if device == "cpu":
        stock, tokenizer = families.load("embedded")
        rows = data.blocks_of(data.documents("stdlib"), tokenizer, LENGTH, tokens // LENGTH)
        name = "embedded"
    else:
        config = transformers.LlamaConfig(**(LARGE | {"num_hidden_layers": large} if large else SHAPE))
        with torch.device(device):
            torch.set_default_dtype(torch.bfloat16 if large else torch.float32)
            stock = transformers.LlamaForCausalLM(config).eval()
            torch.set_default_dtype(torch.float32)
        rows, tokenizer = torch.randint(3, config.vocab_size, (tokens // LENGTH, LENGTH)), None
        name = f"random Llama, {sum(p.numel() for p in stock.parameters()) / 1e9:.2f}B parameters"
    family = families.family_of(stock.config)
    return Bench(name, family, family.tailor(stock), tokenizer, rows)


def plain_forward(bench: Bench) -> None:
    """Logits of all rows."""
    with torch.no_grad():
        for batch in data.batches(bench.rows, BATCH):
            bench.family.run(bench.model, batch.to(bench.model.device))


def plain_backward(bench: Bench, weights: bool) -> None:
    """The loss of all rows and its gradient, of the weights or of activations alone."""
    task = Causal()
    bench.model.requires_grad_(weights)
    for batch in task.prepare(bench.rows, 0).batches(BATCH):
        batch = batch.to(bench.model.device)
        stream = None if weights else bench.family.embed(bench.model, batch.inputs).requires_grad_()
        answers = task.answers(bench.family.run(bench.model, batch.inputs, stream))
        task.loss(answers, batch.labels).backward()
        del answers
        bench.model.zero_grad(set_to_none=True)
    bench.model.requires_grad_(True)


def works(bench: Bench, units: Sequence[str]) -> dict[str, Callable[[], Any]]:
    """What is timed, in the order of one repeat: every probe, for each of the units, right after its plain passes."""
    family, model, rows = bench.family, bench.model, bench.rows
    moments = {name: gram.collect(family, model, rows, UNITS[name]) for name in units}
    probes = {
        name: sensitivity.Sensitivity(family, model, found, UNITS[name], Causal()) for name, found in moments.items()
    }
    return {
        "forward": lambda: plain_forward(bench),
        **{f"gram, {name}": partial(gram.collect, family, model, rows, UNITS[name]) for name in units},
        "forward and backward": lambda: plain_backward(bench, weights=True),
        **{
            f"sensitivity, {name}": partial(sensitivity.measure, family, model, rows, found, UNITS[name], 0)
            for name, found in moments.items()
        },
        "fisher": lambda: fisher.collect(family, model, rows, 0),
        "forward and backward, activations alone": lambda: plain_backward(bench, weights=False),
        **{f"passes, {name}": partial(_passes, probe, rows) for name, probe in probes.items()},
    }


def _passes(probe: sensitivity.Sensitivity, rows: torch.Tensor) -> None:
    """The passes of a probe without what is computed from them."""
    probe.run(rows, 0)
    probe.sums = [type(sums)() for sums in probe.sums]


def ratio(times: dict[str, list[float]], work: str, plain: str) -> dict[str, float]:
    """Median of the ratios within repeats, with the lowest and highest."""
    found = [a / b for a, b in zip(times[work], times[plain], strict=True)]
    return {"median": statistics.median(found), "low": min(found), "high": max(found)}


def costs(bench: Bench, repeats: int, seconds: float, units: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Interleaved times of probes and plain passes, by units; no repeat begins after so many seconds."""
    device, begin = bench.model.device, time.perf_counter()
    few = bench._replace(rows=bench.rows[: BATCH // LENGTH])
    for work in works(few, units).values():
        work()  # warms up
    todo = works(bench, units)
    times: dict[str, list[float]] = {name: [] for name in todo}
    for repeat in range(repeats):
        if repeat > 0 and time.perf_counter() - begin > seconds:
            break
        for name, work in todo.items():
            gc.collect()
            times[name].append(timed(work, device)[1])
        print(f"repeat {repeat}: " + ", ".join(f"{n} {t[-1]:.2f} s" for n, t in times.items() if t), flush=True)
    return {name: _costs_of(times, name) for name in units}


def _costs_of(times: dict[str, list[float]], units: str) -> dict[str, Any]:
    """What one row says."""
    both, alone = "forward and backward", "forward and backward, activations alone"
    found = {
        "gram": ratio(times, f"gram, {units}", "forward"),
        "sensitivity": ratio(times, f"sensitivity, {units}", both),
        "sensitivity_passes": ratio(times, f"passes, {units}", both),
        "fisher": ratio(times, "fisher", both),
        "sensitivity_strictly": ratio(times, f"sensitivity, {units}", alone),
        "sensitivity_passes_strictly": ratio(times, f"passes, {units}", alone),
    }
    own = {name: took for name, took in times.items() if not any(name.endswith(f", {u}") for u in UNITS if u != units)}
    middle = {name: {"median": statistics.median(t), "low": min(t), "high": max(t)} for name, t in own.items()}
    return {"repeats": len(times["fisher"]), "ratios": found, "seconds": middle}


def stages(bench: Bench) -> dict[str, float]:
    """Seconds of solving, reshaping and saving, once each."""
    family, model, device = bench.family, bench.model, bench.model.device
    moments, seconds = timed(lambda: gram.collect(family, model, bench.rows, True), device)
    found = {"gram": seconds}
    measured, found["sensitivity"] = timed(
        lambda: sensitivity.measure(family, model, bench.rows, moments, True, 0), device
    )
    shape = family.shape_of(model.config)
    readings = Readings("random", shape, tuple(measured[0]), tuple(measured[1]), bench.rows.numel(), 0)
    limits = (budgets.parse(BUDGET, shape),)
    plan, found["solve"] = timed(lambda: strategies.allocate(readings, limits), device)
    cut, found["reshape"] = timed(lambda: cuts.reshape(family, model, plan, moments), device)
    if bench.tokenizer is not None:
        with tempfile.TemporaryDirectory() as folder, families.quietly():
            target = Path(folder) / "model"
            found["save"] = timed(lambda: cuts.save(family, cut, bench.tokenizer, target, False), device)[1]
    return found


def agreement(bench: Bench, tokens: int) -> dict[str, float]:
    """How far moments and prices are from those of double precision, on some of the text."""
    rows = bench.rows[: tokens // LENGTH]
    both: list[tuple[Any, Any]] = []
    exact: nn.Module = copy.deepcopy(bench.model).double()
    for model in (bench.model, exact):
        moments = gram.collect(bench.family, model, rows, True)
        both.append((moments, sensitivity.measure(bench.family, model, rows, moments, True, 0)[0]))
    (ours, prices), (theirs, wanted) = both
    found: dict[str, float] = {}
    for layer, double in zip(ours, theirs, strict=True):
        for name, moment in layer.items():
            error = float((moment - double[name]).abs().max() / double[name].abs().max())
            found[name] = max(found.get(name, 0.0), error)
    for reading, double in zip(prices, wanted, strict=True):
        for row, right in zip(reading.values, double.values, strict=True):
            error = max(abs(a - b) for a, b in zip(row, right, strict=True)) / max(*right, 1e-30)
            found[reading.kind] = max(found.get(reading.kind, 0.0), error)
    return found


def profile(bench: Bench) -> None:
    """Print which kernels take the time of both probes."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    cuda = bench.model.device.type == "cuda"
    some = bench._replace(rows=bench.rows[: 2 * BATCH // LENGTH])
    for name, work in works(some, ("all",)).items():
        work()
        with profiler(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as seen:
            timed(work, bench.model.device)
        print(f"== {name}")
        order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
        print(seen.key_averages().table(sort_by=order, row_limit=22, max_name_column_width=70), flush=True)


def rows_of(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """What is measured on one device at one precision of products; of a large model no copy in double precision."""
    torch.set_float32_matmul_precision(asked.products)
    bench = bench_on(asked.device, asked.tokens or (32_768 if asked.device == "cuda" else 8_192), asked.large)
    if asked.profile:
        profile(bench)
    machine = torch.cuda.get_device_name(asked.device) if asked.device == "cuda" else hardware()
    about = {
        "device": asked.device,
        "products": "bf16" if asked.large else {"highest": "float32", "high": "TF32"}[asked.products],
        "hardware": machine,
        "threads": torch.get_num_threads(),
        "model": bench.name,
        "tokens": bench.rows.numel(),
        "batch_tokens": BATCH,
        "length": LENGTH,
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    found = [
        {**about, "units": name, **took}
        for name, took in costs(bench, asked.repeats, asked.seconds, asked.units or list(UNITS)).items()
    ]
    few = min(bench.rows.numel(), 8192)
    found[0] |= (
        {"stages": {}, "agreement": {}}
        if asked.large
        else {"stages": stages(bench), "agreement": agreement(bench, few)}
    )
    return [{"stages": {}, "agreement": {}} | row for row in found]


def section(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    lines = [
        "## What probing costs",
        "",
        "`python benchmarks/probe_cost.py --device DEVICE`. `gram` (second moments, forward passes only) against a"
        " plain forward pass; `sensitivity` (predicted damage of every unit, with one backward pass) and"
        " `fisher` (predicted damage of bits) against a plain forward and backward pass with the weights' gradients,"
        " over the same text in the same batches; in brackets the lowest and highest repeat. The last columns are"
        " the next stages, in seconds.",
        "",
        "| device, products | model, tokens, units | gram | sensitivity | passes alone | fisher | solve | reshape |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in result["rows"]:
        machine = row["hardware"] if isinstance(row["hardware"], str) else row["hardware"]["processor"]
        units = row.get("units", "all")
        cells = [f"{machine}, {row['products']}", f"{row['model']}, {row['tokens']:,}, {units}"]
        for name in ("gram", "sensitivity", "sensitivity_passes", "fisher"):
            found = row["ratios"].get(name)
            spread = f"({found['low']:.2f} to {found['high']:.2f})" if found and row["repeats"] > 1 else "(once)"
            cells.append(f"{found['median']:.2f} x {spread}" if found else "-")
        cells += [f"{row['stages'][name]:.1f} s" if row["stages"] else "-" for name in ("solve", "reshape")]
        lines.append(f"| {' | '.join(cells)} |")
    every = [item for row in result["rows"] for item in row["agreement"].items()]
    name, worst = max(every, key=lambda item: item[1])
    rest = max(value for other, value in every if "mlp" not in other)
    told = f"of attention are within {rest:.1e} of those of the same model in double precision, all within {worst:.1e}"
    lines += ["", f"Moments and predicted damages {told} (`{name}`; on CUDA the MLP's moments are products in TF32)."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure on one device, keep what others said, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no further repeat after so many")
    parser.add_argument("--products", choices=("highest", "high"), default="highest", help="high: TF32")
    parser.add_argument("--large", type=int, default=0, metavar="LAYERS", help="of an 8B model's shape, in bf16")
    parser.add_argument("--units", action="append", choices=list(UNITS), help="both unless given")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args()
    new = rows_of(asked)
    old = json.loads(asked.out.read_text())["rows"] if asked.out.exists() else []
    names = ("device", "products", "units")
    known = [[row[name] for name in names] for row in new]
    kept = [r for r in old if [r.get(n, "all") for n in names] not in known]
    result = {"promised": PROMISED, "rows": sorted([*kept, *new], key=lambda r: (r["device"] != "cuda", r["products"]))}
    write_atomically(asked.out, json.dumps(result, indent=1) + "\n")
    print(section(result))


if __name__ == "__main__":
    main()
