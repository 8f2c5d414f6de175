"""Whether a cut model is slower than its source on a CPU: time per token of the embedded model, uncut and cut.

    python benchmarks/cpu_decode.py

Reading a prompt (prefill) and writing token by token (decode), in float32, by the plain runtime that lies
beside every saved model and by that of `headwise.load(..., optimise=True)`, against the stock model in transformers.
They take turns; a ratio is a time over that of the source run next to it, given as the median of all repeats with the
quartiles, since single repeats on a machine that does other things mean little. Writes
`benchmarks/results/cpu_decode.json`.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import platform
import statistics
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from provenance import commit, hardware
from torch.utils._python_dispatch import TorchDispatchMode

from headwise import cuts, families, pipeline, strategies
from headwise.budgets import parse
from headwise.devices import timed
from headwise.fast.model import optimise
from headwise.runs.settings import Settings
from headwise.types import write_atomically

RESULT = Path(__file__).parent / "results" / "cpu_decode.json"
ALONE: dict[str, Any] = {"pool": "none", "allow": ("qk", "v", "mlp")}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> budget, and settings that differ
    "kv=75%, every head by itself": ("kv=75%", ALONE),
    "kv=25%, every head by itself": ("kv=25%", ALONE),
    "params=80%": ("params=80%", ALONE),
    "kv=50%, heads pooled": ("kv=50%", {"pool": "all", "allow": ("qk", "v")}),
    "kv=50%, in bits": ("kv=50%", {"pool": "auto"}),
    "kv=25%, in bits": ("kv=25%", {"pool": "auto"}),
}
PROMPTS, STEPS = (256, 896), 24  # short, and nearly as long as the model takes
SETTINGS = Settings("embedded", budgets=("params=80%",), tokens=4096, eval_tokens=512, swap_tokens=0, heal="none")


def cut_models() -> dict[str, Any]:
    """The embedded model, cut to every budget by plans from predicted prices: quality is not what is measured."""
    found: dict[str, Any] = {}
    for told, (text, more) in WAYS.items():
        settings = replace(SETTINGS, budgets=(text,), **more)
        bench = pipeline.load_source(settings)
        readings, moments = pipeline.probe(settings, bench, diagnose=False)
        plan = strategies.allocate(readings, (parse(text, bench.family.shape_of(bench.model.config)),))
        found[told] = cuts.reshape(bench.family, bench.model, plan, moments).eval()
    return found


@torch.inference_mode()
def one(model: Any, ids: torch.Tensor) -> tuple[float, float]:
    """Milliseconds per token of prefill and of decode."""
    out, prefill = timed(lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1), ids.device)

    def write() -> None:
        nonlocal out
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)

    decode = timed(write, ids.device, STEPS)[1]
    return prefill * 1e3 / ids.shape[1], decode * 1e3 / STEPS


class _Counted(TorchDispatchMode):
    """Counts operations that compute something: views of a tensor are left out."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += not any(one.alias_info and not one.alias_info.is_write for one in func._schema.returns)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def operations(model: Any, ids: torch.Tensor) -> float:
    """Operations of one decode step, per layer: what small models wait for, whatever the machine."""
    cache = model(input_ids=ids, use_cache=True).past_key_values
    for _ in range(2):  # the first step after a prompt makes places for tokens to come
        with _Counted() as counted:
            model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
    return counted.found / model.config.num_hidden_layers


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "low": low, "high": high, "least": min(values)}


def compare(models: dict[str, Any], ids: torch.Tensor, repeats: int) -> dict[str, Any]:
    """Source, cut, and the cut optimised, in turns."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for number in range(-1, repeats):
        for name in list(models)[:: 1 if number % 2 else -1]:
            found = one(models[name], ids)
            if number >= 0:  # the first warms up
                times[name].append(found)

    def ratio(name: str, place: int) -> dict[str, float]:
        return spread([cut[place] / own[place] for own, cut in zip(times["source"], times[name], strict=True)])

    return {
        stage: {
            "ratio": ratio("cut", place),
            "optimised_ratio": ratio("optimised", place),
            **{f"{name}_ms_per_token": spread([t[place] for t in found]) for name, found in times.items()},
        }
        for place, stage in enumerate(("prefill", "decode"))
    }


def _of(result: dict[str, Any]) -> str:
    return f", commit {result['commit']}" if "commit" in result else ""


def section(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    lines = [
        "## A cut model on a CPU",
        "",
        "`python benchmarks/cpu_decode.py`. Time per token of the embedded model, cut, over that of its source (stock"
        f" transformers), a prompt read and {result['steps']} tokens written, float32,"
        f" {result['hardware']['processor']}, {result['date']}{_of(result)}; medians with quartiles of"
        f" {result['repeats']} alternating repeats. Below 1"
        " is faster. Operations are those of a decode step, per layer.",
        "",
        "| threads | prompt | budget | prefill | prefill, optimise=True | decode | decode, optimise=True | operations"
        " (source) |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in result["rows"]:
        cells = [str(row["threads"]), str(row["prompt"]), row["budget"].replace("every head by itself", "per head")]
        for found in (row[stage][name] for stage in ("prefill", "decode") for name in ("ratio", "optimised_ratio")):
            cells.append(f"{found['median']:.2f} ({found['low']:.2f} to {found['high']:.2f})")
        counts = row["operations"]
        lines.append(f"| {' | '.join(cells)} | {counts['cut']:.0f} ({counts['source']:.0f}) |")
    return "\n".join([*lines, "", _slowest(result["rows"])]) + "\n"


def _slowest(rows: list[dict[str, Any]]) -> str:
    """What a cache in bits costs after a long prompt, by torch alone and optimised."""
    coded = [row for row in rows if "in bits" in row["budget"] and row["prompt"] == max(PROMPTS)]
    told = []
    for stage in ("prefill", "decode"):
        plain, fast = ([row[stage][name]["median"] for row in coded] for name in ("ratio", "optimised_ratio"))
        told += [f"{min(plain):.2f} to {max(plain):.2f} times", f"{min(fast):.2f} to {max(fast):.2f} times"]
    return (
        f"At {max(PROMPTS)} tokens this small model with a cache in bits takes {told[2]} its source's time for a decode"
        " step by torch alone: to code a token and to read codes takes more operations than all else in a layer, and"
        " rows of pooled heads need more products than heads that are apart. With `headwise.load(..., optimise=True)`"
        f" it takes {told[3]}: one library, compiled on this machine, computes a layer's attention, and multiplies few"
        f" rows with matrices. Reading the prompt takes {told[0]} the source's time, {told[1]} with `optimise=True`,"
        " which codes rows in C and has oneDNN multiply; heads rebuild their keys and values from pooled rows twice,"
        " as coded and as near ones."
    )


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--threads", type=int, nargs="+", default=(1, 2))
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args()
    torch.manual_seed(0)
    source, _ = families.load("embedded")
    models = cut_models()
    ids = torch.randint(3, source.config.vocab_size, (1, max(PROMPTS)))
    rows = []
    for threads, prompt in itertools.product(asked.threads, PROMPTS):
        torch.set_num_threads(threads)
        for text, cut in models.items():
            both = {"source": source, "cut": cut, "optimised": optimise(copy.deepcopy(cut))}
            found = compare(both, ids[:, :prompt], asked.repeats)
            counts = {"source": operations(source, ids[:, :prompt]), "cut": operations(cut, ids[:, :prompt])}
            rows.append({"threads": threads, "prompt": prompt, "budget": text, "operations": counts, **found})
            ratios = [f"{stage} {found[stage]['ratio']['median']:.3f}" for stage in ("prefill", "decode")]
            ratios.append(f"optimised {found['decode']['optimised_ratio']['median']:.3f}")
            print(f"{threads} threads, prompt of {prompt}, {text}: {', '.join(ratios)}", flush=True)
    result = {
        "benchmark": "time per token of the embedded model, cut, over that of its source",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "hardware": hardware(),
        "clock": "CPU time of one thread, wall clock of more",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "steps": STEPS,
        "repeats": asked.repeats,
        "rows": rows,
    }
    write_atomically(asked.out, json.dumps(result, indent=1) + "\n")
    print(section(result))


if __name__ == "__main__":
    main()
