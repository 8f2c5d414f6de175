"""Decoding with a cache in bits on a CPU: attention of one new token in C, from its hidden row to its output.

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
from torch import nn

from headwise.fast import packed
from headwise.fast.joined import subclass
from headwise.fast.native_build import N, P, library
from headwise.fast.products import FEW, MANY, Linear, is_plain, times
from headwise.runtime import cache_headwise as caches
from headwise.runtime.coder_headwise import JointCoder, RowCoder, _factor, _scale
from headwise.runtime.modeling_headwise import TailoredAttention
from headwise.runtime.step_headwise import grown

SIZES = ("kept", "size", "groups", "each", "codes", "bytes")
FIELDS = ("first", "byte", "mask", "below", "up")
NUMBERS = ("those", "power", "most", "slope", "half", "step", "middle", "edges", "factors")
STRIDES = ("row_text", "row_group", "row_byte", "old_text", "old_group", "old_byte", "old_token")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
WEIGHTS = ("q", "k", "v", "o", "q_bias", "k_bias", "v_bias", "o_bias", "q_down", "k_down", "mean", "up")
OWN = ("q_down_GWK", "k_down_GWK", "k_mean_GK", "v_up_NVO")
WIDTHS = ("hidden", "width", "pools", "own", "output")
MASKS = (torch.bool, torch.float32)
COUNTS = ("texts", "groups", "heads", "tokens", "near", "whole", "mask_text", "turned", "angles")


class NativeCoder(ctypes.Structure):
    """`Coder` of coder.h."""

    _fields_ = [*((name, ctypes.c_int32) for name in SIZES), *((name, P) for name in (*FIELDS, *NUMBERS))]


class NativeSide(ctypes.Structure):
    """`Side` of native.c: keys or values."""

    _fields_ = [
        *((name, P) for name in ("coder", "fine", "gain", "rows", "old", "near", "starts")),
        *((name, N) for name in STRIDES),
    ]


class NativeLayer(ctypes.Structure):
    """`Layer` of native.c."""

    _fields_ = [*((name, P) for name in WEIGHTS), *((name, N) for name in WIDTHS)]


class NativeStep(ctypes.Structure):
    """`Step` of native.c."""

    _fields_ = [
        *((name, P) for name in ("k", "v", "hidden_or_q", "new_k", "new_v", "cosine", "sine", "out")),
        *((name, P) for name in ("seen", "added", "padding")),
        ("scaling", ctypes.c_float),
        *((name, N) for name in COUNTS),
    ]


_tables: Any = weakref.WeakKeyDictionary()  # coder -> its table, where that lies, and the tensors to which it points
_layers: Any = weakref.WeakKeyDictionary()  # attention -> where its weights lie, and that as C takes it


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


class NativeJoint(JointCoder):
    """Codes rows of several coders in C."""

    def encode(self, *given: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """As its base class, of whose numbers these are."""
        if torch.compiler.is_compiling() or not all(x.is_cpu and x.dtype == torch.float32 for x in given):
            return super().encode(*given)
        given, (texts, groups, tokens, _) = tuple(x.contiguous() for x in given), given[0].shape
        sizes, number = [coder.bytes for coder in self.coders], len(self.coders)
        rows = given[0].new_empty(texts, groups, sum(sizes), tokens, dtype=torch.uint8)
        found = tuple(rows.new_empty(texts, groups, tokens, c.size, dtype=torch.float32) for c in self.coders)
        coders, firsts = (P * number)(*map(_table, self.coders)), (N * number)(*self.firsts)
        parts, columns = (
            (P * len(given))(*(x.data_ptr() for x in given)),
            (N * len(given))(*(x.shape[3] for x in given)),
        )
        numbers = (P * number)(*(x.data_ptr() for x in found))
        asked = coders, firsts, number, parts, columns, len(given), texts * groups, tokens, rows.data_ptr(), numbers
        library().headwise_rows(*asked, torch.get_num_threads())
        return tuple(part.mT for part in rows.split(sizes, 2)), found


def _grouped(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Rows (B, G, T, W) times the matrices of their groups (G, W, K)."""
    parts = [times(x[:, g].contiguous(), one.mT.contiguous(), None) for g, one in enumerate(matrices)]
    found = [part for part in parts if part is not None]
    if len(found) < len(matrices):
        return x @ matrices
    return found[0].unsqueeze(1) if len(found) == 1 else torch.stack(found, 1)


def _plain(part: Any) -> bool:
    """Whether a projection is a matrix and nothing else."""
    return is_plain(part) and not part._forward_hooks and not part._forward_pre_hooks


def _weights(attention: Any, few: bool) -> NativeLayer:
    """What C multiplies with. Looked up in every step: weights may be moved, replaced or wrapped."""
    parts = [attention._modules.get(name) for name in PROJECTIONS]
    pairs = attention.rotary and attention.head_width < attention.head_dim  # which have tables of their own
    heads = few and not pairs and attention.q_norm is None and attention.k_norm is None and all(map(_plain, parts[:3]))
    ours = [*[heads] * 3, few and _plain(parts[3])]
    tensors = [
        part._parameters[name] if own else None
        for name in ("weight", "bias")
        for part, own in zip(parts, ours, strict=True)
    ]
    tensors += [attention._parameters.get(name) if few else None for name in OWN]
    found = [None if x is None else x.data_ptr() for x in tensors]
    known = _layers.get(attention)
    if known is None or known[0] != found:
        plain = all(x is None or (x.dtype == torch.float32 and x.is_contiguous() and x.is_cpu) for x in tensors)
        sizes = attention.hidden, attention.head_width, attention.kv_heads * attention.pooled, attention.out_dim
        output = len(tensors[3]) if tensors[3] is not None else 0
        known = _layers[attention] = found, NativeLayer(*found, *sizes, output) if plain else None
    return known[1]


def _side(attention: Any, layer: Any, at: int, near: torch.Tensor, room: torch.Tensor) -> NativeSide:
    """Keys or values of a layer of a cache: what is there, and where the new token's go."""
    coder, gain = attention.coders[at], attention._buffers.get(("k_gain_GK", "v_gain_GV")[at])
    old = layer.newest[at]
    old = old.narrow(2, old.shape[2] - caches.NEAR + 1, 1)
    return NativeSide(
        _table(coder), _table(coder.fine), None if gain is None else gain.data_ptr(), room.data_ptr(), old.data_ptr(),
        near.data_ptr(), layer.starts[at].data_ptr(), *room.stride()[:2], room.stride(3), *old.stride()[:2],
        *old.stride()[:1:-1],
    )  # fmt: skip


def _angles(positions: Any) -> tuple[Any, Any, int, int]:
    """Cosines and sines of every text or of all (B, 1, W), their width, and how far those of texts lie apart."""
    if positions is None:
        return None, None, 0, 0
    cos, sin = positions
    return cos.data_ptr(), sin.data_ptr(), cos.shape[-1], cos.shape[-1] if len(cos) > 1 else 0


def _token(attention: Any, hidden: torch.Tensor, mask: Any, positions: Any, layer: Any) -> torch.Tensor | None:
    """Attention's output for one new token of every text, which is written into the layer of a cache."""
    texts, groups, few = len(hidden), attention.kv_heads, len(hidden) <= FEW
    weights = _weights(attention, few)
    if weights is None:
        return None
    given: tuple[torch.Tensor, ...] = (hidden,)
    if weights.q is None:
        q, k, v = attention.heads(hidden, positions)
        given = (q, k, v) if few else (*attention.project(q, k), v)
        if any(x.dtype != torch.float32 for x in given):
            return None
    given = tuple(x.contiguous() for x in given)
    near = [
        hidden.new_empty(texts, groups, coder.fine.bytes, caches.NEAR, dtype=torch.uint8) for coder in attention.coders
    ]
    sides = [_side(attention, layer, at, near[at], room) for at, room in enumerate(grown(layer, 1))]
    width = attention.hidden if weights.o else attention.query_heads * (attention.out_dim if few else attention.v_dim)
    out = hidden.new_empty(texts, 1, width)
    padding = None if layer.begun == caches.WHOLE else layer.padding.contiguous()
    mask = None if mask is None else mask.expand(texts, -1, -1, -1).contiguous()
    masks = (None, None) if mask is None else (mask.data_ptr(), None)
    cos, sin, turned, angles = _angles(positions if attention.rotary else None)
    tokens = layer.keys.shape[2]
    step = NativeStep(
        *map(ctypes.addressof, sides), *(x.data_ptr() for x in given), *[None] * (3 - len(given)), cos, sin,
        out.data_ptr(), *(masks[::-1] if mask is not None and mask.dtype != torch.bool else masks),
        None if padding is None else padding.data_ptr(), attention.attend.scaling, texts, groups,
        attention.query_heads // groups, tokens, caches.NEAR, caches.WHOLE, tokens, turned, angles,
    )  # fmt: skip
    if library().headwise_token(ctypes.byref(weights), ctypes.byref(step), torch.get_num_threads()):
        raise MemoryError("no memory is left to read the cache; use a smaller batch.")
    layer.newest = tuple(x.mT for x in near)
    out = out if few else attention.own_values(out.view(texts, 1, attention.query_heads, -1))
    output = None if weights.o else attention._modules.get("o_proj")
    out = out if output is None else output(out)
    return out if attention.resid_dropout is None else attention.resid_dropout(out)


def _covered(attention: Any, hidden: torch.Tensor, mask: Any, positions: Any, cache: Any) -> Any:
    """The layer of a cache to which one new token of every text is written in C, if it is."""
    attend = attention.attend
    if hidden.shape[1] != 1 or hidden.dtype != torch.float32 or attention.training or torch.is_autocast_enabled("cpu"):
        return None
    if attend.sliding_window is not None or attend.softcap is not None or attend.config._attn_implementation != "sdpa":
        return None
    layer = caches.grows_in_place(cache, attention.layer_idx, torch.uint8)
    if type(layer) is not caches.CodedLayer or not layer.newest or not hidden.is_cpu:
        return None
    tokens = layer.keys.shape[2] + 1
    if layer.newest[0].shape[2] < caches.NEAR - 1 or tokens - caches.NEAR < layer.begun:
        return None
    if mask is not None and (mask.dim() != 4 or mask.shape[1:] != (1, 1, tokens) or mask.dtype not in MASKS):
        return None
    tables = positions or ()
    plain = all(x.is_contiguous() and x.dtype == torch.float32 for x in (*layer.starts, *tables))
    return layer if plain and all(x.dim() == 3 for x in tables) else None


@functools.cache
def _native(base: type) -> type:
    inner: Any = base

    def forward(
        self: Any, hidden_states: torch.Tensor, attention_mask: Any = None, position_embeddings: Any = None,
        past_key_values: Any = None, layer_past: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        cache = past_key_values if past_key_values is not None else layer_past
        layer = _covered(self, hidden_states, attention_mask, position_embeddings, cache)
        if layer is not None:
            found = _token(self, hidden_states, attention_mask, position_embeddings, layer)
            if found is not None:
                return found, None
        given = attention_mask, position_embeddings, past_key_values, layer_past
        return inner.forward(self, hidden_states, *given, **kwargs)

    def _own(self: Any, x: torch.Tensor, basis: Any) -> torch.Tensor:
        found: torch.Tensor = inner._own(self, x if basis is None else _grouped(x, basis), None)
        return found

    def _project_keys(self: Any, k: torch.Tensor) -> torch.Tensor:
        if k.shape[2] < MANY or not self.projects:
            few: torch.Tensor = inner._project_keys(self, k)
            return few
        mean, found = self._parameters.get("k_mean_GK"), _grouped(k, self.k_down_GWK)
        return found if mean is None else found - mean.unsqueeze(1)

    return subclass(base, forward=forward, _own=_own, _project_keys=_project_keys)


def attach(model: Any) -> None:
    """Let a model compute in C on a CPU, if this machine can compile it: products, and attention to rows in bits."""
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return
    if isinstance(found := library(), str):
        logging.getLogger("headwise").debug("torch computes all products, and reads rows in bits: %s", found)
        return
    packed.attach(model)
    for module in model.modules():
        if isinstance(module, TailoredAttention) and module.coders:
            module.__class__ = _native(type(module))
            module.coders[0].beside(module.coders[1]).__class__ = NativeJoint
        elif type(module) is nn.Linear:
            module.__class__ = Linear
