"""Products of one row with large weights, on CUDA, with what lies before and after them.

A decode step of one text is as quick as weights can be read. So a norm before a product, the gate of an MLP, a bias and
the sum with the residual stream are part of the kernel that reads the weights: fewer kernels, fewer gaps. For two rows
and more the libraries' products are quicker. All compute in float32 and round where the model's own code rounds.
Imported only where Triton is. N outputs, K inputs.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return, assignment"
# ruff: noqa: SIM108  # branches of kernels are taken when they are built
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from headwise.fast.small import _weighted

ROWS = 2  # of weights, read by a program: measured on an H200, as is `INPUTS`
INPUTS = 2048  # of a row, at once


class Before(NamedTuple):
    """A norm whose result is multiplied."""

    weight: torch.Tensor
    eps: float
    plus: bool  # one is added to its weight


@triton.jit
def _thin(
    x, weight, bias, norm, add, out, eps, N, K: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NORMED: tl.constexpr, PLUS: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out.dtype.element_ty
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    cells = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    others = cells + N.to(tl.int64) * K
    if NORMED:
        d = tl.arange(0, WIDTH)
        whole = tl.load(x + d, mask=d < K, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(whole * whole, 0) / K + eps)
    sums = tl.zeros([BN, BK], tl.float32)
    if GATED:
        more = tl.zeros([BN, BK], tl.float32)
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
        if GATED:
            if K % BK == 0:
                w = tl.load(others + at)
            else:
                w = tl.load(others + at, mask=there[None, :], other=0.0)
            more += w.to(tl.float32) * h[None, :]
    y = tl.sum(sums, 1)
    if BIASED:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    y = y.to(dtype).to(tl.float32)
    if GATED:
        y = (y / (1.0 + tl.exp(-y))).to(dtype).to(tl.float32) * tl.sum(more, 1).to(dtype).to(tl.float32)
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
    K, N = x.shape[-1], len(weight) // 2 if gated else len(weight)
    out = torch.empty(*x.shape[:-1], N, dtype=x.dtype, device=x.device)
    norm, eps, plus = before or (x, 0.0, False)
    each = ROWS // 2 if gated else ROWS
    _thin[(triton.cdiv(N, each),)](
        x, weight, x if bias is None else bias, norm, x if add is None else add, out, eps, N, K=K,
        WIDTH=triton.next_power_of_2(K), BN=each, BK=min(INPUTS, triton.next_power_of_2(K)),
        NORMED=before is not None, PLUS=plus, GATED=gated, BIASED=bias is not None, ADDED=add is not None, num_warps=4,
    )  # fmt: skip
    return out
