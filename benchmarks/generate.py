"""Decode steps end to end: stock transformers, our runtime uncut, and cut to half the key/value cache, by turns.

python benchmarks/generate.py                              # on a CUDA device; writes benchmarks/results/generate.json
python benchmarks/generate.py --model llama-3-8b --rows 16x32k --texts 1x2k,8x8k

Shapes of known models with random bfloat16 weights. The context is written into the caches as random keys and values,
not read by a prefill, for all alike. Stock: an eager loop over StaticCache with sdpa attention. Stock compiled: the
same, compiled with mode="reduce-overhead". Ours: greedy replays; pooled: all heads of a layer share rows, of 16 bits
a number; coded: the same in few bits.
The ideal moves weights and filled cache once, at the speed of a measured copy.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from attention import ideal
from generate_models import DEVICE, MODELS, coded_model, cut_model, pooled_model, stock_model
from provenance import commit
from torch import nn
from transformers import CompileConfig, StaticCache

from headwise import families
from headwise.devices import timed
from headwise.latency.measuring import filled, replayed
from headwise.types.codes import BITS

RESULT = Path(__file__).parent / "results" / "generate.json"
LATER = RESULT.with_name("generate-later.json")  # a run of ours alone, after the other (--out)
CUTS: dict[str, Callable[[int], tuple[int, int]]] = {  # layer -> widths of queries/keys and values, of 128
    "uncut": lambda layer: (128, 128),
    "kv 50%": lambda layer: (64, 64),
    "kv 50%, uneven": lambda layer: ((48, 80), (80, 48), (56, 72), (72, 56))[layer % 4],
}
POOLED = "kv 50%, pooled"
CODES = {  # coefficients of every width, of 1,024 keys and of 1,024 values
    "kv 25%, coded": tuple({8: 128, 4: 512, 2: 384}.get(bits, 0) for bits in BITS),
    "kv 12.5%, coded": tuple({8: 64, 4: 192, 2: 256}.get(bits, 0) for bits in BITS),
}
STOCK = ("stock", "stock compiled")
GRID = [(rows, context) for context in (2048, 8192, 32768) for rows in (1, 8, 16)]


def ours(model: Any, rows: int, context: int, steps: int) -> tuple[list[float], int]:
    """Milliseconds per step of some runs, and the most memory that was taken beside the weights."""
    before = _fresh()
    cache = filled(model, rows, context + 4 * steps + 8)
    cache.rewind(context)
    token = torch.ones(rows, 1, dtype=torch.long, device=DEVICE)
    places = torch.full_like(token, context)
    replayed(model, cache, token, places, 2)
    times = []
    for _ in range(3):
        times.append(timed(lambda: replayed(model, cache, token, places, steps), DEVICE)[1] / steps * 1e3)
    return times, torch.cuda.max_memory_allocated() - before


@torch.no_grad()
def stocks(model: Any, rows: int, context: int, steps: int, compiled: bool = False) -> tuple[list[float], int]:
    """Times of decode steps of stock code."""
    before = _fresh()
    if compiled:
        torch.compiler.reset()
    cache = StaticCache(model.config, max_cache_len=-(-(context + 4 * steps + 8) // 256) * 256)
    heads = model.config.num_key_value_heads
    for layer in cache.layers:
        some = torch.empty(rows, heads, 1, 128, device=DEVICE, dtype=model.dtype)
        layer.lazy_initialization(some, some)
        for x in (layer.keys, layer.values):
            x.normal_()
        layer.cumulative_length.fill_(context)
    token = torch.ones(rows, 1, dtype=torch.long, device=DEVICE)

    call = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True) if compiled else model
    step = partial(call, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def run(count: int) -> None:
        nonlocal token
        for _ in range(count):
            token = step(token).logits[:, -1:].argmax(-1)  # a tensor of its own: a replay overwrites its outputs

    run(3 if compiled else 1)  # compiles, captures and replays
    times = []
    for _ in range(3):
        times.append(timed(lambda: run(steps), DEVICE)[1] / steps * 1e3)
    return times, torch.cuda.max_memory_allocated() - before


def _fresh() -> int:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def weight_bytes(model: nn.Module, moved: bool = False) -> int:
    """Of all weights, or of those that a step moves: of an embedding table that is no output table, next to nothing."""
    found = sum(p.nbytes for p in model.parameters())
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight  # type: ignore[operator]
    return found - (0 if tied or not moved else model.get_input_embeddings().weight.nbytes)  # type: ignore[operator]


def cache_bytes(model: Any, rows: int, context: int) -> int:
    if hasattr(model, "headwise_fast"):
        return int(model.headwise_fast.place_bytes * rows * context)
    shape = families.family_of(model.config).shape_of(model.config)
    return sum(s.kv_heads * (s.qk_dim + s.v_dim) for s in shape.layers) * rows * context * 2


def rivals_of(stock: Any, asked: list[str]) -> dict[str, Any]:
    """Those that are asked for, all with the weights of one stock model as far as they are not cut."""
    found: dict[str, Any] = {}
    for name in asked:
        if name in STOCK:
            found[name] = stock
        elif name in CODES:
            found[name] = coded_model(stock, CODES[name])
        else:
            found[name] = pooled_model(stock) if name == POOLED else cut_model(stock, CUTS[name])
    return found


def measure(name: str, grid: list[tuple[int, int]], rounds: int, asked: list[str]) -> Iterator[dict[str, Any]]:
    """Rows of the result, one per rival and size."""
    stock = stock_model(name)
    rivals = rivals_of(stock, asked)
    free = torch.cuda.get_device_properties(0).total_memory
    for rows, context in grid:
        if cache_bytes(stock, rows, context) * 1.25 + weight_bytes(stock) * 1.3 > 0.95 * free:
            print(f"{name} {rows}x{context}: does not fit")
            continue
        found: dict[str, Any] = {rival: ([], 0) for rival in rivals}
        for _ in range(rounds):
            for rival, model in rivals.items():
                steps = 4 if rival == "stock" else 12
                way = partial(stocks, compiled=rival != "stock") if rival in STOCK else ours
                try:
                    times, taken = way(model, rows, context, steps)
                except Exception as error:  # what compiling may raise is not listed anywhere
                    print(f"{rival} {rows}x{context}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                    continue
                found[rival] = (found[rival][0] + times, max(found[rival][1], taken))
        for rival, (times, taken) in found.items():
            if not times:
                continue
            model = rivals[rival]
            yield {
                "model": name, "rival": rival, "batch": rows, "context": context,
                "ms": statistics.median(times), "low": min(times), "high": max(times),
                "moved_bytes": weight_bytes(model, True) + cache_bytes(model, rows, context),
                "peak_bytes": weight_bytes(model) + taken, "cache_bytes": cache_bytes(model, rows, context),
            }  # fmt: skip


def texts(name: str, sizes: list[tuple[int, int]], tokens: int, asked: list[str]) -> Iterator[dict[str, Any]]:
    """Whole texts by the models' own `generate`, prompt and all; the first one compiles, chooses kernels, captures."""
    rivals = rivals_of(stock_model(name), asked)
    for rows, prompt in sizes:
        ids = torch.randint(1, 1000, (rows, prompt), device=DEVICE)
        how = dict(attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, eos_token_id=None)
        static = dict(cache_implementation="static", compile_config=CompileConfig(mode="reduce-overhead"))
        for rival, model in rivals.items():
            more = static if rival == "stock compiled" else {}
            _fresh()
            try:
                write = partial(model.generate, ids, **how, **more)
                times = [timed(write, DEVICE)[1] for _ in range(4)]
            except Exception as error:
                print(f"{rival} {rows}x{prompt}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            finally:
                if hasattr(model, "headwise_fast"):
                    model.headwise_fast.release()
            first, *later = times
            found = {"s": statistics.median(later), "low": min(later), "high": max(later), "first_s": first}
            yield {"model": name, "rival": rival, "batch": rows, "prompt": prompt, "tokens": tokens, **found}


def _table(result: dict[str, Any]) -> list[str]:
    """Decode steps in Markdown."""
    stock: dict[Any, Any] = {}  # compiled where that was measured
    for row in result["rows"]:
        here = (row["model"], row["batch"], row["context"])
        if row["rival"] in STOCK and (here not in stock or row["ms"] < stock[here]["ms"]):
            stock[here] = row
    uncut = {(r["model"], r["batch"], r["context"]): r for r in result["rows"] if r["rival"] == "uncut"}
    lines = []
    for row in result["rows"]:
        here = (row["model"], row["batch"], row["context"])
        over = uncut[here]["ms"] / row["ms"] if here in uncut else float("nan")
        beside = f"{stock[here]['ms'] / row['ms']:.2f}" if here in stock else ""
        lines.append(
            f"| {row['model']} | {row['batch']} x {row['context'] // 1024}k | {row['rival']} | {row['ms']:.2f} "
            f"({row['low']:.2f} to {row['high']:.2f}) | {row['batch'] / row['ms'] * 1e3:.0f} | "
            f"{beside} | {over:.2f} | {row['ms'] / row['ideal_ms']:.2f} | "
            f"{row['peak_bytes'] / 2**30:.1f} |"
        )
    head = "model | batch x context | | ms per step | tokens/s | times stock's speed | times uncut's | times ideal time"
    return [f"| {head} | peak GiB |", "| " + " | ".join(["---"] * 9) + " |", *lines]


def _later() -> list[str]:
    """The later run."""
    if not LATER.exists():
        return []
    result = json.loads(LATER.read_text())
    when = _when({**result, "date": result["rows"][0]["date"]})
    return ["", f"The same after a later change of how kernels are chosen, {when}; one round:", "", *_table(result)]


def section(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    made = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    told = [
        f"`python benchmarks/generate.py`, {result['hardware']}, {_when(result)}, {made}; bfloat16,",
        "random weights, and random keys and values as context. Stock: an eager loop with a static cache. Compiled:",
        'the same with `mode="reduce-overhead"`, the baseline where it was measured. Others: our',
        "runtime with `optimise=True`, greedy. Low and high over all repeats, models alternating. The ideal reads",
        f"weights and cache once at the speed of a copy ({result['ideal']['copy_bytes_per_s'] / 1e12:.2f} TB/s).",
    ]
    table = [*_table(result), *_later(), *_texts_told(result.get("texts", []))]
    return "\n".join(["## Decode steps", "", *told, "", *table]) + "\n"


def _when(result: dict[str, Any]) -> str:
    """Days and commits of all rows."""
    every = [*result["rows"], *result.get("texts", [])]
    days = sorted({row.get("date", result["date"]) for row in every})
    return ", ".join(days) + "".join(
        f", commit {name}" for name in sorted({r["commit"] for r in every if "commit" in r})
    )


def _texts_told(rows: list[dict[str, Any]]) -> list[str]:
    """Whole texts in Markdown."""
    if not rows:
        return []
    best: dict[Any, float] = {}  # of stock code, compiled where that was measured
    for row in rows:
        if row["rival"] in STOCK:
            size = (row["model"], row.get("batch", 1), row["prompt"], row["tokens"])
            best[size] = min(row["s"], best.get(size, row["s"]))
    lines = []
    for row in rows:
        size = (row["model"], row.get("batch", 1), row["prompt"], row["tokens"])
        over = f"{best[size] / row['s']:.2f}" if size in best else ""
        lines.append(
            f"| {row['model']} | {size[1]} x {row['prompt'] // 1024}k | {row['tokens']} | {row['rival']} | "
            f"{row['s']:.2f} ({row['low']:.2f} to {row['high']:.2f}) | {row['first_s']:.1f} | {over} |"
        )
    told = 'Whole texts by `model.generate`. Stock compiled: `cache_implementation="static"`, reduce-overhead.'
    head = "| model | batch x prompt | tokens | | seconds | first call, seconds | times stock's best speed |"
    return ["", told, "", head, "| " + " | ".join(["---"] * 7) + " |", *lines]


def begun(file: Path, rounds: int) -> dict[str, Any]:
    """The result so far, of the same machine and versions, or a new one."""
    new: dict[str, Any] = {
        "hardware": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "settings": {"dtype": "bfloat16", "context": "random keys and values", "rounds": rounds},
    }
    found = json.loads(file.read_text()) if file.exists() else {}
    if all(found.get(key) == new[key] for key in ("hardware", "versions")):
        return found
    return {**new, "ideal": ideal(), "rows": [], "texts": []}


def sizes(text: str) -> list[tuple[int, int]]:
    """Rows and lengths, as in 16x32k,1x2k."""
    pairs = (x.split("x") for x in text.split(",") if "x" in x)
    return [(int(b), int(c.removesuffix("k")) * 1024) for b, c in pairs]


def main() -> None:
    """Measure, print, write after every row; rows that there are already are measured anew only if asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=[*MODELS, "all"], default="all")
    parser.add_argument("--rows", default="", help="such as 16x32k,1x2k, or none; all if not given")
    parser.add_argument("--texts", default="", help="whole texts, too, such as 1x2k,8x8k")
    parser.add_argument("--tokens", type=int, default=256, help="of a whole text")
    every = [*STOCK, *CUTS, POOLED, *CODES]
    parser.add_argument("--rivals", nargs="+", choices=every, default=every)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args()
    grid = sizes(asked.rows) or ([] if asked.rows else GRID)
    result = begun(asked.out, asked.rounds)
    for name in MODELS if asked.model == "all" else (asked.model,):
        for row in measure(name, grid, asked.rounds, asked.rivals) if grid else ():
            least = row["moved_bytes"] / result["ideal"]["copy_bytes_per_s"] * 1e3
            row["ideal_ms"] = least
            row |= {"date": time.strftime("%Y-%m-%d"), "commit": commit()}
            size, ran = ("model", "batch", "context"), ("date", "commit")  # rows of a size are of one run
            others = [r for r in result["rows"] if any(r[k] != row[k] for k in size)]
            same = [r for r in result["rows"] if all(r.get(k) == row[k] for k in (*size, *ran))]
            result["rows"] = others + [r for r in same if r["rival"] != row["rival"]] + [row]
            asked.out.write_text(json.dumps(result, indent=1) + "\n")
            print(
                f"{name} {row['rival']} {row['batch']}x{row['context']}: {row['ms']:.2f} ms ({row['low']:.2f} to "
                f"{row['high']:.2f}), {row['ms'] / least:.2f} of ideal, {row['peak_bytes'] / 2**30:.1f} GiB",
                flush=True,
            )
        if asked.texts:
            for row in texts(name, sizes(asked.texts), asked.tokens, asked.rivals):
                row |= {"date": time.strftime("%Y-%m-%d"), "commit": commit()}
                told = ("model", "rival", "batch", "prompt", "tokens")
                kept = [r for r in result.get("texts", []) if any(r.get(k, 1) != row[k] for k in told)]
                result["texts"] = [*kept, row]
                asked.out.write_text(json.dumps(result, indent=1) + "\n")
                print(row, flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
