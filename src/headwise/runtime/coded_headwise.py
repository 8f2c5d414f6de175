"""Rows of the key/value cache in few bits. Needs transformers and torch only; lies beside models with a coded cache.

A cached row is a vector of coefficients in a basis in which they are uncorrelated, most important first. The first of
them get 8 bits each, the next 4, 2 and 1; those that get none are not computed at all. A scale belongs to every token
and to at most 64 coefficients of one width, so that no outlier is cut off. A token's codes and scales lie together in
one row of bytes: appending, cropping, reordering and copying a cache move whole rows, as with any other cache.
Written by Headwise (Apache-2.0). Shape suffixes: B batch, G rows per token, T tokens, K coefficients, N bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import DynamicLayer

WIDTHS = (8, 4, 2, 1)  # bits of a coefficient
GROUP = 64  # coefficients that share a scale, at most
OCTAVE = 8  # steps of a scale in a factor of two: one byte covers 2**-16 to 2**16
MIDDLE = 128  # the byte that stands for a scale of one
ONE_BIT = 0.7979  # mean size of a normal number: the best two levels for it


class Part(NamedTuple):
    """Neighbouring coefficients of one width with their scale: where they lie in the row and in its bytes."""

    bits: int
    first: int  # coefficient
    size: int  # coefficients
    byte: int  # of the first code; scales lie behind all codes
    scale: int  # byte


def layout(counts: tuple[int, ...]) -> tuple[list[Part], int]:
    """The parts of a row with so many coefficients of each width, and the bytes that it takes.

    >>> layout((2, 4, 8, 8))[1]  # 2 + 2 + 2 + 1 bytes of codes, 4 of scales
    11
    """
    sizes = [(bits, min(GROUP, count - at)) for bits, count in zip(WIDTHS, counts, strict=True)
             for at in range(0, count, GROUP)]  # fmt: skip
    first = byte = 0
    parts = []
    for number, (bits, count) in enumerate(sizes):
        parts.append(Part(bits, first, count, byte, number))
        first, byte = first + count, byte - (-count * bits // 8)
    return [part._replace(scale=byte + part.scale) for part in parts], byte + len(sizes)


class RowCoder(nn.Module):
    """Codes rows of coefficients (B, G, T, K) as bytes (B, G, T, N) and reads them again.

    `shift_GK` is taken off before coding and added again: the mean of the coefficients, whose spread is one.
    """

    def __init__(self, groups: int, counts: tuple[int, ...]) -> None:
        super().__init__()
        self.counts = tuple(counts)
        self.parts, self.bytes = layout(self.counts)
        self.register_buffer("shift_GK", torch.zeros(groups, sum(self.counts)))

    def encode(self, x_BGTK: torch.Tensor) -> torch.Tensor:
        """Rows as bytes. What becomes of a token depends on that token alone."""
        x = x_BGTK.float() - self.shift_GK[:, None].float()
        codes, scales = [], []
        for part in self.parts:
            own = x.narrow(-1, part.first, part.size)
            size = own.abs().mean(-1, keepdim=True) / ONE_BIT if part.bits == 1 else own.abs().amax(-1, keepdim=True)
            scale = (torch.ceil(OCTAVE * size.clamp_min(2.0**-15).log2()) + MIDDLE).clamp(0, 255)
            scales.append(scale.to(torch.uint8))
            codes.append(_packed(_levels(own / _factor(scale), part.bits), part.bits))
        return torch.cat((*codes, *scales), -1)

    def decode(self, rows_BGTN: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Coefficients of such rows."""
        found = []
        for part in self.parts:
            codes = rows_BGTN.narrow(-1, part.byte, -(-part.size * part.bits // 8))
            scale = _factor(rows_BGTN.narrow(-1, part.scale, 1).float())
            found.append(_values(_unpacked(codes, part.bits, part.size), part.bits) * scale)
        return (torch.cat(found, -1) + self.shift_GK[:, None].float()).to(dtype)

    def forward(self, x_BGTK: torch.Tensor) -> torch.Tensor:
        """Coefficients as the cache will give them back; gradients pass as if nothing had been coded."""
        with torch.no_grad():
            found = self.decode(self.encode(x_BGTK), x_BGTK.dtype)
        return x_BGTK + (found - x_BGTK).detach() if x_BGTK.requires_grad else found


def _factor(code: torch.Tensor) -> torch.Tensor:
    """The scale that a byte stands for."""
    return torch.exp2((code - MIDDLE) / OCTAVE)


def _levels(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Whole numbers from 0 for coefficients between -1 and 1: the middles of equal steps stand for them."""
    count = 1 << bits
    return ((x + 1) * (count / 2)).floor().clamp(0, count - 1).to(torch.uint8)


def _values(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """What such numbers stand for; of one bit the mean size of a normal number on either side."""
    if bits == 1:
        return (2.0 * codes - 1) * ONE_BIT
    return (codes + 0.5) * (2.0 / (1 << bits)) - 1


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of few bits, several to a byte, the first in the lowest bits."""
    if bits == 8:
        return codes
    each = 8 // bits
    codes = nn.functional.pad(codes, (0, -codes.shape[-1] % each)).unflatten(-1, (-1, each))
    places = torch.arange(0, 8, bits, device=codes.device, dtype=torch.uint8)
    return (codes << places).sum(-1, dtype=torch.uint8)


def _unpacked(rows: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The first `count` codes that were packed."""
    if bits == 8:
        return rows
    places = torch.arange(0, 8, bits, device=rows.device, dtype=torch.uint8)
    return ((rows.unsqueeze(-1) >> places) & ((1 << bits) - 1)).flatten(-2)[..., :count]


class CodedLayer(DynamicLayer):
    """A layer of a cache that stores rows of bytes and nothing else, but for the first tokens of every text.

    Those (`whole` of them) keep their coefficients: all other tokens look at them, and their errors would be seen most.
    """

    def __init__(self, keys: RowCoder, values: RowCoder, whole: int = 4) -> None:
        super().__init__()
        self.coders, self.whole = (keys, values), whole
        self.starts: list[torch.Tensor] = []  # coefficients of the first tokens: keys, values (B, G, at most whole, K)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Append rows and return all coefficients as attention reads them."""
        new = (key_states, value_states)
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self.keys, self.values = (
                x.new_empty((*x.shape[:2], 0, coder.bytes), dtype=torch.uint8)
                for x, coder in zip(new, self.coders, strict=True)
            )
            self.starts = [x[:, :, :0] for x in new]
        left = self.whole - self.starts[0].shape[2]
        if left > 0:
            self.starts = [torch.cat((a, x[:, :, :left]), 2) for a, x in zip(self.starts, new, strict=True)]
        rows = [coder.encode(x) for coder, x in zip(self.coders, new, strict=True)]
        self.keys, self.values = torch.cat((self.keys, rows[0]), 2), torch.cat((self.values, rows[1]), 2)
        return self.read()

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All coefficients: those of the first tokens as they were, the others as they were coded."""
        stored, found = (self.keys, self.values), []
        for coder, rows, start in zip(self.coders, stored, self.starts, strict=True):
            whole = min(start.shape[2], rows.shape[2])
            found.append(torch.cat((start[:, :, :whole], coder.decode(rows[:, :, whole:], self.dtype)), 2))
        return found[0], found[1]

    def _each(self, change: Any) -> None:
        self.starts = [change(start) for start in self.starts]

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self.starts = []

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens."""
        super().crop(tokens_to_remove)
        length = self.get_seq_length()
        self._each(lambda start: start[:, :, :length])

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Choose rows of the batch again, for beam search."""
        super().reorder_cache(beam_idx)
        self._each(lambda start: start.index_select(0, beam_idx.to(start.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every text of the batch."""
        super().batch_repeat_interleave(repeats)
        self._each(lambda start: start.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some texts of the batch."""
        super().batch_select_indices(indices)
        self._each(lambda start: start[indices])

    def offload(self) -> None:
        """Move everything to host memory."""
        super().offload()
        self._each(lambda start: start.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move everything back."""
        super().prefetch()
        self._each(lambda start: start.to(self.device, non_blocking=True))

    def nbytes(self) -> int:
        """Bytes that the cache takes."""
        return sum(x.nbytes for x in (self.keys, self.values, *self.starts) if x is not None)
