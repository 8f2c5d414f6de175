"""One new token per text against a long cache of rows in bits that many query heads share, on CUDA.

Codes are unpacked in registers, two at once, right before the tensor cores take them. `_scores` reads keys and writes
weights relative to the highest score so far; `code_sums` reads them with values; `code_beside` adds the tokens that
are not coded. Faster versions of `_scores` and `_sums` in `code_ahead` are used on GPUs with compute capability 9, for
segments of 64 coefficients, if Triton has Gluon and they are measured to be quicker; otherwise `_scores` and `_sums`
are used. Lengths lie on the device, so that one captured graph serves all of them. Imported only where Triton is.
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

    places: int = 128  # scored at once
    warps: int = 8
    stages: int = 2
    programs: int = 1  # per multiprocessor: as many as it runs at once
    held: bool = True  # queries stay in shared memory
    fields: int = 4  # of a word, summed by one program, at most
    sum_stages: int = 3
    sum_registers: int | None = 168
    sum_programs: int = 3
    ahead: int = 0  # chunks of keys in shared memory if `code_ahead` scores; 0: plain Triton does
    sum_ahead: int = 0  # steps of values in shared memory if `code_ahead` sums; 0: plain Triton does


PLAIN = CodeTile(places=64, warps=4, programs=2)  # also where nothing can be measured
AHEAD = PLAIN._replace(ahead=4, sum_ahead=3)  # the same as `PLAIN` where `code_ahead` does not run
TILES = (PLAIN, AHEAD, AHEAD._replace(programs=3), PLAIN._replace(stages=3), CodeTile())  # which are tried
SMALL = (CodeTile(), CodeTile(places=64, warps=4, stages=1, programs=3, held=False))  # for rows too wide for the others


@triton.constexpr_function
def planned(plan, chunk):
    """Of the fields of a chunk: their bits and bits of a word below them; and the number of the first segment."""
    chunks = plan.split()
    planes = [int(x) for x in chunks[chunk]]
    first = sum(len(x) + len(x) % 2 for x in chunks[:chunk])
    return planes, [sum(planes[:f]) for f in range(len(planes))], first


@triton.constexpr_function
def _chunks(plan):
    return len(plan.split())


@triton.constexpr_function
def _field(plan, chunk, field):
    """Bits of a field, and bits of a word below it."""
    planes, places, _ = planned(plan, chunk)
    return planes[field], places[field]


@triton.constexpr_function
def _fields(plan, chunk):
    return len(planned(plan, chunk)[0])


@triton.constexpr_function
def _segment(plan, chunk, field):
    return planned(plan, chunk)[2] + field


@triton.constexpr_function
def _unpacking(kind):
    """Assembly: two fields of a register as centred numbers times 2**(place - 10), times their scales."""
    plane, shift, place = kind[0], kind[1] // 8 * 8, kind[1] % 8
    most = (1 << plane) - 1
    minus = 0x8000 | (plane + place + 3) << 10 | ((most << (11 - plane)) & 1023)  # -most / 2 * 2**(place - 10)
    source = f"shr.u32 t, $1, {shift}; and.b32 t, t," if shift else "and.b32 t, $1,"
    code = "{.reg .b32 t, u, m; " + f"{source} {(most << place) * 0x10001}; "
    code += f"mov.b32 u, {0x74007400}; mov.b32 m, {minus * 0x10001}; "
    return code + "fma.rn.f16x2 t, t, u, m; mul.rn.f16x2 $0, t, $2;}"


@triton.constexpr_function
def _placed(kind):
    """Bits that a field moves down, its mask then, and what is taken off to centre it."""
    most = (1 << kind[0]) - 1
    return kind[1] // 8 * 8, most << kind[1] % 8, most / 2 * 2.0 ** (kind[1] % 8 - 10)


@triton.jit
def _scaled(words, scale, KIND: tl.constexpr, PACKED: tl.constexpr):
    """A field of every word, less its middle, times a scale: what the code stands for, times a power of two."""
    if PACKED:
        return tl.inline_asm_elementwise(
            _unpacking(KIND), "=r,r,r", [words, scale], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        how: tl.constexpr = _placed(KIND)
        x = ((words >> how[0]) & how[1]).to(tl.int16).to(tl.float16, bitcast=True)
        return (x * 16384.0 - how[2]) * scale


@triton.jit
def _factor(both, ODD: tl.constexpr):
    """One of two scales that lie in a number of 32 bits."""
    return (both >> (16 * ODD)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _range(lengths, starts, b, split, S, N: tl.constexpr, WHOLE: tl.constexpr, NEAR: tl.constexpr):
    """The coded places that a text shows, and the blocks of a split: counted from place 0, so that they are aligned."""
    last = tl.load(lengths + b) - NEAR
    begin = tl.load(starts + b) + WHOLE
    first = begin // N
    each = tl.cdiv(tl.maximum(tl.cdiv(last, N) - first, 0), S)
    low = first + split * each
    return begin, last, low, tl.minimum(low + each, tl.cdiv(last, N))


@triton.jit
def _products(
    rows, q, held, scales, cell, PLAN: tl.constexpr, HELD: tl.constexpr, SEG: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, TILE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Products (N, M) of some rows with all queries, which are `held` or not."""
    s = tl.zeros([N, M], tl.float32)
    for c in tl.static_range(_chunks(PLAN)):
        words = tl.load(rows + c * SEG)
        for f in tl.static_range(_fields(PLAN, c)):
            if f % 2 == 0:
                both = tl.load(scales + _segment(PLAN, c, f) // 2 * TILE)
            factor = _factor(both, f % 2)[:, None].broadcast_to(N, SEG)
            if HELD:
                some = held[_segment(PLAN, c, f)]
            else:
                some = tl.load(q + _segment(PLAN, c, f) * (SEG * M) + cell)
            s = tl.dot(_scaled(words, factor, _field(PLAN, c, f), PACKED), some, s)
    return s


@triton.jit(do_not_specialize=COUNTS)
def _scores(
    q, words, scales, weights, tops, split_tops, split_sums, units, lengths, starts, S, L, cap,
    GP: tl.constexpr, PARTS: tl.constexpr, PLAN: tl.constexpr, SEGMENTS: tl.constexpr, SEG: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr, NEAR: tl.constexpr,
    CAPPED: tl.constexpr, HELD: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    begin, last, low, high = _range(lengths, starts, pair // GP, tl.program_id(1), S, N, WHOLE, NEAR)
    ROW: tl.constexpr = _chunks(PLAN) * SEG
    j = tl.arange(0, SEG)
    h = tl.arange(0, M)
    cell = j[:, None] * M + h[None, :]
    words += pair // PARTS * L * ROW
    scales += pair // PARTS * L * (SEGMENTS // 2)
    q += pair * (SEGMENTS * SEG * M)
    unit = tl.load(units + pair * M + h)
    held = ()
    if HELD:
        for f in tl.static_range(SEGMENTS):
            held = held + (tl.load(q + f * (SEG * M) + cell),)
    most = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([N, M], tl.float32)  # summed at the end: in the loop warps would have to wait for each other
    for t in range(low, high):
        at = t * N + tl.arange(0, N)
        rows = words + at[:, None] * ROW + j[None, :]
        own = scales + at // TILE * (TILE * (SEGMENTS // 2)) + at % TILE
        s = _products(rows, q, held, own, cell, PLAN, HELD, SEG, M, N, TILE, PACKED) * unit[None, :]
        if CAPPED:
            s = _capped(s, cap)
        seen = (at >= begin) & (at < last)
        s = tl.where(seen[:, None], s * 1.4426950408889634, float("-inf"))
        top = tl.maximum(most, tl.max(s, 0))  # weights are relative to the highest score so far
        safe = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2(s - safe[None, :])
        total = total * tl.exp2(most - safe)[None, :] + p
        most = top
        tl.store(tops + (pair * (L // N) + t) * M + h, safe)
        tl.store(weights + (pair * L + at)[:, None] * M + h[None, :], p.to(tl.float16))
    target = (pair * S + tl.program_id(1)) * M + h
    tl.store(split_tops + target, most)
    tl.store(split_sums + target, tl.sum(total, 0))
