"""Plans for the bits benchmark: ours at any number of bytes, and what is left without the exact program.

All plans are made from one probing, in its basis and by its prices. `equal bits` gives every coefficient of every layer
one width, `equal ranks` keeps so many directions of every layer in 16 bits, `water-filling` is the textbook rule for
normal numbers, `b = log2(price / level) / 2`, rounded to whole bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rival_caches import NUMBER

from headwise import budgets
from headwise.cost import kv_bytes_per_token
from headwise.cuts import reshape
from headwise.errors import BudgetError
from headwise.probes import fisher
from headwise.runs.settings import Settings
from headwise.runtime import cache_headwise
from headwise.runtime.coder_headwise import RowCoder
from headwise.stages.source import Probed
from headwise.strategies import exact
from headwise.strategies._options import finish
from headwise.types import BITS, Budget, LayerShape, Plan, code_bytes

Code = tuple[int, ...]


def stored_bytes(layers: Sequence[LayerShape], length: int) -> int:
    """Bytes of a text of so many tokens as our caches hold it: codes, scales, and the first and newest tokens."""
    return sum(layer.kv_heads * _row_bytes(layer, length) for layer in layers)


def _row_bytes(layer: LayerShape, length: int) -> int:
    if not layer.coded:
        return length * layer.row_bytes(NUMBER)
    told = layer.to_json()
    coders = [RowCoder(told["k_code"], layer.qk_dim), RowCoder(told["v_code"], layer.v_dim)]
    first = min(cache_headwise.WHOLE, length) * NUMBER * (layer.qk_dim + layer.v_dim)
    newest = min(cache_headwise.NEAR, length) * sum(coder.fine.bytes for coder in coders)
    return length * sum(coder.bytes for coder in coders) + first + newest


@contextmanager
def keeping(first: int, newest: int) -> Iterator[None]:
    """Let our caches keep other numbers of tokens beside their codes, until the end."""
    before = cache_headwise.WHOLE, cache_headwise.NEAR
    cache_headwise.WHOLE, cache_headwise.NEAR = first, newest
    try:
        yield
    finally:
        cache_headwise.WHOLE, cache_headwise.NEAR = before


class Solver:
    """The exact program of one probing, for any number of bytes."""

    def __init__(self, settings: Settings, probed: Probed) -> None:
        self.readings, source = probed.readings, probed.readings.source
        self.limits = budgets.parse_all(settings.budgets, source)
        self.least, self.answer = exact.answers(source, self.readings, self.limits, settings.allow)

    def within(self, most: float, length: int) -> Plan:
        """The exact plan for a text of so many tokens in `most` bytes, everything counted."""
        limit = most / length
        while limit >= self.least and (found := self.answer(limit, 0.0)):
            damage, _, layers, _ = found
            over = stored_bytes(layers, length) - most
            if over <= 0:
                return finish(self.readings.source, self.readings, layers, damage, "exact", (), self.readings.seed)
            limit -= over / length + 1e-3  # the first tokens weigh more in a short text than plans assume
        raise BudgetError(f"{most / length:,.1f} bytes a token are out of reach; the least is {self.least:,.0f}.")


@dataclass(frozen=True, slots=True)
class Prices:
    """What errors cost: prices of all coefficients by layer, for keys and for values, and the probing they are from."""

    probed: Probed
    lists: dict[str, list[fisher.Costs]]

    @classmethod
    def of(cls, probed: Probed) -> Prices:
        """Those of a probing."""
        return cls(probed, {n: [fisher.Costs.of(m, n) for m in probed.moments] for n in "kv"})

    def damage(self, name: str, layer: int, code: Code, errors: Sequence[float] = fisher.ERRORS) -> float:
        """Predicted damage of a code of one layer, corrected as far as the probing measured such codes."""
        return self.lists[name][layer].damage(code, errors) * self._correction(
            name, layer, code_bytes(code, len(self.lists[name][layer].prices))
        )

    def _correction(self, name: str, layer: int, size: int) -> float:
        """Measured by predicted damage of the code offered whose bytes are nearest."""
        curves = [curve for curve in self.probed.readings.curves if curve.kind == f"damage.{name}_bits"]
        first, last = curves[0], curves[-1]
        tick = min(first.ticks[layer][1:], key=lambda tick: abs(tick - size))
        before, after = first.at(layer, tick), last.at(layer, tick)
        return after / before if before > 0 else 1.0

    def plan(self, codes: dict[str, list[Code]], limits: tuple[Budget, ...]) -> Plan:
        """The plan in which every layer has these codes of keys and of values, with its predicted damage."""
        readings = self.probed.readings
        source = readings.source
        targets = [
            replace(layer, k_code=k, v_code=v)
            for layer, k, v in zip(source.layers, codes["k"], codes["v"], strict=True)
        ]
        damage = sum(self.damage(name, at, code) for name in "kv" for at, code in enumerate(codes[name]))
        return finish(source, readings, targets, damage, "exact", limits, readings.seed)

    def equal_bits(self, bits: int) -> Plan:
        """Every coefficient of every layer in so many bits."""
        codes = {
            n: [tuple(len(c.prices) * (width == bits) for width in BITS) for c in rows]
            for n, rows in self.lists.items()
        }
        return self.plan(codes, ())

    def water_filling(self, limits: tuple[Budget, ...]) -> Plan:
        """The bits that are best for normal numbers, rounded; the level is the lowest that the limit allows."""
        below, above = -80.0, 80.0  # logarithms of the level
        for _ in range(60):
            middle = (below + above) / 2
            fits = kv_bytes_per_token(self.plan(self._filled(middle), ()).target) <= limits[0].limit
            below, above = (below, middle) if fits else (middle, above)
        return self.plan(self._filled(above), limits)

    def _filled(self, level: float) -> dict[str, list[Code]]:
        def bits(prices: fisher.Floats) -> Any:
            return np.clip(np.round(0.5 * (np.log2(prices) - level)), 0, BITS[0]).astype(np.int64)

        def code(prices: fisher.Floats) -> Code:
            found = bits(prices)
            return fisher._code([int((found >= width).sum()) for width in BITS], len(prices))

        return {name: [code(costs.prices) for costs in rows] for name, rows in self.lists.items()}

    def equal_ranks(self, limit: float) -> tuple[Plan, float]:
        """As many directions in every layer as 16-bit numbers leave room for, and their predicted damage.

        The plan has codes of 8 bits, so that it can be built; `uncoded` takes these away.
        """
        source = self.probed.readings.source
        rank = math.floor(limit / sum(2 * NUMBER * layer.kv_heads for layer in source.layers))
        if rank < 1:
            raise BudgetError(f"{limit:,.0f} bytes leave no room for one direction of every layer.")
        codes = {
            name: [(min(rank, len(costs.prices)), *(0,) * (len(BITS) - 1)) for costs in rows]
            for name, rows in self.lists.items()
        }
        lossless = (0.0,) * len(BITS)
        damage = sum(self.damage(name, at, code, lossless) for name in "kv" for at, code in enumerate(codes[name]))
        plan = self.plan(codes, ())
        layers = [replace(layer, qk_dim=sum(layer.k_code), v_dim=sum(layer.v_code)) for layer in plan.target.layers]
        return replace(plan, target=plan.target.with_layers(tuple(layers))), damage


def built(bench: Any, probed: Probed, plan: Plan) -> Any:
    """The model of a plan."""
    return reshape(bench.family, bench.model, plan, probed.moments)


def uncoded(family: Any, model: Any) -> Any:
    """The same model with its coefficients cached as they are."""
    for block in family.blocks(model):
        block.attention.coders = None  # softmax ignores the mean of the keys, which is then not taken off
    return model


def rank_bytes(plan: Plan, length: int) -> int:
    """Bytes of a text of so many tokens with a plan's directions in 16 bits."""
    return length * sum(NUMBER * layer.kv_heads * (layer.qk_dim + layer.v_dim) for layer in plan.target.layers)


def limits_of(settings: Settings, bench: Any) -> tuple[Budget, ...]:
    """The budgets of settings, read against a source."""
    return budgets.parse_all(settings.budgets, bench.shape)
