"""What an error in a cached number would cost, and the codes that follow: bits go where they save most.

One backward pass with labels drawn from the model itself gives the Fisher matrix of the keys (as cached, after rotary)
and of the values of every row. With it and the covariance of the rows there is a basis in which coefficients are
uncorrelated, have a spread of one, and an error `e` costs `1/2 sum(price * e**2)`: one price list for keys and values
of all layers. A coefficient with b bits costs `price * D(b) / 2`. Codes are made for a list of common price levels:
the codes of all layers at one level are together the best for the bits that they take.
Near tokens are read in more bits: gradients of near and of far reading are summed apart; bits are given by the latter.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from headwise import processes
from headwise.families import Block, Family
from headwise.linalg import exact_products, fast_products, priced_basis
from headwise.memory import available_bytes
from headwise.probes._backward import drawn_labels, passes
from headwise.probes._layers import Row, reading
from headwise.progress import Track, silently
from headwise.runtime.cache_headwise import WHOLE
from headwise.tasks import Task
from headwise.tasks.causal import Causal
from headwise.types import LayerShape, Reading, code_bytes
from headwise.types.codes import BITS, CACHE_BYTES, near_bits

NAME = "fisher"
CPU = torch.device("cpu")
MEANING = "what errors in cached keys and values cost, from gradients"
ERRORS = (  # of a coefficient with 12, 11, ... 1 bits, squared
    1.6e-7, 6.3e-7, 2.5e-6, 1e-5, 4e-5, 1.5e-4, 6.2e-4, 2.5e-3, 9.8e-3, 0.039, 0.123, 0.47,
)  # fmt: skip
NEARLY = 0.01  # of the price of near reading counts too: there may be little far reading in short texts
MEAN_BITS = (
    *np.arange(12, 8, -1),
    *np.arange(8, 4, -0.5),
    *np.arange(4, 2, -0.25),
    *np.arange(2, 0.2, -0.125),
)  # one code for each
STEP = 8  # products with a multiple of it are fast
Floats = NDArray[np.float64]


@dataclass(slots=True)
class _RowSums:
    """Running sums of one layer's cached rows, on a device: those of a whole large model take gigabytes."""

    device: torch.device
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    tokens: int = 0

    def add(self, **parts: torch.Tensor) -> None:
        for name, part in parts.items():
            self.sums[name] = self.sums[name] + part if name in self.sums else part


class _Watcher:
    """In place of a coder: rows stay as they are, and squares of them and of their gradients are summed."""

    def __init__(self, sums: _RowSums, name: str, near: bool = False) -> None:
        self.sums, self.name, self.near = sums, name, near
        self.fine = self if near else _Watcher(sums, name, True)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        if not x.requires_grad:  # will be computed again
            return x
        own, rows = x.detach(), x.clone()  # a hook that held the rows themselves would keep their graph

        def hook(grad: torch.Tensor) -> None:
            x, g = (t[:, :, WHOLE:].transpose(0, 1).flatten(1, 2).float() for t in (own, grad))
            with exact_products():  # what is left of squares without the mean can be small
                parts = {"near": g.mT @ g} if self.near else {"far": g.mT @ g, "square": x.mT @ x, "sum": x.sum(1)}
            self.sums.add(**{f"{self.name}_{what}": part.double().to(self.sums.device) for what, part in parts.items()})
            self.sums.tokens += x.shape[1] if self.name == "k" and not self.near else 0

        rows.register_hook(hook)
        return rows


@contextmanager
def _watching(attentions: Sequence[Any], device: torch.device) -> Iterator[list[_RowSums]]:
    """Sum over the rows of these layers until the end, on a device."""
    found = [_RowSums(device) for _ in attentions]
    try:
        for sums, attention in zip(found, attentions, strict=True):
            attention.coders = (_Watcher(sums, "k"), _Watcher(sums, "v"))
        yield found
    finally:
        for attention in attentions:
            attention.coders = None


def collect(
    family: Family,
    model: nn.Module,
    tokens: torch.Tensor,
    seed: int,
    track: Track = silently,
    task: Task | None = None,
    recompute: bool = False,
    spread: bool = False,
) -> list[dict[str, torch.Tensor]]:
    """Per layer and for keys (k) and values (v): the basis of a row, its mean and the prices of its coefficients.

    The first tokens of every row are left out: they are not coded, and unlike all others.
    """
    blocks = family.blocks(model)
    task = task or Causal()

    labels = drawn_labels(seed)
    with _watching([block.attention for block in blocks], _place_of_sums(family, model)) as found:
        rows = passes(
            family, model, task, tokens, seed, track, "damage of bits", recompute, spread, None if spread else labels
        )
        for _, run in rows:
            run()
    centred = [block.attention.attend.softcap is None for block in blocks]
    means = list(zip(map(_means, found), centred, strict=True))
    width = max(layer.qk_width for layer in family.shape_of(model.config).layers)
    return processes.side_by_side(lambda pair: _bases(*pair), means, width)


def sums_bytes(layers: Sequence[LayerShape]) -> int:
    """Bytes of all running sums: three matrices in double precision for the rows of keys, and for those of values."""
    return sum(3 * 8 * layer.kv_heads * (layer.qk_width**2 + layer.v_dim**2) for layer in layers)


def sums_fit(size: int, free: int) -> bool:
    """Whether running sums stay on the device: copies to the host would make it wait, but gradients come first."""
    return size <= free // 16


def _place_of_sums(family: Family, model: Any) -> torch.device:
    device: torch.device = model.device
    fit = sums_fit(sums_bytes(family.shape_of(model.config).layers), available_bytes(device))
    return device if fit else CPU


def local(block: Block, rows: Iterable[tuple[torch.Tensor, dict[str, Any]]], seed: int) -> dict[str, torch.Tensor]:
    """Bases, means and prices of one layer alone; gradients reach no further than the stream after its attention.

    In place of the loss stands the squared error that is left in that stream, relative to its size: a price times half
    a squared error is half of that.
    """
    device = block.output.weight.device
    fast = fast_products(device)  # TF32: far finer than prices have to be
    with _watching([block.attention], device) as found, torch.enable_grad(), fast:
        for number, (stream, context) in enumerate(rows):
            q, k, v = (x.detach() for x in block.heads(stream, context))
            middle = block.middle(stream, block.attended(q, k.requires_grad_(), v.requires_grad_(), context))
            size = middle.detach().square().sum(-1, keepdim=True).clamp_min(1e-30).sqrt()
            drawn = torch.Generator(stream.device).manual_seed(seed + number)
            random = torch.randn(middle.shape, generator=drawn, device=middle.device, dtype=middle.dtype)
            (middle * random / size).sum().backward()
    return _bases(_means(found[0]), block.attention.attend.softcap is None)


def _means(seen: _RowSums) -> dict[str, torch.Tensor]:
    """Sums of a layer's rows over all processes, for each token."""
    tokens = int(processes.total(torch.tensor(seen.tokens)))
    return {name: processes.total(seen.sums[name].cpu()) / tokens for name in sorted(seen.sums)}


def _bases(sums: dict[str, torch.Tensor], centred: bool) -> dict[str, torch.Tensor]:
    """Bases, means and prices of a layer. Softmax ignores a common part of the keys, unless logits are capped."""
    out: dict[str, torch.Tensor] = {}
    for name in "kv":
        mean = sums[f"{name}_sum"] * (centred or name == "v")
        covariance = sums[f"{name}_square"] - mean.unsqueeze(2) * mean.unsqueeze(1)
        far = sums[f"{name}_far"]
        near = sums.get(f"{name}_near", torch.zeros_like(far))  # layers with a window read all alike
        basis, prices, _ = priced_basis(covariance, far + NEARLY * near)
        out |= {f"{name}_basis": basis, f"{name}_mean": mean, f"{name}_price": prices}
        out[f"{name}_near"] = (basis * (near @ basis)).sum((1, 2))
    return out


@dataclass(frozen=True, slots=True)
class Costs:
    """What errors in the coefficients of a row's keys or values cost."""

    prices: Floats  # highest first
    near: float  # of reading by near tokens, of all coefficients together

    @classmethod
    def of(cls, moments: dict[str, torch.Tensor], name: str) -> Costs:
        """From what `collect` found of a layer's keys (k) or values (v); all rows of a token share a code."""
        prices: Floats = moments[f"{name}_price"].double().sum(0).cpu().numpy()
        least = max(float(prices.max()), 1e-30) * 1e-9
        return cls(np.maximum(prices, least), float(moments[f"{name}_near"].sum()))

    def damage(self, code: tuple[int, ...], errors: Sequence[float] = ERRORS) -> float:
        """Of a code that gives so many coefficients 12, 11, ... 1 bits, whose squared errors are these."""
        every = np.repeat((*errors, 1.0), (*code, len(self.prices) - sum(code)))
        return 0.5 * float(self.prices @ every + errors[BITS.index(near_bits(code))] * self.near)


def measure(
    shapes: Sequence[LayerShape], moments: Sequence[dict[str, torch.Tensor]], tokens: int, seed: int
) -> tuple[list[Reading], list[dict[str, tuple[tuple[int, ...], ...]]]]:
    """Damage of every code of keys and of values, by its bytes, and the codes themselves, by layer."""
    lists = {name: [Costs.of(moment, name) for moment in moments] for name in "kv"}
    levels = _levels([costs.prices for rows in lists.values() for costs in rows])
    curves, codes = [], [{} for _ in shapes]  # type: ignore[var-annotated]
    for name, rows in lists.items():
        table: list[Row] = []
        for layer, costs in enumerate(rows):
            offered, whole = _offered(costs, levels), CACHE_BYTES * len(costs.prices)
            table.append(((whole, *offered), (0.0, *(damage for _, damage in offered.values())), None))
            codes[layer][f"{name}_bits"] = tuple(code for code, _ in offered.values())
        what = "keys" if name == "k" else "values"
        meaning = f"Predicted loss increase with {what} cached in fewer bits, by the bytes of a row."
        axis, unit = f"bytes of a row's {what}", Causal.unit
        curves.append(reading(NAME, f"damage.{name}_bits", axis, table, unit, meaning, tokens, seed))
    return curves, codes


@functools.cache
def _thresholds() -> tuple[float, ...]:
    """How much more than a bit a coefficient must cost to get 1, 2, ... 12 bits.

    Widths that are never best have the threshold of the next one.
    """
    errors = (1.0, *ERRORS[::-1])
    found, bits = [0.0] * BITS[0], 0
    while bits < BITS[0]:  # along the convex hull of errors by bits
        gain, best = max(((errors[bits] - errors[b]) / 2 / (b - bits), b) for b in range(bits + 1, BITS[0] + 1))
        found[bits:best] = [1 / gain] * (best - bits)
        bits = best
    return tuple(found)


def _reach(prices: Floats, level: float) -> list[int]:
    """How many coefficients, highest prices first, get at least 12, 11, ... 1 bits where a bit costs `level`."""
    rising = prices[::-1]
    wanted = level * np.array(_thresholds()[::-1])
    return [len(prices) - int(place) for place in np.searchsorted(rising, wanted)]


def _levels(lists: list[Floats]) -> list[float]:
    """What a bit costs where coefficients have the wanted number of bits on average."""
    every = np.sort(np.concatenate(lists))[::-1]
    found = []
    for wanted in MEAN_BITS:
        below, above = np.log(every[-1]) - 20, np.log(every[0]) + 5
        for _ in range(40):
            middle = (below + above) / 2
            more = sum(_reach(every, np.exp(middle))) > wanted * len(every)
            below, above = (middle, above) if more else (below, middle)
        found.append(float(np.exp(above)))
    return found


def _offered(costs: Costs, levels: list[float]) -> dict[int, tuple[tuple[int, ...], float]]:
    """Codes of a row and their damage, by the bytes that they take, most bytes first; the last is the smallest."""
    found: dict[int, tuple[tuple[int, ...], float]] = {}
    for level in (*levels, np.inf):
        code = _code(_reach(costs.prices, level), len(costs.prices))
        found.setdefault(code_bytes(code, len(costs.prices)), (code, costs.damage(code)))
    return dict(sorted(found.items(), reverse=True))


def _code(reach: list[int], size: int) -> tuple[int, ...]:
    """How many coefficients have 12, 11, ... 1 bits; all together a multiple of eight, where rows are wide enough."""
    step = STEP if size >= 8 * STEP else 1
    kept = min(size, max(step, -(-reach[-1] // step) * step))  # something is kept
    return tuple(b - a for a, b in zip([0, *reach[:-1]], [*reach[:-1], kept], strict=True))
