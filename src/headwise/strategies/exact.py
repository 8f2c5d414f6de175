"""The best plan there is: one mixed-integer solve over all layers and all units, proven optimal by HiGHS.

A binary variable picks one head count per layer; under each head count one picks a query/key size and one a value
size, so every price is linear although head counts and sizes multiply. MLP widths are picked separately.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from headwise import budgets as prices
from headwise.strategies._options import Choice, LayerMenu, finish, menus, refuse, with_choices
from headwise.types import Budget, LayerShape, ModelShape, Plan, Point, Readings

NAME = "exact"
MEANING = "least predicted damage over all layers and units together, proven optimal"
WAYS = ("qk_projected", "qk_pairs")
SCALE = 1e4  # of objective and budget rows: the solver's tolerances are absolute
FRONTIER_POINTS = 12


@dataclass(slots=True)
class _Program:
    """Columns and rows of the integer program, gathered layer by layer."""

    damage: list[float] = field(default_factory=list)
    price: list[list[float]] = field(default_factory=list)  # per column, per budget
    meaning: list[tuple[int, str, Choice]] = field(default_factory=list)
    rows: list[tuple[list[int], list[float], float]] = field(default_factory=list)  # columns, coefficients, right side

    def column(self, layer: int, kind: str, choice: Choice, price: list[float]) -> int:
        self.damage.append(choice.damage)
        self.price.append(price)
        self.meaning.append((layer, kind, choice))
        return len(self.damage) - 1


def allocate(
    source: ModelShape, readings: Readings, budgets: tuple[Budget, ...], allow: tuple[str, ...], seed: int
) -> Plan:
    """The plan of least predicted damage that meets every budget."""
    offered = menus(source, readings, allow, WAYS)
    program = build(source, offered, budgets)
    fixed, smallest = _fixed_and_smallest(source, offered, program, budgets)
    limits = np.array([budget.limit for budget in budgets]) - fixed
    solved = _solve(program, limits)
    if solved is None:
        raise refuse(source, budgets, dict(zip((b.name for b in budgets), smallest, strict=True)), allow)
    picked, gap = solved
    targets = _targets(source, program, picked)
    damage = float(sum(program.damage[i] for i in picked))
    frontier = _frontier(source, program, budgets, fixed, smallest)
    return finish(source, readings, targets, damage, NAME, budgets, seed, gap=gap, frontier=frontier)


def build(source: ModelShape, offered: list[LayerMenu], budgets: tuple[Budget, ...]) -> _Program:
    """The integer program; choices that another beats in damage and in every price are left out."""
    program = _Program()
    for layer, (shape, menu) in enumerate(zip(source.layers, offered, strict=True)):

        def price(*choices: Choice, shape: LayerShape = shape) -> list[float]:
            return [prices.layer_price(b, source, with_choices(shape, *choices)) for b in budgets]

        base = price()
        picks = []
        for heads in menu.heads:
            whole = price(heads)
            top = program.column(layer, "heads", heads, whole)
            picks.append(top)
            for kind, choices in (("qk", menu.qk), ("v", menu.v)):
                priced = [(c, [a - b for a, b in zip(price(heads, c), whole, strict=True)]) for c in choices]
                columns = [program.column(layer, kind, c, p) for c, p in _undominated(priced)]
                program.rows.append(([*columns, top], [1.0] * len(columns) + [-1.0], 0.0))
        program.rows.append((picks, [1.0] * len(picks), 1.0))
        priced = [(c, [a - b for a, b in zip(price(c), base, strict=True)]) for c in menu.mlp]
        columns = [program.column(layer, "mlp", c, p) for c, p in _undominated(priced)]
        program.rows.append((columns, [1.0] * len(columns), 1.0))
    return program


def _undominated(priced: list[tuple[Choice, list[float]]]) -> list[tuple[Choice, list[float]]]:
    kept: list[tuple[Choice, list[float]]] = []
    for choice, price in sorted(priced, key=lambda item: (item[0].damage, item[1])):
        if not any(all(a <= b for a, b in zip(other, price, strict=True)) for _, other in kept):
            kept.append((choice, price))
    return kept


def _solve(program: _Program, limits: np.ndarray) -> tuple[list[int], float] | None:
    """Indices of the chosen columns and the relative gap to the proven bound; None where nothing is feasible."""
    damage, price = np.array(program.damage), np.array(program.price).T
    index = [np.repeat(i, len(row[0])) for i, row in enumerate(program.rows)]
    entries = (np.concatenate([row[1] for row in program.rows]), (np.concatenate(index), np.concatenate([row[0] for row in program.rows])))
    sides = np.array([row[2] for row in program.rows])
    equal = LinearConstraint(csr_array(entries, shape=(len(sides), len(damage))), sides, sides)
    unit = np.maximum(np.abs(price).sum(axis=1) / SCALE, 1e-30)
    spend = LinearConstraint(price / unit[:, None], -np.inf, limits / unit)
    result = milp(
        damage * (SCALE / max(damage.max(), 1e-30)),
        constraints=[equal, spend] if len(price) else [equal],
        integrality=np.ones(len(damage)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0, "time_limit": 120.0},
    )
    if result.x is None:
        return None
    picked = [int(i) for i in np.flatnonzero(result.x > 0.5)]
    if len(price) and np.any(price[:, picked].sum(axis=1) > limits * (1 + 1e-12) + 1e-9):
        return _solve(program, limits - 1e-6 * unit)  # the solver's tolerance let a hair too much through
    return picked, float(result.mip_gap or 0.0)


def _targets(source: ModelShape, program: _Program, picked: list[int]) -> list[LayerShape]:
    chosen: list[list[Choice]] = [[] for _ in source.layers]
    for column in picked:
        layer, _, choice = program.meaning[column]
        chosen[layer].append(choice)
    return [with_choices(shape, *choices) for shape, choices in zip(source.layers, chosen, strict=True)]


def _fixed_and_smallest(
    source: ModelShape, offered: list[LayerMenu], program: _Program, budgets: tuple[Budget, ...]
) -> tuple[np.ndarray, list[float]]:
    """What the parts cost that no plan changes, and the least that each budget can come to."""
    fixed, smallest = [], []
    for budget in budgets:
        layers = sum(prices.layer_price(budget, source, layer) for layer in source.layers)
        fixed.append(prices.price(budget, source) - layers)
        least = 0.0
        for shape, menu in zip(source.layers, offered, strict=True):
            least += min(
                prices.layer_price(budget, source, with_choices(shape, heads, qk, menu.v[-1], menu.mlp[-1]))
                for heads in menu.heads
                for qk in menu.qk
            )
        smallest.append(fixed[-1] + least)
    return np.array(fixed), smallest


def _frontier(
    source: ModelShape, program: _Program, budgets: tuple[Budget, ...], fixed: np.ndarray, smallest: list[float]
) -> tuple[Point, ...]:
    """Least damage against the first budget's price, the other budgets left as they are."""
    if not budgets:
        return ()
    full = prices.price(budgets[0], source)
    shares = np.linspace(smallest[0] / full, 1.0, FRONTIER_POINTS)
    points = []
    for share in shares:
        limits = np.array([share * full, *(b.limit for b in budgets[1:])]) - fixed
        if (solved := _solve(program, limits)) is not None:
            points.append(Point(float(share), float(sum(program.damage[i] for i in solved[0]))))
    return tuple(points)
