"""One integer program over all layers and all units, solved with a proof of how good its answer is.

A binary variable picks one head count per layer; under each head count one picks a query/key size and one a value
size, so every price is linear although head counts and sizes multiply. MLP widths are picked separately. Bits of a
matrix are picked under what its size depends on; those of the tables of words belong to no layer. Under a budget of
measured time, where a kernel's price is no sum over the two sizes, one picks a pair of them.

Large models have so many sizes that HiGHS alone takes minutes. So budgets first get prices (Lagrange multipliers, by
column generation). With prices every layer chooses on its own, which bounds the damage from below and gives, for every
size, the least additional damage. Sizes beyond the best known plan cannot be part of a better one and are left out;
HiGHS searches the rest, usually a hundredth of the whole. The search is limited by nodes, not by time, so a plan never
depends on the machine; what is not proven within them is the plan's `gap`. `_knapsack` takes what has one budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from headwise import budgets as prices
from headwise.strategies._knapsack import Knapsack
from headwise.strategies._multipliers import Floats, Indices, Mask, free_choices, multipliers, nth, rows_of
from headwise.strategies._options import Choice, LayerMenu, pairs, refuse, with_choices
from headwise.strategies._quiet import without_marked_lines
from headwise.types import Budget, LayerShape, ModelShape

SCALE = 1e3  # of objective and budget rows: the solver's tolerances are absolute
FRONTIER_GAP = 1e-3  # relative; finer than any drawing shows
CORE = 4  # sizes per free choice that are tried first
NODE_LIMIT = 4000  # of one run of HiGHS, which takes seconds; a plan that is not proven by then has a gap above 0

Price = Callable[[LayerShape], Sequence[float]]  # what a layer costs in every budget
Whole = Callable[[ModelShape], Sequence[float]]  # what a model costs in every budget
Ends = Sequence[tuple[Choice, ...]]  # choices of the model as a whole
Column = tuple[Choice, ...]  # what goes together: mostly one choice


class Solution(NamedTuple):
    """What every layer becomes, by which choices, and how far that is proven."""

    targets: list[LayerShape]
    choices: list[list[Choice]]  # per layer, and those of the model as a whole
    gap: float

    @property
    def ends(self) -> dict[str, int]:
        """Bits of the tables of words, where they were chosen."""
        return dict(pair for choice in self.choices[-1] for pair in choice.sizes)

    @property
    def damage(self) -> float:
        """The total of what was minimised."""
        return sum(choice.damage for layer in self.choices for choice in layer)


class Problem:
    """A model's menus under budgets, ready to be solved for these and for other limits of the first budget."""

    def __init__(
        self, source: ModelShape, offered: list[LayerMenu], budgets: tuple[Budget, ...], ends: Ends = ()
    ) -> None:
        self.source, self.budgets = source, budgets
        joint = any(map(prices.joint, budgets))
        price: Price = lambda layer: [prices.layer_price(b, source, layer) for b in budgets]  # noqa: E731
        whole: Whole = lambda model: [prices.price(b, model) for b in budgets]  # noqa: E731
        self.program = build(source, offered, price, joint, ends, whole)
        self.full = np.array([prices.source_price(budget, source) for budget in budgets])  # 100%
        layers = [sum(prices.layer_price(budget, source, layer) for layer in source.layers) for budget in budgets]
        self.fixed = np.array(whole(source)) - layers
        self.least = self.fixed + np.array([self.program.cheapest(row)[0] for row in self.program.price])
        self.seen = np.zeros(len(self.program.damage), dtype=bool)  # columns that mattered in a solve
        self.table = Knapsack(self.program) if Knapsack.fits(self.program) else None

    def solve(self, limits: Sequence[float] | None = None, gap: float = 0.0) -> Solution | None:
        """The selection of least total damage that meets every budget, or other limits; None where there is none.

        With a `gap` above 0 the search may stop that close to the bound.
        """
        solved = self._select([budget.limit for budget in self.budgets] if limits is None else limits, gap)
        if solved is None:
            return None
        choices = chosen(self.program, solved[0], len(self.source.layers))
        rows = zip(self.source.layers, choices[:-1], strict=True)
        return Solution([with_choices(shape, *row) for shape, row in rows], choices, solved[1])

    def damage_at(self, share: float) -> float:
        """Least damage at a share of the first budget's full price, the others as they are; infinite out of reach."""
        limit = share * self.full[0]
        limit = self.least[0] if abs(limit - self.least[0]) < 1e-9 * limit else limit  # its own least is in reach
        solved = self._select([limit, *(budget.limit for budget in self.budgets[1:])], FRONTIER_GAP)
        return float("inf") if solved is None else float(self.program.damage[solved[0]].sum())

    def _select(self, limits: Sequence[float], gap: float) -> tuple[list[int], float] | None:
        left = np.array(limits) - self.fixed
        if self.table is None:
            return select(self.program, left, self.seen, gap)
        return self.table.select(float(self.program.reachable(left)[0]))


def solve(
    source: ModelShape, offered: list[LayerMenu], budgets: tuple[Budget, ...], allow: tuple[str, ...]
) -> Solution:
    """The selection of least total damage that meets every budget; budgets out of reach are refused."""
    problem = Problem(source, offered, budgets)
    found = problem.solve()
    if found is None:
        raise refuse(source, budgets, problem.least.tolist(), allow)
    return found


def chosen(program: Program, picked: list[int], layers: int) -> list[list[Choice]]:
    """The choices behind the picked columns, per layer, and last those of the model as a whole."""
    found: list[list[Choice]] = [[] for _ in range(layers + 1)]
    for i in picked:
        found[program.meaning[i][0]] += program.meaning[i][1]
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """One column per choice. Of every group one column is taken if the group's parent column is, or always if -1."""

    damage: Floats  # per column
    price: Floats  # per budget and column; sizes below a head count hold what they change
    group: Indices  # per column
    parent: Indices  # per group
    meaning: tuple[tuple[int, Column], ...]  # per column: layer and choices
    step: Floats  # per budget: the greatest common divisor of its prices, 0 where they are no whole numbers

    def reachable(self, limits: Floats) -> Floats:
        """The most that a selection can spend within the limits, as far as whole steps tell: bounds get tighter."""
        allowed = limits + 1e-12 * np.abs(limits)  # a percentage of bytes is rarely a whole number
        steps = np.maximum(self.step, 1e-30)
        return np.where(self.step > 0, np.floor(allowed / steps) * steps, allowed)

    def cheapest(self, value: Floats) -> tuple[float, Floats]:
        """The least total of `value` over all selections, and per column how much more a selection with it has."""
        least, total = self._totals(value)
        excess = total - least[self.group]
        above = self.parent[self.group]
        excess += np.where(above >= 0, excess[above], 0.0)
        return float(least[self.parent < 0].sum()), excess

    def _totals(self, value: Floats) -> tuple[Floats, Floats]:
        """Per group the least of its columns, per column its value with the best of all that hangs on it."""
        total, least = value.copy(), np.full(len(self.parent), np.inf)
        hanging = self.parent >= 0
        leaf = hanging[self.group]
        np.minimum.at(least, self.group[leaf], total[leaf])
        np.add.at(total, self.parent[hanging], least[hanging])
        np.minimum.at(least, self.group[~leaf], total[~leaf])
        return least, total


def build(
    source: ModelShape,
    offered: list[LayerMenu],
    price_of: Price,
    joint: bool = False,
    ends: Ends = (),
    whole_price: Whole | None = None,
) -> Program:
    """The program of a model; choices that another beats in damage and in every price are left out.

    Prices must add up over units: a layer's price is that of its heads and sizes plus that of its MLP. Unless `joint`,
    those of query/key and value sizes must add up too. `ends` are choices of the model as a whole.
    """
    known: dict[tuple[object, ...], Floats] = {}

    def price(shape: LayerShape, *choices: Choice) -> Floats:
        key = (shape, *(choice.sizes for choice in choices))  # layers are mostly alike
        if key not in known:
            known[key] = np.array(price_of(with_choices(shape, *choices)), dtype=float)
        return known[key]

    columns = _Columns()
    for layer, (shape, menu) in enumerate(zip(source.layers, offered, strict=True)):
        only = (menu.heads[0], menu.qk[0], menu.v[0], menu.mlp[0])
        if with_choices(shape, *only).gone:  # nothing to choose, and parts of a layer that is gone do not add up
            columns.add_one(layer, only, price(shape, *only))
            continue
        ways = [_kinds(menu, joint, source.grain.equal)]
        if menu.whole:
            uncoded = replace(menu, qk=menu.whole[:1], v=menu.whole[1:])
            ways.append(_kinds(uncoded, joint, source.grain.equal))
        options = list(product(ways, menu.heads))
        tops = columns.add(layer, -1, [(heads,) for _, heads in options], [price(shape, heads) for _, heads in options])
        for top, (kinds, heads) in zip(tops, options, strict=True):
            whole = price(shape, heads)
            for kind in kinds:
                columns.add(layer, top, *_undominated(kind, [price(shape, heads, *c) - whole for c in kind]))
        base = price(shape)
        widths: list[Column] = [(choice,) for choice in menu.mlp]
        widths, costs = _undominated(widths, [price(shape, *c) - base for c in widths])
        for top, (width,) in zip(columns.add(layer, -1, widths, costs), widths, strict=True):
            for name in (name for name in ("gate", "up", "down") if name in menu.weights):
                bits: list[Column] = [(choice,) for choice in menu.weights[name]]
                cost = [price(shape, width, *c) - price(shape, width) for c in bits]
                columns.add(layer, top, *_undominated(bits, cost))
    for choices in ends:
        columns.add(len(offered), -1, *_undominated(*_tables(source, choices, whole_price or (lambda model: ()))))
    return columns.program()


def _tables(source: ModelShape, choices: tuple[Choice, ...], price: Whole) -> tuple[list[Column], list[Floats]]:
    """Widths of a table of words, and what they save."""
    same, found = np.array(price(source)), list[Column]((choice,) for choice in choices)
    return found, [np.array(price(replace(source, **dict(choice.sizes)))) - same for choice in choices]


def _kinds(menu: LayerMenu, joint: bool, equal: bool) -> list[list[Column]]:
    """What is picked under a head count: a query/key size and a value size, or a pair of both.

    Bits of the projections are picked beside a size that they do not depend on, and else with it.
    """
    if joint or equal:
        return [list(pairs(menu, equal))]
    found: list[list[Column]] = []
    for choices, size, names in ((menu.qk, "qk_width", "qk"), (menu.v, "v_dim", "vo")):
        bits = [menu.weights[name] for name in names if name in menu.weights]
        if len({dict(choice.sizes).get(size) for choice in choices}) == 1:
            found += [list[Column]((choice,) for choice in group) for group in (choices, *bits)]
        else:
            found.append([tuple(column) for column in product(choices, *bits)])
    return found


class _Columns:
    """Gathers columns group by group."""

    def __init__(self) -> None:
        self.price: list[Floats] = []
        self.group: list[int] = []
        self.parent: list[int] = []
        self.meaning: list[tuple[int, Column]] = []

    def add(self, layer: int, parent: int, choices: list[Column], price: list[Floats]) -> range:
        """A new group; returns its columns."""
        start = len(self.meaning)
        self.price += price
        self.group += [len(self.parent)] * len(choices)
        self.parent.append(parent)
        self.meaning += [(layer, choice) for choice in choices]
        return range(start, len(self.meaning))

    def add_one(self, layer: int, only: tuple[Choice, ...], price: Floats) -> None:
        """A layer that has no choice."""
        (top,) = self.add(layer, -1, [only[:1]], [price])
        for choice, parent in zip(only[1:], (top, top, -1), strict=True):
            self.add(layer, parent, [(choice,)], [np.zeros_like(price)])

    def program(self) -> Program:
        """All that was gathered."""
        return Program(
            damage=np.array([sum(choice.damage for choice in choices) for _, choices in self.meaning]),
            price=np.array(self.price).T,
            group=np.array(self.group),
            parent=np.array(self.parent),
            meaning=tuple(self.meaning),
            step=np.array([_divisor(row) for row in np.array(self.price).T]),
        )


def _divisor(price: Floats) -> float:
    """The greatest common divisor; 0 for prices that are no whole numbers, or too fine for the solver's tolerance."""
    largest = float(np.abs(price).max())
    if largest >= 2**53 or np.any(price != np.round(price)):
        return 0.0
    divisor = max(int(np.gcd.reduce(price.astype(np.int64))), 1)
    return float(divisor) if largest / divisor < 1e8 else 0.0


def _undominated(choices: list[Column], price: list[Floats]) -> tuple[list[Column], list[Floats]]:
    """The choices that no other beats or equals in damage and in every price; of equals the first."""
    table = np.array([[sum(c.damage for c in one), *row] for one, row in zip(choices, price, strict=True)])
    order = np.lexsort(table.T[::-1])
    table = table[order]
    beats = np.triu((table[:, None] <= table[None]).all(-1), k=1)  # earlier in the order, nowhere worse
    kept = sorted(int(i) for i in order[~beats.any(axis=0)])
    return [choices[i] for i in kept], [price[i] for i in kept]


def select(program: Program, limits: Floats, seen: Mask, gap: float = 0.0) -> tuple[list[int], float] | None:
    """The chosen columns and the relative gap to the proven bound, at most `gap`; None where nothing is feasible.

    Starts with the few columns that the multipliers favour, and widens until what was left out cannot matter.
    """
    limits = program.reachable(limits)
    worth = multipliers(program, limits, seen)
    bound, excess = program.cheapest(program.damage + worth @ program.price)
    bound -= float(worth @ limits)
    reach = nth(excess, CORE * free_choices(program))
    while True:
        keep = np.flatnonzero(excess <= reach)
        found = _branch_and_bound(program, keep, limits, gap / 2)
        damage, proven = (float(program.damage[found[0]].sum()), found[1]) if found else (np.inf, np.inf)
        whole = len(keep) == len(excess)
        least = proven if whole else min(proven, bound + reach)  # what was left out has at least that
        if whole or (found and (damage - least <= gap * damage or proven < bound + reach)):
            break
        # Rounding must not drop a column of the optimum; small steps find better plans on the way.
        reach = min(damage - bound + 1e-9 * abs(bound), nth(excess, 4 * len(keep)))
    return (found[0], max(0.0, 1.0 - least / damage) if damage > 0 else 0.0) if found else None


def _branch_and_bound(program: Program, keep: Indices, limits: Floats, gap: float) -> tuple[list[int], float] | None:
    """The best selection among the columns `keep` and the least damage that any has; None where there is none."""
    matrix, sides = rows_of(program, keep)
    damage, price = program.damage[keep], program.price[:, keep]
    unit = np.abs(price).max(axis=1, initial=1e-30) / SCALE
    hair = np.where(program.step > 0, 0.0, 2e-6)  # whole steps are larger than the solver's tolerance
    spend = [LinearConstraint(price / unit[:, None], -np.inf, limits / unit - hair)] if len(limits) else []
    scale = SCALE / max(float(damage.max()), 1e-30)
    with without_marked_lines():
        result = milp(
            damage * scale,
            constraints=[LinearConstraint(matrix, sides, sides), *spend],
            integrality=np.ones(len(keep)),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": gap, "node_limit": NODE_LIMIT},
        )
    if result.x is None:
        if result.status == 4 and "infeasible" not in result.message.lower():  # HiGHS itself failed
            raise MemoryError(result.message)
        return None
    picked = [int(i) for i in keep[result.x > 0.5]]
    total = float(program.damage[picked].sum())
    return picked, total if result.status == 0 and gap == 0 else min(total, result.mip_dual_bound / scale)
