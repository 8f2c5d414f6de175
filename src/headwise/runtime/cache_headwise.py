"""Keys and values in a cache, whole or in few bits. Needs transformers and torch; lies beside every tailored model.

A coded row is a vector of coefficients in a basis in which they are uncorrelated with a spread of one, most important
first. The first of them get up to 8 bits each, the next fewer; those that get none are not computed at all. A scale of
one byte belongs to every token and about 64 neighbouring coefficients. It is as large as the largest of them, so that
no outlier is cut off. Codes and scales of a token lie together in one row of bytes, which the cache of transformers
stores in place of numbers: it appends, crops, reorders and copies such rows as all others. The first tokens of a text
are also kept whole: all later tokens look at them, and their rows are unlike all others.
Written by Headwise (Apache-2.0). Shape suffixes: B batch, G rows per token, T tokens, K coefficients, N bytes.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

SPARE = 64  # places for tokens to come, in a cache on a CPU
WHOLE = 4  # tokens at the beginning of a text that are kept as they are
GROUP = 64  # neighbouring coefficients that share a scale, about
PLANES = (8, 4, 2, 1)  # bits that pack evenly into bytes
OCTAVE = 8  # steps of a scale in a factor of two: one byte covers 2**-16 to 2**16
MIDDLE = 128  # the byte that stands for a scale of one
FEW_STEPS = 0.8  # the part of the scale that codes of one and two bits cover
_room: Any = weakref.WeakKeyDictionary()  # layer of a cache -> the keys that it shows, and where keys and values lie


@functools.cache
def _only_appends() -> bool:
    """Whether a layer of this version's cache does nothing but append keys and values, as `append` does in its place.

    Tried out once, on three tokens: a version whose layers also keep count of something is left to its own code.
    """
    layer, one, kept = DynamicLayer(), torch.ones(1, 1, 1, 1, device="cpu"), []
    for value in range(3):
        layer.update(value * one, -value * one)
        kept.append({name: held for name, held in vars(layer).items() if name not in ("keys", "values")})
    appended = (layer.keys.flatten().tolist(), layer.values.flatten().tolist()) == ([0, 1, 2], [0, -1, -2])
    return appended and kept[1:] == kept[:-1]


def append(cache: Any, k: torch.Tensor, v: torch.Tensor, index: int) -> Any:
    """As `cache.update`, which copies the whole cache for every token; on a CPU only where no places are left."""
    layer: Any = cache.layers[index] if type(cache) is DynamicCache and index < len(cache.layers) else None
    known = type(layer) in (DynamicLayer, CodedLayer) and layer.get_seq_length() and layer.keys.dtype == k.dtype
    known = known and not cache.offloading and k.device.type == "cpu"
    if not known or torch.is_grad_enabled() or torch.compiler.is_compiling() or not _only_appends():
        return cache.update(k, v, index)
    past, new = layer.keys.shape[2], k.shape[2]
    shown, room = _room.get(layer, (None, (layer.keys,)))
    barred = room[0].is_inference() and not torch.is_inference_mode_enabled()
    if shown is not layer.keys or past + new > room[0].shape[2] or barred:  # new, changed or copied by others, or full
        room = [nn.functional.pad(x, (0, 0, 0, new + SPARE)) for x in (layer.keys, layer.values)]
    for place, x in zip(room, (k, v), strict=True):
        place.narrow(2, past, new).copy_(x)
    layer.keys, layer.values = (place.narrow(2, 0, past + new) for place in room)
    _room[layer] = layer.keys, room
    return layer.keys, layer.values


class CodedLayer(DynamicLayer):
    """A layer of a cache whose rows are bytes, with the first tokens of every text as they are."""

    starts: tuple[torch.Tensor, ...] = ()  # keys and values of the first tokens (B, G, WHOLE, K), once there are any
    padding: torch.Tensor | None = None  # tokens before the first of every text (B)
    begun = 0  # tokens after which every text has more than its first ones

    def keep(self, k: torch.Tensor, v: torch.Tensor, mask: Any) -> None:
        """Keep those of the new tokens that are among the first of their text."""
        past, new = self.get_seq_length(), k.shape[2]
        if self.starts and past >= self.begun:
            return
        if not self.starts:
            self.starts = tuple(x.new_zeros((*x.shape[:2], WHOLE, x.shape[3])) for x in (k, v))
        self.padding = _padding(mask, k)
        self.begun = WHOLE + int(self.padding.max())
        slot = torch.arange(WHOLE, device=k.device) + self.padding.unsqueeze(1) - past  # its place among the new tokens
        given = ((slot >= 0) & (slot < new))[:, None, :, None]
        taken = (_at(x.detach(), slot.clamp(0, new - 1)) for x in (k, v))
        self.starts = tuple(torch.where(given, new, old) for new, old in zip(taken, self.starts, strict=True))

    def restore(self, found: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """Write the first tokens of every text as they were over what codes say of them (B, G, T, K)."""
        padding, tokens = self.padding.unsqueeze(1), found.shape[2]
        last = (tokens - 1 - padding).clamp_min(0)
        slot = torch.arange(WHOLE, device=found.device).minimum(last)  # of shorter texts the last one, repeatedly
        place = (slot + padding).clamp_max(tokens - 1)[:, None, :, None]
        return found.scatter_(2, place.expand(-1, found.shape[1], -1, found.shape[3]), _at(start, slot))

    def _each(self, change: Any) -> None:
        if self.padding is not None:
            self.starts, self.padding = tuple(map(change, self.starts)), change(self.padding)

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self.starts, self.padding, self.begun = (), None, 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Choose rows of the batch again, for beam search."""
        super().reorder_cache(beam_idx)
        self._each(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every text of the batch."""
        super().batch_repeat_interleave(repeats)
        self._each(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some texts of the batch."""
        super().batch_select_indices(indices)
        self._each(lambda x: x[indices])


def remembered(
    coders: tuple[RowCoder, RowCoder], k: torch.Tensor, v: torch.Tensor, cache: Any, index: int, mask: Any, whole: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as a cache gives them back, after those that it holds; without one, as it would.

    `whole`: the first tokens of a text are kept as they are. Caches of other kinds get coded numbers, not bytes.
    """
    if type(cache) is not DynamicCache:
        past = cache.get_seq_length(index) if cache is not None else 0
        new = [coder.rounded(x) for coder, x in zip(coders, (k, v), strict=True)]
        if whole:
            first = _first(k, past, _padding(mask, k))
            new = [torch.where(first, x, y) for x, y in zip((k, v), new, strict=True)]
        k, v = new if cache is None else cache.update(*new, index)
        return k, v
    while len(cache.layers) <= index:
        cache.layers.append(DynamicLayer())
    if whole and type(cache.layers[index]) is DynamicLayer and not cache.layers[index].is_initialized:
        cache.layers[index] = CodedLayer()
    layer: Any = cache.layers[index]
    if type(layer) is CodedLayer:
        layer.keep(k, v, mask)
    rows = append(cache, coders[0].encode(k.detach()), coders[1].encode(v.detach()), index)
    found = [coder.decode(row, k.dtype) for coder, row in zip(coders, rows, strict=True)]
    if type(layer) is CodedLayer:
        found = [layer.restore(x, start) for x, start in zip(found, layer.starts, strict=True)]
    return _as_if_kept(found[0], k), _as_if_kept(found[1], v)


def _as_if_kept(found: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """All rows, with gradients of the new ones, which are last, as if nothing had been coded."""
    if not new.requires_grad:
        return found
    past, coded = found.split((found.shape[-2] - new.shape[-2], new.shape[-2]), -2)
    return torch.cat((past, new + (coded - new).detach()), -2)


def _at(x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """The rows of some tokens (B, G, ...) of every text, by their places (B, ...)."""
    return x.gather(2, token[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _padding(mask: Any, like: torch.Tensor) -> torch.Tensor:
    """How many tokens come before the first of every text (B), by the mask that attention is given."""
    if not isinstance(mask, torch.Tensor) or mask.dim() not in (2, 4):
        return torch.zeros(len(like), dtype=torch.long, device=like.device)
    seen = mask if mask.dim() == 2 else mask[:, 0, -1]  # the last token sees all that are not padding
    seen = seen if seen.dtype == torch.bool or mask.dim() == 2 else seen == 0
    seen = seen.to(torch.uint8)
    none = seen.shape[1] * (seen.amax(1) == 0)  # all tokens so far are padding
    return (seen.argmax(1) + none).expand(len(like))


def _first(x: torch.Tensor, past: Any, padding: torch.Tensor) -> torch.Tensor:
    """Which of the new tokens are among the first of their text (B, 1, T, 1)."""
    place = torch.arange(x.shape[2], device=x.device) + past - padding.unsqueeze(1)
    return ((place >= 0) & (place < WHOLE))[:, None, :, None]


class RowCoder:
    """Codes rows of coefficients (B, G, T, K) as bytes (B, G, T, N) and reads them again.

    `counts` says how many coefficients have how many bits: {"4": 96, "2": 32}. Codes are stored in planes of 8, 4, 2
    and 1 bits, one behind the other: a code of 6 bits has its highest 4 in one plane and the other 2 in another. What
    becomes of a token depends on that token alone.
    """

    def __init__(self, counts: dict[str, int]) -> None:
        self.parts: list[tuple[int, int]] = []  # bits and coefficients, most bits first
        for bits in sorted(map(int, counts), reverse=True):
            self.parts.append((bits, counts[str(bits)]))
        self.size, self.bits = sum(counts.values()), 0
        self.planes: list[tuple[int, int, int]] = []  # bits of a field, the first bit of all, fields
        for plane in PLANES:
            if fields := sum(size for bits, size in self.parts if bits & plane):
                self.planes.append((plane, self.bits, fields))
                self.bits += fields * plane
        self.codes, self.groups = -(-self.bits // 8), max(1, round(self.size / GROUP))
        self.bytes = self.codes + self.groups

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Rows as bytes: codes, then scales."""
        x = x.float()
        padded = nn.functional.pad(x, (0, -self.size % self.groups))
        size = padded.unflatten(-1, (self.groups, -1)).abs().amax(-1).clamp_min(2.0**-15)
        scale = (torch.ceil(OCTAVE * size.log2()) + MIDDLE).clamp(0, 255)
        parts = (x / self._spread(_factor(scale))).split([size for _, size in self.parts], -1)
        codes = [(_levels(part, bits), bits) for part, (bits, _) in zip(parts, self.parts, strict=True)]
        rows = torch.zeros((*x.shape[:-1], self.codes), dtype=torch.uint8, device=x.device)
        for plane, start, _ in self.planes:  # below a field of a code are those of smaller planes
            fields = [code >> (bits & (plane - 1)) for code, bits in codes if bits & plane]
            packed = _packed(torch.cat(fields, -1) & ((1 << plane) - 1), plane, start % 8 // plane)
            rows |= nn.functional.pad(packed, (start // 8, self.codes - start // 8 - packed.shape[-1]))
        return torch.cat((rows, scale.to(torch.uint8)), -1)

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
        values = [_values(code, bits) for code, (bits, _) in zip(codes, self.parts, strict=True)]
        scale = _factor(rows.narrow(-1, self.codes, self.groups).float())
        return (torch.cat(values, -1) * self._spread(scale)).to(dtype)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Coefficients as a cache would give them back; gradients pass as if nothing had been coded."""
        with torch.no_grad():
            found = self.decode(self.encode(x), x.dtype)
        return _as_if_kept(found, x)

    def _spread(self, scale: torch.Tensor) -> torch.Tensor:
        """A scale for every coefficient."""
        return scale.repeat_interleave(-(-self.size // self.groups), -1)[..., : self.size]


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
