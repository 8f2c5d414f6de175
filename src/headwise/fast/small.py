"""Small kernels between the large products of a decode step, on CUDA: a norm, a gate, heads to their places, a token.

A step of a small batch is as quick as weights can be moved, if what lies between takes few launches. All compute in
float32 and round where the model's own code rounds. Imported only where Triton is.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# ruff: noqa: SIM108  # branches of kernels are taken when they are built
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _weighted(x, w, PLUS: tl.constexpr, dtype: tl.constexpr):
    """A normed vector times its weights: rounded before, or one plus the weight and rounded after (Gemma)."""
    if PLUS:
        y = (x * (1.0 + w)).to(dtype).to(tl.float32)
    else:
        y = (x.to(dtype).to(tl.float32) * w).to(dtype).to(tl.float32)
    return y


@triton.jit
def _norm(x, weight, out, row, eps, width, WIDTH: tl.constexpr, PLUS: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    h = tl.load(x + b * row + d, mask=d < width, other=0.0).to(tl.float32)
    w = tl.load(weight + d, mask=d < width, other=0.0).to(tl.float32)
    h = h * tl.rsqrt(tl.sum(h * h, 0) / width + eps)
    tl.store(out + b * width + d, _weighted(h, w, PLUS, out.dtype.element_ty).to(out.dtype.element_ty), mask=d < width)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, plus: bool) -> torch.Tensor:
    """Over the last dimension."""
    flat, width = x.reshape(-1, x.shape[-1]), x.shape[-1]
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    block = triton.next_power_of_2(width)
    _norm[(len(flat),)](flat, weight, out, flat.stride(0), eps, width, WIDTH=block, PLUS=plus, num_warps=8)
    return out.view(x.shape)


@triton.jit
def _gate(both, out, width, BLOCK: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(both + b * 2 * width + d, mask=d < width, other=0.0).to(tl.float32)
    up = tl.load(both + b * 2 * width + width + d, mask=d < width, other=0.0).to(tl.float32)
    opened = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + b * width + d, (opened * up).to(out.dtype.element_ty), mask=d < width)


def silu_gate(both: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of gate and up side by side in the last dimension."""
    flat, width = both.reshape(-1, both.shape[-1]), both.shape[-1] // 2
    out = torch.empty(len(flat), width, dtype=both.dtype, device=both.device)
    _gate[(len(flat), triton.cdiv(width, 1024))](flat, out, width, BLOCK=1024)
    return out.view(*both.shape[:-1], width)


@triton.jit
def _heads(
    qkv, cos, sin, pairs, norms, queries, keys, values, place, eps,
    qkv_row, cos_row, k_row, k_head, k_place, v_row, v_head, v_place,
    H: tl.constexpr, G: tl.constexpr, SHARE: tl.constexpr, W: tl.constexpr, V: tl.constexpr, TURNED: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, VALUES: tl.constexpr,
    PAIRED: tl.constexpr, NORMED: tl.constexpr, PLUS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    dtype: tl.constexpr = queries.dtype.element_ty
    at = tl.load(place)
    if h >= H + G:
        value_head = h - H - G
        d = tl.arange(0, VALUES)
        value = tl.load(qkv + b * qkv_row + (H + G) * W + value_head * V + d, mask=d < V, other=0.0)
        tl.store(values + b * v_row + value_head * v_head + at * v_place + d, value, mask=d < V)
    else:
        key = h >= H
        g = tl.where(key, h - H, h // SHARE)
        x = qkv + b * qkv_row + h * W
        j = tl.arange(0, HALF)
        turning = j < TURNED // 2
        x1 = tl.load(x + j, mask=turning, other=0.0).to(tl.float32)
        x2 = tl.load(x + TURNED // 2 + j, mask=turning, other=0.0).to(tl.float32)
        r = TURNED + tl.arange(0, REST)
        x3 = tl.load(x + r, mask=r < W, other=0.0).to(tl.float32)
        if NORMED:
            scale = tl.rsqrt((tl.sum(x1 * x1, 0) + tl.sum(x2 * x2, 0) + tl.sum(x3 * x3, 0)) / W + eps)
            weight = norms + key.to(tl.int32) * W
            w1 = tl.load(weight + j, mask=turning, other=0.0).to(tl.float32)
            w2 = tl.load(weight + TURNED // 2 + j, mask=turning, other=0.0).to(tl.float32)
            w3 = tl.load(weight + r, mask=r < W, other=0.0).to(tl.float32)
            x1 = _weighted(x1 * scale, w1, PLUS, dtype)
            x2 = _weighted(x2 * scale, w2, PLUS, dtype)
            x3 = _weighted(x3 * scale, w3, PLUS, dtype)
        if PAIRED:
            column = tl.load(pairs + g * (TURNED // 2) + j, mask=turning, other=0).to(tl.int32)
        else:
            column = j
        c = tl.load(cos + b * cos_row + column, mask=turning, other=0.0).to(tl.float32)
        s = tl.load(sin + b * cos_row + column, mask=turning, other=0.0).to(tl.float32)
        y1 = (x1 * c - x2 * s).to(dtype)
        y2 = (x2 * c + x1 * s).to(dtype)
        y3 = x3.to(dtype)
        here = queries + (b * H + h) * W  # beyond its heads where this is a key: masked
        there = keys + b * k_row + g * k_head + at * k_place
        tl.store(here + j, y1, mask=turning & (h < H))
        tl.store(here + TURNED // 2 + j, y2, mask=turning & (h < H))
        tl.store(here + r, y3, mask=(r < W) & (h < H))
        tl.store(there + j, y1, mask=turning & key)
        tl.store(there + TURNED // 2 + j, y2, mask=turning & key)
        tl.store(there + r, y3, mask=(r < W) & key)


def place_heads(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairs: torch.Tensor | None, norms: torch.Tensor | None,
    keys: torch.Tensor, values: torch.Tensor, place: torch.Tensor, eps: float, plus: bool, turned: int, aside: bool,
    query_heads: int, width: int,
) -> torch.Tensor:  # fmt: skip
    """Queries (B, H, 1, W), normed and turned; keys likewise and values go to their place in the cache.

    `qkv` (B, 1, ...) holds all heads; `keys` with `aside` has one place, for keys that are still to be projected. Of
    pooled heads there are more keys than values: a row of values is that of several heads.
    """
    (rows, groups), (value_heads, V) = keys.shape[:2], values.shape[1::2]
    queries = torch.empty(rows, query_heads, 1, width, dtype=qkv.dtype, device=qkv.device)
    some: Any = qkv
    _heads[(rows, query_heads + groups + value_heads)](
        qkv, cos, sin, some if pairs is None else pairs, some if norms is None else norms, queries, keys, values, place,
        eps, qkv.stride(0), cos.stride(0) if len(cos) > 1 else 0,
        keys.stride(0), keys.stride(1), 0 if aside else keys.stride(2), *values.stride()[:3],
        H=query_heads, G=groups, SHARE=query_heads // groups, W=width, V=V, TURNED=turned,
        HALF=triton.next_power_of_2(max(turned // 2, 1)), REST=triton.next_power_of_2(max(width - turned, 1)),
        VALUES=triton.next_power_of_2(V), PAIRED=pairs is not None, NORMED=norms is not None, PLUS=plus,
        num_warps=1,
    )  # fmt: skip
    return queries


@triton.jit
def _largest(logits, best, where, row, width, BLOCK: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + b * row + d, mask=d < width, other=float("-inf")).to(tl.float32)
    here = b * tl.num_programs(1) + tl.program_id(1)
    most = tl.max(x, 0)
    tl.store(best + here, most)
    tl.store(where + here, tl.min(tl.where(x == most, d, width), 0))


@triton.jit
def _largest_of(best, where, token, parts, width, PARTS: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PARTS)
    x = tl.load(best + b * parts + i, mask=i < parts, other=float("-inf"))
    at = tl.load(where + b * parts + i, mask=i < parts, other=width)
    first = tl.min(tl.where(x == tl.max(x, 0), at, width), 0)
    tl.store(token + b, tl.minimum(first, width - 1).to(tl.int64))  # of logits that are no numbers: a token that exists


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The first of the largest numbers (B, 1) of every row (B, V): torch takes one program for a row."""
    rows, width = logits.shape
    parts = triton.cdiv(width, 2048)
    best = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    where = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    token = torch.empty(rows, 1, dtype=torch.long, device=logits.device)
    _largest[(rows, parts)](logits, best, where, logits.stride(0), width, BLOCK=2048)
    _largest_of[(rows,)](best, where, token, parts, width, PARTS=triton.next_power_of_2(parts))
    return token
