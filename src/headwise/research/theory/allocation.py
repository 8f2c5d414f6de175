"""The best groups of heads for a budget: the bound of `bound.py`, minimised exactly over the integers.

Minimise over M, H_m, d_m subject to `sum_m H_m d_m = D` (or at most D). The bound is a sum with one part per lag and
the budget is one number, so a table over lags and budget holds everything that matters:

    F_m(s) = min_n F_{m-1}(s - n) + f_m(n),    f_m(n) = least part of lag m over all H_m d_m = n

By induction `F_m(s)` is the least cost of lags 1 to m at spend s: every allocation is a path through this table, and
the minimum runs over all of them. That is the whole proof. The table is then made small without losing it. With a
price `lam` on every unit spent, each lag chooses alone, which bounds the cost of every allocation from below; the same
sum says how far above that bound any allocation through a given entry must lie. Entries further above it than the best
allocation found are left out, and if that allocation is itself within the reach that was kept, nothing left out can
beat it; otherwise the reach grows and the table is filled again. `d_m > d` is legal though useless: it may be the
only way to spend D exactly.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwise.errors import BudgetError, ShapeError
from headwise.research.theory.bound import HEADS_CONSTANT, HEADS_GROWTH, Floats, Group, Weights, bound, check

FIRST_REACH = 1e-3  # of the error of serving nothing; what is kept in the first table
REACH_GROWTH = 4.0
PRICE_STEPS = 32  # halvings of the interval that holds the best price; any price is safe
SLACK = 1e-9  # of the error of serving nothing: far above rounding, so that no optimum is cut by it
TIE = 1e-12  # of the same: costs closer than this are equal

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Allocation:
    """The best groups, which lag each serves, and what they spend. `error` is the least value of the bound."""

    groups: tuple[Group, ...]
    lags: tuple[int, ...]  # 1..M unless any lag may be served
    error: float
    spent: int
    dim: int  # the budget D
    token_dim: int
    rho: tuple[float, ...]
    norm: float
    eps: float

    @property
    def heads(self) -> int:
        """Heads in all groups together."""
        return sum(group.heads for group in self.groups)


class CurvePoint(NamedTuple):
    """One way to cut D into equal heads, and its bound."""

    heads: int  # in all groups together
    heads_per_group: int
    head_dim: int
    error: float


def allocate(
    rho: Weights,
    dim: int,
    token_dim: int,
    norm: float = 1.0,
    eps: float = 0.0,
    exact_spend: bool = True,
    head_step: int = 1,
    dim_step: int = 1,
    any_lags: bool = False,
) -> Allocation:
    """The groups with the least bound for the budget `dim`: proven, the same for the same input.

    `head_step` and `dim_step` keep head counts and dimensions on multiples that hardware likes. `any_lags` goes beyond
    the paper: any set of lags may be served, which matters where measured weights do not fall. Without `exact_spend`
    serving no lag at all is legal. Of equal answers the one that stops at the earliest lag, then spends least, then,
    from the last lag to the first, leaves the lag out or gives it fewest heads.

    >>> allocate([0.25] * 4, dim=256, token_dim=8).groups[0]
    Group(heads=8, dim=8)
    """
    weights = check(rho, token_dim, norm, eps) * norm
    units = _units(dim, head_step, dim_step, exact_spend)
    menu = _Menu(weights, token_dim, eps, units, head_step, dim_step, exact_spend)
    picked = _Table(menu, any_lags).solve() if units else {}
    lags = tuple(sorted(picked))
    groups = tuple(picked[lag] for lag in lags)
    return Allocation(
        groups=groups,
        lags=lags,
        error=bound(rho, groups, token_dim, norm, eps, lags),
        spent=sum(group.heads * group.dim for group in groups),
        dim=dim,
        token_dim=token_dim,
        rho=tuple(float(value) for value in rho),
        norm=norm,
        eps=eps,
    )


def curve_over_heads(
    rho: Weights, dim: int, token_dim: int, groups: int = 1, norm: float = 1.0, eps: float = 0.0
) -> tuple[CurvePoint, ...]:
    """The bound against the number of heads H when all groups are alike: `H/M` heads of dimension `D/H` in each.

    Every H that M divides and that divides D is a point.
    """
    weights = check(rho, token_dim, norm, eps)
    if not 1 <= groups <= len(weights):
        raise ShapeError(f"{groups} groups for {len(weights)} lags; give 1 to {len(weights)} groups.")
    if dim < 1 or dim % groups:
        raise BudgetError(
            f"a budget of {dim} does not divide among {groups} equal groups; give a multiple of {groups}."
        )
    found = []
    for share in range(1, dim // groups + 1):
        heads = share * groups
        if dim % heads == 0:
            group = Group(share, dim // heads)
            found.append(CurvePoint(heads, share, group.dim, bound(rho, [group] * groups, token_dim, norm, eps)))
    return tuple(found)


def best_point(curve: Sequence[CurvePoint]) -> CurvePoint:
    """The lowest point of a curve; of equal ones the one with fewest heads."""
    return min(curve, key=lambda point: (point.error, point.heads))


def _units(dim: int, head_step: int, dim_step: int, exact_spend: bool) -> int:
    """The budget in units of the smallest legal group."""
    if head_step < 1 or dim_step < 1:
        raise ShapeError(f"head_step is {head_step} and dim_step is {dim_step}; steps are at least 1.")
    if dim < 1:
        raise BudgetError(f"a budget of {dim} buys nothing; give a dim of at least {head_step * dim_step}.")
    step = head_step * dim_step
    if exact_spend and dim % step:
        near = [value for value in (dim // step * step, (dim // step + 1) * step) if value]
        raise BudgetError(
            f"with heads in steps of {head_step} and dimensions in steps of {dim_step} every spend is a multiple of "
            f"{step}, so {dim} cannot be spent exactly; the nearest that can: {' and '.join(map(str, near))}. "
            "Give one of these, smaller steps, or allow spending less (exact_spend=False, --at-most)."
        )
    return dim // step


class _Menu:
    """The best way to spend n units on one lag, for every n: all pairs of head count and dimension, sorted by spend."""

    def __init__(
        self, weights: Floats, token_dim: int, eps: float, units: int, head_step: int, dim_step: int, exact: bool
    ) -> None:
        self.weights, self.units, self.exact = weights, units, exact
        most = units if exact else min(units, -(-token_dim // dim_step))  # a larger head sees no more of a token
        dims = np.arange(1, most + 1)
        per_dim = units // dims
        dim = np.repeat(dims, per_dim)
        heads = np.arange(len(dim)) - np.repeat(np.cumsum(per_dim) - per_dim, per_dim) + 1
        order = np.lexsort((heads, heads * dim))
        self.spend = (heads * dim)[order]
        self.heads, self.dim = heads[order] * head_step, dim[order] * dim_step
        self.lost = (1 + eps) * np.sqrt(np.maximum(0.0, 1 - self.dim / token_dim))
        self.starts = np.flatnonzero(np.diff(self.spend, prepend=0))  # where each spend begins

    def pairs(self, lag: int, start: int = 0, stop: int | None = None) -> Floats:
        """The part of a lag in the bound, for every pair from `start` to `stop`."""
        blurred = HEADS_CONSTANT * math.exp(HEADS_GROWTH * lag) / self.heads[start:stop]
        return np.asarray(self.weights[lag - 1] * (self.lost[start:stop] + blurred))

    def costs(self, lag: int) -> Floats:
        """`f_m(n)` for n = 0 .. units; infinite at 0 and, if less may be spent, where a smaller spend is as good."""
        cost = np.full(self.units + 1, np.inf)
        cost[self.spend[self.starts]] = np.minimum.reduceat(self.pairs(lag), self.starts)
        if not self.exact:
            earlier = np.minimum.accumulate(cost)[:-1]
            cost[1:][cost[1:] >= earlier] = np.inf
        return cost

    def group(self, lag: int, spend: int, tie: float) -> Group:
        """The group of fewest heads among the best that spend so much."""
        start, stop = np.searchsorted(self.spend, [spend, spend + 1])
        cost = self.pairs(lag, start, stop)
        first = int(start + np.flatnonzero(cost <= cost.min() + tie)[0])
        return Group(int(self.heads[first]), int(self.dim[first]))


class _Table:
    """The table `F_m(s)`, pruned by a price on every unit as the top of this file says.

    `to_go[m]` is the least priced cost of all that follows lag m. With `any_lags` a lag may be left out by spending
    nothing on it; else the groups stop after some lag and leave the whole tail out.
    """

    def __init__(self, menu: _Menu, any_lags: bool) -> None:
        self.menu, self.any_lags = menu, any_lags
        self.lags = len(menu.weights)
        self.cost = np.array([menu.costs(lag) for lag in range(1, self.lags + 1)])
        if any_lags:
            self.cost[:, 0] = menu.weights
        after = np.concatenate([np.cumsum(menu.weights[::-1])[::-1], [0.0]])  # cost of leaving out all lags from m+1
        self.tail = np.where(np.arange(self.lags + 1) < self.lags, np.inf, 0.0) if any_lags else after
        self.scale = float(menu.weights.sum())
        self.rows: list[Floats] = []

    def solve(self) -> dict[int, Group]:
        """Lag -> group of the best allocation."""
        price = self._best_price()
        lower = float(self._to_go(price)[0][0]) - price * self.menu.units
        reach = FIRST_REACH * self.scale
        while (found := self._fill(price, reach)) - lower > reach:
            reach = min(reach * REACH_GROWTH, found - lower + SLACK * self.scale)
        return self._trace(found)

    def _to_go(self, price: float) -> tuple[Floats, int]:
        """Per lag the least priced cost of what follows it, and what the cheapest path from the start spends."""
        priced = self.cost + price * np.arange(self.menu.units + 1)
        choice = priced.argmin(axis=1)
        least = priced[np.arange(self.lags), choice]
        to_go, spent = self.tail.copy(), 0
        for lag in range(self.lags - 1, -1, -1):
            onward = least[lag] + to_go[lag + 1]
            if onward < to_go[lag]:
                to_go[lag], spent = onward, spent + int(choice[lag])
            else:
                spent = 0
        return to_go, spent

    def _best_price(self) -> float:
        """The price at which the lags, each for itself, spend about the budget: there the lower bound is highest."""
        low, high = 0.0, self.scale
        for _ in range(PRICE_STEPS):
            middle = (low + high) / 2
            if self._to_go(middle)[1] > self.menu.units:
                low = middle
            else:
                high = middle
        return high

    def _fill(self, price: float, reach: float) -> float:
        """Fill the table with all that lies within reach of the lower bound; the least cost of a whole allocation."""
        units, slack = self.menu.units, SLACK * self.scale
        to_go, priced = self._to_go(price)[0], price * np.arange(units + 1, dtype=np.float64)
        limit = to_go[0] + reach + slack
        row = np.full(units + 1, np.inf)
        row[0] = 0.0
        self.rows = [row]
        best = self._end(0)[0]
        for lag in range(self.lags):
            row = _min_plus(row, self.cost[lag], limit - to_go[lag + 1] - (row + priced).min(), priced)
            row[row + priced + to_go[lag + 1] > limit] = np.inf
            if not np.isfinite(row).any():
                break
            self.rows.append(row)
            best = min(best, self._end(lag + 1)[0])
        return best

    def _end(self, lag: int) -> tuple[float, int]:
        """Cost and spend of the cheapest allocation that ends after a lag; of equal ones the least spend."""
        row = self.rows[lag] + self.tail[lag]
        if self.menu.exact:
            return float(row[-1]), self.menu.units
        least = float(row.min())
        return least, int(np.flatnonzero(row <= least + TIE * self.scale)[0])

    def _trace(self, least: float) -> dict[int, Group]:
        """Walk back from the best end; among equal ways the first by the rule that `allocate` states."""
        tie = TIE * self.scale
        last = next(lag for lag in range(len(self.rows)) if self._end(lag)[0] <= least + tie)
        spent, picked = self._end(last)[1], {}
        for lag in range(last, 0, -1):
            way = self.rows[lag - 1][spent::-1] + self.cost[lag - 1][: spent + 1]
            equal = np.flatnonzero(way <= self.rows[lag][spent] + tie).tolist()
            if equal[0] == 0:
                continue  # left out
            groups = [self.menu.group(lag, spend, tie) for spend in equal]
            picked[lag] = min(groups)
            spent -= equal[groups.index(picked[lag])]
        return picked


def _min_plus(row: Floats, cost: Floats, limit: float, priced: Floats) -> Floats:
    """`min_n row(s - n) + cost(n)` for every s, with the options n whose priced cost is within the limit."""
    found = np.full_like(row, np.inf)
    known = np.flatnonzero(np.isfinite(row))
    first, stop = int(known[0]), int(known[-1]) + 1
    for n in np.flatnonzero(cost + priced <= limit).tolist():
        end = min(stop, len(row) - n)
        if end > first:
            part = found[first + n : end + n]
            np.minimum(part, row[first:end] + cost[n], out=part)
    return found
