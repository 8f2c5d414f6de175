"""One new token per text against a long cache of rows in bits that many query heads share, on CUDA.

Codes are unpacked in registers, two at once, right before the tensor cores take them. `_scores` reads keys and writes
weights relative to the highest score of a block of places; `_sums` reads them with values, each program some
coefficients of some places; `code_beside` adds the tokens that are not coded. Lengths lie on the device, so that one
captured graph serves all of them. Imported only where Triton is.
Shape suffixes: B texts, H query heads, G rows per token, L places, K and V coefficients, S splits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# ruff: noqa: SIM108  # branches of kernels are taken when they are built
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from headwise.fast.flash_decode import _capped

COUNTS = ["S", "L"]  # numbers of splits and places: kernels are not built anew for each


class CodeTile(NamedTuple):
    """How the kernels are built."""

    places: int = 128  # scored at once
    warps: int = 8
    stages: int = 2
    programs: int = 2  # per multiprocessor, about
    unrolled: bool = True  # chunks of a row: reads of the next places begin before this row is done
    held: bool = True  # queries stay in shared memory
    sum_warps: int = 4
    sum_stages: int = 3
    sum_programs: int = 4
    fields: int = 8  # segments that a program sums, at most


@triton.constexpr_function
def _unpacking(plane, field, scaled):
    """Assembly: two fields of a register as centred numbers times 2**(place - 10), and times scales if given."""
    low = 10 // plane
    shift, place = field // low * low * plane, field % low * plane
    most = (1 << plane) - 1
    minus = 0x8000 | (plane + place + 3) << 10 | ((most << (11 - plane)) & 1023)  # -most / 2 * 2**(place - 10)
    source = f"shr.u32 t, $1, {shift}; and.b32 t, t," if shift else "and.b32 t, $1,"
    code = "{.reg .b32 t, u, m; " + f"{source} {(most << place) * 0x10001}; "
    code += f"mov.b32 u, {0x74007400}; mov.b32 m, {minus * 0x10001}; "
    if scaled:
        return code + "fma.rn.f16x2 t, t, u, m; mul.rn.f16x2 $0, t, $2;}"
    return code + "fma.rn.f16x2 $0, t, u, m;}"


@triton.constexpr_function
def _placed(plane, field):
    """Bits that a field moves down, its mask then, and what is taken off to centre it."""
    low = 10 // plane
    shift, place = field // low * low * plane, field % low * plane
    return shift, ((1 << plane) - 1) << place, ((1 << plane) - 1) / 2 * 2.0 ** (place - 10)


@triton.jit
def _centred(words, PLANE: tl.constexpr, FIELD: tl.constexpr, PACKED: tl.constexpr):
    """A field of every word, less its middle: what the code stands for in steps, times a power of two."""
    if PACKED:
        return tl.inline_asm_elementwise(
            _unpacking(PLANE, FIELD, False), "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        how: tl.constexpr = _placed(PLANE, FIELD)
        x = ((words >> how[0]) & how[1]).to(tl.int16).to(tl.float16, bitcast=True)
        return x * 16384.0 - how[2]


@triton.jit
def _scaled(words, scale, PLANE: tl.constexpr, FIELD: tl.constexpr, PACKED: tl.constexpr):
    """The same, times a scale for every word."""
    if PACKED:
        return tl.inline_asm_elementwise(
            _unpacking(PLANE, FIELD, True), "=r,r,r", [words, scale], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return _centred(words, PLANE, FIELD, PACKED) * scale


@triton.jit
def _score_chunk(
    s, rows, q, held, scales, groups, seen, first, cell,
    PLANE: tl.constexpr, SEG: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, AT: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Scores (N, M) and what the segments of a chunk add to them; `held` has queries from segment `AT` on, or none."""
    words = tl.load(rows, mask=seen[:, None], other=0)
    for f in tl.static_range(16 // PLANE):
        if AT >= 0:
            some = held[AT + f]
        else:
            some = tl.load(q + (first + f) * (SEG * M) + cell)
        byte = tl.load(scales + tl.load(groups + first + f) * TILE, mask=seen, other=0).to(tl.float32)
        factor = tl.exp2(byte * 0.125 - 16.0)
        s += tl.dot(_centred(words, PLANE, f, PACKED), some) * factor[:, None]
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
    q, words, scales, groups, weights, tops, sums, units, lengths, starts, S, L, cap, GP: tl.constexpr, PARTS: tl.constexpr,
    GROUPS: tl.constexpr, SEGMENTS: tl.constexpr, C8: tl.constexpr, C4: tl.constexpr, C2: tl.constexpr, C1: tl.constexpr,
    SEG: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr, NEAR: tl.constexpr,
    CAPPED: tl.constexpr, UNROLLED: tl.constexpr, HELD: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    begin, last, low, high = _range(lengths, starts, pair // GP, tl.program_id(1), S, N, WHOLE, NEAR)
    C: tl.constexpr = C8 + C4 + C2 + C1
    B4: tl.constexpr = 2 * C8
    B2: tl.constexpr = B4 + 4 * C4
    B1: tl.constexpr = B2 + 8 * C2
    j = tl.arange(0, SEG)
    h = tl.arange(0, M)
    cell = j[:, None] * M + h[None, :]
    words += pair // PARTS * L * (C * SEG)
    scales += pair // PARTS * L * GROUPS
    q += pair * (SEGMENTS * SEG * M)
    unit = tl.load(units + pair * M + h)
    held = ()
    if HELD:
        for f in tl.static_range(SEGMENTS):
            held = held + (tl.load(q + f * (SEG * M) + cell),)
    for t in range(low, high):
        at = t * N + tl.arange(0, N)
        seen = (at >= begin) & (at < last)
        s = tl.zeros([N, M], tl.float32)
        rows = words + at[:, None] * (C * SEG) + j[None, :]
        own = scales + at // TILE * (TILE * GROUPS) + at % TILE
        if UNROLLED:
            for c in tl.static_range(C8):
                s = _score_chunk(s, rows + c * SEG, q, held, own, groups, seen, 2 * c, cell, 8, SEG, M, TILE, 2 * c if HELD else -1, PACKED)
            for c in tl.static_range(C4):
                s = _score_chunk(s, rows + (C8 + c) * SEG, q, held, own, groups, seen, B4 + 4 * c, cell, 4, SEG, M, TILE, B4 + 4 * c if HELD else -1, PACKED)
            for c in tl.static_range(C2):
                s = _score_chunk(s, rows + (C8 + C4 + c) * SEG, q, held, own, groups, seen, B2 + 8 * c, cell, 2, SEG, M, TILE, B2 + 8 * c if HELD else -1, PACKED)
            for c in tl.static_range(C1):
                s = _score_chunk(s, rows + (C8 + C4 + C2 + c) * SEG, q, held, own, groups, seen, B1 + 16 * c, cell, 1, SEG, M, TILE, B1 + 16 * c if HELD else -1, PACKED)
        else:
            for c in range(C8):
                s = _score_chunk(s, rows + c * SEG, q, held, own, groups, seen, 2 * c, cell, 8, SEG, M, TILE, -1, PACKED)
            for c in range(C4):
                s = _score_chunk(s, rows + (C8 + c) * SEG, q, held, own, groups, seen, B4 + 4 * c, cell, 4, SEG, M, TILE, -1, PACKED)
            for c in range(C2):
                s = _score_chunk(s, rows + (C8 + C4 + c) * SEG, q, held, own, groups, seen, B2 + 8 * c, cell, 2, SEG, M, TILE, -1, PACKED)
            for c in range(C1):
                s = _score_chunk(s, rows + (C8 + C4 + C2 + c) * SEG, q, held, own, groups, seen, B1 + 16 * c, cell, 1, SEG, M, TILE, -1, PACKED)
        s = s * unit[None, :]
        if CAPPED:
            s = _capped(s, cap)
        s = tl.where(seen[:, None], s * 1.4426950408889634, float("-inf"))
        top = tl.max(s, 0)
        p = tl.exp2(s - tl.where(top == float("-inf"), 0.0, top)[None, :])
        block = (pair * (L // N) + t) * M + h
        tl.store(tops + block, top)
        tl.store(sums + block, tl.sum(p, 0))
        tl.store(weights + (pair * L + at)[:, None] * M + h[None, :], p.to(tl.float16))


@triton.jit
def _sum_fields(
    weights, words, scales, groups, highest, tops, out, most, low, high, segment, h,
    PLANE: tl.constexpr, FIRST: tl.constexpr, FIELDS: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr,
    SLOTS: tl.constexpr, SEG: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Sums over places of some fields of a chunk."""
    j, n = tl.arange(0, SEG), tl.arange(0, TILE)
    z = ()
    for f in tl.static_range(FIELDS):
        z = z + (tl.zeros([SEG, M], tl.float32),)
    for t in range(low * (N // TILE), high * (N // TILE)):
        w = tl.load(weights + (t * TILE + n)[:, None] * M + h[None, :])
        top = tl.load(tops + t // (N // TILE) * M + h)
        w = (w.to(tl.float32) * tl.exp2(top - most)[None, :]).to(tl.float16)
        code = tl.load(words + t * (TILE * CHUNKS * SEG) + j[:, None] * TILE + n[None, :])
        own = scales + t * (TILE * GROUPS) + n
        new = ()
        for f in tl.static_range(FIELDS):
            new = new + (_add_field(z[f], w, code, own, groups + segment + f, highest, PLANE, FIRST + f, SEG, TILE, PACKED),)
        z = new
    for f in tl.static_range(FIELDS):
        tl.store(out + h[None, :] * SLOTS + (segment + f) * SEG + j[:, None], z[f])


@triton.jit
def _add_field(
    z, w, code, scales, group, highest,
    PLANE: tl.constexpr, FIELD: tl.constexpr, SEG: tl.constexpr, TILE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    g = tl.load(group)
    byte = tl.load(scales + g * TILE).to(tl.float32)
    scale = tl.exp2(tl.minimum(byte - tl.load(highest + g), 0.0) * 0.125 + 8.0).to(tl.float16)
    return tl.dot(_scaled(code, scale[None, :].broadcast_to(SEG, TILE), PLANE, FIELD, PACKED), w, z)


@triton.jit(do_not_specialize=COUNTS)
def _sums(
    weights, words, scales, groups, highest, tops, sums, part, split_tops, split_sums, lengths, starts, S, L,
    GP: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr, SLOTS: tl.constexpr,
    C8: tl.constexpr, C4: tl.constexpr, C2: tl.constexpr, C1: tl.constexpr, FIELDS: tl.constexpr,
    SEG: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr, NEAR: tl.constexpr,
    BLOCK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0)
    split = tl.program_id(1)
    pair = tl.program_id(2).to(tl.int64)
    begin, last, low, high = _range(lengths, starts, pair // GP, split, S, N, WHOLE, NEAR)
    C: tl.constexpr = C8 + C4 + C2 + C1
    h = tl.arange(0, M)
    i = tl.arange(0, BLOCK)
    tops += pair * (L // N) * M
    sums += pair * (L // N) * M
    most = tl.full([M], float("-inf"), tl.float32)
    for t in range(low, high, BLOCK):
        x = tl.load(tops + (t + i)[:, None] * M + h[None, :], mask=(t + i < high)[:, None], other=float("-inf"))
        most = tl.maximum(most, tl.max(x, 0))
    safe = tl.where(most == float("-inf"), 0.0, most)
    target = pair * S + split
    if unit == 0:
        total = tl.zeros([M], tl.float32)
        for t in range(low, high, BLOCK):
            there = (t + i < high)[:, None]
            x = tl.load(tops + (t + i)[:, None] * M + h[None, :], mask=there, other=float("-inf"))
            y = tl.load(sums + (t + i)[:, None] * M + h[None, :], mask=there, other=0.0)
            total += tl.sum(y * tl.exp2(x - safe[None, :]), 0)
        tl.store(split_tops + target * M + h, most)
        tl.store(split_sums + target * M + h, total)
    weights += pair * L * M
    words += pair // PARTS * L * (C * SEG)
    scales += pair // PARTS * L * GROUPS
    highest += pair // PARTS * GROUPS
    part += target * (SLOTS * M)
    B4: tl.constexpr = 2 * C8
    B2: tl.constexpr = B4 + 4 * C4
    B1: tl.constexpr = B2 + 8 * C2
    F2: tl.constexpr = 8 if FIELDS >= 8 else 4
    U4: tl.constexpr = C8 + C4
    U2: tl.constexpr = U4 + C2 * (8 // F2)
    if C8 > 0:
        if unit < C8:
            _sum_fields(weights, words + unit * SEG * TILE, scales, groups, highest, tops, part, safe, low, high, 2 * unit, h, 8, 0, 2, C, GROUPS, SLOTS, SEG, M, N, TILE, PACKED)
    if C4 > 0:
        if (unit >= C8) & (unit < U4):
            _sum_fields(weights, words + unit * SEG * TILE, scales, groups, highest, tops, part, safe, low, high, B4 + 4 * (unit - C8), h, 4, 0, 4, C, GROUPS, SLOTS, SEG, M, N, TILE, PACKED)
    if C2 > 0:
        chunk = (unit - U4) // (8 // F2)
        for half in tl.static_range(8 // F2):
            if (unit >= U4) & (unit < U2) & ((unit - U4) % (8 // F2) == half):
                _sum_fields(weights, words + (U4 + chunk) * SEG * TILE, scales, groups, highest, tops, part, safe, low, high, B2 + 8 * chunk + half * F2, h, 2, half * F2, F2, C, GROUPS, SLOTS, SEG, M, N, TILE, PACKED)
    if C1 > 0:
        chunk = (unit - U2) // 4
        for half in tl.static_range(4):
            if (unit >= U2) & ((unit - U2) % 4 == half):
                _sum_fields(weights, words + (C8 + C4 + C2 + chunk) * SEG * TILE, scales, groups, highest, tops, part, safe, low, high, B1 + 16 * chunk + half * 4, h, 1, half * 4, 4, C, GROUPS, SLOTS, SEG, M, N, TILE, PACKED)
