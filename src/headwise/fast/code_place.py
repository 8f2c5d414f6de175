"""New rows of keys or values as codes in the cache of a fast model, on CUDA.

One kernel codes new rows, keeps the first tokens of a text as they are, and the newest in more bits: as
`RowCoder` and `CodedLayer` do. Imported only where Triton is.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# ruff: noqa: SIM108  # branches of kernels are taken when they are built
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from headwise.fast.code_layout import SCALE_UP, TILE, CodeLayout

FIELDS = 8  # of a word, at most


@triton.jit
def _scale(x):
    """Scales that cover rows of numbers."""
    size = tl.maximum(tl.max(tl.abs(x), 1), 0.000030517578125)
    byte = tl.minimum(tl.maximum(tl.ceil(8.0 * tl.log2(size)) + 128.0, 0.0), 255.0)
    return tl.exp2((byte - 128.0) * 0.125)


@triton.jit
def _codes(x, factor, bits):
    """Codes of numbers by their bits."""
    count = tl.exp2(bits.to(tl.float32))
    slope = count * 0.5 / tl.where(bits <= 2, 0.9, 1.0)
    code = tl.floor(x / factor * slope + count * 0.5)
    return tl.minimum(tl.maximum(code, 0.0), count - 1.0)


@triton.jit
def _row(x, k, there):
    """Some numbers of a row; what is not a number is padding, which is hidden."""
    found = tl.load(x + k, mask=there, other=0.0).to(tl.float32)
    return tl.where(found == found, found, 0.0)


@triton.jit
def _place_chunk(
    x, words, scales, own, bits, raised, below, group, plane, place, first, chunk, at, UP,
    KEPT: tl.constexpr, EACH: tl.constexpr, CHUNKS: tl.constexpr, PAIRS: tl.constexpr, FIELDS: tl.constexpr,
    TILE: tl.constexpr, SEG: tl.constexpr, WIDE: tl.constexpr, BY_PLACE: tl.constexpr,
):  # fmt: skip
    """One chunk of a row's words, with the scales of its segments."""
    f, j, i = tl.arange(0, FIELDS), tl.arange(0, SEG), tl.arange(0, WIDE)
    segment = tl.load(first + chunk)
    used = f < tl.load(first + chunk + 1) - segment
    segment += f
    k = tl.load(group + segment, mask=used, other=0)[:, None] * EACH + i[None, :]
    factor = _scale(_row(x, k, used[:, None] & (i < EACH)[None, :] & (k < KEPT)))
    half = tl.minimum(factor * UP, 65504.0).to(tl.float16).to(tl.int16, bitcast=True)
    if BY_PLACE:
        target = ((at // TILE * PAIRS + segment // 2) * TILE + at % TILE) * 2 + segment % 2
    else:
        target = (at // TILE * (2 * PAIRS) + segment) * TILE + at % TILE
    tl.store(scales + target, half, mask=used)
    slot = segment[:, None] * SEG + j[None, :]
    wide = tl.load(bits + slot, mask=used[:, None], other=0)
    numbers = _row(x, tl.load(own + slot, mask=used[:, None], other=0), wide > 0)
    code = _codes(numbers, factor[:, None], wide).to(tl.int32) + tl.load(raised + slot, mask=used[:, None], other=0)
    width = tl.load(plane + segment, mask=used, other=0)[:, None]
    field = (code >> tl.load(below + slot, mask=used[:, None], other=0)) & ((1 << width) - 1)
    up = tl.load(place + segment, mask=used, other=0)[:, None]
    word = tl.sum(tl.where(wide > 0, field, 0) << up, 0)
    if BY_PLACE:
        target = (at * CHUNKS + chunk) * SEG + j
    else:
        target = ((at // TILE * CHUNKS + chunk) * SEG + j) * TILE + at % TILE
    tl.store(words + target, word.to(tl.int16))


@triton.jit(do_not_specialize=["past", "T"])
def _place_codes(
    x, words, scales, side, own, bits, raised, below, group, plane, place, first, starts, places, past, T, UP,
    x_row, x_group, x_token, word_row, scale_row, KEPT: tl.constexpr, SIZE: tl.constexpr, EACH: tl.constexpr,
    CHUNKS: tl.constexpr, PAIRS: tl.constexpr, FIELDS: tl.constexpr, FINE: tl.constexpr,
    FINE_BITS: tl.constexpr, G: tl.constexpr, WHOLE: tl.constexpr, NEAR: tl.constexpr, SIDE: tl.constexpr,
    ON_DEVICE: tl.constexpr, TILE: tl.constexpr, SEG: tl.constexpr, WIDE: tl.constexpr, BY_PLACE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = row % T
    pair = row // T
    b = pair // G
    chunk = tl.program_id(1)
    if ON_DEVICE:
        at = tl.load(places)
        end = at + 1
    else:
        at = past + token
        end = (past + T).to(tl.int64)
    start = tl.load(starts + b)
    x += b * x_row + pair % G * x_group + token * x_token
    if chunk < CHUNKS:
        _place_chunk(
            x, words + pair * word_row, scales + pair * scale_row, own, bits, raised, below, group, plane, place, first,
            chunk, at, UP, KEPT, EACH, CHUNKS, PAIRS, FIELDS, TILE, SEG, WIDE, BY_PLACE,
        )  # fmt: skip
    else:
        i = tl.arange(0, WIDE)[None, :]
        k = (chunk - CHUNKS) * FINE + i
        there = (i < FINE) & (k < SIZE)
        new = _row(x, k, there)
        side += pair * SIDE * SIZE
        if at + NEAR >= end:
            factor = _scale(new)[:, None]
            code = _codes(new, factor, tl.full([1, WIDE], FINE_BITS, tl.int32))
            near = (code * (2.0 / (1 << FINE_BITS)) + (1.0 / (1 << FINE_BITS) - 1.0)) * factor
            tl.store(side + (WHOLE + at % NEAR) * SIZE + k, near.to(side.dtype.element_ty), mask=there)
        if (at >= start) & (at < start + WHOLE):
            tl.store(side + (at - start) * SIZE + k, new.to(side.dtype.element_ty), mask=there)


def place_codes(
    layout: CodeLayout, held: Any, x_BGTK: torch.Tensor, starts_B: torch.Tensor, past: int | torch.Tensor,
    by_place: bool, whole: int, near: int,
) -> None:  # fmt: skip
    """Write new rows behind `past` others, which may be counted on the device if there is one new row.

    `held` has the buffers of a side (`CodedSide`): words, scales, and side for tokens that are not coded.
    """
    B, G, T, K = x_BGTK.shape
    x = x_BGTK if x_BGTK.stride(3) == 1 else x_BGTK.contiguous()
    table = layout.tables(x.device)
    chunks, fine_groups = layout.chunks, max(1, round(layout.size / 64))
    fine = -(-layout.size // fine_groups)
    known = isinstance(past, int)
    _place_codes[(B * G * T, chunks + fine_groups)](
        x, held.words, held.scales.view(torch.int16), held.side, table["own"], table["bits"], table["raised"],
        table["below"], table["group"], table["plane"], table["place"], table["first"], starts_B,
        starts_B if known else past, past if known else 0, T, SCALE_UP, *x.stride()[:3], held.words.stride(1),
        2 * held.scales.stride(1), KEPT=layout.kept, SIZE=K, EACH=layout.each, CHUNKS=chunks, PAIRS=layout.pairs,
        FIELDS=FIELDS, FINE=fine, FINE_BITS=layout.fine_bits, G=G, WHOLE=whole, NEAR=near, SIDE=held.side.shape[2],
        ON_DEVICE=not known, TILE=TILE, SEG=layout.segment, WIDE=triton.next_power_of_2(max(fine, layout.each)),
        BY_PLACE=by_place, num_warps=4,
    )  # fmt: skip
