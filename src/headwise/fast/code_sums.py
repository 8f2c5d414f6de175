"""The second large kernel of decode attention over rows in bits, on CUDA: sums over places of values by their weights.

Each program sums a few coefficients of some places. `code_decode` has the first kernel and tells of both. Imported only
where Triton is.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return, assignment"
from __future__ import annotations

import triton
import triton.language as tl

from headwise.fast.code_decode import _factor, _range, _scaled


@triton.jit
def _sum_fields(
    weights, words, scales, tops, out, most, low, high, h, sizes,
    PLANE: tl.constexpr, FIRST: tl.constexpr, FIELDS: tl.constexpr,
    SEG: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Sums over places of some fields of a chunk; `sizes`: of words and scales of a tile, and of slots."""
    j, n = tl.arange(0, SEG), tl.arange(0, TILE)
    z = ()
    for _f in tl.static_range(FIELDS):
        z = z + (tl.zeros([SEG, M], tl.float32),)
    for t in range(low * (N // TILE), high * (N // TILE)):
        w = tl.load(weights + (t * TILE + n)[:, None] * M + h[None, :])
        top = tl.load(tops + t // (N // TILE) * M + h)
        w = (w.to(tl.float32) * tl.exp2(top - most)[None, :]).to(tl.float16)
        code = tl.load(words + t * sizes[0] + j[:, None] * TILE + n[None, :])
        new = ()
        for pair in tl.static_range(FIELDS // 2):
            both = tl.load(scales + t * sizes[1] + pair * TILE + n)
            for odd in tl.static_range(2):
                scale = _factor(both, odd)[None, :].broadcast_to(SEG, TILE)
                x = _scaled(code, scale, PLANE, FIRST + 2 * pair + odd, PACKED)
                new = new + (tl.dot(x, w, z[2 * pair + odd]),)
        z = new
    for f in tl.static_range(FIELDS):
        tl.store(out + h[None, :] * sizes[2] + f * SEG + j[:, None], z[f])


@triton.jit
def _total(weights, tops, most, low, high, h, M: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr):
    """Sums of weights."""
    n = tl.arange(0, TILE)
    total = tl.zeros([TILE, M], tl.float32)
    for t in range(low * (N // TILE), high * (N // TILE)):
        w = tl.load(weights + (t * TILE + n)[:, None] * M + h[None, :])
        total += w.to(tl.float32) * tl.exp2(tl.load(tops + t // (N // TILE) * M + h) - most)[None, :]
    return tl.sum(total, 0)


@triton.jit
def _most(tops, low, high, h, M: tl.constexpr, BLOCK: tl.constexpr):
    """The highest score of some blocks of places."""
    i = tl.arange(0, BLOCK)
    most = tl.full([M], float("-inf"), tl.float32)
    for t in range(low, high, BLOCK):
        x = tl.load(tops + (t + i)[:, None] * M + h[None, :], mask=(t + i < high)[:, None], other=float("-inf"))
        most = tl.maximum(most, tl.max(x, 0))
    return most


@triton.jit(do_not_specialize=["S", "L", "C8", "C4", "C2", "C1"])
def _sums(
    weights, words, scales, tops, part, split_tops, split_sums, lengths, starts, S, L, C8, C4, C2, C1,
    GP: tl.constexpr, PARTS: tl.constexpr, SEG: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr,
    WHOLE: tl.constexpr, NEAR: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0)  # a chunk, or part of one, so that there are at most four fields; the last sums weights
    pair = tl.program_id(2).to(tl.int64)
    begin, last, low, high = _range(lengths, starts, pair // GP, tl.program_id(1), S, N, WHOLE, NEAR)
    h = tl.arange(0, M)
    tops += pair * (L // N) * M
    most = _most(tops, low, high, h, M, BLOCK)
    safe = tl.where(most == float("-inf"), 0.0, most)
    target = pair * S + tl.program_id(1)
    chunks, segments = C8 + C4 + C2 + C1, 2 * C8 + 4 * C4 + 8 * C2 + 16 * C1
    sizes = (TILE * SEG * chunks, TILE // 2 * segments, segments * SEG)
    U4, U2 = C8 + C4, C8 + C4 + 2 * C2
    B4, B2 = 2 * C8, 2 * C8 + 4 * C4
    chunk = tl.where(unit < U4, unit, tl.where(unit < U2, U4 + (unit - U4) // 2, U4 + C2 + (unit - U2) // 4))
    first = tl.where(unit < C8, 2 * unit, tl.where(unit < U4, B4 + 4 * (unit - C8), B2 + 4 * (unit - U4)))
    weights += pair * L * M
    words += pair // PARTS * L * (chunks * SEG) + chunk * (SEG * TILE)
    scales += pair // PARTS * L * (segments // 2) + first // 2 * TILE
    part += target * (segments * SEG * M) + first * SEG
    if unit == tl.num_programs(0) - 1:
        tl.store(split_tops + target * M + h, most)
        tl.store(split_sums + target * M + h, _total(weights, tops, safe, low, high, h, M, N, TILE))
    elif unit < C8:
        _sum_fields(weights, words, scales, tops, part, safe, low, high, h, sizes, 8, 0, 2, SEG, M, N, TILE, PACKED)
    elif unit < U4:
        _sum_fields(weights, words, scales, tops, part, safe, low, high, h, sizes, 4, 0, 4, SEG, M, N, TILE, PACKED)
    elif unit < U2:
        for half in tl.static_range(2):
            if (unit - U4) % 2 == half:
                _sum_fields(
                    weights, words, scales, tops, part, safe, low, high, h, sizes,
                    2, 4 * half, 4, SEG, M, N, TILE, PACKED,
                )  # fmt: skip
    else:
        for quarter in tl.static_range(4):
            if (unit - U2) % 4 == quarter:
                _sum_fields(
                    weights, words, scales, tops, part, safe, low, high, h, sizes,
                    1, 4 * quarter, 4, SEG, M, N, TILE, PACKED,
                )  # fmt: skip
