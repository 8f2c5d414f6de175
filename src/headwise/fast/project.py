"""Projections of one new token between heads and the rows of the cache that they share, on CUDA.

Queries and keys go to rows in one kernel, and what heads read of rows comes back in another: the products are small, so
that the time of a step would go into starting kernels and into copies between them. All compute in float32 and round
where the model's own code rounds. Imported only where Triton is.
Shape suffixes: B texts, H query heads, G rows per token, N matrices (heads whose keys were pooled), W widths of heads,
K and V widths of rows, O width of a head's output.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

COLUMNS = 32  # of a matrix, in one program
INPUTS = 128  # of a row, at once
ROWS = 64  # that one program multiplies, at most


@triton.jit
def _product(
    x, cells, matrix, columns, there, some, INNER: tl.constexpr, OUTER: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows at `x + cells` times some columns of a matrix (INNER, OUTER), rounded."""
    d = tl.arange(0, BK)
    y = tl.zeros([BM, BN], tl.float32)
    for low in range(0, INNER, BK):
        inside = low + d < INNER
        row = tl.load(x + cells[:, None] + (low + d)[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        block = matrix + (low + d)[:, None] * OUTER + columns[None, :]
        block = tl.load(block, mask=inside[:, None] & some[None, :], other=0.0)
        y = tl.dot(row, block, y, input_precision=PRECISION)
    return y.to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def _to_rows(
    q, k, q_down, k_down, mean, gain, q_out, k_out, place, B, k_row, k_group, k_place,
    N: tl.constexpr, POOLED: tl.constexpr, SHARE: tl.constexpr, W: tl.constexpr, K: tl.constexpr,
    CENTRED: tl.constexpr, GAINED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    some = columns < K
    r = tl.program_id(2) * BM + tl.arange(0, BM)
    dtype: tl.constexpr = q.dtype.element_ty
    if i < N:
        there = r < B * SHARE
        cells = ((r // SHARE) * (N * SHARE) + i * SHARE + r % SHARE).to(tl.int64)
        y = _product(q, cells * W, q_down + i * (W * K), columns, there, some, W, K, BM, BN, BK, PRECISION)
        if GAINED:
            y = y / tl.load(gain + i // POOLED * K + columns, mask=some, other=1.0).to(tl.float32)[None, :]
        tl.store(q_out + cells[:, None] * K + columns[None, :], y.to(dtype), mask=there[:, None] & some[None, :])
    elif tl.program_id(2) * BM < B:
        g = i - N
        there = r < B
        cells = (r * (N // POOLED) + g).to(tl.int64) * (POOLED * W)
        matrix = k_down + g * (POOLED * W * K)
        y = _product(k, cells, matrix, columns, there, some, POOLED * W, K, BM, BN, BK, PRECISION)
        if CENTRED:
            y = (y - tl.load(mean + g * K + columns, mask=some, other=0.0).to(tl.float32)[None, :]).to(dtype)
        if GAINED:
            y = y.to(tl.float32) * tl.load(gain + g * K + columns, mask=some, other=1.0).to(tl.float32)[None, :]
        target = k_out + r.to(tl.int64) * k_row + g * k_group + tl.load(place) * k_place
        tl.store(target[:, None] + columns[None, :], y.to(dtype), mask=there[:, None] & some[None, :])


def to_rows(
    q_BH1W: torch.Tensor, k_BN1W: torch.Tensor, downs: tuple[torch.Tensor, torch.Tensor], mean_GK: torch.Tensor | None,
    gain_GK: torch.Tensor | None, keys_BGLK: torch.Tensor | None, place: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Queries (B, H, 1, K) and keys (B, G, 1, K) of one token as rows have them.

    Where the buffer of a cache is given, keys are written to a place of it, and it is returned. `mean_GK` is taken off
    keys; queries are divided by `gain_GK`, and keys multiplied, whose numbers are powers of two.
    """
    q, k, (q_down, k_down) = q_BH1W.contiguous(), k_BN1W.contiguous(), downs
    (B, H, _, W), N, (G, _, K) = q.shape, k.shape[1], k_down.shape
    aside = keys_BGLK is None
    keys = q.new_empty(B, G, 1, K) if keys_BGLK is None else keys_BGLK
    out, some = q.new_empty(B, H, 1, K), q_down
    BM = min(ROWS, max(16, triton.next_power_of_2(B * H // N)))
    _to_rows[(N + G, triton.cdiv(K, COLUMNS), triton.cdiv(B * H // N, BM))](
        q, k, q_down, k_down, some if mean_GK is None else mean_GK, some if gain_GK is None else gain_GK, out, keys,
        place, B, keys.stride(0), keys.stride(1), 0 if aside else keys.stride(2), N=N, POOLED=N // G, SHARE=H // N,
        W=W, K=K, CENTRED=mean_GK is not None, GAINED=gain_GK is not None, BM=BM, BN=COLUMNS, BK=INPUTS,
        PRECISION=_precision(q),
    )  # fmt: skip
    return out, keys


@triton.jit
def _from_rows(
    z, up, gain, out, B, N: tl.constexpr, POOLED: tl.constexpr, SHARE: tl.constexpr, V: tl.constexpr, OUT: tl.constexpr,
    GAINED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    some = columns < OUT
    r = tl.program_id(2) * BM + tl.arange(0, BM)
    there = r < B * SHARE
    cells = ((r // SHARE) * (N * SHARE) + i * SHARE + r % SHARE).to(tl.int64)
    d = tl.arange(0, BK)
    y = tl.zeros([BM, BN], tl.float32)
    for low in range(0, V, BK):
        inside = low + d < V
        row = tl.load(z + cells[:, None] * V + (low + d)[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        if GAINED:
            by = tl.load(gain + i // POOLED * V + low + d, mask=inside, other=1.0).to(tl.float32)
            row = (row.to(tl.float32) / by[None, :]).to(z.dtype.element_ty)
        block = up + i * (V * OUT) + (low + d)[:, None] * OUT + columns[None, :]
        block = tl.load(block, mask=inside[:, None] & some[None, :], other=0.0)
        y = tl.dot(row, block, y, input_precision=PRECISION)
    target = out + cells[:, None] * OUT + columns[None, :]
    tl.store(target, y.to(out.dtype.element_ty), mask=there[:, None] & some[None, :])


def from_rows(z_B1HV: torch.Tensor, up_NVO: torch.Tensor, gain_GV: torch.Tensor | None) -> torch.Tensor:
    """What every head has of the values that it read in rows, heads side by side (B, 1, H O); `gain_GV` divides."""
    z, (B, _, H, V), (N, _, width) = z_B1HV.contiguous(), z_B1HV.shape, up_NVO.shape
    out = z.new_empty(B, 1, H * width)
    BM = min(ROWS, max(16, triton.next_power_of_2(B * H // N)))
    given: Any = up_NVO if gain_GV is None else gain_GV
    _from_rows[(N, triton.cdiv(width, COLUMNS), triton.cdiv(B * H // N, BM))](
        z, up_NVO, given, out, B, N=N, POOLED=1 if gain_GV is None else N // len(gain_GV), SHARE=H // N, V=V, OUT=width,
        GAINED=gain_GV is not None, BM=BM, BN=COLUMNS, BK=INPUTS, PRECISION=_precision(z),
    )  # fmt: skip
    return out


def _precision(x: torch.Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"
