"""Prices of budgets (Lagrange multipliers): what a unit of every budget is worth in damage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array, hstack

if TYPE_CHECKING:
    from headwise.strategies._program import Program

GOLDEN = (5**0.5 - 1) / 2
Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]


def multipliers(program: Program, limits: Floats, seen: Mask) -> Floats:
    """What a unit of every budget is worth in damage, by column generation.

    The linear program over the columns met so far gives multipliers, and these show which columns it lacks. Columns are
    shared between solves. Any result is safe: good multipliers only make the integer program smaller.
    """
    best, highest = np.zeros(len(limits)), -np.inf
    if not len(limits):
        return best
    if len(limits) == 1:
        return _multiplier(program, float(limits[0]))
    unit = np.maximum(np.abs(program.price).max(axis=1), 1e-30)
    ceiling = 100.0 * max(float(program.damage.max()), 1e-30)  # of a multiplier: what overspending costs
    for point in np.vstack([np.zeros(len(limits)), np.diag(ceiling / unit), ceiling / unit]):  # ends of the range
        seen |= program.cheapest(program.damage + point @ program.price)[1] <= 0
    for _ in range(60):
        keep = np.flatnonzero(seen)
        matrix, sides = rows_of(program, keep)
        extra = len(limits)
        solved = linprog(
            np.concatenate([program.damage[keep] / ceiling, np.ones(extra)]),
            A_ub=np.column_stack([program.price[:, keep] / unit[:, None], -np.eye(extra)]),
            b_ub=limits / unit,
            A_eq=hstack([matrix, csr_array((len(sides), extra))]),
            b_eq=sides,
            method="highs",
        )
        found = np.maximum(-solved.ineqlin.marginals, 0.0) * ceiling / unit
        least, excess = program.cheapest(program.damage + found @ program.price)
        bound = least - float(found @ limits)
        if bound > highest:
            best, highest = found, bound
        if highest >= solved.fun * ceiling - 1e-9 * abs(highest):
            break
        seen |= excess <= nth(excess, 2 * free_choices(program))
    return best


def _multiplier(program: Program, limit: float) -> Floats:
    """What a unit of the only budget is worth in damage: where the bound, which is concave in it, is highest."""
    unit = max(float(np.abs(program.price).max()), 1e-30)
    low, high = -60.0, float(np.log(1e3 * max(float(program.damage.max()), 1e-30)))

    def bound(point: float) -> float:
        value = np.exp(point) / unit
        return float(program.cheapest(program.damage + value * program.price[0])[0] - value * limit)

    for _ in range(64):  # golden section
        first, second = high - (high - low) * GOLDEN, low + (high - low) * GOLDEN
        low, high = (low, second) if bound(first) > bound(second) else (first, high)
    return np.array([np.exp((low + high) / 2) / unit])


def free_choices(program: Program) -> int:
    """How many choices a plan makes: head counts and MLP widths."""
    return int((program.parent < 0).sum())


def nth(excess: Floats, size: int) -> float:
    """The excess up to which about `size` columns lie; infinite where there are no more."""
    return float(np.partition(excess, size)[size]) if size < len(excess) else float("inf")


def rows_of(program: Program, keep: Indices) -> tuple[csr_array, Floats]:
    """One row per group that is left: its columns add up to its parent column, or to one."""
    groups = np.unique(program.group[keep])
    place = np.full(len(program.damage), -1)
    place[keep] = np.arange(len(keep))
    parents = program.parent[groups]
    below = np.flatnonzero(parents >= 0)
    row = np.concatenate([np.searchsorted(groups, program.group[keep]), below])
    column = np.concatenate([np.arange(len(keep)), place[parents[below]]])
    entries = np.concatenate([np.ones(len(keep)), -np.ones(len(below))])
    return csr_array((entries, (row, column)), shape=(len(groups), len(keep))), (parents < 0).astype(float)
