"""Programs with one budget: the table over all limits answers as the solver does, and says when it cannot be used."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from headwise.strategies._knapsack import Knapsack
from headwise.strategies._program import Program, select


def program(sizes: tuple[int, ...], step: int = 3, seed: int = 0, budgets: int = 1) -> Program:
    """A group of every size, prices in whole steps and some below nothing, damages that fall with the price."""
    rng = np.random.default_rng(seed)
    price = np.concatenate([np.sort(rng.choice(40, n, replace=False))[::-1] - 20 for n in sizes]) * float(step)
    damage = np.concatenate([np.sort(rng.random(n)) for n in sizes])
    group = np.repeat(np.arange(len(sizes)), sizes)
    prices, steps = np.tile(price, (budgets, 1)), np.full(budgets, float(step))
    return Program(damage, prices, group, np.full(len(sizes), -1), tuple((0, ()) for _ in damage), steps)


@pytest.mark.parametrize("seed", range(5))
def test_every_limit_gets_the_least_damage(seed: int) -> None:
    found = program((4, 1, 5, 3), seed=seed)
    groups = [np.flatnonzero(found.group == group) for group in range(4)]
    table = Knapsack(found)
    plans = [(found.price[0][list(p)].sum(), found.damage[list(p)].sum()) for p in product(*groups)]
    cheapest = min(price for price, _ in plans)
    assert table.select(cheapest - 1) is None, "out of reach"
    for limit in np.arange(cheapest, cheapest + 200, 7.0):
        answer = table.select(limit)
        assert answer is not None and answer[1] == 0
        picked = answer[0]
        assert [found.group[i] for i in picked] == [0, 1, 2, 3], "one of every group"
        assert found.price[0][picked].sum() <= limit
        best = min(damage for price, damage in plans if price <= limit)
        assert found.damage[picked].sum() == pytest.approx(best)


def test_it_agrees_with_the_solver() -> None:
    found = program((12,) * 8, seed=3)
    table = Knapsack(found)
    for limit in (-300.0, -90.0, 0.0, 150.0):
        solved = select(found, np.array([limit]), np.zeros(len(found.damage), dtype=bool))
        picked = table.select(limit)
        assert (solved is None) == (picked is None)
        if solved and picked:
            assert found.damage[picked[0]].sum() == pytest.approx(found.damage[solved[0]].sum(), rel=1e-9)


def test_other_programs_are_left_to_the_solver() -> None:
    one = program((3, 3, 2))
    assert Knapsack.fits(one)
    assert not Knapsack.fits(program((3, 3, 2), budgets=2)), "two budgets"
    fine = Program(one.damage, one.price + 0.5, one.group, one.parent, one.meaning, np.zeros(1))
    assert not Knapsack.fits(fine), "no whole steps"
    hanging = Program(one.damage, one.price, one.group, np.array([-1, 0, 0]), one.meaning, one.step)
    assert not Knapsack.fits(hanging), "choices that depend on which column of another group is taken"
    huge = Program(one.damage, one.price * 1e9, one.group, one.parent, one.meaning, one.step)
    assert not Knapsack.fits(huge), "a table that would take too long"
