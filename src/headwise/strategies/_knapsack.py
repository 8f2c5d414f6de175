"""Programs with one budget in whole steps, such as bytes, whose choices are all free: solved for every limit at once.

A table over the steps that may be spent holds the least damage of the groups so far, and which column got it there.
Codes of cached rows have so many sizes of so many different bytes that branching takes long; the table does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from headwise.strategies._program import Program

MOST = 3_000_000_000  # additions: seconds


class Knapsack:
    """The least damage within any limit, and the columns that have it."""

    def __init__(self, program: Program) -> None:
        price = np.round(program.price[0] / program.step[0]).astype(np.int64)
        groups = [np.flatnonzero(program.group == group) for group in range(len(program.parent))]
        self.least = sum(int(price[columns].min()) for columns in groups)
        self.step, self.fixed = float(program.step[0]), [int(c[0]) for c in groups if len(c) == 1]
        self.free = [columns for columns in groups if len(columns) > 1]
        self.price = [price[columns] - price[columns].min() for columns in self.free]
        self.damage = [program.damage[columns] for columns in self.free]
        self.picked: list[NDArray[np.int16]] = []

    @property
    def room(self) -> int:
        """Steps above the least that any selection can spend."""
        return sum(int(price.max()) for price in self.price)

    @staticmethod
    def fits(program: Program) -> bool:
        """Whether one budget in whole steps is all that ties the choices together, and the table is not too large."""
        if len(program.step) != 1 or program.step[0] <= 0:
            return False
        above = program.parent[program.parent >= 0]
        sizes = np.bincount(program.group, minlength=len(program.parent))
        if np.any(sizes[program.group[above]] > 1) or sizes.max(initial=0) >= np.iinfo(np.int16).max:
            return False
        return (Knapsack(program).room + 1) * len(program.damage) <= MOST

    def select(self, limit: float) -> tuple[list[int], float] | None:
        """The columns of least damage within a limit, and no gap; None where it is out of reach."""
        if not self.picked:
            self._fill()
        left = min(int(np.floor(limit / self.step + 1e-9)) - self.least, self.room)
        if left < 0:
            return None
        found = list(self.fixed)
        for columns, price, picked in zip(self.free[::-1], self.price[::-1], self.picked[::-1], strict=True):
            place = int(picked[left])
            found.append(int(columns[place]))
            left -= int(price[place])
        return sorted(found), 0.0

    def _fill(self) -> None:
        size = self.room + 1
        best = np.zeros(size)
        for damages, prices in zip(self.damage, self.price, strict=True):
            new, picked = np.full(size, np.inf), np.zeros(size, np.int16)
            for place in np.lexsort((prices, damages)):  # of equal damage the cheapest
                damage, price = float(damages[place]), int(prices[place])
                total = best[: size - price] + damage
                better = total < new[price:]
                np.copyto(new[price:], total, where=better)
                picked[price:][better] = place
            best = new
            self.picked.append(picked)
