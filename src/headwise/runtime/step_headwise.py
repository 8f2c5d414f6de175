"""What one new token reads of a coded cache: bytes, and few rows in numbers. Lies beside every tailored model.

Written by Headwise (Apache-2.0). Shape suffixes: B batch, G rows per token, T tokens, K coefficients, N bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from .coder_headwise import RowCoder

TILE = 1 << 18  # numbers that one new token reads at once, about
SPARE = 64  # places for tokens to come, in a cache on a CPU
_room: Any = weakref.WeakKeyDictionary()  # layer of a cache -> the keys that it shows, and where keys and values lie


def with_places(x: torch.Tensor, more: int) -> torch.Tensor:
    """Rows before places for more. In rows of bytes, one byte of all tokens lies together: as `RowCoder` reads them."""
    return nn.functional.pad(x.mT, (0, more)).mT if x.dtype == torch.uint8 else nn.functional.pad(x, (0, 0, 0, more))


def grown(layer: Any, new: int) -> Any:
    """Where the keys and values of a layer lie on a CPU, after it was given places for new ones, still to be written.

    There is room for some more: the whole cache is copied only where no places are left.
    """
    end = layer.keys.shape[2] + new
    shown, room = _room.get(layer, (None, (layer.keys,)))
    barred = room[0].is_inference() and not torch.is_inference_mode_enabled()
    if shown is not layer.keys or end > room[0].shape[2] or barred:  # new, changed or copied by others, or full
        room = [with_places(x, new + SPARE) for x in (layer.keys, layer.values)]
    layer.keys, layer.values = (place.narrow(2, 0, end) for place in room)
    _room[layer] = layer.keys, room
    return room


def whole_rows(coders: Any, layer: Any, fine: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Numbers of the first and the near keys and values (B, G, K, T). Made anew in every step: a cache holds bytes."""
    wide = torch.promote_types(dtype, torch.float32)
    found = (coder.fine.decode(x, wide) for coder, x in zip(coders, fine, strict=True))
    return tuple(torch.cat((x.to(wide), y), 2).mT for x, y in zip(layer.starts, found, strict=True))


class OneToken(NamedTuple):
    """Keys and values that one new token of every text reads: in bytes, which `read` does not turn into rows."""

    k: torch.Tensor  # (B, G, S, N)
    v: torch.Tensor
    whole: tuple[torch.Tensor, ...]  # first and near ones in numbers, as `whole_rows` makes them
    start: int  # the first near place
    coders: tuple[RowCoder, RowCoder]
    rows: Callable[[], Any]  # makes `Rows`: all in numbers
    gains: tuple[Any, Any] | None = None  # as those of `Rows`

    def read(self, attend: Any, q: torch.Tensor, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the heads' queries (B, H, 1, K) find: values (B, 1, H, V), and weights if the kernel gives them."""
        plain = attend.config._attn_implementation == "sdpa" and attend.softcap is None and not attend.training
        if not plain or q.requires_grad or (mask is not None and mask.dim() != 4):
            return self.rows()._replace(gains=self.gains).read(attend, q, mask, **kwargs)
        first, values = self.whole
        begin = self._first()
        asked = q.to(first.dtype).view(*self.k.shape[:2], -1, q.shape[3]) * attend.scaling
        asked = asked if self.gains is None else asked / self.gains[0].unsqueeze(1)
        tiles = self._tiles(self.k, self.coders[0])
        logits = torch.cat((asked @ first, *(self.coders[0].scores(asked, rows) for rows in tiles)), 3)
        if mask is not None:
            mask = torch.cat((mask[..., :begin], mask[..., self.start :], mask[..., begin : self.start]), 3)
            mask = mask.expand(-1, q.shape[1], -1, -1).reshape(-1, *logits.shape[1:])
            logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
        weights = logits.softmax(3)
        z, at = weights.narrow(3, 0, first.shape[3]) @ values.mT, first.shape[3]
        for rows in self._tiles(self.v, self.coders[1]):
            z += self.coders[1].mixed(weights.narrow(3, at, rows.shape[2]), rows)
            at += rows.shape[2]
        z = z if self.gains is None else z / self.gains[1].unsqueeze(1)
        return z.to(q.dtype).view(q.shape[0], 1, q.shape[1], -1), None

    def _first(self) -> int:
        """How many first tokens there are."""
        return self.whole[0].shape[3] - (self.k.shape[2] - self.start)

    def _tiles(self, rows: torch.Tensor, coder: RowCoder) -> tuple[torch.Tensor, ...]:
        """Coded rows between the first and the near ones, not too many at once."""
        begin = self._first()
        far = rows.narrow(2, begin, self.start - begin)
        return far.split(max(1, TILE // (far.shape[0] * far.shape[1] * coder.size)), 2) if far.shape[2] else ()
