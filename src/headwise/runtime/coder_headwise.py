"""Rows of numbers as bytes, in few bits a number. Needs torch alone; lies beside every tailored model.

A row is a vector of coefficients, most important first. The first of them get up to 12 bits each, the next fewer;
those that get none are read as zeros. A scale of one byte belongs to every token and about 64 neighbouring
coefficients. It is as large as the largest of them, so that no outlier is cut off. Codes and scales of a token lie
together in one row.
Written by Headwise (Apache-2.0). Shape suffixes: B batch, G rows per token, T tokens, K coefficients, N bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

GROUP = 64  # neighbouring coefficients that share a scale, about
PLANES = (8, 4, 2, 1)  # bits that pack evenly into bytes
FINE = 8  # bits of a number of a near token, at least
OCTAVE = 8  # steps of a scale in a factor of two: one byte covers 2**-16 to 2**16
MIDDLE = 128  # the byte that stands for a scale of one
SPREAD: Any = {  # bits of a field -> numbers as wide as all fields of a byte; how far bits move, and which then stay
    4: (torch.int16, ((4, 0x0F0F),)),
    2: (torch.int32, ((12, 0x000F000F), (6, 0x03030303))),
    1: (torch.int64, ((28, 0x0000000F0000000F), (14, 0x0003000300030003), (7, 0x0101010101010101))),
}
FEW_STEPS = 0.9  # the part of the scale that codes of one and two bits cover


def as_if_kept(found: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """All rows, with gradients of the new ones, which are last, as if nothing had been coded."""
    if not new.requires_grad:
        return found
    past, coded = found.split((found.shape[-2] - new.shape[-2], new.shape[-2]), -2)
    return torch.cat((past, new + (coded - new).detach()), -2)


class RowCoder:
    """Codes rows of coefficients (B, G, T, K) as bytes (B, G, T, N) and reads them again.

    `counts` says how many of the first coefficients have how many bits: {"4": 96, "2": 32}; the others get none. Codes
    are stored in planes of 8, 4, 2 and 1 bits, one behind the other: a code of 6 bits has its highest 4 in one plane
    and the other 2 in another. `fine` codes near tokens: all numbers in as many bits as the
    widest code has, or in 8. What becomes of a token depends on that token alone.
    """

    def __init__(self, counts: dict[str, int], size: int) -> None:
        self.parts: list[tuple[int, int]] = []  # bits and coefficients, most bits first
        for bits in sorted(map(int, counts), reverse=True):
            self.parts.append((bits, counts[str(bits)]))
        self.size, self.kept, self.bits = size, sum(counts.values()), 0
        self.planes: list[tuple[int, int, int]] = []  # bits of a field, the first bit of all, fields
        for plane in PLANES:
            if fields := sum(size for bits, size in self.parts if bits & plane):
                self.planes.append((plane, self.bits, fields))
                self.bits += fields * plane
        self.codes, self.groups = -(-self.bits // 8), max(1, round(self.kept / GROUP))
        self.bytes = self.codes + self.groups
        near = {str(max([FINE, *map(int, counts)])): size}
        self.fine = self if counts == near else RowCoder(near, size)
        self._runs = [self._side_by_side(plane) for plane, _, _ in self.planes]
        self._made: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def _side_by_side(self, plane: int) -> list[tuple[int, int, bool]]:
        """Coefficients with a field in a plane: the first of a run, how many, and whether they have a larger field."""
        runs: list[tuple[int, int, bool]] = []
        first = 0
        for bits, size in self.parts:
            more = bits >= 2 * plane
            if size and bits & plane and runs and sum(runs[-1][:2]) == first and runs[-1][2] == more:
                runs[-1] = (runs[-1][0], runs[-1][1] + size, more)
            elif size and bits & plane:
                runs.append((first, size, more))
            first += size
        return runs

    def _tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """By row: for every coefficient its largest code, codes per unit, a step and the first middle; and for every
        field its coefficient, the bits of the code below it, its mask, its bits of a byte below it, and its byte."""
        if device in self._made:
            return self._made[device]
        codes, fields = [], []
        for bits, size in self.parts:
            count, span = 1 << bits, _span(bits)
            codes += [(count - 1.0, count / 2 / span, 2.0 / count * span, (1.0 / count - 1) * span)] * size
        codes += [(0.0,) * 4] * (self.size - self.kept)
        for plane, at, _ in self.planes:
            first = 0
            for bits, size in self.parts:
                for coefficient in range(first, first + size if bits & plane else 0):
                    fields.append((coefficient, bits & (plane - 1), (1 << plane) - 1, at % 8, at // 8))
                    at += plane
                first += size
        made = tuple(torch.tensor(rows, device=device).T.contiguous() for rows in (codes, fields))
        if not torch.compiler.is_compiling():  # where tensors may be stand-ins
            self._made[device] = made[0], made[1]
        return made[0], made[1]

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Rows as bytes: codes, then scales."""
        code, scale = self._coded(x)
        if len(self.planes) == 1 and self.planes[0][0] == 8:
            return torch.cat((code, scale), -1).to(torch.uint8)
        own, below, mask, up, byte = self._tables(x.device)[1]
        fields = code.long().index_select(-1, own).bitwise_right_shift_(below).bitwise_and_(mask)
        rows = torch.zeros((*x.shape[:-1], self.codes), dtype=torch.long, device=x.device)
        rows.scatter_add_(-1, byte.expand(fields.shape), fields.bitwise_left_shift_(up))
        return torch.cat((rows, scale.long()), -1).to(torch.uint8)

    def _coded(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of all coefficients, and the bytes of scales, as numbers."""
        x = x[..., : self.kept].float().nan_to_num()  # of padding, which is hidden
        most, slope = self._tables(x.device)[0][:2, : self.kept]
        padded = nn.functional.pad(x, (0, -self.kept % self.groups)) if self.kept % self.groups else x
        size = padded.unflatten(-1, (self.groups, -1)).abs().amax(-1).clamp_min(2.0**-15)
        scale = (torch.ceil(OCTAVE * size.log2()) + MIDDLE).clamp(0, 255)
        code = torch.addcmul((most + 1) / 2, x / self._spread(_factor(scale)), slope).floor()
        return code.clamp_min(0).minimum(most), scale

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Coefficients of such rows."""
        wide = torch.int16 if any(bits > 8 for bits, _ in self.parts) else torch.uint8
        codes = rows.new_empty((*rows.shape[:-1], self.size), dtype=wide)
        if self.kept < self.size:
            codes.narrow(-1, self.kept, self.size - self.kept).zero_()
        for (plane, start, count), runs in zip(self.planes, self._runs, strict=True):
            end = -(-(start + count * plane) // 8)
            fields, at = _unpacked(rows[..., start // 8 : end], plane), start % 8 // plane
            for first, size, more in runs:
                those, new = codes.narrow(-1, first, size), fields.narrow(-1, at, size)
                if more:  # below what larger fields hold
                    torch.add(new, those, alpha=1 << plane, out=those)
                else:
                    those.copy_(new)
                at += size
        return self._read(codes.float(), rows.narrow(-1, self.codes, self.groups).float(), dtype)

    def _read(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What codes and scales stand for; coefficients beyond the kept ones are zeros."""
        _, _, step, middle = self._tables(codes.device)[0]
        found, factor = torch.addcmul(middle, codes, step), _factor(scale)
        each = -(-self.kept // self.groups)
        full = self.kept // each  # groups; the last one may be smaller
        found.narrow(-1, 0, full * each).unflatten(-1, (full, each)).mul_(factor[..., :full, None])
        if full < self.groups and full * each < self.kept:
            found.narrow(-1, full * each, self.kept - full * each).mul_(factor[..., full : full + 1])
        return found.to(dtype)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Coefficients as a cache would give them back; gradients pass as if nothing had been coded."""
        with torch.no_grad():
            codes, scale = self._coded(x)  # packing into bytes loses nothing
            found = self._read(nn.functional.pad(codes, (0, self.size - self.kept)), scale, x.dtype)
        return as_if_kept(found, x)

    def _spread(self, scale: torch.Tensor) -> torch.Tensor:
        """A scale for every coefficient."""
        return scale.repeat_interleave(-(-self.kept // self.groups), -1)[..., : self.kept]


def _factor(code: torch.Tensor) -> torch.Tensor:
    """The scale that a byte stands for."""
    return torch.exp2((code - MIDDLE) / OCTAVE)


def _span(bits: int) -> float:
    """The part of the scale that the steps cover: with few steps less error is made where most numbers are.

    Still fewer would have the least squared error, but all numbers would shrink together, which does more damage.
    """
    return FEW_STEPS if bits <= 2 else 1.0


def _unpacked(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """All fields of some bytes, a byte each: bits of a wider number are moved apart in halves, all bytes at once."""
    if bits == 8:
        return rows
    wide, halves = SPREAD[bits]
    x = rows.to(wide)
    for shift, mask in halves:
        x = (x << shift).bitwise_or_(x).bitwise_and_(mask)
    return x.view(torch.uint8)
