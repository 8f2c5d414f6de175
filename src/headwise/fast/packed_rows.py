"""Products of few rows with matrices in few bits, and parts of such matrices in 16 bits, on CUDA.

A decode step is as quick as weights can be read, and those in 4 bits are a quarter of those in 16. Numbers fill words
of 32 bits without gaps, so that a few words hold whole numbers: a period (of 3 bits, 3 words with 32 numbers). What
lies at the same place of all periods is multiplied at once, with the columns of the rows that belong to it, so that no
number moves before it is multiplied. Nothing is converted either: bits of a word that are kept where they are, all
others cleared, are a floating-point number so small that its value is the whole number times a power of two, and the
power is taken back where the number is multiplied anyway. This holds for float32 in the 24 lower bits of a word, and
for 16 bits, of which a word has two, in the 8 lower ones.

Where tensor cores are used, numbers are rounded as the module's own code rounds them; elsewhere (in float32, and for a
single row where that is quicker) they are not rounded. All sums are in float32. Imported only where Triton is.
Shape suffixes: S slices of a row; N rows of the matrix; P periods; K columns; M rows to multiply.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return, assignment"
# ruff: noqa: SIM108  # branches of kernels are taken when they are built
from __future__ import annotations

import torch
import triton
import triton.language as tl

from headwise.fast.packed_cuts import cut_of, layout_of

NUMBERS = 1024  # of a part of a matrix that one program unpacks
LEAST = tl.constexpr(-149)  # exponent of the smallest number in float32
LIFT = tl.constexpr(80)  # by which exponents of a row are higher while it is multiplied with such numbers
RAISED = tl.constexpr(22)  # by which those of scales are, where several rows are multiplied with them


@triton.jit
def _load(cells, there, EVEN: tl.constexpr):
    """What lies at cells; zeros beyond a row, whose end is looked at only where rows do not fill whole blocks."""
    if EVEN:
        found = tl.load(cells)
    else:
        found = tl.load(cells, mask=there, other=0)
    return found


@triton.jit
def _words(first, left, WORDS: tl.constexpr, EVEN: tl.constexpr):
    """The words of periods, one tensor for each place."""
    found = (_load(first, left > 0, EVEN),)
    for i in tl.static_range(1, WORDS):
        found = found + (_load(first + i, left > i, EVEN),)
    return found


@triton.constexpr_function
def _at(begin, bits):
    """The bit at which `_field` leaves a number that begins at a bit of a word."""
    return begin - (0 if begin + bits <= 24 else 8 if begin + bits <= 32 else 16)


@triton.jit
def _field(words, BEGIN: tl.constexpr, BITS: tl.constexpr):
    """Numbers at a place of periods, times 2^(LEAST + _at(...)), in float32."""
    low = words[BEGIN // 32].to(tl.uint32, bitcast=True)
    if BEGIN % 32 + BITS <= 24:
        window = low
    elif BEGIN % 32 + BITS <= 32:
        window = low >> 8
    else:
        window = (low >> 16) | (words[BEGIN // 32 + 1].to(tl.uint32, bitcast=True) << 16)
    return (window & (((1 << BITS) - 1) << _at(BEGIN % 32, BITS))).to(tl.float32, bitcast=True)


@triton.jit
def _input(x, p, j: tl.constexpr, columns, EACH: tl.constexpr, EVEN: tl.constexpr, dtype: tl.constexpr):
    """Numbers j of periods of a row, in float32. Of 16 bits four are loaded at once, as a whole number."""
    if x.dtype.element_ty == tl.int64:
        four = tl.load(x + p * (EACH // 4) + j // 4)
        found = (four >> (j % 4 * 16)).to(tl.int16).to(dtype, bitcast=True)
    else:
        found = _load(x + p * EACH + j, p * EACH + j < columns, EVEN)
    return found.to(tl.float32)


@triton.jit
def _rows(N, BN: tl.constexpr, GATED: tl.constexpr):
    """Rows of the matrix that a program has: of the gate, then those of what it opens."""
    i = tl.arange(0, BN * (1 + GATED))
    return (tl.minimum(tl.program_id(0) * BN + i % BN, N - 1) + i // BN * N).to(tl.int64)


@triton.jit
def _finish(
    y, row, bias, add, out, M, N, BN: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr,
    ADDED: tl.constexpr,
):  # fmt: skip
    """Write products (N, M) after what follows them, rounded wherever the module's own code rounds."""
    dtype: tl.constexpr = out.dtype.element_ty
    if BIASED:
        y += tl.load(bias + row).to(tl.float32)[:, None]
    y = y.to(dtype).to(tl.float32)
    if GATED:
        both, is_gate = tl.reshape(y, [2, BN, ROWS]), tl.arange(0, 2)[:, None, None] == 0
        gate, opened = tl.sum(tl.where(is_gate, both, 0.0), 0), tl.sum(tl.where(is_gate, 0.0, both), 0)
        y = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * opened
    n, m = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, ROWS)
    cells = m[None, :].to(tl.int64) * N + n[:, None]
    there = (n < N)[:, None] & (m < M)[None, :]
    if ADDED:
        y = tl.load(add + cells, mask=there, other=0.0).to(tl.float32) + y
    tl.store(out + cells, y.to(dtype), mask=there)


# A thread takes one word of a row, its neighbour the next, and the scales and columns that belong to it: so nothing
# moves between threads. For this the length of a row is no multiple of anything, and all is loaded with periods first.
@triton.jit(do_not_specialize=["row_words"])
def _one(
    x, words, scale, bias, add, out, M, N, columns, row_words, groups, BITS: tl.constexpr, EACH: tl.constexpr,
    WORDS: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out.dtype.element_ty
    HALF: tl.constexpr = 2.0 ** (BITS - 1 + LIFT + LEAST)
    row = _rows(N, BN, GATED)
    begin, by = words + row[None, :] * row_words, scale + row[None, :] * groups
    sums = tl.zeros([BN * (1 + GATED), BP], tl.float32)
    for at in tl.range(0, tl.cdiv(columns, EACH), BP, num_stages=1, loop_unroll_factor=STAGES):
        p = at + tl.arange(0, BP)
        turned = _words(begin + (p * WORDS)[:, None], (row_words - p * WORDS)[:, None], WORDS, EVEN)
        if GROUP % EACH == 0:  # the numbers of a period share a scale
            gain = tl.trans(_load(by + (p * EACH // GROUP)[:, None], (p * EACH < columns)[:, None], EVEN))
        part = tl.zeros([BN * (1 + GATED), BP], tl.float32)
        total = tl.zeros([BP], tl.float32)
        for j in tl.static_range(EACH):
            h = _input(x, p, j, columns, EACH, EVEN, dtype)
            number = tl.trans(_field(turned, j * BITS, BITS)) * (h * 2.0 ** (LIFT - _at(j * BITS % 32, BITS)))[None, :]
            if GROUP % EACH == 0:
                total += h
                part += number
            else:
                column = p * EACH + j
                gain = tl.trans(_load(by + (column // GROUP)[:, None], (column < columns)[:, None], EVEN))
                part += (number - (h * HALF)[None, :]) * gain.to(tl.float32)
        if GROUP % EACH == 0:
            part = (part - (total * HALF)[None, :]) * gain.to(tl.float32)
        sums += part
    y = tl.sum(sums, 1) * 2.0 ** -(LIFT + LEAST)
    _finish(y[:, None], row, bias, add, out, M, N, BN, 1, GATED, BIASED, ADDED)


@triton.jit
def _places(x, S: tl.constexpr, M: tl.constexpr, K: tl.constexpr, COUNT: tl.constexpr):
    """What of (S, M, K * COUNT) lies at each of COUNT places, one tensor for each."""
    if COUNT == 1:
        return (tl.reshape(x, [S, M, K]),)
    else:
        low, high = tl.split(tl.permute(tl.reshape(x, [S, M, K, 2, COUNT // 2]), [0, 1, 2, 4, 3]))
        return _places(low, S, M, K, COUNT // 2) + _places(high, S, M, K, COUNT // 2)


@triton.jit
def _whole(bits, gain, UP: tl.constexpr, HALF: tl.constexpr):
    """Numbers of 16 bits from their bits: times UP, less half of their range, times scales."""
    number = bits.to(tl.int16).to(gain.dtype, bitcast=True)
    up, half = tl.full(number.shape, UP, gain.dtype), tl.full(number.shape, HALF, gain.dtype)
    return tl.fma(number, up, -half) * gain


@triton.jit
def _pair(words, gain, j: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    """Numbers j of both halves of words, side by side, times scales. The highest power of two is not enough to make
    them whole: scales are as much larger."""
    AT: tl.constexpr = j * BITS % 8
    TOP: tl.constexpr = 127 if dtype == tl.bfloat16 else 15
    DOWN: tl.constexpr = 6 if dtype == tl.bfloat16 else 9
    both = (words >> (j * BITS - AT)) & ((((1 << BITS) - 1) << AT) * 0x10001)
    raised = (gain * 2.0**DOWN).to(dtype)
    low = _whole(both, raised, 2.0 ** (TOP - AT), 2.0 ** (BITS - 1 - DOWN))
    high = _whole(both >> 16, raised, 2.0 ** (TOP - AT), 2.0 ** (BITS - 1 - DOWN))
    return tl.reshape(tl.join(low, high), [low.shape[0], low.shape[1], low.shape[2] * 2])


@triton.jit
def _gains(
    by, p, at, columns, S: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, EACH: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Scales of periods, where the numbers of a period share one. Whole groups have theirs loaded once."""
    COUNT: tl.constexpr = max(1, BP * EACH // GROUP)
    if EVEN and (COUNT * GROUP == BP * EACH or GROUP % (BP * EACH) == 0):
        first = (at + tl.arange(0, S) * BP) * EACH // GROUP
        gain = tl.load(by + first[:, None, None] + tl.arange(0, COUNT)[None, None, :])
        gain = tl.reshape(tl.broadcast_to(gain[:, :, :, None], [S, BN, COUNT, BP // COUNT]), [S, BN, BP])
    else:
        gain = _load(by + p * EACH // GROUP, p * EACH < columns, EVEN)
    return gain.to(tl.float32)


@triton.jit
def _several(
    x, words, scale, bias, add, out, M, N, columns, row_words, groups, BITS: tl.constexpr, EACH: tl.constexpr,
    WORDS: tl.constexpr, GROUP: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
    STAGES: tl.constexpr, MOST: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x.dtype.element_ty
    ROWS: tl.constexpr = max(8, MOST)  # as many as tensor cores take: rows again, whose products are not written
    HALVES: tl.constexpr = 2 if 8 % BITS == 0 and GROUP % EACH == 0 else 1
    ALL: tl.constexpr = BN * (1 + GATED)
    row = _rows(N, BN, GATED)
    begin, by = words + row[None, :, None] * row_words, scale + row[None, :, None] * groups
    lines = x + tl.minimum(tl.arange(0, MOST), M - 1)[None, :, None] * columns
    sums = tl.zeros([S, ALL, ROWS], tl.float32)
    for at in tl.range(0, tl.cdiv(columns, EACH), S * BP, num_stages=STAGES):
        p = at + tl.arange(0, S)[:, None, None] * BP + tl.arange(0, BP)[None, None, :]
        k = (at + tl.arange(0, S) * BP)[:, None, None] * EACH + tl.arange(0, BP * EACH)[None, None, :]
        held = _words(begin + p * WORDS, row_words - p * WORDS, WORDS, EVEN)
        if GROUP % EACH == 0:
            gain = _gains(by, p, at, columns, S, ALL, BP, EACH, GROUP, EVEN)
        x_SMK = _places(_load(lines + k, k < columns, EVEN), S, MOST, BP * HALVES, EACH // HALVES)
        for j in tl.static_range(EACH // HALVES):
            if HALVES == 2:
                w_SNK = _pair(held[0], gain, j, BITS, dtype)
            else:
                if GROUP % EACH != 0:
                    column = p * EACH + j
                    gain = _load(by + column // GROUP, column < columns, EVEN).to(tl.float32)
                number = _field(held, j * BITS, BITS) * 2.0 ** (-LEAST - RAISED - _at(j * BITS % 32, BITS))
                w_SNK = ((number - 2.0 ** (BITS - 1 - RAISED)) * (gain * 2.0**RAISED)).to(dtype)
            again = tl.reshape(x_SMK[j], [S, 1, MOST, BP * HALVES])
            again = tl.reshape(tl.broadcast_to(again, [S, ROWS // MOST, MOST, BP * HALVES]), [S, ROWS, BP * HALVES])
            sums = tl.dot(w_SNK, tl.permute(again, [0, 2, 1]), sums)
    _finish(tl.sum(sums, 0), row, bias, add, out, M, N, BN, ROWS, GATED, BIASED, ADDED)


def _times(
    x: torch.Tensor, words: torch.Tensor, scale: torch.Tensor, bits: int, bias: torch.Tensor | None,
    gated: bool = False, add: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Rows (M, columns) times a packed matrix: see `one_times`."""
    x, (M, columns), groups, N = x.contiguous(), x.shape, scale.shape[1], len(words) // (1 + gated)
    out, layout = x.new_empty(M, N), layout_of(bits, columns, groups)
    cut = cut_of(layout, M, N, columns, x.dtype == torch.float32)
    BN, even = max(1, cut.BN // (1 + gated)), columns % (layout.EACH * cut.BP * max(1, cut.S)) == 0
    given = (
        words, scale, x if bias is None else bias, x if add is None else add, out, M, N, columns, words.shape[1], groups
    )  # fmt: skip
    made = dict(
        **layout._asdict(), BN=BN, BP=cut.BP, STAGES=cut.stages, GATED=gated, BIASED=bias is not None,
        ADDED=add is not None, EVEN=even, num_warps=cut.warps,
    )  # fmt: skip
    if cut.S:
        _several[(triton.cdiv(N, BN),)](x, *given, **made, S=cut.S, MOST=triton.next_power_of_2(M))
    else:
        fours = even and x.element_size() == 2 and x.storage_offset() % 4 == 0
        _one[(triton.cdiv(N, BN),)](x.view(torch.int64) if fours else x, *given, **made)
    return out


def few_times(
    x: torch.Tensor, words: torch.Tensor, scale: torch.Tensor, bits: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows (M, columns) times a packed matrix: words (N, ...) and scales (N, groups), as `PackedLinear` has them.

    One row, or up to 16 of numbers in 16 bits.
    """
    return _times(x, words, scale, bits, bias)


def one_times(
    x: torch.Tensor, words: torch.Tensor, scale: torch.Tensor, bits: int, bias: torch.Tensor | None = None, *,
    gated: bool = False, add: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """A single row (..., columns) times a packed matrix: silu of the first half times the second if `gated`; added to
    `add`."""
    return _times(x.reshape(1, -1), words, scale, bits, bias, gated, add).view(*x.shape[:-1], -1)


@triton.jit
def _unpacked(
    words, scale, out, columns, row_words, groups, BITS: tl.constexpr, GROUP: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    there = k < columns
    word, shift = k * BITS // 32, k * BITS % 32
    first = words + row * row_words + word
    low = tl.load(first, mask=there, other=0).to(tl.uint32, bitcast=True)
    high = tl.load(first + 1, mask=there & (shift + BITS > 32), other=0).to(tl.uint32, bitcast=True)
    gain = tl.load(scale + row * groups + k // GROUP, mask=there, other=0.0)
    field = ((low >> shift) | (high << 1 << (31 - shift))) & ((1 << BITS) - 1)
    number = (field.to(tl.float32) - (1 << (BITS - 1))) * gain.to(tl.float32)
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
