"""Products of one row with large weights, on CUDA, with what lies before and after them.

A decode step of one text is as quick as weights can be read. So a norm before a product, the gate of an MLP, a bias and
the sum with the residual stream are part of the kernel that reads the weights: fewer kernels, fewer gaps. For two rows
and more the libraries' products are quicker. All compute in float32 and round where the model's own code rounds.
Imported only where Triton is. N outputs, K inputs.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return, assignment"
# ruff: noqa: SIM108  # branches of kernels are taken when they are built
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from headwise.fast.fused import Before
from headwise.fast.small import _weighted

INPUTS = 2048  # of a row, at once: measured on an H200, as is that a program reads two rows of weights


@triton.jit
def _products(
    x, weight, rows, norm, eps, K: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, NORMED: tl.constexpr,
    PLUS: tl.constexpr,
):  # fmt: skip
    """Products of a row with two rows of a weight."""
    dtype: tl.constexpr = x.dtype.element_ty
    k = tl.arange(0, BK)
    cells = weight + rows.to(tl.int64)[:, None] * K + k[None, :]
    if NORMED:
        d = tl.arange(0, WIDTH)
        whole = tl.load(x + d, mask=d < K, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(whole * whole, 0) / K + eps)
    sums = tl.zeros([2, BK], tl.float32)
    for at in range(0, K, BK):
        there = at + k < K
        h = tl.load(x + at + k, mask=there, other=0.0).to(tl.float32)
        if NORMED:
            gain = tl.load(norm + at + k, mask=there, other=0.0).to(tl.float32)
            h = _weighted(h * scale, gain, PLUS, dtype)
        if K % BK == 0:
            w = tl.load(cells + at)
        else:
            w = tl.load(cells + at, mask=there[None, :], other=0.0)
        sums += w.to(tl.float32) * h[None, :]
    return tl.sum(sums, 1)


@triton.jit
def _thin(
    x, weight, bias, norm, add, out, eps, N, K: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr,
    NORMED: tl.constexpr, PLUS: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out.dtype.element_ty
    i = tl.arange(0, 2)
    if GATED:  # a row of the gate and one of what it opens
        n = tl.program_id(0)
        rows = n + i * N
    else:
        n = tl.program_id(0) * 2 + i
        rows = tl.minimum(n, N - 1)
    y = _products(x, weight, rows, norm, eps, K, WIDTH, BK, NORMED, PLUS)
    if BIASED:
        y += tl.load(bias + rows).to(tl.float32)
    y = y.to(dtype).to(tl.float32)
    if GATED:
        gate = tl.sum(tl.where(i == 0, y, 0.0), 0)
        y = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * tl.sum(tl.where(i == 1, y, 0.0), 0)
    if ADDED:
        y = tl.load(add + n, mask=n < N, other=0.0).to(tl.float32) + y
    tl.store(out + n, y.to(dtype), mask=n < N)


def thin(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, before: Before | None = None,
    gated: bool = False, add: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """A row (..., K) times a weight (N, K): normed before; silu of the first half times the second if `gated`; added
    to `add`."""
    x, weight = x.contiguous(), weight.contiguous()  # which they are, as a rule
    N = len(weight) // 2 if gated else len(weight)
    out = torch.empty(*x.shape[:-1], N, dtype=x.dtype, device=x.device)
    norm, eps, _ = before or (x, 0.0, False)
    _thin[(N if gated else triton.cdiv(N, 2),)](
        x, weight, x if bias is None else bias, norm, x if add is None else add, out, eps, N,
        GATED=gated, BIASED=bias is not None, ADDED=add is not None, **_built(x, before),
    )  # fmt: skip
    return out


def _built(x: torch.Tensor, before: Before | None) -> dict[str, Any]:
    """What a product of a row is built with."""
    K = x.shape[-1]
    width = triton.next_power_of_2(K)
    plus = before is not None and before.plus
    return dict(K=K, WIDTH=width, BK=min(INPUTS, width), NORMED=before is not None, PLUS=plus, num_warps=4)


@triton.jit
def _row_heads(
    x, weight, bias, norm, cos, sin, pairs, queries, keys, values, place, eps, k_head, k_place, v_head, v_place,
    H: tl.constexpr, G: tl.constexpr, SHARE: tl.constexpr, W: tl.constexpr, V: tl.constexpr, TURNED: tl.constexpr,
    PAIRED: tl.constexpr, BIASED: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr,
    NORMED: tl.constexpr, PLUS: tl.constexpr,
):  # fmt: skip
    """Two numbers of a head: those that rotary positions turn together, or neighbours."""
    dtype: tl.constexpr = queries.dtype.element_ty
    n = tl.program_id(0)
    i = tl.arange(0, 2)
    at = tl.load(place)
    EACH: tl.constexpr = W // 2
    if n < (H + G) * EACH:
        head, pair = n // EACH, n % EACH
        column = tl.where(pair < TURNED // 2, pair + i * (TURNED // 2), 2 * pair + i)
        rows = head * W + column
    else:
        head = (n - (H + G) * EACH) // (V // 2)
        pair = 0
        column = (n - (H + G) * EACH) % (V // 2) * 2 + i
        rows = (H + G) * W + head * V + column
    y = _products(x, weight, rows, norm, eps, K, WIDTH, BK, NORMED, PLUS)
    if BIASED:
        y += tl.load(bias + rows).to(tl.float32)
    y = y.to(dtype).to(tl.float32)
    if n < (H + G) * EACH:
        g = tl.where(head >= H, head - H, head // SHARE)
        if pair < TURNED // 2:
            if PAIRED:
                angle = tl.load(pairs + g * (TURNED // 2) + pair).to(tl.int32)
            else:
                angle = pair
            c = tl.load(cos + angle).to(tl.float32)
            s = tl.load(sin + angle).to(tl.float32)
            first, second = tl.sum(tl.where(i == 0, y, 0.0), 0), tl.sum(tl.where(i == 1, y, 0.0), 0)
            y = tl.where(i == 0, first * c - second * s, second * c + first * s)
        here = tl.where(head < H, queries + head * W, keys + g * k_head + at * k_place)
        tl.store(here + column, y.to(dtype))
    else:
        tl.store(values + head * v_head + at * v_place + column, y.to(dtype))


def heads_of_row(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, before: Before,
    turning: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int], keys: torch.Tensor, values: torch.Tensor,
    place: torch.Tensor, aside: bool, query_heads: int,
) -> torch.Tensor:  # fmt: skip
    """Queries (1, H, 1, W) of a row of a single text; keys and values go to their place in the cache.

    As `small.place_heads` of the row's product with the weights of all heads, in one kernel: for heads without norms
    and of even widths. `turning` has cosines, sines, the pairs that were kept, and how many numbers of a head turn.
    """
    x, weight, (cos, sin, pairs, turned) = x.contiguous(), weight.contiguous(), turning
    (G, _, W), (value_heads, V) = keys.shape[1:4], values.shape[1::2]
    queries = torch.empty(1, query_heads, 1, W, dtype=x.dtype, device=x.device)
    _row_heads[((query_heads + G) * (W // 2) + value_heads * (V // 2),)](
        x, weight, x if bias is None else bias, before.weight, cos, sin, x if pairs is None else pairs, queries, keys,
        values, place, before.eps, keys.stride(1), 0 if aside else keys.stride(2), *values.stride()[1:3],
        H=query_heads, G=G, SHARE=query_heads // G, W=W, V=V, TURNED=turned, PAIRED=pairs is not None,
        BIASED=bias is not None, **_built(x, before),
    )  # fmt: skip
    return queries
