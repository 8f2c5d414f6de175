"""The cache of layers whose rows are in bits, as our kernels read it, and what happens to new rows there.

Codes and scales are those of `RowCoder`; only their order in memory is another. The first tokens of a text are kept as
they are, the newest in more bits (`CodedLayer`), beside the codes. Shape suffixes: B texts, G rows per token,
L places, T tokens, K coefficients.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from headwise.errors import ModelError
from headwise.fast.cache import FastLayer
from headwise.fast.code_layout import TILE, CodeLayout
from headwise.runtime.cache_headwise import NEAR, WHOLE, Rows

SIDE = -(-(WHOLE + NEAR) // 16) * 16  # tokens that are not coded, as kernels read them
KERNEL_DEVICES = ["cuda"]  # where the kernels run
CHANGED = "this text began with rows in bits for our kernels, and cannot continue without them: "


class CodedSide:
    """Keys or values of a layer."""

    def __init__(self, layout: CodeLayout, by_place: bool, rows: int, groups: int, places: int, like: torch.Tensor):
        self.layout, self.by_place, self.places = layout, by_place, places
        size, device = (rows, groups), like.device
        self.words = torch.zeros(*size, places * max(1, layout.words), dtype=torch.int16, device=device)
        self.scales = torch.zeros(*size, places * max(1, layout.pairs), dtype=torch.int32, device=device)  # two in each
        self.side = torch.zeros(*size, SIDE, layout.size, dtype=like.dtype, device=device)

    def of(self, rows: slice) -> CodedSide:
        """Some texts."""
        made = object.__new__(CodedSide)
        made.__dict__ = {name: x[rows] if torch.is_tensor(x) else x for name, x in vars(self).items()}
        return made

    def buffers(self) -> tuple[torch.Tensor, ...]:
        """All that it holds."""
        return self.words, self.scales, self.side

    def write(self, x_BGTK: torch.Tensor, starts_B: torch.Tensor, past: int | torch.Tensor) -> None:
        """Append rows behind `past` others."""
        from headwise.fast.code_place import place_codes

        place_codes(self.layout, self, x_BGTK, starts_B, past, self.by_place, WHOLE, NEAR)

    def read(self, starts_B: torch.Tensor, past: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `past` rows as they are read from afar, and the newest as they are read from near."""
        used = -(-past // TILE) * TILE
        words, scales = (x[..., : x.shape[2] // self.places * used] for x in (self.words, self.scales))
        rows = self.layout.read(words.contiguous(), scales.contiguous(), self.by_place)[:, :, :past].to(dtype)
        place = torch.arange(past, device=rows.device) - starts_B[:, None]
        first = ((place >= 0) & (place < WHOLE))[:, None, :, None]
        begin = max(0, past - NEAR + 1)
        newest = torch.arange(begin, past, device=rows.device) % NEAR + WHOLE
        slot = place.clamp(0, WHOLE - 1).long()[:, None, :, None].expand(-1, rows.shape[1], -1, rows.shape[3])
        whole = self.side.gather(2, slot)
        near = torch.where(first[:, :, begin:], whole[:, :, begin:], self.side[:, :, newest])
        return torch.where(first, whole, rows), near


class CodedFastLayer(FastLayer):
    """Rows of one layer in bits. Outside fast steps it is an ordinary cache of numbers, which are coded when read."""

    def __init__(self, capacity: int, layouts: tuple[CodeLayout, CodeLayout]) -> None:
        super().__init__(capacity)
        self.layouts = layouts
        self.sides: Any = ()

    def allocate_codes(self, rows: int, groups: int, like: torch.Tensor) -> None:
        """Make room for so many texts with so many rows per token."""
        self.dtype, self.device = like.dtype, like.device
        kinds = zip(self.layouts, (True, False), strict=True)
        self.sides = tuple(CodedSide(one, keys, rows, groups, self.capacity, like) for one, keys in kinds)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Append numbers, as an ordinary cache does."""
        if self.sides:
            raise ModelError(f"{CHANGED}generate it anew, or load the model without optimise=True.")
        return super().update(key_states, value_states, *args, **kwargs)

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self.is_initialized = bool(self.sides)

    def buffers(self) -> tuple[torch.Tensor, ...]:
        """All that it holds."""
        return tuple(x for side in self.sides for x in side.buffers()) if self.sides else super().buffers()


def supported(layers: list[Any]) -> bool:
    """Whether our kernels read the rows in bits that some layers have, if any."""
    coded = [layer for layer in layers if layer.coders is not None]
    if not coded:
        return True
    here = all(layer.q_proj.weight.device.type in KERNEL_DEVICES for layer in coded)
    return here and find_spec("triton") is not None and all(layer.attend.sliding_window is None for layer in coded)


def layouts_of(layer: Any) -> tuple[CodeLayout, CodeLayout] | None:
    """How the rows of an attention lie in the cache, if they are in bits."""
    if layer.coders is None:
        return None
    keys, values = (CodeLayout(coder) for coder in layer.coders)
    return keys, values


def write_prompt(attention: Any, cache: Any, k: torch.Tensor, v: torch.Tensor) -> Rows:
    """Write rows of new tokens into a cache, and return what these tokens read of all rows so far."""
    layer, seen = cache.layers[attention.layer_idx], cache.seen
    if not layer.is_initialized:
        layer.allocate_codes(cache.batch, k.shape[1], k)
    past, starts_B = seen.end - k.shape[2], seen.starts_B
    place = torch.arange(past, seen.end, device=k.device) - starts_B[:, None]
    first = ((place >= 0) & (place < WHOLE))[:, None, :, None]
    rows, near = [], []
    for coder, held, x in zip(attention.coders, layer.sides, (k, v), strict=True):
        side = held.of(cache.rows)
        far, fine = (torch.where(first, x, one.rounded(x)) for one in (coder, coder.fine))
        if past:
            before = side.read(starts_B, past, x.dtype)
            far, fine = (torch.cat(both, 2) for both in zip(before, (far, fine), strict=True))
        side.write(x, starts_B, past)
        rows.append(far)
        near.append(fine)
    return Rows(rows[0], rows[1], tuple(near), seen.end - near[0].shape[2], past)


def padding_mask(cache: Any) -> torch.Tensor | None:
    """Which places are not padding (B, L), where some text has padding."""
    seen = cache.seen
    if not seen.padded:
        return None
    found: torch.Tensor = torch.arange(seen.end, device=seen.starts_B.device) >= seen.starts_B[:, None]
    return found
