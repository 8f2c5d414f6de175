"""Keys and values in a cache, whole or in few bits. Needs transformers and torch; lies beside every tailored model.

Rows are coded as bytes (`coder_headwise.py`), which the cache of transformers stores in place of numbers: it appends,
crops, reorders and copies such rows as all others. The first tokens of a text are also kept whole: all later tokens
look at them, and their rows are unlike all others. Every token reads itself and its nearest predecessors in
more bits, at least 8 a number: attention looks at them most, and there are few of them.
Written by Headwise (Apache-2.0). Shape suffixes: B batch, G rows per token, T tokens, K coefficients, N bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, StaticLayer

from .coder_headwise import RowCoder, as_if_kept
from .prompt_headwise import at_once, padding_of, read_prompt
from .softmax_headwise import right_with_masks
from .step_headwise import OneToken, grown, whole_rows

WHOLE = 4  # tokens at the beginning of a text that are kept as they are
NEAR = 32  # tokens, the reading one among them, that are read in more bits
BACK = 32  # tokens that can be taken back, at most, with as many still read so
BLOCK = 256  # queries that read together
SMALL = 32  # as many on a CPU, of a prompt that is read at once, and at least NEAR: fewer places are read in vain


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


def updated(cache: Any, k: torch.Tensor, v: torch.Tensor, index: int) -> Any:
    """As `cache.update`. A cache made before its first token may have wider rows, as long for keys as for values."""
    held = cache.layers[index] if index < len(cache.layers) else None
    if not isinstance(held, StaticLayer) or not held.is_initialized:
        return cache.update(k, v, index)
    missing = [y.shape[-1] - x.shape[-1] for x, y in ((k, held.keys), (v, held.values))]
    if not any(missing):
        return cache.update(k, v, index)
    rows = cache.update(*(nn.functional.pad(x, (0, n)) for x, n in zip((k, v), missing, strict=True)), index)
    return tuple(x[..., : x.shape[-1] - n] for x, n in zip(rows, missing, strict=True))


def grows_in_place(cache: Any, index: int, dtype: torch.dtype) -> Any:
    """A layer of a cache on a CPU to which `append` may write rows of a type in place, if it is one."""
    layer: Any = cache.layers[index] if type(cache) is DynamicCache and index < len(cache.layers) else None
    known = type(layer) in (DynamicLayer, CodedLayer) and layer.get_seq_length() and layer.keys.dtype == dtype
    known = known and not cache.offloading and layer.keys.device.type == "cpu"
    if not known or torch.is_grad_enabled() or torch.compiler.is_compiling() or not _only_appends():
        return None
    return layer


def append(cache: Any, k: torch.Tensor, v: torch.Tensor, index: int) -> Any:
    """As `cache.update`, which copies the whole cache for every token; on a CPU only where no places are left."""
    layer = grows_in_place(cache, index, k.dtype)
    if layer is None or k.device.type != "cpu":
        return updated(cache, k, v, index)
    past, new = layer.keys.shape[2], k.shape[2]
    for place, x in zip(grown(layer, new), (k, v), strict=True):
        place.narrow(2, past, new).copy_(x)
    return layer.keys, layer.values


class CodedLayer(DynamicLayer):
    """A layer of a cache whose rows are bytes, with the first tokens of every text as they are."""

    newest: tuple[torch.Tensor, ...] = ()  # keys and values of the newest tokens in more bits (B, G, T, N)
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
        self.padding = padding_of(mask, k)
        self.begun = WHOLE + int(self.padding.max())
        slot = torch.arange(WHOLE, device=k.device) + self.padding.unsqueeze(1) - past  # its place among the new tokens
        given = ((slot >= 0) & (slot < new))[:, None, :, None]
        taken = (_at(x.detach(), slot.clamp(0, new - 1)) for x in (k, v))
        self.starts = tuple(torch.where(given, new, old) for new, old in zip(taken, self.starts, strict=True))

    def nearest(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rows in more bits of the new tokens (B, G, T, N), after those that are near the first of them."""
        new: tuple[torch.Tensor, ...] = (k, v)
        tokens = k.shape[2]
        if self.newest:  # a byte of all tokens lies together, as `RowCoder` reads them
            near = (x.narrow(2, max(0, x.shape[2] - NEAR + 1), min(x.shape[2], NEAR - 1)) for x in self.newest)
            new = tuple(torch.cat((x.mT, y.mT), 3).mT for x, y in zip(near, new, strict=True))
        kept = NEAR - 1 + min(tokens, BACK)
        self.newest = tuple(x[:, :, -kept:].clone() for x in new) if new[0].shape[2] > kept else new
        return new

    def restore(self, found: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """Write the first tokens of every text as they were over what codes say of them (B, G, T, K)."""
        if self.begun == WHOLE <= found.shape[2]:  # no padding
            found[:, :, :WHOLE] = start
            return found
        padding, tokens = self.padding.unsqueeze(1), found.shape[2]
        last = (tokens - 1 - padding).clamp_min(0)
        slot = torch.arange(WHOLE, device=found.device).minimum(last)  # of shorter texts the last one, repeatedly
        place = (slot + padding).clamp_max(tokens - 1)[:, None, :, None]
        return found.scatter_(2, place.expand(-1, found.shape[1], -1, found.shape[3]), _at(start, slot))

    def restore_near(self, near: torch.Tensor, start: torch.Tensor, before: int) -> torch.Tensor:
        """Rows of the newest tokens, with so many tokens before them; first tokens of a text as they were."""
        if before >= self.begun:
            return near
        if self.begun == WHOLE:  # no padding
            held = min(WHOLE - before, near.shape[2])
            near[:, :, :held] = start[:, :, before : before + held]
            return near
        slot = torch.arange(near.shape[2], device=near.device) + before - self.padding.unsqueeze(1)
        first = ((slot >= 0) & (slot < WHOLE))[:, None, :, None]
        return torch.where(first, _at(start, slot.clamp(0, WHOLE - 1)), near)

    def _each(self, change: Any) -> None:
        if self.padding is not None:
            self.starts, self.newest = tuple(map(change, self.starts)), tuple(map(change, self.newest))
            self.padding = change(self.padding)

    def reset(self) -> None:
        """Forget all tokens."""
        self.keys = self.values = None  # transformers 5.17 would only fill them with zeros
        self.is_initialized = False
        super().reset()
        self.starts, self.newest, self.padding, self.begun = (), (), None, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens."""
        before = self.get_seq_length()
        super().crop(tokens_to_remove)
        gone = before - self.get_seq_length()
        self.newest = tuple(x[:, :, : max(0, x.shape[2] - gone)] for x in self.newest)

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


class Rows(NamedTuple):
    """Keys and values that queries read: coded ones, and near ones in more bits, if they are not among the coded."""

    k: torch.Tensor  # (B, G, S, K)
    v: torch.Tensor
    near: tuple[torch.Tensor, ...] = ()  # keys and values of the newest places
    start: int = 0  # the place of the first of them
    past: Any = 0  # the place of the first query
    gains: tuple[Any, Any] | None = None  # what keys and values are still to be divided by (G, K) and (G, V)

    def plain(self) -> Rows:
        """These rows with keys and values divided by their gains."""
        if self.gains is None:
            return self
        k_gain, v_gain = (gain.unsqueeze(1) for gain in self.gains)
        return self._replace(gains=None).changed(lambda keys: keys / k_gain, lambda values: values / v_gain)

    def changed(self, keys: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Rows:
        """These rows after a linear map of all keys and one of all values."""
        near = (keys(self.near[0]), values(self.near[1])) if self.near else ()
        return self._replace(k=keys(self.k), v=values(self.v), near=near)

    def read(self, attend: Any, q: torch.Tensor, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the heads' queries (B, H, T, K) find: values (B, T, H, V), and weights if the kernel gives them."""
        if self.gains is not None:  # dividing queries and results instead says the same: gains are powers of two
            k_gain, v_gain = (gain.repeat_interleave(q.shape[1] // len(gain), 0) for gain in self.gains)
            read = self._replace(gains=None).read(attend, q / k_gain.unsqueeze(1), mask, **kwargs)
            return read[0] / v_gain, read[1]
        if not self.near:
            found: tuple[torch.Tensor, torch.Tensor | None] = attend(q, self.k, self.v, mask, **kwargs)
            return found
        if mask is None and self.past == self.start == 0 and at_once(attend, q, (self.k, self.v, *self.near)):
            return read_prompt(q, (self.k, self.v), self.near, attend.scaling, NEAR, SMALL), None
        parts = [self._part(attend, q, mask, *block, **kwargs) for block in self._blocks(q.shape[2])]
        z, weights = zip(*parts, strict=True)
        return torch.cat(z, 1), None if weights[0] is None else torch.cat(weights, 2)

    def _blocks(self, tokens: int) -> Iterator[tuple[slice, slice, slice]]:
        """Queries that read together, and the places that they read: as coded, and in more bits."""
        end = self.start + self.near[0].shape[2]
        # A place on the device: places without tokens are hidden by the mask. A graph: one for any number of tokens.
        if not isinstance(self.past, int) or torch.compiler.is_exporting():
            yield slice(0, tokens), slice(0, self.k.shape[2]), slice(self.start, end)
            return
        for first in range(0, tokens, BLOCK):
            last = min(first + BLOCK, tokens)
            near = max(self.start, self.past + first - NEAR + 1), self.past + last
            far = max(self.start, self.past + last - NEAR)
            yield slice(first, last), slice(0, far), slice(*near)

    def _part(
        self, attend: Any, q: torch.Tensor, mask: Any, those: slice, far: slice, near: slice, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What some queries find in coded places and in near ones."""
        own = slice(near.start - self.start, near.stop - self.start)
        k, v = (torch.cat((x[:, :, far], y[:, :, own]), 2) for x, y in zip(self[:2], self.near, strict=True))
        seen = self._seen(mask, those, far, near, q.device)
        with right_with_masks(q):
            z, weights = attend(q[:, :, those], k, v, seen, masked=True, **kwargs)
        if weights is None:
            return z, None
        found = weights.new_zeros((*weights.shape[:3], self.k.shape[2]))
        found[..., far] += weights[..., : far.stop]
        found[..., near] += weights[..., far.stop :]
        return z, found

    def _seen(self, mask: Any, those: slice, far: slice, near: slice, device: torch.device) -> torch.Tensor:
        """The mask of some queries over coded places, followed by near ones: every place is read in one form."""
        query = (torch.arange(those.start, those.stop, device=device) + self.past).unsqueeze(1)
        coded, fine = (torch.arange(part.start, part.stop, device=device) for part in (far, near))
        apart = torch.cat(((query - coded >= NEAR) | (coded < self.start), (query - fine).abs() < NEAR), 1)
        place = torch.cat((coded, fine))
        if mask is None:
            return (apart & (query >= place))[None, None]
        if not isinstance(mask, torch.Tensor):
            raise ValueError('a coded cache cannot be read with this attention; set attn_implementation="sdpa"')
        if mask.dim() == 2:  # which tokens are not padding
            return mask.bool()[:, None, None, place] & apart & (query >= place)
        mask = mask[:, :, those][..., place]
        return mask & apart if mask.dtype == torch.bool else mask.masked_fill(~apart, torch.finfo(mask.dtype).min)


def remembered(
    coders: tuple[RowCoder, RowCoder], k: torch.Tensor, v: torch.Tensor, cache: Any, index: int, mask: Any, whole: bool,
    gains: tuple[Any, Any] = (None, None),
) -> Rows | OneToken:  # fmt: skip
    """Keys and values as a cache gives them back, after those that it holds; without one, as it would.

    `whole`: the first tokens of a text are kept as they are, and near tokens are read in more bits. `gains` are factors
    of keys and values (G, K): codes need numbers of equal spread, and training needs weights of equal size.
    """
    if gains[0] is None:
        return _remembered(coders, k, v, cache, index, mask, whole)
    k_gain, v_gain = (gain.unsqueeze(1) for gain in gains)
    return _remembered(coders, k * k_gain, v * v_gain, cache, index, mask, whole)._replace(gains=gains)


def _remembered(
    coders: tuple[RowCoder, RowCoder], k: torch.Tensor, v: torch.Tensor, cache: Any, index: int, mask: Any, whole: bool
) -> Rows | OneToken:
    """Rows without gains. Caches of other kinds keep numbers as they are and code them whenever they are read."""
    past = 0 if cache is None else cache.get_seq_length(index) + 0  # a static cache changes its count in place
    if type(cache) is DynamicCache:
        return _from_bytes(coders, k, v, cache, index, mask, whole)
    if not whole:
        k, v = (coder.rounded(x) for coder, x in zip(coders, (k, v), strict=True))
        return Rows(*((k, v) if cache is None else updated(cache, k, v, index)))
    alone = k.shape[2] == 1
    k, v = (k, v) if cache is None else updated(cache, k, v, index)
    first = _first(k, padding_of(mask, k))
    rows = [torch.where(first, x, coder.rounded(x)) for coder, x in zip(coders, (k, v), strict=True)]
    near = tuple(torch.where(first, x, coder.fine.rounded(x)) for coder, x in zip(coders, (k, v), strict=True))
    if not alone:
        return Rows(rows[0], rows[1], near, 0, past)
    place = torch.arange(k.shape[2], device=k.device)
    those = ((place <= past) & (place > past - NEAR))[:, None]
    k, v = (torch.where(those, x, y) for x, y in zip(near, rows, strict=True))
    return Rows(k, v)


def _from_bytes(
    coders: tuple[RowCoder, RowCoder], k: torch.Tensor, v: torch.Tensor, cache: Any, index: int, mask: Any, whole: bool
) -> Rows | OneToken:
    """Rows without gains in transformers' own cache, which holds rows of bytes."""
    while len(cache.layers) <= index:
        cache.layers.append(DynamicLayer())
    if whole and type(cache.layers[index]) is DynamicLayer and not cache.layers[index].is_initialized:
        cache.layers[index] = CodedLayer()
    layer: Any = cache.layers[index]
    coded, numbers = coders[0].beside(coders[1]).encode(k.detach(), v.detach())
    fine: tuple[torch.Tensor, ...] = ()
    if type(layer) is CodedLayer:
        layer.keep(k, v, mask)
        fine = layer.nearest(*coded[2:])
    rows = append(cache, coded[0], coded[1], index)
    start, past = (rows[0].shape[2] - x.shape[2] for x in (fine[0] if fine else rows[0], k))
    alone = fine and k.shape[2] == 1 and fine[0].shape[2] == NEAR and layer.begun == WHOLE <= start
    if alone and not k.requires_grad and not torch.compiler.is_compiling():
        near = whole_rows(coders, layer, fine, k.dtype)
        return OneToken(rows[0], rows[1], near, start, coders, lambda: _unpacked(coders, layer, rows, fine, k, v))
    if not past:  # all numbers are at hand
        rows, fine = numbers[:2], numbers[2:] if fine else ()
    return _unpacked(coders, layer, rows, fine, k, v)


def _unpacked(coders: Any, layer: Any, rows: Any, fine: Any, k: torch.Tensor, v: torch.Tensor) -> Rows:
    """Rows in numbers, of which the last are those of keys and values."""
    start, past = (rows[0].shape[2] - x.shape[2] for x in (fine[0] if fine else rows[0], k))
    found, near = (
        [x.to(k.dtype) if x.is_floating_point() else coder.decode(x, k.dtype) for coder, x in those]
        for those in (
            zip(coders, rows, strict=True),
            zip((coder.fine for coder in coders[: len(fine)]), fine, strict=True),
        )
    )
    if near:
        found = [layer.restore(x, first) for x, first in zip(found, layer.starts, strict=True)]
        near = [layer.restore_near(x, first, start) for x, first in zip(near, layer.starts, strict=True)]
    if near and k.shape[2] == 1:
        for x, y in zip(found, near, strict=True):
            x[:, :, start:] = y
        near = []
    given_k, given_v = map(as_if_kept, found, (k, v))
    return Rows(given_k, given_v, tuple(map(as_if_kept, near, (k, v))), start, past)


def _at(x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """The rows of some tokens (B, G, ...) of every text, by their places (B, ...)."""
    return x.gather(2, token[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _first(x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    """Which of all tokens are among the first of their text (B, 1, T, 1)."""
    place = torch.arange(x.shape[2], device=x.device) - padding.unsqueeze(1)
    return ((place >= 0) & (place < WHOLE))[:, None, :, None]
