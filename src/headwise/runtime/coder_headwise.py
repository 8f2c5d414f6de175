"""Rows of numbers as bytes, in few bits a number. Needs torch alone; lies beside every tailored model.

A row is a vector of coefficients, most important first. The first of them get up to 8 bits each, the next fewer; those
that get none are read as zeros. A scale of one byte belongs to every token and about 64 neighbouring coefficients. It
is as large as the largest of them, so that no outlier is cut off. Codes and scales of a token lie together in one row.
Written by Headwise (Apache-2.0). Shape suffixes: B batch, G rows per token, T tokens, K coefficients, N bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

GROUP = 64  # neighbouring coefficients that share a scale, about
PLANES = (8, 4, 2, 1)  # bits that pack evenly into bytes
OCTAVE = 8  # steps of a scale in a factor of two: one byte covers 2**-16 to 2**16
MIDDLE = 128  # the byte that stands for a scale of one
FEW_STEPS = 0.8  # the part of the scale that codes of one and two bits cover


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
    and the other 2 in another. What becomes of a token depends on that token alone.
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
        self.fine = self if counts == {"8": size} else RowCoder({"8": size}, size)  # for tokens that are near

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Rows as bytes: codes, then scales."""
        codes, scale = self._coded(x)
        rows = torch.zeros((*x.shape[:-1], self.codes), dtype=torch.uint8, device=x.device)
        for plane, start, _ in self.planes:  # below a field of a code are those of smaller planes
            pairs = zip(codes, self.parts, strict=True)
            fields = [code >> (bits & (plane - 1)) for code, (bits, _) in pairs if bits & plane]
            packed = _packed(torch.cat(fields, -1) & ((1 << plane) - 1), plane, start % 8 // plane)
            rows |= nn.functional.pad(packed, (start // 8, self.codes - start // 8 - packed.shape[-1]))
        return torch.cat((rows, scale.to(torch.uint8)), -1)

    def _coded(self, x: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Codes of the parts with as many bits each, and the bytes of scales, as numbers."""
        x = x[..., : self.kept].float()
        padded = nn.functional.pad(x, (0, -self.kept % self.groups))
        size = padded.unflatten(-1, (self.groups, -1)).abs().amax(-1).clamp_min(2.0**-15)
        scale = (torch.ceil(OCTAVE * size.log2()) + MIDDLE).clamp(0, 255).nan_to_num()  # of padding, which is hidden
        parts = (x / self._spread(_factor(scale))).split([size for _, size in self.parts], -1)
        return [_levels(part, bits) for part, (bits, _) in zip(parts, self.parts, strict=True)], scale

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Coefficients of such rows."""
        codes: list[Any] = [0] * len(self.parts)
        for plane, start, count in self.planes:
            end = -(-(start + count * plane) // 8)
            fields, at = _unpacked(rows[..., start // 8 : end], plane), start % 8 // plane
            for number, (bits, size) in enumerate(self.parts):
                if bits & plane:
                    codes[number] = codes[number] << plane | fields.narrow(-1, at, size)
                    at += size
        return self._read(codes, rows.narrow(-1, self.codes, self.groups).float(), dtype)

    def _read(self, codes: list[Any], scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What codes and scales stand for."""
        values = [_values(code, bits) for code, (bits, _) in zip(codes, self.parts, strict=True)]
        found = (torch.cat(values, -1) * self._spread(_factor(scale))).to(dtype)
        return found if self.kept == self.size else nn.functional.pad(found, (0, self.size - self.kept))

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Coefficients as a cache would give them back; gradients pass as if nothing had been coded."""
        with torch.no_grad():
            found = self._read(*self._coded(x), x.dtype)  # packing into bytes loses nothing
        return as_if_kept(found, x)

    def _spread(self, scale: torch.Tensor) -> torch.Tensor:
        """A scale for every coefficient."""
        return scale.repeat_interleave(-(-self.kept // self.groups), -1)[..., : self.kept]


def _factor(code: torch.Tensor) -> torch.Tensor:
    """The scale that a byte stands for."""
    return torch.exp2((code - MIDDLE) / OCTAVE)


def _levels(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Whole numbers from 0 for coefficients between -1 and 1: the middles of equal steps stand for them."""
    count = 1 << bits
    return ((x / _span(bits) + 1) * (count / 2)).floor().clamp(0, count - 1).to(torch.uint8)


def _values(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """What such numbers stand for."""
    return ((codes + 0.5) * (2.0 / (1 << bits)) - 1) * _span(bits)


def _span(bits: int) -> float:
    """The part of the scale that the steps cover: with few steps less error is made where most numbers are."""
    return FEW_STEPS if bits <= 2 else 1.0


def _packed(fields: torch.Tensor, bits: int, skipped: int) -> torch.Tensor:
    """Fields of few bits, several to a byte, the first in the lowest bits; the first byte begins with others."""
    if bits == 8:
        return fields
    each = 8 // bits
    fields = nn.functional.pad(fields, (skipped, -(skipped + fields.shape[-1]) % each)).unflatten(-1, (-1, each))
    places = torch.arange(0, 8, bits, device=fields.device, dtype=torch.uint8)
    return (fields << places).sum(-1, dtype=torch.uint8)


def _unpacked(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """All fields of some bytes."""
    if bits == 8:
        return rows
    places = torch.arange(0, 8, bits, device=rows.device, dtype=torch.uint8)
    return ((rows.unsqueeze(-1) >> places) & ((1 << bits) - 1)).flatten(-2)
