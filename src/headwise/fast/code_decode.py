"""One new token per text against a long cache of rows in bits that many query heads share, on CUDA.

Codes are unpacked in registers, two at once, right before the tensor cores take them. `_scores` reads keys and writes
weights relative to the highest score of a block of places; `code_sums` reads them with values; `code_beside` adds the
tokens that are not coded. Lengths lie on the device, so that one captured graph serves all of them. Imported only where
Triton is.
Shape suffixes: B texts, H query heads, G rows per token, L places, K and V coefficients, S splits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return, assignment"
# ruff: noqa: SIM108  # branches of kernels are taken when they are built
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from headwise.fast.flash_decode import _capped

COUNTS = ["S", "L"]  # numbers of splits and places: kernels are not built anew for each


class CodeTile(NamedTuple):
    """How the kernels are built."""

    places: int = 64  # scored at once
    warps: int = 4
    stages: int = 2
    programs: int = 4  # per multiprocessor, about
    unrolled: bool = True  # chunks of a row: reads of the next places begin before this row is done
    held: bool = True  # queries stay in shared memory
    sum_stages: int = 3
    sum_programs: int = 8


TILES = (  # which are tried; the last takes least shared memory
    CodeTile(),
    CodeTile(places=128, warps=8),
    CodeTile(places=128),
    CodeTile(stages=3),
    CodeTile(places=128, stages=3, unrolled=False, held=False),
    CodeTile(unrolled=False, held=False),
)
PROGRAMS = (2, 4, 8)


@triton.constexpr_function
def _unpacking(plane, field):
    """Assembly: two fields of a register as centred numbers times 2**(place - 10), times their scales."""
    low = 10 // plane
    shift, place = field // low * low * plane, field % low * plane
    most = (1 << plane) - 1
    minus = 0x8000 | (plane + place + 3) << 10 | ((most << (11 - plane)) & 1023)  # -most / 2 * 2**(place - 10)
    source = f"shr.u32 t, $1, {shift}; and.b32 t, t," if shift else "and.b32 t, $1,"
    code = "{.reg .b32 t, u, m; " + f"{source} {(most << place) * 0x10001}; "
    code += f"mov.b32 u, {0x74007400}; mov.b32 m, {minus * 0x10001}; "
    return code + "fma.rn.f16x2 t, t, u, m; mul.rn.f16x2 $0, t, $2;}"


@triton.constexpr_function
def _placed(plane, field):
    """Bits that a field moves down, its mask then, and what is taken off to centre it."""
    low = 10 // plane
    shift, place = field // low * low * plane, field % low * plane
    return shift, ((1 << plane) - 1) << place, ((1 << plane) - 1) / 2 * 2.0 ** (place - 10)


@triton.jit
def _scaled(words, scale, PLANE: tl.constexpr, FIELD: tl.constexpr, PACKED: tl.constexpr):
    """A field of every word, less its middle, times a scale: what the code stands for, times a power of two."""
    if PACKED:
        return tl.inline_asm_elementwise(
            _unpacking(PLANE, FIELD), "=r,r,r", [words, scale], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        how: tl.constexpr = _placed(PLANE, FIELD)
        x = ((words >> how[0]) & how[1]).to(tl.int16).to(tl.float16, bitcast=True)
        return (x * 16384.0 - how[2]) * scale


@triton.jit
def _factor(both, ODD: tl.constexpr):
    """One of two scales that lie in a number of 32 bits."""
    return (both >> (16 * ODD)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _score_chunk(
    s, rows, q, held, scales, cell,
    PLANE: tl.constexpr, AT: tl.constexpr, SEG: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Scores (N, M) and what the segments of a chunk add to them; `held` has their queries from `AT` on, or none."""
    words = tl.load(rows)
    for pair in tl.static_range(8 // PLANE):
        both = tl.load(scales + pair * TILE)
        for odd in tl.static_range(2):
            if AT >= 0:
                some = held[AT + 2 * pair + odd]
            else:
                some = tl.load(q + (2 * pair + odd) * (SEG * M) + cell)
            factor = _factor(both, odd)[:, None].broadcast_to(N, SEG)
            s = tl.dot(_scaled(words, factor, PLANE, 2 * pair + odd, PACKED), some, s)
    return s


@triton.jit
def _score_plane(
    s, rows, q, held, scales, cell,
    PLANE: tl.constexpr, COUNT: tl.constexpr, CHUNK: tl.constexpr, FIRST: tl.constexpr, UNROLLED: tl.constexpr,
    HELD: tl.constexpr, SEG: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Scores and what all chunks of a plane add; its first chunk has number `CHUNK`, its first segment `FIRST`."""
    F: tl.constexpr = 16 // PLANE
    rows += CHUNK * SEG
    q += FIRST * (SEG * M)
    scales += FIRST // 2 * TILE
    if UNROLLED:
        for c in tl.static_range(COUNT):
            s = _score_chunk(
                s, rows + c * SEG, q + c * (F * SEG * M), held, scales + c * (F // 2 * TILE), cell,
                PLANE, FIRST + c * F if HELD else -1, SEG, M, N, TILE, PACKED,
            )  # fmt: skip
    else:
        for c in range(COUNT):
            s = _score_chunk(
                s, rows + c * SEG, q + c * (F * SEG * M), held, scales + c * (F // 2 * TILE), cell,
                PLANE, -1, SEG, M, N, TILE, PACKED,
            )  # fmt: skip
    return s


@triton.jit
def _range(lengths, starts, b, split, S, N: tl.constexpr, WHOLE: tl.constexpr, NEAR: tl.constexpr):
    """The coded places that a text shows, and the blocks of a split: counted from place 0, so that they are aligned."""
    last = tl.load(lengths + b) - NEAR
    begin = tl.load(starts + b) + WHOLE
    first = begin // N
    each = tl.cdiv(tl.maximum(tl.cdiv(last, N) - first, 0), S)
    low = first + split * each
    return begin, last, low, tl.minimum(low + each, tl.cdiv(last, N))


@triton.jit(do_not_specialize=COUNTS)
def _scores(
    q, words, scales, weights, tops, units, lengths, starts, S, L, cap, GP: tl.constexpr, PARTS: tl.constexpr,
    SEGMENTS: tl.constexpr, C8: tl.constexpr, C4: tl.constexpr, C2: tl.constexpr, C1: tl.constexpr,
    SEG: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr, NEAR: tl.constexpr,
    CAPPED: tl.constexpr, UNROLLED: tl.constexpr, HELD: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    begin, last, low, high = _range(lengths, starts, pair // GP, tl.program_id(1), S, N, WHOLE, NEAR)
    C: tl.constexpr = C8 + C4 + C2 + C1
    B2: tl.constexpr = 2 * C8 + 4 * C4
    j = tl.arange(0, SEG)
    h = tl.arange(0, M)
    cell = j[:, None] * M + h[None, :]
    words += pair // PARTS * L * (C * SEG)
    scales += pair // PARTS * L * (SEGMENTS // 2)
    q += pair * (SEGMENTS * SEG * M)
    unit = tl.load(units + pair * M + h)
    held = ()
    if HELD:
        for f in tl.static_range(SEGMENTS):
            held = held + (tl.load(q + f * (SEG * M) + cell),)
    for t in range(low, high):
        at = t * N + tl.arange(0, N)
        s = tl.zeros([N, M], tl.float32)
        rows = words + at[:, None] * (C * SEG) + j[None, :]
        own = scales + at // TILE * (TILE * (SEGMENTS // 2)) + at % TILE
        s = _score_plane(s, rows, q, held, own, cell, 8, C8, 0, 0, UNROLLED, HELD, SEG, M, N, TILE, PACKED)
        s = _score_plane(s, rows, q, held, own, cell, 4, C4, C8, 2 * C8, UNROLLED, HELD, SEG, M, N, TILE, PACKED)
        s = _score_plane(s, rows, q, held, own, cell, 2, C2, C8 + C4, B2, UNROLLED, HELD, SEG, M, N, TILE, PACKED)
        s = _score_plane(
            s, rows, q, held, own, cell, 1, C1, C - C1, B2 + 8 * C2, UNROLLED, HELD, SEG, M, N, TILE, PACKED
        )
        s = s * unit[None, :]
        if CAPPED:
            s = _capped(s, cap)
        seen = (at >= begin) & (at < last)
        s = tl.where(seen[:, None], s * 1.4426950408889634, float("-inf"))
        top = tl.max(s, 0)
        p = tl.exp2(s - tl.where(top == float("-inf"), 0.0, top)[None, :])
        tl.store(tops + (pair * (L // N) + t) * M + h, top)
        tl.store(weights + (pair * L + at)[:, None] * M + h[None, :], p.to(tl.float16))
