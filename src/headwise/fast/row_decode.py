"""One new token per text against a long cache of wide rows that many query heads share, on CUDA.

Rows of 16 bits (`row_decode`) are read once by one kernel. Coded rows (`coded_decode`, see `row_packing`) take two: the
first reads keys and writes weights, the second reads weights and values. The sums of wide rows fill the registers of a
multiprocessor; apart, several programs share one, and each hides the waiting of the others. Weights take 64 bytes per
place and 32 heads, twice. In all kernels places are the rows of a product and heads its columns, so that the tensor
cores take codes from registers, where they are unpacked two at a time: see `row_packing.Field`.
Scales of keys are applied to the products of a column, those of values to the unpacked codes.
The first tokens of a text and the newest ones may be given whole in 16 bits; they are one more split.
Lengths lie on the device, so that one captured graph serves all of them. Imported only where Triton is. Source of the
split: Dao et al., Flash-Decoding, 2023.
Shape suffixes: B texts, H query heads, G rows per token, L places, K and V widths, S splits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return, assignment"
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from headwise.fast.flash_decode import _capped, blocks
from headwise.fast.row_packing import ROWS, Field, Packing

HEADS = 32  # query heads of a program, at most: more share a row by reading it again
BOOST = tl.constexpr(8.0)  # weights are multiplied by 2**8, so that small ones are no zeros in 16 bits
COUNTS = ["S", "SLOTS"]  # numbers of splits: kernels are not built anew for each
WIDTH = tl.constexpr(64)  # of a column: ROWS


class Tile(NamedTuple):
    """How a kernel is built."""

    places: int = 64  # read at once
    warps: int = 4
    stages: int = 3  # reads in flight
    programs: int = 2  # per multiprocessor, about
    swap: bool = False  # whole rows: places are the rows of products, not their columns
    columns: int = 8  # coded values: of one program, at most


class Whole(NamedTuple):
    """Tokens in 16 bits, keys and values side by side, in place of what the rows say of them."""

    first: torch.Tensor  # (B, G, F, K + V): the first tokens of every text
    newest: torch.Tensor  # (B, G, R, K + V): the token at place l lies at l % R


class CodedRows(NamedTuple):
    """Keys and values of all places, as `row_packing` lays them out."""

    keys: Packing
    values: Packing
    k_words: torch.Tensor  # (B, G, L, words), 16 bits
    k_scales: torch.Tensor  # (B, G, L / 64, groups, 64), bytes
    v_words: torch.Tensor
    v_scales: torch.Tensor


@triton.jit
def _range(lengths, starts, b, FIRST: tl.constexpr, NEWEST: tl.constexpr, WINDOW: tl.constexpr):
    """The places of a text that are read from rows: neither the first nor the newest where those are given."""
    end = tl.load(lengths + b)
    begin = tl.load(starts + b) + FIRST
    if WINDOW > 0:
        begin = tl.maximum(begin, end - WINDOW)
    return begin, end - NEWEST


@triton.jit
def _share(begin, end, split, S, N: tl.constexpr):
    """The tiles of a split, counted from place 0: so tiles are aligned, and a text's first and last are masked."""
    low = begin // N
    each = tl.cdiv(tl.maximum(tl.cdiv(end, N) - low, 0), S)
    low += split * each
    return low, tl.minimum(low + each, tl.cdiv(end, N))


@triton.jit
def _exp(s, scaling, cap, CAPPED: tl.constexpr):
    """Scores as powers of two."""
    s = s * scaling
    if CAPPED:
        s = _capped(s, cap)
    return s * 1.4426950408889634


@triton.jit(do_not_specialize=COUNTS)
def _attend_rows(
    q, k, v, part, top, lengths, starts, scaling, cap, S, SLOTS, q_row, q_head, row, group,
    G: tl.constexpr, SHARE: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROW: tl.constexpr,
    K1: tl.constexpr, K2: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    FIRST: tl.constexpr, NEWEST: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    b = (tl.program_id(0) // (G * PARTS)).to(tl.int64)
    g = (tl.program_id(0) // PARTS % G).to(tl.int64)
    head = tl.program_id(0) % PARTS * M + tl.arange(0, M)
    begin, end = _range(lengths, starts, b, FIRST, NEWEST, WINDOW)
    low, high = _share(begin, end, split, S, N)
    k += b * row + g * group
    v += b * row + g * group
    i1, j1 = tl.arange(0, K1), tl.arange(0, V1)
    i2, j2 = K1 + tl.arange(0, K2 if K2 > 0 else 16), V1 + tl.arange(0, V2 if V2 > 0 else 16)
    queries = q + b * q_row + (g * SHARE + head) * q_head
    real = head < SHARE
    most = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    target = (b * G + g) * SHARE + head
    if SWAP:
        q1 = tl.load(queries[None, :] + i1[:, None], mask=real[None, :] & (i1 < K)[:, None], other=0.0)
        if K2 > 0:
            q2 = tl.load(queries[None, :] + i2[:, None], mask=real[None, :] & (i2 < K)[:, None], other=0.0)
        z1 = tl.zeros([V1, M], tl.float32)
        z2 = tl.zeros([V2 if V2 > 0 else 16, M], tl.float32)
    else:
        q1 = tl.load(queries[:, None] + i1[None, :], mask=real[:, None] & (i1 < K)[None, :], other=0.0)
        if K2 > 0:
            q2 = tl.load(queries[:, None] + i2[None, :], mask=real[:, None] & (i2 < K)[None, :], other=0.0)
        z1 = tl.zeros([M, V1], tl.float32)
        z2 = tl.zeros([M, V2 if V2 > 0 else 16], tl.float32)
    for t in range(low, high):
        at = t * N + tl.arange(0, N)
        seen = (at >= begin) & (at < end)
        x1 = tl.load(k + at[:, None] * ROW + i1[None, :], mask=seen[:, None] & (i1 < K)[None, :], other=0.0)
        y1 = tl.load(v + at[:, None] * ROW + j1[None, :], mask=seen[:, None] & (j1 < V)[None, :], other=0.0)
        if K2 > 0:
            x2 = tl.load(k + at[:, None] * ROW + i2[None, :], mask=seen[:, None] & (i2 < K)[None, :], other=0.0)
        if V2 > 0:
            y2 = tl.load(v + at[:, None] * ROW + j2[None, :], mask=seen[:, None] & (j2 < V)[None, :], other=0.0)
        if SWAP:
            s = tl.dot(x1, q1, input_precision=PRECISION)
            if K2 > 0:
                s = tl.dot(x2, q2, s, input_precision=PRECISION)
            s = tl.where(seen[:, None], _exp(s, scaling, cap, CAPPED), float("-inf"))
            higher = tl.maximum(most, tl.max(s, 0))
        else:
            s = tl.dot(q1, tl.trans(x1), input_precision=PRECISION)
            if K2 > 0:
                s = tl.dot(q2, tl.trans(x2), s, input_precision=PRECISION)
            s = tl.where(seen[None, :], _exp(s, scaling, cap, CAPPED), float("-inf"))
            higher = tl.maximum(most, tl.max(s, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
        fade = tl.exp2(most - safe)
        most = higher
        if SWAP:
            p = tl.exp2(s - safe[None, :])
            total = total * fade + tl.sum(p, 0)
            z1 = tl.dot(tl.trans(y1), p.to(y1.dtype), z1 * fade[None, :], input_precision=PRECISION)
            if V2 > 0:
                z2 = tl.dot(tl.trans(y2), p.to(y1.dtype), z2 * fade[None, :], input_precision=PRECISION)
        else:
            p = tl.exp2(s - safe[:, None])
            total = total * fade + tl.sum(p, 1)
            z1 = tl.dot(p.to(y1.dtype), y1, z1 * fade[:, None], input_precision=PRECISION)
            if V2 > 0:
                z2 = tl.dot(p.to(y1.dtype), y2, z2 * fade[:, None], input_precision=PRECISION)
    some = tl.where(total > 0, total, 1.0)
    tl.store(top + target * SLOTS + split, tl.where(total > 0, most + tl.log2(some), float("-inf")), mask=real)
    if SWAP:
        z1 = tl.trans(z1)
        z2 = tl.trans(z2)
    sums = part + ((target * S + split) * V)[:, None]
    tl.store(sums + j1[None, :], z1 / some[:, None], mask=real[:, None] & (j1 < V)[None, :])
    if V2 > 0:
        tl.store(sums + j2[None, :], z2 / some[:, None], mask=real[:, None] & (j2 < V)[None, :])


@triton.jit(do_not_specialize=COUNTS)
def _attend_whole(
    q, first, newest, part, top, lengths, starts, scaling, cap, SLOTS, q_row, q_head,
    G: tl.constexpr, SHARE: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, F: tl.constexpr,
    R: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    b = (tl.program_id(0) // (G * PARTS)).to(tl.int64)
    g = (tl.program_id(0) // PARTS % G).to(tl.int64)
    head = tl.program_id(0) % PARTS * M + tl.arange(0, M)
    real = head < SHARE
    end = tl.load(lengths + b)
    begin = tl.load(starts + b)
    n = tl.arange(0, N)
    early = n < F
    late = end - 1 - (end - 1 - (n - F) + R) % R  # the last place that is so much more than a multiple of R
    at = tl.where(early, begin + n, late)
    seen = (at < end) & (n < F + R) & (early | (at >= begin + F))
    if WINDOW > 0:
        seen &= at >= end - WINDOW
    W: tl.constexpr = K + V
    rows = tl.where(early, first + ((b * G + g) * F + n) * W, newest + ((b * G + g) * R + n - F) * W)
    queries = q + b * q_row + (g * SHARE + head) * q_head
    s = tl.zeros([M, N], tl.float32)
    for i in range(0, K, D):
        d = i + tl.arange(0, D)
        x = tl.load(queries[:, None] + d[None, :], mask=real[:, None] & (d < K)[None, :], other=0.0)
        y = tl.load(rows[None, :] + d[:, None], mask=seen[None, :] & (d < K)[:, None], other=0.0)
        s = tl.dot(x, y, s, input_precision=PRECISION)
    s = tl.where(seen[None, :], _exp(s, scaling, cap, CAPPED), float("-inf"))
    most = tl.max(s, 1)
    p = tl.exp2(s - tl.where(most == float("-inf"), 0.0, most)[:, None])
    total = tl.sum(p, 1)
    some = tl.where(total > 0, total, 1.0)
    target = (b * G + g) * SHARE + head
    tl.store(top + target * SLOTS + SLOTS - 1, tl.where(total > 0, most + tl.log2(some), float("-inf")), mask=real)
    p = p / some[:, None]
    for i in range(0, V, D):
        d = i + tl.arange(0, D)
        y = tl.load(rows[:, None] + K + d[None, :], mask=seen[:, None] & (d < V)[None, :], other=0.0)
        z = tl.dot(p.to(y.dtype), y, input_precision=PRECISION)
        tl.store(part + target[:, None] * V + d[None, :], z, mask=real[:, None] & (d < V)[None, :])


@triton.jit(do_not_specialize=COUNTS)
def _combine_rows(
    part, whole, top, out, slots, zeros, factors, S, SLOTS,
    V: tl.constexpr, SUMS: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr, MAPPED: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    d = tl.program_id(1) * D + tl.arange(0, D)
    x = tl.load(top + row * SLOTS + split, mask=split < SLOTS, other=float("-inf"))
    most = tl.max(x, 0)
    weight = tl.where(x == float("-inf"), 0.0, tl.exp2(x - most))
    sums = part + (row * S + split) * SUMS
    there = (split < S)[:, None] & (weight > 0)[:, None] & (d < V)[None, :]
    if MAPPED:  # sums of weights lie behind all others; codes are from zero on, so their middle is taken off
        total = tl.sum(weight * tl.load(sums + SUMS - 1, mask=(split < S) & (weight > 0), other=0.0) / 256.0, 0)
        z = tl.load(sums[:, None] + tl.load(slots + d, mask=d < V, other=0)[None, :], mask=there, other=0.0)
        zero = tl.load(sums[:, None] + tl.load(zeros + d, mask=d < V, other=0)[None, :], mask=there, other=0.0)
        mixed = tl.sum(z * weight[:, None], 0) * tl.load(factors + d, mask=d < V, other=0.0)
        mixed -= tl.sum(zero * weight[:, None], 0) * tl.load(factors + V + d, mask=d < V, other=0.0)
    else:
        total = tl.sum(tl.where(split < S, weight, 0.0), 0)
        mixed = tl.sum(tl.load(sums[:, None] + d[None, :], mask=there, other=0.0) * weight[:, None], 0)
    if WHOLE:
        last = tl.load(top + row * SLOTS + SLOTS - 1)
        share = tl.where(last == float("-inf"), 0.0, tl.exp2(last - most))
        total += share
        mixed += share * tl.load(whole + row * V + d, mask=d < V, other=0.0)
    mixed = mixed / tl.where(total > 0, total, 1.0)
    tl.store(out + row * V + d, mixed.to(out.dtype.element_ty), mask=d < V)


@triton.constexpr_function
def _number(PLAN, block, job, what):
    """A number of a plan. Blocks: 'offset words width:job,job'; jobs: 'shift mask bits place group column mine'."""
    head, _, jobs = PLAN.split("|")[block].partition(":")
    return int((head if job < 0 else jobs.split(",")[job]).split()[what])


@triton.constexpr_function
def _jobs(PLAN, block):
    """How many jobs a block has; without a block, how many blocks a plan has."""
    parts = PLAN.split("|")
    return len(parts) if block < 0 else len(parts[block].split(","))


@triton.constexpr_function
def _middle(PLAN, block, job):
    """The code that stands for zero, in the units of a column's field."""
    bits, place = [int(x) for x in PLAN.split("|")[block].partition(":")[2].split(",")[job].split()[2:4]]
    return ((1 << bits) - 1) * 0.5 * (1 << place)


@triton.constexpr_function
def _steps(PLAN, block, job):
    """How two words in one register become two numbers."""
    shift, mask = [int(x) for x in PLAN.split("|")[block].partition(":")[2].split(",")[job].split()[:2]]
    if not shift:
        return f"and.b32 $0, $1, {mask * 0x10001:#x};"
    return f"{{ .reg .b32 y; shr.b32 y, $1, {shift}; and.b32 $0, y, {mask * 0x10001:#x}; }}"


@triton.jit
def _unpack(words, PLAN: tl.constexpr, block: tl.constexpr, job: tl.constexpr, PLAIN: tl.constexpr):
    """A column: codes times 2**(place - 24)."""
    if PLAIN:
        code = ((words.to(tl.int32) & 0xFFFF) >> _number(PLAN, block, job, 0)) & _number(PLAN, block, job, 1)
        return code.to(tl.float32) * 2.0**-24
    else:
        steps: tl.constexpr = _steps(PLAN, block, job)
        return tl.inline_asm_elementwise(steps, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _factor(byte):
    """The scale that a byte stands for. The byte becomes a number by the bits of 2**23 above it."""
    whole = (byte.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
    return tl.exp2(whole * 0.125 - 1048592.0)


@triton.jit
def _scale_at(n, g, GROUPS: tl.constexpr):
    """Where the scale of a group lies: 64 places of a group side by side, then the next group."""
    return n // WIDTH * (GROUPS * WIDTH) + g * WIDTH + n % WIDTH


@triton.jit
def _lanes(N: tl.constexpr, GROUPS: tl.constexpr):
    """The same for the first group at all places of a tile."""
    n = tl.arange(0, N)
    if N == WIDTH:
        return n
    return _scale_at(n, 0, GROUPS)


@triton.jit
def _scale_tile(scales, group, lane, GROUPS: tl.constexpr):
    """The scales of a tile."""
    there = scales + group[:, None] * WIDTH + lane[None, :]
    return tl.load(there, mask=(group < GROUPS)[:, None], other=0)


@triton.jit
def _size(queries, real, K: tl.constexpr, M: tl.constexpr):
    """The largest number of every head's query, by which it is divided: numbers of 16 bits end at 65504."""
    w = tl.arange(0, WIDTH)
    size = tl.full([M], 1e-30, tl.float32)
    for i in range(0, K, WIDTH):
        x = tl.load(queries[None, :] + (i + w)[:, None], mask=real[None, :] & (i + w < K)[:, None], other=0.0)
        size = tl.maximum(size, tl.max(tl.abs(x.to(tl.float32)), 0))
    return size


@triton.jit
def _job_queries(
    queries, real, size, columns, steps, PLAN: tl.constexpr, block: tl.constexpr, job: tl.constexpr, HALF: tl.constexpr
):
    """Queries in the order of a block's words; zeros where words hold nothing of this job."""
    at = _number(PLAN, block, job, 5) * WIDTH + tl.arange(0, _number(PLAN, block, -1, 2))
    column = tl.load(columns + at)
    x = tl.load(queries[None, :] + column[:, None], mask=real[None, :] & (column >= 0)[:, None], other=0.0)
    return (x.to(tl.float32) / size[None, :] * tl.load(steps + at)[:, None]).to(HALF)


@triton.jit
def _block_words(words, at, ROW: tl.constexpr, PLAN: tl.constexpr, block: tl.constexpr):
    """The words of a block at some places. What nobody wrote is read, too, but weighed with zero: any word will do."""
    c = tl.arange(0, _number(PLAN, block, -1, 2))
    there = words + at[:, None] * ROW + _number(PLAN, block, -1, 0) + c[None, :]
    if _number(PLAN, block, -1, 1) == _number(PLAN, block, -1, 2):
        return tl.load(there)
    return tl.load(there, mask=(c < _number(PLAN, block, -1, 1))[None, :], other=0)


@triton.jit
def _turned_words(words, at, c, ROW: tl.constexpr, PLAN: tl.constexpr, block: tl.constexpr):
    """The same with words as rows, all 64 of a column."""
    there = words + at[None, :] * ROW + _number(PLAN, block, -1, 0) + c[:, None]
    if _number(PLAN, block, -1, 1) == WIDTH:
        return tl.load(there)
    return tl.load(there, mask=(c < _number(PLAN, block, -1, 1))[:, None], other=0)


@triton.jit
def _highest(tops, low, high, M: tl.constexpr):
    """The highest score of some tiles."""
    h = tl.arange(0, M)
    most = tl.full([M], float("-inf"), tl.float32)
    for t in range(low, high, 32):
        tile = t + tl.arange(0, 32)
        x = tl.load(tops + tile[:, None] * M + h[None, :], mask=(tile < high)[:, None], other=float("-inf"))
        most = tl.maximum(most, tl.max(x, 0))
    return most


@triton.jit(do_not_specialize=COUNTS)
def _score_codes(
    q, words, scales, value_scales, halves, weights, tops, columns, steps, lengths, starts, scaling, cap, S,
    L, q_row, q_head,
    G: tl.constexpr, SHARE: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr, PLAN: tl.constexpr,
    GROUPS: tl.constexpr, VALUE_GROUPS: tl.constexpr, AHEAD: tl.constexpr, VALUE_AHEAD: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, FIRST: tl.constexpr, NEWEST: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, PLAIN: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    pair = (tl.program_id(0) // PARTS).to(tl.int64)  # of a text and a row
    b, g = pair // G, pair % G
    mine = tl.program_id(0).to(tl.int64)
    head = tl.program_id(0) % PARTS * M + tl.arange(0, M)
    real = head < SHARE
    begin, end = _range(lengths, starts, b, FIRST, NEWEST, WINDOW)
    low, high = _share(begin, end, split, S, N)
    queries = q + b * q_row + (g * SHARE + head) * q_head
    size = _size(queries, real, K, M)
    held = ()
    group, value_group = tl.arange(0, AHEAD), tl.arange(0, VALUE_AHEAD)
    zeros = tl.zeros([AHEAD, M], tl.float32)
    for block in tl.static_range(_jobs(PLAN, -1)):
        for job in tl.static_range(_jobs(PLAN, block)):
            taken = _job_queries(queries, real, size, columns, steps, PLAN, block, job, HALF)
            held += (taken,)
            middle = tl.sum(taken.to(tl.float32), 0) * (_middle(PLAN, block, job) / 512)
            zeros += tl.where((group == _number(PLAN, block, job, 4))[:, None], middle[None, :], 0.0)
    words += pair * L * ROW
    scales += pair * L * GROUPS
    value_scales += pair * L * VALUE_GROUPS
    halves += pair * L * (VALUE_GROUPS + 1)
    high_zeros = zeros.to(HALF)  # in two parts: what is left when both are subtracted may be small
    low_zeros = (zeros - high_zeros.to(tl.float32)).to(HALF)
    n = tl.arange(0, N)
    lane, value_lane, half_lane = _lanes(N, GROUPS), _lanes(N, VALUE_GROUPS), _lanes(N, VALUE_GROUPS + 1)
    after = tl.minimum(low, L // N - 1)
    near = _scale_tile(scales + after * (N * GROUPS), group, lane, GROUPS)
    now = _scale_tile(value_scales + after * (N * VALUE_GROUPS), value_group, value_lane, VALUE_GROUPS)
    for t in range(low, high):
        at = t * N + n
        seen = (at >= begin) & (at < end)
        scale = tl.trans(_factor(near).to(HALF))
        zero = tl.dot(scale, high_zeros, input_precision=PRECISION)
        zero = tl.dot(scale, low_zeros, zero, input_precision=PRECISION)
        half = tl.minimum(_factor(now) * 256.0, 65504.0).to(HALF)  # for the kernel that sums values
        there = halves + t * (N * (VALUE_GROUPS + 1)) + half_lane
        tl.store(there[None, :] + value_group[:, None] * WIDTH, half, mask=(value_group < VALUE_GROUPS)[:, None])
        tl.store(there + VALUE_GROUPS * WIDTH, 256.0)  # and for the sum of all weights
        after = tl.minimum(t + 1, high - 1)
        near = _scale_tile(scales + after * (N * GROUPS), group, lane, GROUPS)  # keeps them near for all jobs, too
        now = _scale_tile(value_scales + after * (N * VALUE_GROUPS), value_group, value_lane, VALUE_GROUPS)
        s = tl.zeros([N, M], tl.float32)
        for block in tl.static_range(_jobs(PLAN, -1)):
            x = _block_words(words, at, ROW, PLAN, block)
            for job in tl.static_range(_jobs(PLAN, block)):
                byte = tl.load(scales + t * (N * GROUPS) + _number(PLAN, block, job, 4) * WIDTH + lane)
                y = _unpack(x, PLAN, block, job, PLAIN).to(HALF)
                y = tl.dot(y, held[_number(PLAN, block, job, 6)], input_precision=PRECISION)
                s += y * _factor(byte)[:, None]
        s = (s * 32768.0 - zero) * size[None, :]
        s = tl.where(seen[:, None], _exp(s, scaling, cap, CAPPED), float("-inf"))
        most = tl.max(s, 0)
        p = tl.exp2(s - (tl.where(most == float("-inf"), 0.0, most) - BOOST)[None, :])
        row = (mine * L + at)[:, None] * M
        tl.store(weights + row + tl.arange(0, M)[None, :], p.to(HALF))
        mark = (mine * (L // N) + t) * M + tl.arange(0, M)
        tl.store(tops + mark, most)


@triton.jit(do_not_specialize=COUNTS)
def _sum_codes(
    words, halves, weights, tops, part, top, row_groups, lengths, starts, S, SLOTS, L,
    G: tl.constexpr, SHARE: tl.constexpr, PARTS: tl.constexpr, ROW: tl.constexpr, PLAN: tl.constexpr,
    GROUPS: tl.constexpr, AHEAD: tl.constexpr, SUMS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    TOPS: tl.constexpr, FIRST: tl.constexpr, NEWEST: tl.constexpr, WINDOW: tl.constexpr, LEADS: tl.constexpr,
    PLAIN: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    pair = (tl.program_id(0) // PARTS).to(tl.int64)  # of a text and a row
    b, g = pair // G, pair % G
    mine = tl.program_id(0).to(tl.int64)
    h, n, c = tl.arange(0, M), tl.arange(0, N), tl.arange(0, WIDTH)
    head = tl.program_id(0) % PARTS * M + h
    real = head < SHARE
    begin, end = _range(lengths, starts, b, FIRST, NEWEST, WINDOW)
    low, high = _share(begin, end, split, S, N)
    tops += mine * (L // TOPS) * M
    most = _highest(tops, low * N // TOPS, tl.cdiv(high * N, TOPS), M)
    safe = tl.where(most == float("-inf"), 0.0, most)
    words += pair * L * ROW
    halves += pair * L * (GROUPS + 1)
    weights += mine * L * M
    group, lane = tl.arange(0, AHEAD), _lanes(N, GROUPS + 1)
    zero = tl.zeros([AHEAD, M], tl.float32)
    z = ()
    for block in tl.static_range(_jobs(PLAN, -1)):
        for _job in tl.static_range(_jobs(PLAN, block)):
            z += (tl.zeros([WIDTH, M], tl.float32),)
    for t in range(low, high):
        at = t * N + n
        p = tl.load(weights + at[:, None] * M + h[None, :]).to(tl.float32)
        p = (p * tl.exp2(tl.load(tops + t * N // TOPS * M + h) - safe)[None, :]).to(HALF)
        if LEADS:
            half = _scale_tile(halves + t * (N * (GROUPS + 1)), group, lane, GROUPS + 1)
            zero = tl.dot(half, p, zero, input_precision=PRECISION)
        sums = ()
        for block in tl.static_range(_jobs(PLAN, -1)):
            x = _turned_words(words, at, c, ROW, PLAN, block)
            for job in tl.static_range(_jobs(PLAN, block)):
                y = _unpack(x, PLAN, block, job, PLAIN).to(HALF)
                if _number(PLAN, block, job, 4) >= 0:  # one group
                    y *= tl.load(halves + t * (N * (GROUPS + 1)) + _number(PLAN, block, job, 4) * WIDTH + lane)[None, :]
                else:
                    groups = tl.load(row_groups + _number(PLAN, block, job, 5) * WIDTH + c)
                    y *= tl.load(halves + t * (N * (GROUPS + 1)) + groups[:, None] * WIDTH + lane[None, :])
                sums += (tl.dot(y, p, z[_number(PLAN, block, job, 6)], input_precision=PRECISION),)
        z = sums
    target = part + (((b * G + g) * SHARE + head) * S + split) * SUMS
    for block in tl.static_range(_jobs(PLAN, -1)):
        for job in tl.static_range(_jobs(PLAN, block)):
            slot = _number(PLAN, block, job, 5) * WIDTH + c
            tl.store(target[None, :] + slot[:, None], z[_number(PLAN, block, job, 6)], mask=real[None, :])
    if LEADS:
        tl.store(top + ((b * G + g) * SHARE + head) * SLOTS + split, most - BOOST, mask=real)
        slot = SUMS - GROUPS - 1 + group
        tl.store(target[None, :] + slot[:, None], zero, mask=real[None, :] & (group <= GROUPS)[:, None])


def _parts(share: int) -> tuple[int, int]:
    """Heads of a program, and programs that share the heads of a row."""
    width = max(16, min(HEADS, triton.next_power_of_2(share)))
    return width, -(-share // width)


def _splits(pairs: int, places: int, device: torch.device, tile: Tile) -> int:
    """Programs per text and row, fixed when a graph is captured: enough to fill the device evenly."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(-(-processors * tile.programs // pairs), -(-places // tile.places), 128))


def _precision(dtype: torch.dtype) -> Any:
    return "ieee" if dtype == torch.float32 else "tf32"


def row_decode(
    q_BHK: torch.Tensor,
    k_BGLK: torch.Tensor,
    v_BGLV: torch.Tensor,
    lengths_B: torch.Tensor,
    starts_B: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
    window: int | None = None,
    whole: Whole | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """The heads' outputs (B, H, V). Places `starts <= l < lengths` of a text are seen, its last `window` where given.

    Keys and values may be views of one buffer, side by side or one behind the other; both have the same strides.
    """
    tile = tile or ROW_TILE
    (B, H, K), (G, L, V) = q_BHK.shape, (*k_BGLK.shape[1:3], v_BGLV.shape[3])
    if k_BGLK.stride() != v_BGLV.stride() or k_BGLK.stride(3) != 1 or q_BHK.stride(2) != 1:
        raise ValueError("keys and values of a place must have the same strides, and numbers of a row lie side by side")
    M, parts = _parts(H // G)
    S = _splits(B * G * parts, L, q_BHK.device, tile)
    part, top = _room(q_BHK, S, V, whole)
    (K1, K2), (V1, V2) = (blocks(width, True, 2 * M if not tile.swap else 16) for width in (K, V))
    _attend_rows[(B * G * parts, S)](
        q_BHK, k_BGLK, v_BGLV, part, top, lengths_B, starts_B, scaling, softcap or 1.0, S, top.shape[2],
        q_BHK.stride(0), q_BHK.stride(1), k_BGLK.stride(0), k_BGLK.stride(1),
        G=G, SHARE=H // G, PARTS=parts, K=K, V=V, ROW=k_BGLK.stride(2), K1=K1, K2=K2, V1=V1, V2=V2, M=M, N=tile.places,
        FIRST=whole.first.shape[2] if whole else 0, NEWEST=whole.newest.shape[2] if whole else 0, WINDOW=window or 0,
        CAPPED=softcap is not None, SWAP=tile.swap, PRECISION=_precision(q_BHK.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return _combined(q_BHK, part, top, G, V, lengths_B, starts_B, scaling, softcap, window, whole)


def _room(q_BHK: torch.Tensor, S: int, sums: int, whole: Whole | None) -> tuple[torch.Tensor, torch.Tensor]:
    """For sums of all splits, and the logarithms of their weights."""
    B, H, _ = q_BHK.shape
    part = torch.empty(B, H, S, sums, dtype=torch.float32, device=q_BHK.device)
    top = torch.empty(B, H, S + (whole is not None), dtype=torch.float32, device=q_BHK.device)
    return part, top


def _combined(
    q_BHK: torch.Tensor, part: torch.Tensor, top: torch.Tensor, G: int, V: int, lengths_B: torch.Tensor,
    starts_B: torch.Tensor, scaling: float, softcap: float | None, window: int | None, whole: Whole | None,
    values: ValueTables | None = None,
) -> torch.Tensor:  # fmt: skip
    """Outputs from the sums of all splits, those of whole tokens among them."""
    B, H, K = q_BHK.shape
    out = torch.empty(B, H, V, dtype=q_BHK.dtype, device=q_BHK.device)
    extra = torch.empty(B, H, V, dtype=torch.float32, device=q_BHK.device) if whole else out
    if whole:
        _check(whole, q_BHK, V)
        M, parts = _parts(H // G)
        F, R = whole.first.shape[2], whole.newest.shape[2]
        _attend_whole[(B * G * parts,)](
            q_BHK, whole.first, whole.newest, extra, top, lengths_B, starts_B, scaling, softcap or 1.0, top.shape[2],
            q_BHK.stride(0), q_BHK.stride(1),
            G=G, SHARE=H // G, PARTS=parts, K=K, V=V, F=F, R=R, M=M, N=max(16, triton.next_power_of_2(F + R)), D=128,
            WINDOW=window or 0, CAPPED=softcap is not None, PRECISION=_precision(q_BHK.dtype), num_stages=2,
        )  # fmt: skip
    S, sums = part.shape[2:]
    tables = (values.slots, values.zeros, values.factors) if values else (out, out, out)
    _combine_rows[(B * H, -(-V // 128))](
        part, extra, top, out, *tables, S, top.shape[2],
        V=V, SUMS=sums, SPLITS=triton.next_power_of_2(top.shape[2]), D=128, MAPPED=values is not None,
        WHOLE=whole is not None,
    )  # fmt: skip
    return out


def _check(whole: Whole, q_BHK: torch.Tensor, V: int) -> None:
    wide = q_BHK.shape[2] + V
    for x in whole:
        if x.shape[3] != wide or x.dtype != q_BHK.dtype or not x.is_contiguous():
            raise ValueError(f"whole tokens must be contiguous rows of {wide} numbers like the queries, not {x.shape}")


class KeyTables(NamedTuple):
    """What kernels read of the packing of keys: a job is the part of a column that shares a scale."""

    plan: str
    columns: torch.Tensor  # (jobs, 64): the coefficient of every word, -1 where none is
    steps: torch.Tensor  # (jobs, 64): what a query is multiplied by


class ValueTables(NamedTuple):
    """And of that of values: a job is a column."""

    plans: tuple[str, ...]  # of programs that share a row's values
    groups: torch.Tensor  # (columns, 64): the group of every word
    slots: torch.Tensor  # (V): where the sum of a coefficient lies
    zeros: torch.Tensor  # (V): and that of its scales
    factors: torch.Tensor  # (2, V): what both are multiplied by


def _job(field: Field, group: int, column: int, mine: int) -> str:
    numbers = (field.shift, field.mask, field.bits, field.place, group, column, mine)
    return " ".join(map(str, numbers))


def _plan(packed: Packing, jobs: dict[int, list[str]]) -> str:
    """Blocks with their jobs, in words: what a kernel is built from."""
    made = []
    for at, its in jobs.items():
        block = packed.blocks[at]
        made.append(f"{block.offset} {block.words} {max(16, triton.next_power_of_2(block.words))}:" + ",".join(its))
    return "|".join(made)


@functools.cache
def _key_tables(packed: Packing, device: torch.device) -> KeyTables:
    jobs: dict[int, list[str]] = {}
    columns: list[list[int]] = []
    steps = []
    for column in packed.columns:
        for group in sorted({packed.group(one) for one in column.coefficients if one >= 0}):
            held = [one if one >= 0 and packed.group(one) == group else -1 for one in column.coefficients]
            held += [-1] * (ROWS - len(held))
            jobs.setdefault(column.block, []).append(_job(column.field, group, len(columns), len(columns)))
            columns.append(held)
            steps.append([packed.step(one) * 2.0 ** (9 - column.field.place) if one >= 0 else 0.0 for one in held])
    tables = torch.tensor(columns, dtype=torch.int32), torch.tensor(steps, dtype=torch.float32)
    return KeyTables(_plan(packed, jobs), *(table.to(device) for table in tables))


@functools.cache
def _value_tables(packed: Packing, device: torch.device, most: int) -> ValueTables:
    jobs: dict[int, list[tuple[Field, int, int]]] = {}
    groups = []
    for at, column in enumerate(packed.columns):
        among = sorted({packed.group(one) for one in column.coefficients if one >= 0})
        if among:  # more than one are looked up word by word
            jobs.setdefault(column.block, []).append((column.field, among[0] if len(among) == 1 else -1, at))
        its = [packed.group(one) if one >= 0 else 0 for one in column.coefficients]
        groups.append(its + [0] * (ROWS - len(its)))
    parts: list[dict[int, list[str]]] = [{}]
    filled = 0
    for block, its_jobs in jobs.items():
        if filled and filled + len(its_jobs) > most:
            parts.append({})
            filled = 0
        for job in its_jobs:
            if filled == most:  # a block of many columns is read again
                parts.append({})
                filled = 0
            parts[-1].setdefault(block, []).append(_job(*job, filled))
            filled += 1
    its_fields = [packed.columns[place // ROWS].field for place in packed.places]
    steps = [packed.step(one) for one in range(packed.size)]
    # Codes are 2**(place - 24) of themselves and scales 256 times.
    factors = [step * 2.0 ** (16 - field.place) for step, field in zip(steps, its_fields, strict=True)]
    middles = [step * field.middle / 256 for step, field in zip(steps, its_fields, strict=True)]
    behind = ROWS * len(packed.columns)
    tables = (
        torch.tensor(groups, dtype=torch.int32),
        torch.from_numpy(packed.places),
        torch.tensor([behind + packed.group(one) for one in range(packed.size)], dtype=torch.int32),
        torch.tensor((factors, middles), dtype=torch.float32),
    )
    return ValueTables(tuple(_plan(packed, part) for part in parts), *(table.to(device) for table in tables))


def coded_decode(
    q_BHK: torch.Tensor,
    rows: CodedRows,
    lengths_B: torch.Tensor,
    starts_B: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
    window: int | None = None,
    whole: Whole | None = None,
    score_tile: Tile | None = None,
    sum_tile: Tile | None = None,
) -> torch.Tensor:
    """As `row_decode`, of coded rows: outputs (B, H, V) in the order of RowCoder's coefficients."""
    first, second = score_tile or SCORE_TILE, sum_tile or SUM_TILE
    (B, H, K), (G, L, KW), V = q_BHK.shape, rows.k_words.shape[1:], rows.values.size
    if L % first.places or first.places % second.places or second.places % ROWS:
        raise ValueError(
            f"{L} places must be a multiple of {first.places}, {first.places} of {second.places}, and that of {ROWS}"
        )
    _check_codes(rows, K)
    device, share = q_BHK.device, H // G
    half = torch.float32 if q_BHK.dtype == torch.float32 else torch.float16
    M, parts = _parts(share)
    pairs = B * G * parts
    keys, values = _key_tables(rows.keys, device), _value_tables(rows.values, device, second.columns)
    weights = torch.empty(pairs, L, M, dtype=half, device=device)
    halves = torch.empty(B * G, rows.values.groups + 1, L, dtype=half, device=device)
    tops = torch.empty(pairs, L // first.places, M, dtype=torch.float32, device=device)
    common: dict[str, Any] = {
        "G": G, "SHARE": share, "PARTS": parts, "M": M, "WINDOW": window or 0,
        "FIRST": whole.first.shape[2] if whole else 0, "NEWEST": whole.newest.shape[2] if whole else 0,
        "HALF": tl.float32 if half == torch.float32 else tl.float16, "PRECISION": _precision(half),
        "PLAIN": half == torch.float32 or bool(triton.knobs.runtime.interpret),
    }  # fmt: skip
    S = _splits(pairs, L, device, first)
    _score_codes[(pairs, S)](
        q_BHK, rows.k_words, rows.k_scales, rows.v_scales, halves, weights, tops, keys.columns, keys.steps,
        lengths_B, starts_B, scaling, softcap or 1.0, S, L, q_BHK.stride(0), q_BHK.stride(1),
        K=K, ROW=KW, PLAN=keys.plan, GROUPS=rows.keys.groups, VALUE_GROUPS=rows.values.groups,
        AHEAD=_ahead(rows.keys.groups), VALUE_AHEAD=triton.next_power_of_2(rows.values.groups),
        CAPPED=softcap is not None, N=first.places, num_warps=first.warps, num_stages=first.stages, **common,
    )  # fmt: skip
    S = _splits(pairs * len(values.plans), L, device, second)
    sums = ROWS * len(rows.values.columns) + rows.values.groups + 1
    part, top = _room(q_BHK, S, sums, whole)
    for number, plan in enumerate(values.plans):
        _sum_codes[(pairs, S)](
            rows.v_words, halves, weights, tops, part, top, values.groups, lengths_B, starts_B, S,
            top.shape[2], L,
            ROW=rows.v_words.shape[3], PLAN=plan, GROUPS=rows.values.groups,
            AHEAD=_ahead(rows.values.groups + 1), SUMS=sums, LEADS=number == 0, N=second.places,
            TOPS=first.places, num_warps=second.warps, num_stages=second.stages, **common,
        )  # fmt: skip
    return _combined(q_BHK, part, top, G, V, lengths_B, starts_B, scaling, softcap, window, whole, values)


def _ahead(groups: int) -> int:
    """Rows of an operand that holds scales."""
    return max(16, triton.next_power_of_2(groups))


def _check_codes(rows: CodedRows, K: int) -> None:
    """All texts and rows of a tensor follow each other without gaps."""
    if rows.keys.size != K:
        raise ValueError(f"queries have {K} numbers and coded keys {rows.keys.size}")
    for x, size in ((rows.k_words, rows.keys.words), (rows.v_words, rows.values.words)):
        if x.dtype != torch.int16 or x.shape[3] != size or not x.is_contiguous():
            raise ValueError(f"words must be contiguous rows of {size} numbers of 16 bits, not {x.dtype} {x.shape}")
    for x, size in ((rows.k_scales, rows.keys.groups), (rows.v_scales, rows.values.groups)):
        if x.dtype != torch.uint8 or x.shape[3:] != (size, ROWS) or not x.is_contiguous():
            raise ValueError(f"scales must be contiguous bytes of {size} groups, not {x.dtype} {x.shape}")


@triton.jit(do_not_specialize=["T"])
def _write_scales(
    x, scales, places, T, L, G, x_text, x_group, x_token,
    K: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, AHEAD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    pair, t = (tl.program_id(0) // T).to(tl.int64), tl.program_id(0) % T
    group, d = tl.arange(0, AHEAD), tl.arange(0, WIDE)
    at = group[:, None] * SIZE + d[None, :]
    there = (at < K) & (d < SIZE)[None, :]
    row = x + pair // G * x_text + pair % G * x_group + t.to(tl.int64) * x_token
    size = tl.maximum(tl.max(tl.abs(tl.load(row + at, mask=there, other=0.0).to(tl.float32)), 1), 2.0**-15)
    byte = tl.minimum(tl.maximum(tl.ceil(8.0 * tl.log2(size)) + 128.0, 0.0), 255.0)
    target = pair * L * GROUPS + _scale_at(tl.load(places + t), group, GROUPS)
    tl.store(scales + target, byte.to(tl.uint8), mask=group < GROUPS)


@triton.jit(do_not_specialize=["T"])
def _write_words(
    x, scales, words, places, columns, details, T, L, G, x_text, x_group, x_token,
    WORDS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, FIELDS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    pair, t = (tl.program_id(0) // T).to(tl.int64), tl.program_id(0) % T
    w = tl.program_id(1) * D + tl.arange(0, D)
    row = x + pair // G * x_text + pair % G * x_group + t.to(tl.int64) * x_token
    place = tl.load(places + t)
    word = tl.zeros([D], tl.int32)
    for field in range(FIELDS):
        at = field * WORDS + w
        one = tl.load(columns + at, mask=w < WORDS, other=-1)
        there = one >= 0
        bits = tl.load(details + at * 3, mask=there, other=1)
        value = tl.load(row + one, mask=there, other=0.0).to(tl.float32)
        byte = tl.load(scales + pair * L * GROUPS + _scale_at(place, one // SIZE, GROUPS), mask=there, other=128)
        value = value / _factor(byte) / tl.where(bits <= 2, 0.8, 1.0)
        count = (1 << bits).to(tl.float32)
        code = tl.minimum(tl.maximum(tl.floor((value + 1.0) * (count * 0.5)), 0.0), count - 1.0).to(tl.int32)
        code = (code + tl.load(details + at * 3 + 1, mask=there, other=0)) << tl.load(
            details + at * 3 + 2, mask=there, other=0
        )
        word |= tl.where(there, code, 0)
    tl.store(words + (pair * L + place) * WORDS + w, word.to(tl.int16), mask=w < WORDS)


@functools.cache
def _writing(packed: Packing, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """By field and word: the coefficient or -1; its bits, what is added to its code, and where it starts."""
    most = max(len(block.fields) for block in packed.blocks)
    columns = torch.full((most, packed.words), -1, dtype=torch.int32)
    details = torch.zeros(most, packed.words, 3, dtype=torch.int32)
    for column in packed.columns:
        block = packed.blocks[column.block]
        number = block.fields.index(column.field)
        for word, one in enumerate(column.coefficients):
            if one >= 0:
                columns[number, block.offset + word] = one
                its = (packed.bits[one], packed.raised(one, column.field), column.field.start)
                details[number, block.offset + word] = torch.tensor(its)
    return columns.to(device), details.to(device)


def write_rows(
    packed: Packing, x_BGTK: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, places_T: torch.Tensor
) -> None:
    """Code new tokens and write them to their places in `words` and `scales`, as CodedRows has them."""
    B, G, T, K = x_BGTK.shape
    if packed.size != K or x_BGTK.stride(3) != 1 or not (words.is_contiguous() and scales.is_contiguous()):
        raise ValueError(f"rows must have {packed.size} numbers side by side, not {tuple(x_BGTK.shape)}")
    L, size = words.shape[2], packed.group_size
    strides = x_BGTK.stride()[:3]
    _write_scales[(B * G * T,)](
        x_BGTK, scales, places_T, T, L, G, *strides, K=K, GROUPS=packed.groups, SIZE=size,
        AHEAD=triton.next_power_of_2(packed.groups), WIDE=triton.next_power_of_2(size),
    )  # fmt: skip
    columns, details = _writing(packed, words.device)
    _write_words[(B * G * T, -(-packed.words // 128))](
        x_BGTK, scales, words, places_T, columns, details, T, L, G, *strides,
        WORDS=packed.words, GROUPS=packed.groups, SIZE=size, FIELDS=len(columns), D=128,
    )  # fmt: skip


def coded_rows(
    keys: Packing, values: Packing, texts: int, rows: int, places: int, device: torch.device | str
) -> CodedRows:
    """Room for so many places, a multiple of 64."""
    tensors: list[torch.Tensor] = []
    for packed in (keys, values):
        tensors.append(torch.zeros(texts, rows, places, packed.words, dtype=torch.int16, device=device))
        tensors.append(torch.zeros(texts, rows, places // ROWS, packed.groups, ROWS, dtype=torch.uint8, device=device))
    return CodedRows(keys, values, *tensors)


ROW_TILE = Tile(places=32, warps=8, stages=2, programs=2)
SCORE_TILE = Tile(places=128, warps=8, stages=2, programs=1)
SUM_TILE = Tile(places=64, warps=4, stages=2, programs=2, columns=8)
