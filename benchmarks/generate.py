"""Decode steps end to end: stock transformers, our runtime uncut, and cut to half the key/value cache, by turns.

python benchmarks/generate.py                              # on a CUDA device; writes benchmarks/results/generate.json
python benchmarks/generate.py --model llama-3-8b --rows 16x32k --texts

Shapes of known models with random bfloat16 weights. The context is written into the caches as random keys and values,
not read by a prefill, for all alike. Stock: an eager loop over StaticCache with sdpa attention. Ours: greedy replays.
The ideal moves weights and filled cache once, at the speed of a measured copy.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from attention import ideal
from torch import nn
from transformers import StaticCache

from headwise import families
from headwise.devices import timed
from headwise.families import CAUSAL
from headwise.fast.cache import FastCache
from headwise.fast.fused import joined
from headwise.fast.model import optimise
from headwise.latency.measuring import replayed

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RESULT = Path(__file__).parent / "results" / "generate.json"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3-8b": ("llama", dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072)),
    "qwen3-0.6b": ("qwen3", dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, head_dim=128,
        num_attention_heads=16, num_key_value_heads=8, vocab_size=151936, max_position_embeddings=131072,
        tie_word_embeddings=True)),
}  # fmt: skip
CUTS: dict[str, Callable[[int], tuple[int, int]]] = {  # layer -> widths of queries/keys and values, of 128
    "uncut": lambda layer: (128, 128),
    "kv 50%": lambda layer: (64, 64),
    "kv 50%, uneven": lambda layer: ((48, 80), (80, 48), (56, 72), (72, 56))[layer % 4],
}
GRID = [(rows, context) for context in (2048, 8192, 32768) for rows in (1, 8, 16)]


@torch.no_grad()
def stock_model(name: str) -> Any:
    """Random weights, made on the device."""
    kind, sizes = MODELS[name]
    made = families.family_of_type(kind).kinds[kind].stock_classes()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            model = made[CAUSAL](made["AutoConfig"](**sizes, dtype="bfloat16", attn_implementation="sdpa"))
    finally:
        torch.set_default_dtype(torch.float32)
    for layer in model.model.layers:  # joined as ours will be, so that the rivals can share them
        joined([layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj])
        joined([layer.mlp.gate_proj, layer.mlp.up_proj])
    return model.eval()


@torch.no_grad()
def cut_model(stock: Any, widths: Callable[[int], tuple[int, int]]) -> Any:
    """The same on our runtime; what is not cut is shared with the stock model, what is gets new random weights."""
    family = families.family_of(stock.config)
    shape = family.shape_of(stock.config)
    tensors, layers = family.state_of(stock, clone=False), []
    for index, layer in enumerate(shape.layers):
        qk_dim, v_dim = widths(index)
        if (qk_dim, v_dim) != (layer.qk_dim, layer.v_dim):
            own = family.take_layer(tensors, index, stock.config)
            own |= _narrow(own, layer, qk_dim, v_dim, shape.grain.rotary)
            family.put_layer(tensors, index, own, stock.config)
        # Rotary pairs go where the family lets them; otherwise queries and keys are projected after rotary.
        width = qk_dim if shape.grain.rotary else layer.qk_width
        layers.append(replace(layer, qk_dim=qk_dim, qk_width=width, v_dim=v_dim))
    return optimise(family.build(stock, tuple(layers), tensors))


def _narrow(own: dict[str, torch.Tensor], layer: Any, qk_dim: int, v_dim: int, pairs: bool) -> dict[str, torch.Tensor]:
    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(size, device=DEVICE, dtype=torch.bfloat16) * 0.02

    hidden = own["q.weight"].shape[1]
    new = {"v.weight": drawn(layer.kv_heads * v_dim, hidden), "o.weight": drawn(hidden, layer.query_heads * v_dim)}
    if not pairs:
        return new | {name: drawn(layer.kv_heads, layer.qk_width, qk_dim) for name in ("q_down", "k_down")}
    new |= {"q.weight": drawn(layer.query_heads * qk_dim, hidden), "k.weight": drawn(layer.kv_heads * qk_dim, hidden)}
    kept = torch.arange(qk_dim // 2, device=DEVICE) * (layer.qk_dim // 2) // (qk_dim // 2)
    return new | {"pairs": kept.repeat(layer.kv_heads, 1)}


def fast_cache(model: Any, rows: int, context: int, more: int) -> FastCache:
    """Filled with random keys and values."""
    cache = FastCache(model.headwise_fast.layers, context + more)
    attentions = [module for module in model.modules() if hasattr(module, "attend")]
    for layer, sizes in zip(cache.layers, attentions, strict=True):
        made = (
            torch.empty(1, sizes.kv_heads, 1, d, device=DEVICE, dtype=model.dtype) for d in (sizes.qk_dim, sizes.v_dim)
        )
        layer.allocate(rows, *made)
        for x in (layer.keys, layer.values):
            x.normal_()
        layer.length = context
    cache.batch, cache.starts_B = rows, torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    return cache


def ours(model: Any, rows: int, context: int, steps: int) -> tuple[list[float], int]:
    """Milliseconds per step of some runs, and the most memory that was taken beside the weights."""
    before = _fresh()
    cache = fast_cache(model, rows, context, 4 * steps + 8)
    token = torch.ones(rows, 1, dtype=torch.long, device=DEVICE)
    places = torch.full_like(token, context)
    replayed(model, cache, token, places, 2)
    times = []
    for _ in range(3):
        times.append(timed(lambda: replayed(model, cache, token, places, steps), DEVICE)[1] / steps * 1e3)
    return times, torch.cuda.max_memory_allocated() - before


@torch.no_grad()
def stocks(model: Any, rows: int, context: int, steps: int) -> tuple[list[float], int]:
    """The same for stock code."""
    before = _fresh()
    cache = StaticCache(model.config, max_cache_len=-(-(context + 4 * steps + 8) // 256) * 256)
    heads = model.config.num_key_value_heads
    for layer in cache.layers:
        some = torch.empty(rows, heads, 1, 128, device=DEVICE, dtype=model.dtype)
        layer.lazy_initialization(some, some)
        for x in (layer.keys, layer.values):
            x.normal_()
        layer.cumulative_length.fill_(context)
    token = torch.ones(rows, 1, dtype=torch.long, device=DEVICE)

    step = partial(model, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def run(count: int) -> None:
        nonlocal token
        for _ in range(count):
            token = step(token).logits[:, -1:].argmax(-1)

    run(1)
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
    shape = families.family_of(model.config).shape_of(model.config)
    return sum(s.kv_heads * (s.qk_dim + s.v_dim) for s in shape.layers) * rows * context * 2


def measure(name: str, grid: list[tuple[int, int]], rounds: int) -> Iterator[dict[str, Any]]:
    """Rows of the result, one per rival and size."""
    stock = stock_model(name)
    rivals = {"stock": stock, **{cut: cut_model(stock, widths) for cut, widths in CUTS.items()}}
    free = torch.cuda.get_device_properties(0).total_memory
    for rows, context in grid:
        if cache_bytes(stock, rows, context) * 1.25 + weight_bytes(stock) * 1.3 > 0.95 * free:
            print(f"{name} {rows}x{context}: does not fit")
            continue
        found: dict[str, Any] = {rival: ([], 0) for rival in rivals}
        for _ in range(rounds):
            for rival, model in rivals.items():
                steps = 4 if rival == "stock" else 12
                times, taken = (stocks if rival == "stock" else ours)(model, rows, context, steps)
                found[rival] = (found[rival][0] + times, max(found[rival][1], taken))
        for rival, (times, taken) in found.items():
            model = rivals[rival]
            yield {
                "model": name, "rival": rival, "batch": rows, "context": context,
                "ms": statistics.median(times), "low": min(times), "high": max(times),
                "moved_bytes": weight_bytes(model, True) + cache_bytes(model, rows, context),
                "peak_bytes": weight_bytes(model) + taken, "cache_bytes": cache_bytes(model, rows, context),
            }  # fmt: skip


def texts(name: str, prompt: int = 2048, tokens: int = 64) -> Iterator[dict[str, Any]]:
    """Whole texts by the models' own `generate`, prompt and all; the first one chooses kernels and captures."""
    stock = stock_model(name)
    rivals = {"stock": stock, **{cut: cut_model(stock, CUTS[cut]) for cut in ("uncut", "kv 50%")}}
    ids = torch.randint(1, 1000, (1, prompt), device=DEVICE)
    how = dict(attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, eos_token_id=None)
    times: dict[str, list[float]] = {rival: [] for rival in rivals}
    for _ in range(4):
        for rival, model in rivals.items():
            times[rival].append(timed(lambda model=model: model.generate(ids, **how), DEVICE)[1])
    for rival, (first, *more) in times.items():
        found = {"s": statistics.median(more), "low": min(more), "high": max(more), "first_s": first}
        yield {"model": name, "rival": rival, "prompt": prompt, "tokens": tokens, **found}


def section(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    stock = {(r["model"], r["batch"], r["context"]): r for r in result["rows"] if r["rival"] == "stock"}
    uncut = {(r["model"], r["batch"], r["context"]): r for r in result["rows"] if r["rival"] == "uncut"}
    made, lines = ", ".join(f"{name} {version}" for name, version in result["versions"].items()), []
    for row in result["rows"]:
        here = (row["model"], row["batch"], row["context"])
        over = uncut[here]["ms"] / row["ms"] if here in uncut else float("nan")
        lines.append(
            f"| {row['model']} | {row['batch']} x {row['context'] // 1024}k | {row['rival']} | {row['ms']:.2f} "
            f"({row['low']:.2f} to {row['high']:.2f}) | {row['batch'] / row['ms'] * 1e3:.0f} | "
            f"{stock[here]['ms'] / row['ms']:.1f} | {over:.2f} | {row['ms'] / row['ideal_ms']:.2f} | "
            f"{row['peak_bytes'] / 2**30:.1f} |"
        )
    told = [
        f"`python benchmarks/generate.py`, {result['hardware']}, {result['date']}, {made}; bfloat16,",
        "random weights, random keys and values for a context. Stock: an eager loop over a static cache. Others: our",
        "runtime with `optimise=True`, greedy. Low and high over all repeats, models alternating. The ideal moves",
        f"weights and cache once at the speed of a copy ({result['ideal']['copy_bytes_per_s'] / 1e12:.2f} TB/s).",
    ]
    head = "model | batch x context | | ms per step | tokens/s | times stock's speed | times uncut's | times ideal time"
    table = [f"| {head} | peak GiB |", "| " + " | ".join(["---"] * 9) + " |", *lines]
    return "\n".join(["## Decode steps", "", *told, "", *table, *_texts_told(result.get("texts", []))]) + "\n"


def _texts_told(rows: list[dict[str, Any]]) -> list[str]:
    """Whole texts in Markdown."""
    if not rows:
        return []
    stock = {row["model"]: row["s"] for row in rows if row["rival"] == "stock"}
    lines = [
        f"| {row['model']} | {row['rival']} | {row['s']:.2f} ({row['low']:.2f} to {row['high']:.2f}) | "
        f"{row['first_s']:.1f} | {stock[row['model']] / row['s']:.1f} |"
        for row in rows
    ]
    told = (
        f"Whole texts by `model.generate`: {rows[0]['tokens']} tokens after a prompt of {rows[0]['prompt']}, one row."
    )
    head = ["| model | | seconds | of the first call | times stock's speed |", "| --- | --- | --- | --- | --- |"]
    return ["", told, "", *head, *lines]


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


def main() -> None:
    """Measure, print, write after every row; rows that there are already are measured anew only if asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=[*MODELS, "all"], default="all")
    parser.add_argument("--rows", default="", help="such as 16x32k,1x2k, or none; all if not given")
    parser.add_argument("--texts", action="store_true", help="whole texts, too")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args()
    sizes = [x.split("x") for x in asked.rows.split(",") if "x" in x]
    grid = [(int(b), int(c.removesuffix("k")) * 1024) for b, c in sizes] or ([] if asked.rows else GRID)
    result = begun(asked.out, asked.rounds)
    for name in MODELS if asked.model == "all" else (asked.model,):
        for row in measure(name, grid, asked.rounds) if grid else ():
            least = row["moved_bytes"] / result["ideal"]["copy_bytes_per_s"] * 1e3
            row["ideal_ms"] = least
            told = ("model", "rival", "batch", "context")
            result["rows"] = [r for r in result["rows"] if any(r[k] != row[k] for k in told)] + [row]
            asked.out.write_text(json.dumps(result, indent=1) + "\n")
            print(
                f"{name} {row['rival']} {row['batch']}x{row['context']}: {row['ms']:.2f} ms ({row['low']:.2f} to "
                f"{row['high']:.2f}), {row['ms'] / least:.2f} of ideal, {row['peak_bytes'] / 2**30:.1f} GiB",
                flush=True,
            )
        if asked.texts:
            found = list(texts(name))
            result["texts"] = [r for r in result.get("texts", []) if r["model"] != name] + found
            asked.out.write_text(json.dumps(result, indent=1) + "\n")
            print("\n".join(_texts_told(found)), flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
