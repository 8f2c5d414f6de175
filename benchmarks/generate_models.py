"""Shapes of known models with random weights, for benchmarks: stock, cut head by head, and with pooled heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from headwise import families
from headwise.families import CAUSAL
from headwise.fast.joined import joined
from headwise.fast.model import optimise

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3-8b": ("llama", dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072)),
    "qwen3-0.6b": ("qwen3", dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, head_dim=128,
        num_attention_heads=16, num_key_value_heads=8, vocab_size=151936, max_position_embeddings=131072,
        tie_word_embeddings=True)),
}  # fmt: skip
POOLED_ROW = (512, 512)  # of 1,024 keys and 1,024 values


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


@torch.no_grad()
def pooled_model(stock: Any) -> Any:
    """All heads of a layer share rows, cut to half; new random weights where the cut needs them."""
    family = families.family_of(stock.config)
    shape = family.shape_of(stock.config)
    tensors, layers = family.state_of(stock, clone=False), []
    for index, layer in enumerate(shape.layers):
        wide = replace(layer.pooling(layer.kv_heads), qk_dim=POOLED_ROW[0], v_dim=POOLED_ROW[1])
        own = family.take_layer(tensors, index, stock.config)
        hidden, each = own["v.weight"].shape[1], layer.v_dim
        own |= {name: _drawn(1, wide.qk_width, wide.qk_dim) for name in ("q_down", "k_down")}
        own |= {"v.weight": _drawn(wide.v_dim, hidden), "v_up": _drawn(layer.kv_heads, wide.v_dim, each)}
        family.put_layer(tensors, index, own, stock.config)
        layers.append(wide)
    return optimise(family.build(stock, tuple(layers), tensors))


@torch.no_grad()
def coded_model(stock: Any, code: tuple[int, ...]) -> Any:
    """All heads of a layer share rows in bits, so many coefficients of 12, 11, ... 1; random weights where needed."""
    family = families.family_of(stock.config)
    shape = family.shape_of(stock.config)
    tensors, layers = family.state_of(stock, clone=False), []
    for index, layer in enumerate(shape.layers):
        wide = layer.pooling(layer.kv_heads)
        wide = replace(wide, qk_dim=wide.qk_width, v_dim=wide.v_width, k_code=code, v_code=code)
        own = family.take_layer(tensors, index, stock.config)
        hidden, each, rows = own["v.weight"].shape[1], layer.v_dim, (1, wide.qk_dim)
        own |= {name: _drawn(1, wide.qk_width, wide.qk_dim) for name in ("q_down", "k_down")}
        own |= {"v.weight": _drawn(wide.v_dim, hidden), "v_up": _drawn(layer.kv_heads, wide.v_dim, each)}
        own |= {"k_mean": _drawn(*rows), "v.bias": _drawn(wide.v_dim), "o.bias": _drawn(hidden)}
        own |= {name: torch.ones(rows, device=DEVICE, dtype=torch.bfloat16) for name in ("k_gain", "v_gain")}
        family.put_layer(tensors, index, own, stock.config)
        layers.append(wide)
    return optimise(family.build(stock, tuple(layers), tensors))


def _drawn(*size: int) -> torch.Tensor:
    return torch.randn(size, device=DEVICE, dtype=torch.bfloat16) * 0.02


def _narrow(own: dict[str, torch.Tensor], layer: Any, qk_dim: int, v_dim: int, pairs: bool) -> dict[str, torch.Tensor]:
    hidden = own["q.weight"].shape[1]
    new = {"v.weight": _drawn(layer.kv_heads * v_dim, hidden), "o.weight": _drawn(hidden, layer.query_heads * v_dim)}
    if not pairs:
        return new | {name: _drawn(layer.kv_heads, layer.qk_width, qk_dim) for name in ("q_down", "k_down")}
    new |= {"q.weight": _drawn(layer.query_heads * qk_dim, hidden), "k.weight": _drawn(layer.kv_heads * qk_dim, hidden)}
    kept = torch.arange(qk_dim // 2, device=DEVICE) * (layer.qk_dim // 2) // (qk_dim // 2)
    return new | {"pairs": kept.repeat(layer.kv_heads, 1)}
