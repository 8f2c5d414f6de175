"""One new token per text against a long cache of wide rows that many query heads share, on CUDA.

As `flash_decode`, for rows of pooled heads: too wide for one product over a whole place, so keys and values are read
apart, each in two blocks. The places are split over programs; a second kernel combines what they found. Lengths lie on
the device, so that one captured graph serves all of them. Imported only where Triton is.
Shape suffixes: B texts, H query heads, G rows per token, L places, K and V widths, S splits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from headwise.fast.flash_decode import Tile, _capped, blocks, run_splits

HEADS = 32  # query heads of a program, at most: more share a row by reading it again
COUNTS = ["S"]  # numbers of splits: kernels are not built anew for each


@triton.jit
def _block(rows, at, d, seen, ROW: tl.constexpr, W: tl.constexpr):
    """Some columns of some places, zeros where there are none: what nobody filled is never read."""
    return tl.load(rows + at[:, None] * ROW + d[None, :], mask=seen[:, None] & (d < W)[None, :], other=0.0)


@triton.jit
def _range(lengths, starts, b, split, S, N: tl.constexpr, WINDOW: tl.constexpr):
    """The places that a text shows, and the tiles of a split: counted from place 0, so that they are aligned."""
    end = tl.load(lengths + b)
    begin = tl.load(starts + b)
    if WINDOW > 0:
        begin = tl.maximum(begin, end - WINDOW)
    first = begin // N
    each = tl.cdiv(tl.maximum(tl.cdiv(end, N) - first, 0), S)
    low = first + split * each
    return begin, end, low, tl.minimum(low + each, tl.cdiv(end, N))


@triton.jit
def _weights(s, most, seen, scaling, cap, CAPPED: tl.constexpr):
    """Weights of new places relative to the highest score so far, that score, and what older sums fade by."""
    s = s * scaling
    if CAPPED:
        s = _capped(s, cap)
    s = tl.where(seen[None, :], s * 1.4426950408889634, float("-inf"))
    higher = tl.maximum(most, tl.max(s, 1))
    safe = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
    return tl.exp2(s - safe[:, None]), higher, tl.exp2(most - safe)


@triton.jit(do_not_specialize=COUNTS)
def _attend_rows(
    q, k, v, part, top, lengths, starts, scaling, cap, S, q_row, q_head, row, group,
    G: tl.constexpr, SHARE: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROW: tl.constexpr,
    K1: tl.constexpr, K2: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    b = (tl.program_id(0) // (G * PARTS)).to(tl.int64)
    g = (tl.program_id(0) // PARTS % G).to(tl.int64)
    head = tl.program_id(0) % PARTS * M + tl.arange(0, M)
    real = head < SHARE
    begin, end, low, high = _range(lengths, starts, b, split, S, N, WINDOW)
    k += b * row + g * group
    v += b * row + g * group
    i1, j1 = tl.arange(0, K1), tl.arange(0, V1)
    i2, j2 = K1 + tl.arange(0, K2 if K2 > 0 else 16), V1 + tl.arange(0, V2 if V2 > 0 else 16)
    queries = (q + b * q_row + (g * SHARE + head) * q_head)[:, None]
    q1 = tl.load(queries + i1[None, :], mask=real[:, None] & (i1 < K)[None, :], other=0.0)
    if K2 > 0:
        q2 = tl.load(queries + i2[None, :], mask=real[:, None] & (i2 < K)[None, :], other=0.0)
    z1 = tl.zeros([M, V1], tl.float32)
    z2 = tl.zeros([M, V2 if V2 > 0 else 16], tl.float32)
    most = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    for t in range(low, high):
        at = t * N + tl.arange(0, N)
        seen = (at >= begin) & (at < end)
        x1, y1 = _block(k, at, i1, seen, ROW, K), _block(v, at, j1, seen, ROW, V)
        s = tl.dot(q1, tl.trans(x1), input_precision=PRECISION)
        if K2 > 0:
            s = tl.dot(q2, tl.trans(_block(k, at, i2, seen, ROW, K)), s, input_precision=PRECISION)
        p, most, fade = _weights(s, most, seen, scaling, cap, CAPPED)
        total = total * fade + tl.sum(p, 1)
        z1 = tl.dot(p.to(y1.dtype), y1, z1 * fade[:, None], input_precision=PRECISION)
        if V2 > 0:
            y2 = _block(v, at, j2, seen, ROW, V)
            z2 = tl.dot(p.to(y2.dtype), y2, z2 * fade[:, None], input_precision=PRECISION)
    some = tl.where(total > 0, total, 1.0)
    target = ((b * G + g) * SHARE + head) * S + split
    tl.store(top + target, tl.where(total > 0, most + tl.log2(some), float("-inf")), mask=real)
    sums = part + (target * V)[:, None]
    tl.store(sums + j1[None, :], z1 / some[:, None], mask=real[:, None] & (j1 < V)[None, :])
    if V2 > 0:
        tl.store(sums + j2[None, :], z2 / some[:, None], mask=real[:, None] & (j2 < V)[None, :])


def row_decode(
    q_BHK: torch.Tensor,
    k_BGLK: torch.Tensor,
    v_BGLV: torch.Tensor,
    lengths_B: torch.Tensor,
    starts_B: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
    window: int | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """The heads' outputs (B, H, V). Places `starts <= l < lengths` of a text are seen, its last `window` where given.

    Keys and values may be views of one buffer, side by side or one behind the other; both have the same strides.
    """
    K, V, share, tile = q_BHK.shape[2], v_BGLV.shape[3], q_BHK.shape[1] // k_BGLK.shape[1], tile or ROW_TILE
    M = max(16, min(HEADS, triton.next_power_of_2(share)))
    (K1, K2), (V1, V2) = (blocks(width, tile.cut, 2 * M) for width in (K, V))
    seen = (lengths_B, starts_B, scaling, softcap, window)
    how = dict(PARTS=-(-share // M), K1=K1, K2=K2, V1=V1, V2=V2, M=M)
    return run_splits(_attend_rows, q_BHK, (k_BGLK, v_BGLV), v_BGLV, *seen, tile, how, 128)


ROW_TILE = Tile(places=32, warps=4, stages=2, programs=2, even=True)
