"""Other ways to store a cache in few bits, each as its paper has it: what attention reads back, and the bytes it takes.

A rival acts on a tailored model as it would in serving: every token's keys and values are read in stored form by that
token and by all later ones. KIVI keeps the newest tokens whole, so each query there has its own. Bytes count all that
is stored: codes packed without gaps, scales and zero points in 16 bits, and tokens that are kept whole in 16 bits a
number. Shape suffixes: B batch, G key/value heads, T tokens, D numbers of a head.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from headwise.runtime.cache_headwise import NEAR, Rows
from headwise.types import LayerShape

NUMBER = 2  # bytes of a scale, of a zero point and of a number that is kept whole
FIRST = 4  # tokens that are kept whole at the beginning of a text, where a rival is given that help
GROUP = 64  # numbers of a head that share a scale


class Coder(Protocol):
    """Rounds heads of tokens (B, G, T, D), each token by itself."""

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """The numbers as they are read back."""
        ...

    def row_bytes(self, size: int) -> int:
        """Bytes of one token's head with so many numbers."""
        ...


def whole_numbers(x: torch.Tensor, bits: int, dim: int, clip: float = 1.0) -> torch.Tensor:
    """Numbers as integers of so many bits between the least and the largest along a dimension, and back again.

    Scale and least number are stored in 16 bits. `clip`: which part of the range the integers cover.
    """
    x = x.float()
    low, high = (clip * end for end in (x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)))
    low = low.half().float()
    scale = ((high - low) / (2**bits - 1)).clamp_min(2.0**-24).half().float()
    return ((x - low) / scale).round().clamp(0, 2**bits - 1) * scale + low


@functools.cache
def hadamard(size: int) -> torch.Tensor:
    """An orthogonal matrix of equal entries up to their signs; in blocks where the size is no power of two.

    >>> hadamard(2).mul(2**0.5).tolist()
    [[1.0, 1.0], [1.0, -1.0]]
    """
    block, found = size & -size, torch.ones(1, 1)
    while len(found) < block:
        found = torch.cat((torch.cat((found, found), 1), torch.cat((found, -found), 1)))
    return torch.block_diag(*[found / math.sqrt(block)] * (size // block))


@functools.cache
def rotation(size: int) -> torch.Tensor:
    """A random orthogonal matrix, always the same."""
    drawn = torch.randn(size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, upper = torch.linalg.qr(drawn)
    return (found * upper.diagonal().sign()).float()


@dataclass(frozen=True, slots=True)
class Integers:
    """Integers with a scale and a zero point for some neighbouring numbers of a token's head.

    `turned`: heads are multiplied with a Hadamard matrix first, as QuaRot does (Ashkboos et al. 2024, arXiv
    2404.00456), with its clipping of 0.95 and one group for the whole head.
    """

    bits: int
    group: int = GROUP
    clip: float = 1.0
    turned: bool = False

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """See `Coder`."""
        turn = hadamard(x.shape[-1]).to(x.device) if self.turned else None
        y = x.float() if turn is None else x.float() @ turn
        parts = [whole_numbers(part, self.bits, -1, self.clip) for part in y.split(self.group, -1)]
        found = torch.cat(parts, -1)
        return (found if turn is None else found @ turn.mT).to(x.dtype)

    def row_bytes(self, size: int) -> int:
        """See `Coder`."""
        return -(-size * self.bits // 8) + 2 * NUMBER * -(-size // self.group)


@functools.cache
def normal_levels(bits: int) -> torch.Tensor:
    """The values that represent a normal variable with least squared error (Lloyd and Max), in order.

    >>> [round(x, 2) for x in normal_levels(2).tolist()]
    [-1.51, -0.45, 0.45, 1.51]
    """
    grid = np.linspace(-6, 6, 12_001)
    weight = np.exp(-(grid**2) / 2)
    levels = np.linspace(-3, 3, 2**bits)
    for _ in range(400):
        place = np.searchsorted((levels[1:] + levels[:-1]) / 2, grid)
        levels = np.bincount(place, weight * grid, 2**bits) / np.bincount(place, weight, 2**bits)
    return torch.tensor(levels, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class Turbo:
    """TurboQuant (Zandieh et al. 2025, arXiv 2504.19874): a random rotation, then the best levels for normal numbers.

    The version for least squared error, for keys and values; the length of a head's vector is stored in 16 bits.
    """

    bits: int

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """See `Coder`."""
        size = x.shape[-1]
        turn, levels = rotation(size).to(x.device), normal_levels(self.bits).to(x.device)
        length = x.float().norm(dim=-1, keepdim=True).half().float()
        y = x.float() @ turn * (math.sqrt(size) / length.clamp_min(2.0**-24))
        found = levels[torch.bucketize(y, (levels[1:] + levels[:-1]) / 2)]
        return (found * length / math.sqrt(size) @ turn.mT).to(x.dtype)

    def row_bytes(self, size: int) -> int:
        """See `Coder`."""
        return -(-size * self.bits // 8) + NUMBER


@dataclass(frozen=True, slots=True)
class Rival:
    """A cache whose tokens are rounded one by one, but for the first `whole` of a text and the `newest`."""

    name: str
    coder: Coder
    whole: int = 0
    newest: int = 0  # none, or as many as ours reads in 8 bits

    def remembered(self, k: torch.Tensor, v: torch.Tensor, *_: Any) -> Rows:
        """Keys and values of a whole text as later tokens read them."""
        rounded = [torch.cat((x[:, :, : self.whole], self.coder.rounded(x[:, :, self.whole :])), 2) for x in (k, v)]
        return Rows(rounded[0], rounded[1], (k, v) if self.newest else ())

    def stored_bytes(self, layers: Sequence[LayerShape], length: int) -> float:
        """Bytes of a text of so many tokens."""
        whole = min(self.whole + self.newest, length)
        return sum(
            layer.kv_heads * (whole * NUMBER * size + (length - whole) * self.coder.row_bytes(size))
            for layer in layers
            for size in (layer.qk_dim, layer.v_dim)
        )

    @contextmanager
    def acting(self, blocks: list[Any]) -> Iterator[None]:
        """Let the attention of every layer read what this cache gives back, until the end."""
        try:
            for block in blocks:
                self._act(block.attention)
            yield
        finally:
            for block in blocks:
                for name in ("remembered", "attended"):
                    block.attention.__dict__.pop(name, None)

    def _act(self, attention: Any) -> None:
        attention.remembered = self.remembered


@dataclass(frozen=True, slots=True)
class Kivi(Rival):
    """KIVI (Liu et al. 2024, arXiv 2402.02750): keys by channel over groups of tokens, values by token.

    Keys are rounded `newest` tokens at a time, once so many have come; until then they are whole. Of the values the
    newest so many are always whole. Needs heads that do not share rows.
    """

    newest: int = 128

    @property
    def coded(self) -> Integers:
        """How values are rounded; keys have as many bits, and as many tokens in a group as values have numbers."""
        assert isinstance(self.coder, Integers)
        return self.coder

    def keys(self, k_BGTD: torch.Tensor) -> torch.Tensor:
        """Keys as they are stored once their group is full; the others whole."""
        first, step = self.whole, self.coded.group
        end = first + max(0, k_BGTD.shape[2] - first) // step * step
        groups = k_BGTD[:, :, first:end].unflatten(2, (-1, step))
        rounded = whole_numbers(groups, self.coded.bits, 3).flatten(2, 3).to(k_BGTD.dtype)
        return torch.cat((k_BGTD[:, :, :first], rounded, k_BGTD[:, :, end:]), 2)

    def _act(self, attention: Any) -> None:
        if attention.pooled > 1:
            raise ValueError("KIVI needs the keys of every head by themselves.")
        attention.attended = functools.partial(self.attended, attention.attend)

    def attended(self, attend: Any, q: torch.Tensor, rows: Rows, mask: Any, **_: Any) -> tuple[torch.Tensor, None]:
        """What the heads give the output projection; queries that see the same keys whole go together."""
        k, v = rows.k, rows.v
        stored_k, tokens = self.keys(k), q.shape[2]
        stored_v = torch.cat((v[:, :, : self.whole], self.coder.rounded(v[:, :, self.whole :])), 2)
        out, start = [], 0
        while start < tokens:
            stop = min(tokens, (start or self.whole) + self.newest)
            seen = torch.cat((stored_k[:, :, :start], k[:, :, start:stop]), 2)
            weights = self._weights(attend, q[:, :, start:stop], seen, mask, start)
            age = torch.arange(start, stop, device=q.device)[:, None] - torch.arange(stop, device=q.device)
            whole = weights * (age <= self.newest)
            shared = [x[:, :, :stop].float().unsqueeze(2) for x in (v, stored_v)]
            out.append((whole @ shared[0] + (weights - whole) @ shared[1]).flatten(1, 2))
            start = stop
        return torch.cat(out, 2).transpose(1, 2).flatten(2).to(q.dtype), None

    def _weights(self, attend: Any, q: torch.Tensor, k: torch.Tensor, mask: Any, start: int) -> torch.Tensor:
        """Attention weights of some queries, the first at `start` (B, G, queries of a head, T, T)."""
        tokens, seen = q.shape[2], k.shape[2]
        grouped = q.float().unflatten(1, (k.shape[1], -1))
        logits = grouped @ k.float().unsqueeze(2).mT * attend.scaling
        if attend.softcap is not None:
            logits = torch.tanh(logits / attend.softcap) * attend.softcap
        if mask is None:
            mask = torch.ones(tokens, seen, dtype=torch.bool, device=q.device).tril(start)
        else:
            mask = mask[:, :, start : start + tokens, :seen].unsqueeze(2)
        hidden = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
        return hidden.softmax(-1)

    def stored_bytes(self, layers: Sequence[LayerShape], length: int) -> float:
        """Bytes of a text of so many tokens: the mean over the last `newest` lengths, as the window fills and empties.

        What is measured on a whole text has such windows, too.
        """
        lengths = range(max(1, length - self.newest + 1), length + 1)
        return sum(self._at(layers, one) * length / one for one in lengths) / len(lengths)

    def _at(self, layers: Sequence[LayerShape], length: int) -> float:
        first = min(self.whole, length)
        keys = (length - first) // self.newest * self.newest  # rounded
        values = max(0, length - first - self.newest)
        bits, group = self.coded.bits, self.coded.group
        total = 0.0
        for layer in layers:
            key = keys * (layer.qk_dim * bits / 8 + 2 * NUMBER * layer.qk_dim / group)
            value = values * self.coder.row_bytes(layer.v_dim)
            whole = NUMBER * ((length - keys) * layer.qk_dim + (length - values) * layer.v_dim)
            total += layer.kv_heads * (key + value + whole)
        return total


def _plain() -> Iterator[Rival]:
    for bits in (8, 4, 3, 2):
        yield Rival(f"int{bits} by token", Integers(bits))
        if bits < 8:
            yield Rival(f"int{bits} by token, groups of 32", Integers(bits, 32))
            yield Rival(f"QuaRot int{bits}", Integers(bits, 1024, 0.95, turned=True))
            yield Rival(f"TurboQuant {bits} bits", Turbo(bits))
            yield Kivi(f"KIVI int{bits}, newest 128", Integers(bits, 32))
            yield Kivi(f"KIVI int{bits}, newest 32", Integers(bits, 32), newest=32)


@functools.cache
def rivals() -> dict[str, Rival]:
    """All rivals by name, each also with the first and the newest tokens of a text kept whole."""
    found = [one for rival in _plain() for one in (rival, helped(rival))]
    return {rival.name: rival for rival in found}


def helped(rival: Rival) -> Rival:
    """The same with the help that ours has: first tokens kept whole, and newest ones where it does not keep its own."""
    if rival.newest:
        return replace(rival, name=f"{rival.name}, first {FIRST} whole", whole=FIRST)
    name = f"{rival.name}, first {FIRST} and newest {NEAR} whole"
    return replace(rival, name=name, whole=FIRST, newest=NEAR)


def whole_bytes(layers: Sequence[LayerShape], length: int) -> int:
    """Bytes of a text in a cache of 16 bits a number: what shares are of."""
    return length * sum(NUMBER * layer.kv_heads * (layer.qk_dim + layer.v_dim) for layer in layers)
