"""What an error in a cached number would cost, and the codes that follow: bits go where they save most.

One backward pass with labels drawn from the model itself gives the Fisher matrix of the keys (as cached, after rotary)
and of the values of every row. With it and the covariance of the rows there is a basis in which coefficients are
uncorrelated, have a spread of one, and an error `e` costs `1/2 sum(price * e**2)`: one price list for keys and values
of all layers. A coefficient with b bits costs `price * D(b) / 2`. Codes are made for a list of common price levels:
the codes of all layers at one level are together the best for the bits that they take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from headwise import processes
from headwise.families import Family
from headwise.families._watch import watching
from headwise.linalg import priced_basis
from headwise.probes._backward import passes
from headwise.probes._layers import Row, reading
from headwise.progress import Track, silently
from headwise.runtime.cache_headwise import WHOLE
from headwise.tasks import Prepared, Task
from headwise.tasks._task import random_for
from headwise.tasks.causal import Causal
from headwise.types import BITS, LayerShape, Reading, code_bytes

NAME = "fisher"
MEANING = "what errors in cached keys and values cost, from gradients"
ERRORS = (4e-5, 1.6e-4, 6.2e-4, 2.5e-3, 9.7e-3, 0.039, 0.157, 0.46)  # of a coefficient with 8, 7, ... 1 bits, squared
# Dropping a direction of the keys does more than noise of its size: all keys lose what they have in common. Measured
# on the embedded model and on SmolLM2-135M.
DROPPED = {"k": 2.0, "v": 1.0}
MEAN_BITS = (*np.arange(8, 4, -0.5), *np.arange(4, 2, -0.25), *np.arange(2, 0.2, -0.125))  # one code for each
Floats = NDArray[np.float64]


@dataclass(slots=True)
class _RowSums:
    """Running sums of one layer's cached rows."""

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    tokens: int = 0

    def add(self, **parts: torch.Tensor) -> None:
        for name, part in parts.items():
            self.sums[name] = self.sums[name] + part if name in self.sums else part


class _Fisher:
    """Sums of squares of rows and of their gradients, while the model runs forward and backward."""

    def __init__(self, layers: int) -> None:
        self.layers = [_RowSums() for _ in range(layers)]

    def attention(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor) -> None:
        if not k.requires_grad:  # will be computed again
            return
        for name, rows in (("k", k), ("v", v)):
            self._see(layer, name, rows)

    def _see(self, layer: int, name: str, rows: torch.Tensor) -> None:
        seen = self.layers[layer]

        def hook(grad: torch.Tensor) -> None:
            x, g = (t[:, :, WHOLE:].transpose(0, 1).flatten(1, 2).float() for t in (rows.detach(), grad))
            parts = {"square": x.mT @ x, "fisher": g.mT @ g, "sum": x.sum(1)}
            seen.add(**{f"{name}_{what}": part.double().cpu() for what, part in parts.items()})
            seen.tokens += x.shape[1] if name == "k" else 0

        rows.register_hook(hook)


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
    found, task = _Fisher(len(blocks)), task or Causal()

    def labels(outputs: torch.Tensor, batch: Prepared) -> torch.Tensor:
        rows = zip(batch.inputs, outputs.detach()[:, :-1], strict=True)
        draws = torch.stack([_drawn(log_probabilities, random_for(row, seed)) for row, log_probabilities in rows])
        return torch.cat((batch.labels[:, :1], draws), 1)

    with watching(blocks, found.attention):
        rows = passes(
            family, model, task, tokens, seed, track, "prices of bits", recompute, spread, None if spread else labels
        )
        for _, run in rows:
            run()
    return [
        _bases(sums, block.attention.attend.softcap is None) for sums, block in zip(found.layers, blocks, strict=True)
    ]


def _drawn(log_probabilities: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """A token for every place of a row. Every row has its own numbers: batches and processes do not change them."""
    reached = log_probabilities.double().exp().cumsum(-1)
    wanted = torch.rand(len(reached), 1, generator=random, dtype=torch.float64).to(reached.device) * reached[:, -1:]
    return torch.searchsorted(reached, wanted, right=True).squeeze(1)


def _bases(seen: _RowSums, centred: bool) -> dict[str, torch.Tensor]:
    """Bases, means and prices of a layer. Softmax ignores a common part of the keys, unless logits are capped."""
    tokens = int(processes.total(torch.tensor(seen.tokens)))
    out: dict[str, torch.Tensor] = {}
    sums = {name: processes.total(seen.sums[name]) / tokens for name in sorted(seen.sums)}
    for name in "kv":
        mean = sums[f"{name}_sum"] * (centred or name == "v")
        covariance = sums[f"{name}_square"] - mean.unsqueeze(2) * mean.unsqueeze(1)
        basis, prices, _ = priced_basis(covariance, sums[f"{name}_fisher"])
        out |= {f"{name}_basis": basis, f"{name}_mean": mean, f"{name}_price": prices}
    return out


def measure(
    shapes: Sequence[LayerShape], moments: Sequence[dict[str, torch.Tensor]], tokens: int, seed: int
) -> tuple[list[Reading], list[dict[str, tuple[tuple[int, ...], ...]]]]:
    """Damage of every code of keys and of values, by its bytes, and the codes themselves, by layer."""
    lists = {name: [_prices(moment[f"{name}_price"]) for moment in moments] for name in "kv"}
    levels = _levels([prices for rows in lists.values() for prices in rows])
    curves, codes = [], [{} for _ in shapes]  # type: ignore[var-annotated]
    for name, rows in lists.items():
        table: list[Row] = []
        for layer, prices in enumerate(rows):
            offered = _offered(prices, levels, DROPPED[name])
            full = 2 * len(prices)
            table.append(((full, *offered), (0.0, *(damage for _, damage in offered.values())), None))
            codes[layer][f"{name}_bits"] = tuple(code for code, _ in offered.values())
        what = "keys" if name == "k" else "values"
        meaning = f"Predicted loss increase with {what} cached in fewer bits, by the bytes of a row."
        axis, unit = f"bytes of a row's {what}", Causal.unit
        curves.append(reading(NAME, f"damage.{name}_bits", axis, table, unit, meaning, tokens, seed))
    return curves, codes


def _prices(price: torch.Tensor) -> Floats:
    """Of the coefficients of all rows of a token, which share a code."""
    found: Floats = price.double().sum(0).cpu().numpy()
    return np.maximum(found, max(float(found.max()), 1e-30) * 1e-9)


def _bits(prices: Floats, level: float, dropped: float) -> NDArray[np.int64]:
    """The best bits of every coefficient where a bit costs `level`."""
    costs = 0.5 * np.outer((dropped, *ERRORS[::-1]), prices) + level * np.arange(9)[:, None]
    found: NDArray[np.int64] = costs.argmin(0)
    return found


def _levels(lists: list[Floats]) -> list[float]:
    """What a bit costs where coefficients have the wanted number of bits on average."""
    every = np.concatenate(lists)
    low, high = float(every.min()) * ERRORS[0] / 8, float(every.max()) * 8
    found = []
    for wanted in MEAN_BITS:
        below, above = np.log(low), np.log(high)
        for _ in range(30):
            middle = (below + above) / 2
            below, above = (middle, above) if _bits(every, np.exp(middle), 1.0).mean() > wanted else (below, middle)
        found.append(float(np.exp(above)))
    return found


def _offered(prices: Floats, levels: list[float], dropped: float) -> dict[int, tuple[tuple[int, ...], float]]:
    """Codes of a row and their damage, by the bytes that they take, most bytes first."""
    found: dict[int, tuple[tuple[int, ...], float]] = {}
    for level in levels:
        code = _rounded(_bits(prices, level, dropped))
        found.setdefault(code_bytes(code), (code, _damage(prices, code, dropped)))
    return dict(sorted(found.items(), reverse=True))


def _rounded(bits: NDArray[np.int64]) -> tuple[int, ...]:
    """How many coefficients have 8, 7, ... 1 bits: whole bytes of every width where rows are wide enough."""
    size, step = len(bits), 8 if len(bits) >= 64 else 1
    reach = [min(size, step * round(int((bits >= width).sum()) / step)) for width in BITS]
    reach[-1] = max(reach[-1], min(step, size))  # something is kept
    reach = list(np.maximum.accumulate(reach))
    return tuple(int(b - a) for a, b in zip([0, *reach], reach, strict=False))


def _damage(prices: Floats, code: tuple[int, ...], dropped: float) -> float:
    errors = np.repeat((*ERRORS, dropped), (*code, len(prices) - sum(code)))
    return 0.5 * float(prices @ errors)
