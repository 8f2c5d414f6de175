"""Rows of numbers as bytes, in few bits a number. Needs torch alone; lies beside every tailored model.

A row is a vector of coefficients, most important first. The first of them get up to 12 bits each, the next fewer;
those that get none are read as zeros. A scale of one byte belongs to every token and about 64 neighbouring
coefficients. It is as large as the largest of them, so that no outlier is cut off. Codes and scales of a token lie
together in one row.
Written by Headwise (Apache-2.0). Shape suffixes: B batch, G rows per token, T tokens, K coefficients, N bytes.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import nn

GROUP = 64  # neighbouring coefficients that share a scale, about
FINE = 8  # bits of a number of a near token, at least
OCTAVE = 8  # steps of a scale in a factor of two: one byte covers 2**-16 to 2**16
TOKENS = 128  # that are coded at once, in memory near the processor
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
        self.fine = self if counts == near else _fine(size, *near)
        self.fields = placed(widths)
        self._both: JointCoder | None = None  # with the coder of values, if this is one of keys
        self._made: dict[Any, Any] = {}

    def _tables(self, device: torch.device) -> torch.Tensor:
        """Of every coefficient, by row: the largest code, codes per unit, a step and the first middle."""
        if device in self._made:
            return self._made[device]
        codes = []
        for bits, size in self.parts:
            count, span = 1 << bits, _span(bits)
            codes += [(count - 1.0, count / 2 / span, 2.0 / count * span, (1.0 / count - 1) * span)] * size
        codes += [(0.0,) * 4] * (self.size - self.kept)
        return _kept(self._made, device, torch.tensor(codes, device=device).T.contiguous())

    def _fields(self, device: torch.device, dtype: torch.dtype) -> Any:
        """Of fields, group by group with as many in each: byte, mask, coefficient, and what they are times in codes,
        and in coefficients of scale one; and half of their largest, by which they lie too high."""
        if (device, dtype) in self._made:
            return self._made[device, dtype]
        groups = [[field for field in self.fields if field.own // self.each == group] for group in range(self.groups)]
        most = max(map(len, groups))
        nothing = Field(0, 0, 0, 0, 0)
        fields = [field for group in groups for field in (*group, *[nothing] * (most - len(group)))]
        byte, own = (torch.tensor([getattr(f, name) for f in fields], device=device) for name in ("byte", "own"))
        mask = torch.tensor([f.mask << f.up for f in fields], dtype=torch.uint8, device=device)
        power = torch.tensor([2.0 ** (f.below - f.up) for f in fields], dtype=dtype, device=device)
        step = power * self._tables(device)[2].to(dtype)[own] * (mask > 0)
        made = byte, mask.unsqueeze(1), own, power, step, mask.view(self.groups, 1, most) / -2
        return _kept(self._made, (device, dtype), (*made[:5], made[5].to(dtype)))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Rows as bytes: codes, then scales."""
        return JointCoder((self,), (0,)).encode(x)[0][0]

    def beside(self, other: RowCoder) -> JointCoder:
        """Codes rows of keys and of the other coder's values side by side, and then both fine."""
        if self._both is None or self._both.coders[1] is not other:
            self._both = JointCoder((self, other, self.fine, other.fine), (0, self.size, 0, self.size))
        return self._both

    def _coded(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of all coefficients, and the bytes of scales, as numbers."""
        x = x[..., : self.kept].float().nan_to_num()  # of padding, which is hidden
        most, slope = self._tables(x.device)[:2, : self.kept]
        padded = nn.functional.pad(x, (0, -self.kept % self.groups)) if self.kept % self.groups else x
        scale = _scale(padded.unflatten(-1, (self.groups, -1)).abs().amax(-1))
        code = torch.addcmul((most + 1) / 2, x / self._spread(_factor(scale)), slope).floor()
        return code.clamp_min(0).minimum(most), scale

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Coefficients of such rows."""
        byte, mask, own, power, *_ = self._fields(rows.device, torch.float32)
        fields = rows.mT.index_select(2, byte).bitwise_and_(mask) * power.unsqueeze(1)
        codes = fields.new_zeros((*fields.shape[:2], self.size, fields.shape[3])).index_add_(2, own, fields)
        return self._read(codes.mT, rows.narrow(-1, self.codes, self.groups), dtype)

    def scores(self, q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Products (B, G, h, T) of queries (B, G, h, K) with the coefficients of such rows."""
        byte, mask, own, _, step, lean = self._fields(q.device, q.dtype)
        texts, heads, asking, tokens = *q.shape[:3], rows.shape[2]
        fields = rows.mT.index_select(2, byte).bitwise_and_(mask).to(q.dtype).view(-1, lean.shape[2], tokens)
        asked = (q.index_select(3, own) * step).view(texts, heads, asking, self.groups, -1).transpose(2, 3)
        asked = asked.reshape(-1, asking, lean.shape[2])
        base = asked @ lean.mT if len(asked) == self.groups else asked @ lean.mT.repeat(texts * heads, 1, 1)
        found = torch.baddbmm(base, asked, fields).view(texts, heads, self.groups, asking, tokens)
        return found.mul_(self._factors(rows, q.dtype)).sum(2)

    def mixed(self, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Sums (B, G, h, K) of the coefficients of such rows, times weights (B, G, h, T)."""
        byte, mask, own, _, step, lean = self._fields(rows.device, weights.dtype)
        fields = rows.mT.index_select(2, byte).bitwise_and_(mask).to(weights.dtype)
        weights = weights.unsqueeze(2) * self._factors(rows, weights.dtype)
        base = weights.sum(4, keepdim=True) * lean
        found = torch.baddbmm(
            base.flatten(0, 2), weights.flatten(0, 2), fields.view(-1, lean.shape[2], rows.shape[2]).mT
        )
        found = found.view(base.shape).transpose(2, 3).flatten(3) * step
        return found.new_zeros((*found.shape[:3], self.size)).scatter_add_(3, own.expand(found.shape), found)

    def _factors(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What the numbers of every group and token are to be multiplied with (B, G, groups, 1, T)."""
        return _factor(rows.narrow(-1, self.codes, self.groups).mT.unsqueeze(3)).to(dtype)

    def _read(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What codes and scales stand for; coefficients beyond the kept ones are zeros."""
        _, _, step, middle = self._tables(codes.device)
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
            found = self._read(nn.functional.pad(codes, (0, self.size - self.kept)), scale, x.dtype)
        return as_if_kept(found, x)

    def _spread(self, scale: torch.Tensor) -> torch.Tensor:
        """A scale for every coefficient."""
        return scale.repeat_interleave(self.each, -1)[..., : self.kept]


@functools.cache
def _fine(size: int, bits: str) -> RowCoder:
    """The coder of near tokens, the same for all layers: its tables are read once for all of them."""
    return RowCoder({bits: size}, size)


class JointCoder:
    """Codes rows of several coders at once, which takes hardly more steps than one of them alone.

    `firsts` is the place of every coder's first coefficient among those that are given side by side.
    """

    def __init__(self, coders: tuple[RowCoder, ...], firsts: tuple[int, ...]) -> None:
        self.coders, self.firsts = coders, firsts
        self.each = max(coder.each for coder in coders)
        self._made: dict[Any, tuple[torch.Tensor, ...]] = {}

    def _tables(self, device: torch.device) -> Any:
        """Of all groups: their coefficients, repeated up to the same number; largest codes, codes per unit, steps,
        first middles, codes of zero and zeros (groups, each, 1). Of fields: code or scale; bits below, mask and place;
        byte. And where every coder's coefficients lie in groups; those without bits in a last group, of zeros."""
        if device in self._made:
            return self._made[device]
        own: list[list[int]] = []
        codes: list[torch.Tensor] = []
        count = sum(coder.groups for coder in self.coders)
        fields, slots, begin = [], [], 0
        for coder, first in zip(self.coders, self.firsts, strict=True):
            slot: list[int] = []  # of every coefficient
            for group in range(coder.groups):
                those = list(range(group * coder.each, min(coder.kept, (group + 1) * coder.each))) or [0]
                slot += [len(own) * self.each + at for at in range(len(those))]
                those += those[:1] * (self.each - len(those))
                own.append([first + at for at in those])
                codes.append(coder._tables(device)[:, those])
                fields.append(((count + 1) * self.each + len(own) - 1, 0, 255, 0, begin + coder.codes + group))
            fields += [(slot[f.own], f.below, f.mask, f.up, begin + f.byte) for f in coder.fields]
            slots += [*slot[: coder.kept], *[count * self.each] * (coder.size - coder.kept)]
            begin += coder.bytes
        table = torch.stack((*codes, torch.zeros_like(codes[0])), 1).unsqueeze(3)
        numbers = torch.tensor(fields, dtype=torch.int32, device=device).T.contiguous()
        taken = torch.tensor([*own, own[0]], device=device).flatten()
        made = numbers[0].long(), numbers[1:4].unsqueeze(2), numbers[4].long().unsqueeze(1)
        table = torch.cat((table, (table[:1] + 1) / 2, torch.zeros_like(table[:1])))
        return _kept(self._made, device, (taken, table, *made, torch.tensor(slots, device=device)))

    def encode(self, *given: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Rows of every coder (B, G, T, N) as bytes, codes before scales, of coefficients (B, G, T, K) side by side.

        And the coefficients that each of them stands for, in single precision.
        """
        x = torch.cat(given, -1) if len(given) > 1 else given[0]
        some = x.shape[2] if torch.compiler.is_compiling() else TOKENS  # one graph for any number of tokens
        parts = [self._encode(part.mT.contiguous()) for part in x.split(some, 2)] if x.shape[2] > some else ()
        rows, found = (torch.cat(part, 3) for part in zip(*parts, strict=True)) if parts else self._encode(x.mT)
        both = rows.split([coder.bytes for coder in self.coders], 2), found.split([c.size for c in self.coders], 2)
        return tuple(part.mT for part in both[0]), tuple(part.mT for part in both[1])

    def _encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of all coders (B, G, N, T) of coefficients (B, G, K, T), and what they stand for."""
        taken, (most, slope, step, middle, half, least), which, (below, mask, up), byte, slots = self._tables(x.device)
        texts, heads, _, tokens = x.shape
        x = x.float().nan_to_num().index_select(2, taken).view(texts, heads, -1, self.each, tokens)
        scale = _scale(x.abs().amax(3))
        factor = _factor(scale).unsqueeze(3)
        codes = torch.addcmul(half, x / factor, slope).clamp_(least, most).floor_()
        numbers = torch.cat((codes.flatten(2, 3), scale), 2).int().index_select(2, which)
        numbers = numbers.bitwise_right_shift_(below).bitwise_and_(mask).bitwise_left_shift_(up)
        rows = numbers.new_zeros((texts, heads, sum(coder.bytes for coder in self.coders), tokens))
        if tokens == 1:
            rows.scatter_add_(2, byte.expand(numbers.shape), numbers)
        else:  # in whole lines
            rows.index_add_(2, byte[:, 0], numbers)
        found = torch.addcmul(middle, codes, step).mul_(factor).view(texts, heads, -1, tokens)
        return rows.to(torch.uint8), found.index_select(2, slots)


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


def _scale(size: torch.Tensor) -> torch.Tensor:
    """The bytes of scales, as numbers, of groups whose largest numbers are of this size."""
    return (torch.ceil(OCTAVE * size.clamp_min(2.0**-15).log2()) + MIDDLE).clamp(0, 255)


def _factor(code: torch.Tensor) -> torch.Tensor:
    """The scales that bytes stand for, whatever numbers hold them: looked up, so that all ways of reading agree."""
    if (table := _FACTORS.get(code.device)) is None:
        octaves = (torch.arange(256, dtype=torch.float64, device=code.device) - MIDDLE) / OCTAVE
        table = _kept(_FACTORS, code.device, torch.exp2(octaves).float())
    return table.index_select(0, code.reshape(-1).int()).view(code.shape)


def _span(bits: int) -> float:
    """The part of the scale that the steps cover: with few steps less error is made where most numbers are.

    Still fewer would have the least squared error, but all numbers would shrink together, which does more damage.
    """
    return FEW_STEPS if bits <= 2 else 1.0
