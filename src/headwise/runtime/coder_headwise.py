"""Rows of numbers as bytes, in few bits a number. Needs torch alone; lies beside every tailored model.

A row is a vector of coefficients, most important first. The first of them get up to 12 bits each, the next fewer;
those that get none are read as zeros. A scale of one byte belongs to every token and about 64 neighbouring
coefficients. It is as large as the largest of them, so that no outlier is cut off. Codes and scales of a token lie
together in one row.
Written by Headwise (Apache-2.0). Shape suffixes: B batch, G rows per token, T tokens, K coefficients, N bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

GROUP = 64  # neighbouring coefficients that share a scale, about
FINE = 8  # bits of a number of a near token, at least
OCTAVE = 8  # steps of a scale in a factor of two: one byte covers 2**-16 to 2**16
MIDDLE = 128  # the byte that stands for a scale of one
FEW_STEPS = 0.9  # the part of the scale that codes of one and two bits cover
_FACTORS: dict[Any, torch.Tensor] = {}  # device -> the scales that bytes stand for


def as_if_kept(found: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """All rows, with gradients of the new ones, which are last, as if nothing had been coded."""
    if not new.requires_grad:
        return found
    past, coded = found.split((found.shape[-2] - new.shape[-2], new.shape[-2]), -2)
    return torch.cat((past, new + (coded - new).detach()), -2)


class RowCoder:
    """Codes rows of coefficients (B, G, T, K) as bytes (B, G, T, N) and reads them again.

    `counts` says how many of the first coefficients have how many bits: {"4": 96, "2": 32}; the others get none. `fine`
    codes near tokens: all numbers in as many bits as the widest code has, or in 8. What becomes of a token depends on
    that token alone. Queries can be asked of bytes (`scores`) and values be added up from them (`mixed`): a code is a
    sum of fields of bytes, each times a power of two, so one product reads all of them without putting codes together.
    """

    def __init__(self, counts: dict[str, int], size: int) -> None:
        self.parts: list[tuple[int, int]] = []  # bits and coefficients, most bits first
        for bits in sorted(map(int, counts), reverse=True):
            self.parts.append((bits, counts[str(bits)]))
        widths = [bits for bits, count in self.parts for _ in range(count)]
        self.size, self.kept, self.bits = size, len(widths), sum(widths)
        self.codes, self.groups = -(-self.bits // 8), max(1, round(self.kept / GROUP))
        self.each = -(-self.kept // self.groups)  # coefficients of a group; the last one may have fewer
        self.bytes = self.codes + self.groups
        near = {str(max([FINE, *map(int, counts)])): size}
        self.fine = self if counts == near else RowCoder(near, size)
        self.fields = placed(widths)
        self._both: Encoder | None = None  # with the coder of values, if this is one of keys
        self._made: dict[Any, tuple[torch.Tensor, ...]] = {}

    def _tables(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """By row: of every coefficient the largest code, codes per unit, a step and the first middle. And of fields,
        group by group: their bytes, their masks, and what they add to codes, as powers of two (groups, each, C)."""
        if device in self._made:
            return self._made[device]
        codes = []
        for bits, size in self.parts:
            count, span = 1 << bits, _span(bits)
            codes += [(count - 1.0, count / 2 / span, 2.0 / count * span, (1.0 / count - 1) * span)] * size
        codes += [(0.0,) * 4] * (self.size - self.kept)
        groups = [[field for field in self.fields if field.own // self.each == group] for group in range(self.groups)]
        most = max(map(len, groups))
        where, masks = ([[0] * most for _ in groups] for _ in range(2))
        powers = [[[0.0] * most for _ in range(self.each)] for _ in groups]
        for group, fields in enumerate(groups):
            for at, field in enumerate(fields):
                where[group][at], masks[group][at] = field.byte, field.mask << field.up
                powers[group][field.own % self.each][at] = 2.0 ** (field.below - field.up)
        table = torch.tensor(codes, device=device).T.contiguous()
        taken = torch.tensor(where, device=device).flatten()
        mask = torch.tensor(masks, dtype=torch.uint8, device=device).view(-1, 1)
        return _kept(self._made, device, (table, taken, mask, torch.tensor(powers, device=device)))

    def _weights(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """What fields, and a last number that is always one, add to coefficients of scale one (groups, each, C + 1)."""
        if (device, dtype) in self._made:
            return self._made[device, dtype][0]
        table, _, _, powers = self._tables(device)
        kept = nn.functional.pad(table[2:, : self.kept], (0, self.groups * self.each - self.kept))
        step, middle = kept.view(2, self.groups, self.each, 1)
        return _kept(self._made, (device, dtype), (torch.cat((powers * step, middle), -1).to(dtype),))[0]

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Rows as bytes: codes, then scales."""
        return Encoder((self,), (0,)).encode(x)[0]

    def encode_beside(self, other: RowCoder, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, Any]:
        """Rows of keys and of the other coder's values as bytes: coded, and fine."""
        if self._both is None or self._both.coders[1] is not other:
            coders = (self, other, self.fine, other.fine)
            self._both = Encoder(coders, (0, self.size, 0, self.size))
        rows = self._both.encode(torch.cat((k, v), -1))
        return rows[:2], rows[2:]

    def _coded(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of all coefficients, and the bytes of scales, as numbers."""
        x = x[..., : self.kept].float().nan_to_num()  # of padding, which is hidden
        most, slope = self._tables(x.device)[0][:2, : self.kept]
        padded = nn.functional.pad(x, (0, -self.kept % self.groups)) if self.kept % self.groups else x
        scale = _scale(padded.unflatten(-1, (self.groups, -1)))
        return _level(x, self._spread(_factor(scale)), most, slope), scale

    def _taken(self, rows: torch.Tensor, dtype: torch.dtype, ones: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Fields of rows as numbers (B, G, groups, C, T), before as many ones, and factors (B, G, groups, 1, T)."""
        _, taken, mask, powers = self._tables(rows.device)
        fields = rows.mT.index_select(2, taken).bitwise_and_(mask).unflatten(2, (self.groups, -1))
        found = fields.new_empty((*fields.shape[:3], powers.shape[2] + ones, rows.shape[2]), dtype=dtype)
        found.narrow(3, 0, powers.shape[2]).copy_(fields)
        found.narrow(3, powers.shape[2], ones).fill_(1)
        return found, _factor(rows.narrow(-1, self.codes, self.groups).mT.unsqueeze(3)).to(dtype)

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Coefficients of such rows."""
        fields, _ = self._taken(rows, torch.float32, 0)
        codes = (self._tables(rows.device)[3] @ fields).flatten(2, 3).mT[..., : self.kept]
        scale = rows.narrow(-1, self.codes, self.groups).float()
        return self._read(self._filled(codes), scale, dtype)

    def scores(self, q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Products (B, G, h, T) of queries (B, G, h, K) with the coefficients of such rows."""
        fields, factor = self._taken(rows, q.dtype, 1)
        missing = self.groups * self.each - self.kept
        q = q if self.kept == self.size and not missing else nn.functional.pad(q[..., : self.kept], (0, missing))
        asked = q.unflatten(3, (self.groups, self.each)).transpose(2, 3) @ self._weights(q.device, q.dtype)
        return (asked @ fields).mul_(factor).sum(2)

    def mixed(self, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Sums (B, G, h, K) of the coefficients of such rows, times weights (B, G, h, T)."""
        fields, factor = self._taken(rows, weights.dtype, 1)
        found = (weights.unsqueeze(2) * factor) @ fields.mT @ self._weights(rows.device, weights.dtype).mT
        found = found.transpose(2, 3).flatten(3)
        return found if self.kept == self.size == found.shape[3] else self._filled(found[..., : self.kept])

    def _filled(self, kept: torch.Tensor) -> torch.Tensor:
        """Coefficients that have no bits are zeros."""
        return nn.functional.pad(kept, (0, self.size - self.kept))

    def _read(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What codes and scales stand for; coefficients beyond the kept ones are zeros."""
        _, _, step, middle = self._tables(codes.device)[0]
        found, factor = torch.addcmul(middle, codes, step), _factor(scale)
        full = self.kept // self.each  # groups; the last one may be smaller
        found.narrow(-1, 0, full * self.each).unflatten(-1, (full, self.each)).mul_(factor[..., :full, None])
        if full < self.groups and full * self.each < self.kept:
            last = found.narrow(-1, full * self.each, self.kept - full * self.each)
            last.mul_(factor[..., full : full + 1])
        return found.to(dtype)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Coefficients as a cache would give them back; gradients pass as if nothing had been coded."""
        with torch.no_grad():
            codes, scale = self._coded(x)  # packing into bytes loses nothing
            found = self._read(self._filled(codes), scale, x.dtype)
        return as_if_kept(found, x)

    def _spread(self, scale: torch.Tensor) -> torch.Tensor:
        """A scale for every coefficient."""
        return scale.repeat_interleave(self.each, -1)[..., : self.kept]


class Encoder:
    """Codes rows of several coders at once, which takes hardly more steps than one of them alone.

    `firsts` is the place of every coder's first coefficient among those that are given side by side.
    """

    def __init__(self, coders: tuple[RowCoder, ...], firsts: tuple[int, ...]) -> None:
        self.coders, self.firsts = coders, firsts
        self.each = max(coder.each for coder in coders)
        self._made: dict[Any, tuple[torch.Tensor, ...]] = {}

    def _tables(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """For all groups: which coefficients they have, repeated up to the same number, their largest codes and codes
        per unit (groups, each, 1). And of fields by row: the code or scale, the bits below it, mask, place and byte."""
        if device in self._made:
            return self._made[device]
        own: list[list[int]] = []
        codes: list[torch.Tensor] = []
        fields, scales = [], sum(coder.groups for coder in self.coders) * self.each
        begin = 0
        for coder, first in zip(self.coders, self.firsts, strict=True):
            slot = []  # of every coefficient
            for group in range(coder.groups):
                those = list(range(group * coder.each, min(coder.kept, (group + 1) * coder.each))) or [0]
                slot += [len(own) * self.each + at for at in range(len(those))]
                those += those[:1] * (self.each - len(those))
                own.append([first + at for at in those])
                codes.append(coder._tables(device)[0][:2, those])
                fields.append((scales + len(own) - 1, 0, 255, 0, begin + coder.codes + group))
            fields += [(slot[f.own], f.below, f.mask, f.up, begin + f.byte) for f in coder.fields]
            begin += coder.bytes
        table = torch.stack(codes, 1).unsqueeze(3)
        numbers = torch.tensor(fields, dtype=torch.int32, device=device).T.contiguous()
        made = (torch.tensor(own, device=device).flatten(), table, numbers[:4].unsqueeze(2), numbers[4].long())
        return _kept(self._made, device, made)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rows of every coder (B, G, T, N) as bytes, codes before scales, of coefficients side by side (B, G, T, K)."""
        own, (most, slope), (which, below, mask, up), byte = self._tables(x.device)
        x = x.mT.float().nan_to_num().index_select(2, own).unflatten(2, (-1, self.each))
        scale = _scale(x.transpose(3, 4))
        codes = _level(x, _factor(scale).unsqueeze(3), most, slope)
        numbers = torch.cat((codes.flatten(2, 3), scale), 2).int().index_select(2, which.flatten())
        numbers = numbers.bitwise_right_shift_(below).bitwise_and_(mask).bitwise_left_shift_(up)
        sizes = [coder.bytes for coder in self.coders]
        rows = numbers.new_zeros((*numbers.shape[:2], sum(sizes), numbers.shape[3]))
        if numbers.shape[3] == 1:
            rows.scatter_add_(2, byte.view(-1, 1).expand(numbers.shape), numbers)
        else:  # in whole lines
            rows.index_add_(2, byte, numbers)
        return tuple(part.mT for part in rows.to(torch.uint8).split(sizes, 2))


class Field(NamedTuple):
    """Bits of a code that lie in one byte."""

    own: int  # the coefficient
    below: int  # bits of its code below them
    mask: int
    up: int  # bits of the byte below them
    byte: int


def placed(widths: list[int]) -> list[Field]:
    """Where the bits of codes of such widths lie, without a gap. Few codes lie in more bytes than they must."""
    fields = [Field(own, bits - 8, 255, 0, 0) for own, bits in enumerate(widths) if bits >= 8]
    fields = [field._replace(byte=byte) for byte, field in enumerate(fields)]
    waiting: dict[int, list[int]] = {}  # bits -> coefficients whose lowest bits, so many, have no place yet
    for own, bits in enumerate(widths):
        if bits % 8:
            waiting.setdefault(bits % 8, []).append(own)
    byte, free = len(fields), 8
    while waiting:
        bits = max((bits for bits in waiting if bits <= free), default=min(waiting))
        part, own = min(bits, free), waiting[bits].pop(0)
        fields.append(Field(own, bits - part, (1 << part) - 1, 8 - free, byte))
        if bits > part:
            waiting.setdefault(bits - part, []).append(own)
        if not waiting[bits]:
            del waiting[bits]
        free -= part
        if not free:
            byte, free = byte + 1, 8
    return fields


def _kept(made: dict[Any, Any], key: Any, tables: Any) -> Any:
    """Tables, kept for the next time; not where tensors may be stand-ins."""
    if not torch.compiler.is_compiling():
        made[key] = tables
    return tables


def _scale(groups: torch.Tensor) -> torch.Tensor:
    """The bytes of scales, as numbers: the largest of every group, which lies in the last dimension."""
    size = groups.abs().amax(-1).clamp_min(2.0**-15)
    return (torch.ceil(OCTAVE * size.log2()) + MIDDLE).clamp(0, 255)


def _level(x: torch.Tensor, factor: torch.Tensor, most: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    """Codes of coefficients with these scales."""
    return torch.addcmul((most + 1) / 2, x / factor, slope).floor().clamp_min(0).minimum(most)


def _factor(code: torch.Tensor) -> torch.Tensor:
    """The scales that bytes stand for, whatever numbers hold them: looked up, so that all ways of reading agree."""
    if (table := _FACTORS.get(code.device)) is None:
        octaves = (torch.arange(256, dtype=torch.float64, device=code.device) - MIDDLE) / OCTAVE
        table = _kept(_FACTORS, code.device, torch.exp2(octaves).float())
    return table.index_select(0, code.flatten().int()).view(code.shape)


def _span(bits: int) -> float:
    """The part of the scale that the steps cover: with few steps less error is made where most numbers are.

    Still fewer would have the least squared error, but all numbers would shrink together, which does more damage.
    """
    return FEW_STEPS if bits <= 2 else 1.0
