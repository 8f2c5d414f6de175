"""Decoding with a cache in bits on a CPU: what one new token writes and reads, in C instead of many torch operations.

The cache is the ordinary one, byte for byte: prompts, beams, and whatever is not covered here run as without this.
Shape suffixes: B batch, G rows per token, T tokens, K coefficients, N bytes.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import weakref
from typing import Any

import torch

from headwise.fast.fused import subclass
from headwise.fast.native_build import N, P, library
from headwise.runtime import cache_headwise as caches
from headwise.runtime.coder_headwise import RowCoder, _factor, _scale
from headwise.runtime.modeling_headwise import TailoredAttention
from headwise.runtime.step_headwise import grown

TEXTS = 4  # at most, whose rows are multiplied with matrices one by one
SIZES = ("kept", "size", "groups", "each", "codes", "bytes")
FIELDS = ("first", "byte", "mask", "below", "up")
NUMBERS = ("those", "power", "most", "slope", "half", "step", "middle", "edges", "factors")
STRIDES = ("x_text", "x_group", "row_text", "row_group", "row_byte", "old_text", "old_group", "old_byte", "old_token")
COUNTS = ("texts", "groups", "heads", "tokens", "near", "whole", "q_text", "q_head", "mask_text")


class NativeCoder(ctypes.Structure):
    """`Coder` of native.c."""

    _fields_ = [*((name, ctypes.c_int32) for name in SIZES), *((name, P) for name in (*FIELDS, *NUMBERS))]


class NativeSide(ctypes.Structure):
    """`Side` of native.c: keys or values."""

    _fields_ = [
        *((name, P) for name in ("coder", "fine", "x", "gain", "rows", "old", "near", "starts")),
        *((name, N) for name in STRIDES),
    ]


class NativeStep(ctypes.Structure):
    """`Step` of native.c."""

    _fields_ = [
        *((name, P) for name in ("k", "v", "q", "z", "seen", "added", "padding")),
        ("scaling", ctypes.c_float),
        *((name, N) for name in COUNTS),
    ]


_tables: Any = weakref.WeakKeyDictionary()  # coder -> its table, where that lies, and the tensors to which it points


@functools.cache
def _scales() -> tuple[torch.Tensor, torch.Tensor]:
    """The largest number of each of the first 255 scales, as torch rounds logarithms here; and all scales."""
    scale = torch.arange(255)
    low, high = torch.zeros(255, dtype=torch.int32), torch.full((255,), 0x7F7FFFFF, dtype=torch.int32)
    while (high > low).any():  # bits of positive numbers are in their order
        middle = low + (high - low + 1) // 2
        fits = _scale(middle.view(torch.float32)) <= scale
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle - 1)
    none = _scale(torch.zeros(255)) > scale
    return low.view(torch.float32).masked_fill(none, -1.0), _factor(torch.arange(256))


def _table(coder: RowCoder) -> int:
    """Where a coder's table for C lies."""
    if (known := _tables.get(coder)) is not None:
        return known[1]
    fields = sorted(coder.fields, key=lambda field: field.own)
    counts = torch.bincount(torch.tensor([f.own for f in fields], dtype=torch.int64), minlength=coder.kept)
    most, slope, step = coder._tables(torch.device("cpu"))[:3]
    parts = {name: torch.tensor([getattr(f, name) for f in fields], dtype=torch.int32) for name in FIELDS[1:]}
    parts["first"] = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int()
    parts["those"] = (parts["mask"] << parts["up"]).to(torch.uint8)
    parts["power"] = torch.tensor([2.0 ** (f.below - f.up) for f in fields])
    parts |= dict(zip(NUMBERS[2:], (most, slope, (most + 1) / 2, step, most / 2, *_scales()), strict=True))
    parts = {name: x.contiguous() for name, x in parts.items()}
    found = NativeCoder(
        *(getattr(coder, name) for name in SIZES), *(parts[name].data_ptr() for name in (*FIELDS, *NUMBERS))
    )
    _tables[coder] = found, ctypes.addressof(found), parts
    return ctypes.addressof(found)


class NativeToken:
    """One new token of every text, which was written into a cache, and what it reads there."""

    def __init__(self, attention: Any, layer: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        self.attention, self.layer, self.new = attention, layer, (k, v)
        gains = attention._buffers.get("k_gain_GK"), attention._buffers.get("v_gain_GV")
        self.gains = None if gains[0] is None else gains
        old, rooms, size = layer.newest, grown(layer, 1), (*k.shape[:2], -1, caches.NEAR)
        self.k, near = layer.keys, []
        sides = []
        for at, coder in enumerate(attention.coders):
            x, room, before = self.new[at], rooms[at], old[at].narrow(2, old[at].shape[2] - caches.NEAR + 1, 1)
            near.append(torch.empty((*size[:2], coder.fine.bytes, caches.NEAR), dtype=torch.uint8))
            strides = *x.stride()[:2], *room.stride()[:2], room.stride(3), *before.stride()[:2], *before.stride()[:1:-1]
            coders = (_table(one) for one in (coder, coder.fine))
            gain = gains[at].data_ptr() if self.gains else None
            starts = layer.starts[at].data_ptr()
            found = x.data_ptr(), gain, room.data_ptr(), before.data_ptr(), near[at].data_ptr(), starts
            sides.append(NativeSide(*coders, *found, *strides))
            library().headwise_write(ctypes.byref(sides[at]), *k.shape[:2], self.k.shape[2] - 1, caches.NEAR)
        self.sides, self.kept = sides, (rooms, near)
        layer.newest = tuple(x.mT for x in near)

    def read(self, attend: Any, q: torch.Tensor, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the heads' queries (B, H, 1, K) find: values (B, 1, H, V), and weights if torch reads them."""
        tokens = self.k.shape[2]
        fits = mask is None or (mask.dim() == 4 and mask.shape[1:3] == (1, 1) and mask.shape[3] == tokens)
        fits = fits and (mask is None or mask.dtype in (torch.bool, torch.float32)) and q.dtype == torch.float32
        if not fits or attend.config._attn_implementation != "sdpa" or attend.softcap is not None or attend.training:
            return self._rows().read(attend, q, mask, **kwargs)
        q = q if q.stride(3) == 1 else q.contiguous()
        z = q.new_empty(q.shape[0], 1, q.shape[1], self.new[1].shape[3])
        padding = None if self.layer.begun == caches.WHOLE else self.layer.padding.contiguous()
        mask = None if mask is None else mask.expand(q.shape[0], -1, -1, -1)
        mask = mask if mask is None or mask.stride(3) == 1 else mask.contiguous()
        masks = (None, None) if mask is None else (mask.data_ptr(), None)
        masks = masks[::-1] if mask is not None and mask.dtype != torch.bool else masks
        texts, groups = self.k.shape[:2]
        step = NativeStep(
            *map(ctypes.addressof, self.sides), q.data_ptr(), z.data_ptr(), *masks,
            None if padding is None else padding.data_ptr(), attend.scaling,
            texts, groups, q.shape[1] // groups, tokens, caches.NEAR, caches.WHOLE, q.stride(0), q.stride(1),
            0 if mask is None else mask.stride(0),
        )  # fmt: skip
        if library().headwise_read(ctypes.byref(step), torch.get_num_threads()):
            raise MemoryError("no memory is left to read the cache; use a smaller batch.")
        return z, None

    def _rows(self) -> Any:
        """All that is read, in numbers."""
        k, v = (
            self.new if self.gains is None else (x * g.unsqueeze(1) for x, g in zip(self.new, self.gains, strict=True))
        )
        layer = self.layer
        rows = caches._unpacked(self.attention.coders, layer, (layer.keys, layer.values), layer.newest, k, v)
        return rows._replace(gains=self.gains)


def _covered(attention: Any, k: torch.Tensor, v: torch.Tensor, cache: Any) -> Any:
    """The layer of a cache to which new rows are written in C, if they are."""
    if k.shape[2] != 1 or k.dtype != torch.float32 or k.requires_grad or attention.attend.sliding_window is not None:
        return None
    layer = caches.grows_in_place(cache, attention.layer_idx, torch.uint8)
    if type(layer) is not caches.CodedLayer or not layer.newest or layer.starts[0].dtype != torch.float32:
        return None
    far = layer.keys.shape[2] + 1 - caches.NEAR
    if layer.newest[0].shape[2] < caches.NEAR - 1 or far < layer.begun or k.device.type != "cpu":
        return None
    plain = all(x.stride(3) == 1 for x in (k, v)) and all(x.is_contiguous() for x in layer.starts)
    return layer if plain and v.dtype == torch.float32 else None


def _few(attention: Any, *tensors: torch.Tensor) -> bool:
    """Whether C multiplies the rows of new tokens with matrices: for many texts torch is faster."""
    plain = all(x.dtype == torch.float32 and x.device.type == "cpu" and x.stride(-1) == 1 for x in tensors)
    return plain and len(tensors[0]) <= TEXTS and not attention.training and not torch.is_grad_enabled()


def _products(x: torch.Tensor, matrices: torch.Tensor, mean: torch.Tensor | None = None) -> torch.Tensor:
    """Rows of heads (B, H, W) times the matrices of their groups (G, W, K), less the means of groups (G, K)."""
    (texts, heads), (groups, width, size) = x.shape[:2], matrices.shape
    z = x.new_empty(texts, heads, size)
    library().headwise_products(
        x.data_ptr(), *x.stride()[:2], matrices.data_ptr(), None if mean is None else mean.data_ptr(), z.data_ptr(),
        texts, groups, heads // groups, width, size, torch.get_num_threads(),
    )  # fmt: skip
    return z


@functools.cache
def _native(base: type) -> type:
    inner: Any = base

    def remembered(self: Any, k: torch.Tensor, v: torch.Tensor, mask: Any = None, cache: Any = None) -> Any:
        layer = None if self.coders is None else _covered(self, k, v, cache)
        return inner.remembered(self, k, v, mask, cache) if layer is None else NativeToken(self, layer, k, v)

    def project(self: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if q.shape[2] > 1 or not self.projects or not _few(self, q, k, self.q_down_GWK, self.k_down_GWK):
            return inner.project(self, q, k)
        down = self.q_down_GWK.view(-1, q.shape[3], self.qk_dim)
        rows = _products(k.squeeze(2), self.k_down_GWK, self._parameters.get("k_mean_GK"))
        return _products(q.squeeze(2), down).unsqueeze(2), rows.unsqueeze(2)

    def own_values(self: Any, z: torch.Tensor) -> torch.Tensor:
        if z.shape[1] > 1 or not self.v_projects or not _few(self, z, self.v_up_NVO):
            return inner.own_values(self, z)
        return _products(z.squeeze(1), self.v_up_NVO).flatten(1).unsqueeze(1)

    return subclass(base, remembered=remembered, project=project, own_values=own_values)


def attach(model: Any) -> None:
    """Let every layer of a model whose rows are in bits decode in C, if this machine can compile it."""
    layers = [module for module in model.modules() if isinstance(module, TailoredAttention) and module.coders]
    weights = [layer.q_proj.weight for layer in layers]
    if not layers or any(x.device.type != "cpu" or x.dtype != torch.float32 for x in weights):
        return
    if isinstance(found := library(), str):
        logging.getLogger("headwise").debug("rows in bits are read by torch: %s", found)
        return
    for layer in layers:
        layer.__class__ = _native(type(layer))
