"""Products of few rows with matrices in few bits, and parts of such matrices in 16 bits, on CUDA.

A decode step is as quick as weights can be read, and those in 4 bits are a quarter of those in 16. Numbers fill words
of 32 bits without gaps, so that a few words hold whole numbers: a period (of 3 bits, 3 words with 32 numbers). What
lies at the same place of all periods is multiplied at once, with the columns of the rows that belong to it, so that no
number moves before it is multiplied. A single row takes no tensor cores, and numbers that are not rounded; several take
both, and numbers rounded as the module's own code rounds them. All sums are in float32. Imported only where Triton is.
Shape suffixes: S slices of a row, of which every warp has one; N rows of the matrix; P periods; M rows to multiply.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return, assignment"
# ruff: noqa: SIM108  # branches of kernels are taken when they are built
from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl

STAGES = tl.constexpr(4)  # blocks of words under way, of one row
SPREAD = 256  # programs for one row, about: there are 132 multiprocessors on an H200
SLICE = 16  # periods: the fewest columns that tensor cores take
NUMBERS = 1024  # of a part of a matrix that one program unpacks


class Periods(NamedTuple):
    """How the numbers of a matrix lie in its words, as kernels take it."""

    BITS: int
    EACH: int  # numbers of a period
    WORDS: int  # words of a period
    GROUP: int  # numbers that share a scale


def layout_of(bits: int, columns: int, groups: int) -> Periods:
    """The layout of a matrix. A single scale for a row is one for all its periods, also where the last is not full."""
    words = bits // gcd(bits, 32)
    each = 32 * words // bits
    return Periods(bits, each, words, columns // groups if groups > 1 else triton.cdiv(columns, each) * each)


@triton.jit
def _load(cells, there, EVEN: tl.constexpr):
    """What lies at cells; zeros beyond a row, whose end is looked at only where rows do not fill whole blocks."""
    if EVEN:
        found = tl.load(cells)
    else:
        found = tl.load(cells, mask=there, other=0)
    return found


@triton.jit
def _number(low, high, shift, BITS: tl.constexpr):
    """1 + n / 2^bits in float32 of numbers n that begin at a bit of a word, and may end in the next one.

    The field of a number becomes the highest bits of a mantissa: nothing is converted.
    """
    field = (low.to(tl.uint32, bitcast=True) >> shift) | (high.to(tl.uint32, bitcast=True) << 1 << (31 - shift))
    field = (field << (23 - BITS)) & (((1 << BITS) - 1) << (23 - BITS))
    return (field | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _numbers(words, left, j: tl.constexpr, BITS: tl.constexpr, EVEN: tl.constexpr):
    """Those at place j of periods that begin at `words`. Words that several places ask for are loaded once."""
    WORD: tl.constexpr = j * BITS // 32
    SHIFT: tl.constexpr = j * BITS % 32
    low = _load(words + WORD, left > WORD, EVEN)
    if SHIFT + BITS > 32:
        high = _load(words + WORD + 1, left > WORD + 1, EVEN)
    else:
        high = low * 0
    return _number(low, high, SHIFT, BITS)


@triton.jit
def _scaled(number, scale, BITS: tl.constexpr):
    """Numbers of a matrix from those of `_number`: less half of their range, times scales. This is exact."""
    whole = scale.to(tl.float32) * (1 << BITS)
    return tl.fma(number, whole, -1.5 * whole)


@triton.jit
def _input(x, p, j: tl.constexpr, columns, EACH: tl.constexpr, EVEN: tl.constexpr, dtype: tl.constexpr):
    """Numbers j of periods of a row, in float32. Of 16 bits four are loaded at once, as a whole number."""
    if x.dtype.element_ty == tl.int64:
        four = tl.load(x + p * (EACH // 4) + j // 4)
        found = (four >> (j % 4 * 16)).to(tl.int16).to(dtype, bitcast=True)
    else:
        found = _load(x + p * EACH + j, p * EACH + j < columns, EVEN)
    return found.to(tl.float32)


@triton.jit(do_not_specialize=["row_words"])  # a thread takes one word of a row, its neighbour the next
def _one(
    x, words, scale, bias, add, out, N, columns, row_words, groups, BITS: tl.constexpr, EACH: tl.constexpr,
    WORDS: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, GATED: tl.constexpr,
    BIASED: tl.constexpr, ADDED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out.dtype.element_ty
    if GATED:  # rows of the gate, then those of what it opens
        i = tl.arange(0, 2 * BN)
        row = tl.minimum(tl.program_id(0) * BN + i % BN, N - 1) + i // BN * N
    else:
        row = tl.minimum(tl.program_id(0) * BN + tl.arange(0, BN), N - 1)
    begin = words + row.to(tl.int64)[:, None] * row_words
    by = scale + row.to(tl.int64)[:, None] * groups
    sums = tl.zeros([BN * (1 + GATED), BP], tl.float32)
    for at in tl.range(0, tl.cdiv(columns, EACH), BP, num_stages=STAGES):
        p = at + tl.arange(0, BP)
        left = (row_words - p * WORDS)[None, :]
        if GROUP % EACH == 0:  # the numbers of a period share a scale
            gain = _load(by + (p * EACH // GROUP)[None, :], left > 0, EVEN).to(tl.float32)
        part = tl.zeros([BN * (1 + GATED), BP], tl.float32)
        total = tl.zeros([BP], tl.float32)
        for j in tl.static_range(EACH):
            number = _numbers(begin + (p * WORDS)[None, :], left, j, BITS, EVEN)
            column = p * EACH + j
            h = _input(x, p, j, columns, EACH, EVEN, dtype)
            if GROUP % EACH == 0:
                total += h
            else:
                gain = _load(by + (column // GROUP)[None, :], (column < columns)[None, :], EVEN)
                number = _scaled(number, gain, BITS)
            part += number * h[None, :]
        if GROUP % EACH == 0:
            part = (part - 1.5 * total[None, :]) * (gain * (1 << BITS))
        sums += part
    y = tl.sum(sums, 1)
    if BIASED:
        y += tl.load(bias + row).to(tl.float32)
    y = y.to(dtype).to(tl.float32)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    if GATED:
        both = tl.reshape(y, [2, BN])
        gate = tl.sum(tl.where(tl.arange(0, 2)[:, None] == 0, both, 0.0), 0)
        opened = tl.sum(tl.where(tl.arange(0, 2)[:, None] == 1, both, 0.0), 0)
        y = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * opened
    if ADDED:
        y = tl.load(add + n, mask=n < N, other=0.0).to(tl.float32) + y
    tl.store(out + n, y.to(dtype), mask=n < N)


@triton.jit
def _several(
    x, words, scale, bias, out, M, N, columns, row_words, groups, BITS: tl.constexpr, EACH: tl.constexpr,
    WORDS: tl.constexpr, GROUP: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, ROWS: tl.constexpr,
    BIASED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x.dtype.element_ty
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.minimum(n, N - 1).to(tl.int64)[None, :, None]
    m = tl.arange(0, ROWS)
    period_SP = tl.arange(0, S)[:, None] * BP + tl.arange(0, BP)[None, :]
    sums = tl.zeros([S, BN, ROWS], tl.float32)
    for at in range(0, tl.cdiv(columns, EACH), S * BP):
        p = at + period_SP
        first = words + row * row_words + (p * WORDS)[:, None, :]
        left = (row_words - p * WORDS)[:, None, :]
        by = scale + row * groups
        if GROUP % EACH == 0:
            gain = _load(by + (p * EACH // GROUP)[:, None, :], left > 0, EVEN)
        for j in tl.static_range(EACH):
            number = _numbers(first, left, j, BITS, EVEN)
            column = p * EACH + j
            if GROUP % EACH != 0:
                gain = _load(by + (column // GROUP)[:, None, :], (column < columns)[:, None, :], EVEN)
            there = (column < columns)[:, :, None] & (m < M)[None, None, :]
            x_SPM = tl.load(x + column[:, :, None] + (m * columns)[None, None, :], mask=there, other=0.0)
            sums = tl.dot(_scaled(number, gain, BITS).to(dtype), x_SPM, sums)
    y = tl.sum(sums, 0)
    if BIASED:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    target = out + m[None, :].to(tl.int64) * N + n[:, None]
    tl.store(target, y.to(dtype), mask=(n < N)[:, None] & (m < M)[None, :])


def few_times(
    x: torch.Tensor, words: torch.Tensor, scale: torch.Tensor, bits: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows (M, columns) times a packed matrix: words (N, ...) and scales (N, groups), as `PackedLinear` has them.

    One row, or up to 16 of numbers in 16 bits.
    """
    x, (M, columns), N = x.contiguous(), x.shape, len(words)
    if M == 1:
        return one_times(x, words, scale, bits, bias)
    out, layout = x.new_empty(M, N), layout_of(bits, columns, scale.shape[1])
    BN, S = (32 if M > 4 else 16), (4 if layout.EACH == 32 else 8)
    _several[(triton.cdiv(N, BN),)](
        x, words, scale, x if bias is None else bias, out, M, N, columns, words.shape[1], scale.shape[1],
        **layout._asdict(), S=S, BN=BN, BP=SLICE, ROWS=triton.next_power_of_2(M), BIASED=bias is not None,
        EVEN=columns % (layout.EACH * S * SLICE) == 0, num_warps=S, num_stages=3 if layout.WORDS == 1 else 2,
    )  # fmt: skip
    return out


def one_times(
    x: torch.Tensor, words: torch.Tensor, scale: torch.Tensor, bits: int, bias: torch.Tensor | None = None, *,
    gated: bool = False, add: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """A single row (..., columns) times a packed matrix: silu of the first half times the second if `gated`; added to
    `add`."""
    x, columns, groups, N = x.contiguous(), x.shape[-1], scale.shape[1], len(words) // (1 + gated)
    out, layout = x.new_empty(*x.shape[:-1], N), layout_of(bits, columns, groups)
    BN = min(16, max(4, triton.next_power_of_2(N // SPREAD))) // (1 + gated)
    BP = 64 if layout.EACH == 32 else 128  # fewer than threads: so the compiler moves nothing between them
    even = columns % (layout.EACH * BP) == 0
    fours = even and x.element_size() == 2 and x.storage_offset() % 4 == 0
    row = x.view(torch.int64) if fours else x
    _one[(triton.cdiv(N, BN),)](
        row, words, scale, x if bias is None else bias, x if add is None else add, out, N, columns, words.shape[1],
        groups, **layout._asdict(), BN=BN, BP=BP, GATED=gated, BIASED=bias is not None, ADDED=add is not None,
        EVEN=even, num_warps=8,
    )  # fmt: skip
    return out


@triton.jit
def _unpacked(
    words, scale, out, columns, row_words, groups, BITS: tl.constexpr, GROUP: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    there = k < columns
    word, shift = k * BITS // 32, k * BITS % 32
    first = words + row * row_words + word
    low = tl.load(first, mask=there, other=0)
    high = tl.load(first + 1, mask=there & (shift + BITS > 32), other=0)
    gain = tl.load(scale + row * groups + k // GROUP, mask=there, other=0.0)
    number = _scaled(_number(low, high, shift, BITS), gain, BITS)
    tl.store(out + row * columns + k, number.to(out.dtype.element_ty), mask=there)


def unpacked_rows(
    words: torch.Tensor, scale: torch.Tensor, bits: int, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """Rows of a packed matrix (rows, words) as numbers."""
    rows, groups = scale.shape
    out = torch.empty(rows, columns, dtype=dtype, device=words.device)
    block = min(NUMBERS, triton.next_power_of_2(columns))
    if rows:
        _unpacked[(rows, triton.cdiv(columns, block))](
            words, scale, out, columns, words.shape[1], groups, BITS=bits,
            GROUP=layout_of(bits, columns, groups).GROUP, BK=block,
        )  # fmt: skip
    return out
