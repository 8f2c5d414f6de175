"""The papers' mathematics: the solver equals brute force, fast formulas equal dense ones, bounds are attained."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from headwise.errors import BudgetError, HeadwiseError, ShapeError
from headwise.research.theory import profiles
from headwise.research.theory.allocation import allocate, best_point, curve_over_heads
from headwise.research.theory.bound import Group, below_lag, bound, terms
from headwise.types import Reading, Readings

weights = some.lists(some.floats(0, 4, allow_nan=False), min_size=1, max_size=6)


def brute_force(
    rho: list[float], dim: int, token_dim: int, exact: bool, head_step: int, dim_step: int, any_lags: bool
) -> float:
    """The least bound over every legal allocation, one by one."""
    sizes = [
        Group(heads, size)
        for heads in range(head_step, dim + 1, head_step)
        for size in range(dim_step, dim // heads + 1, dim_step)
    ]
    everything = range(1, len(rho) + 1)
    best = math.inf
    for count in range(len(rho) + 1):
        for lags in itertools.combinations(everything, count) if any_lags else [tuple(everything[:count])]:
            for groups in itertools.product(sizes, repeat=count):
                spent = sum(group.heads * group.dim for group in groups)
                if spent == dim if exact else spent <= dim:
                    best = min(best, bound(rho, groups, token_dim, lags=lags))
    return best


def test_the_solver_equals_brute_force_on_500_random_cases() -> None:
    rng = random.Random(0)
    for _ in range(500):
        lags, exact, any_lags = rng.randint(1, 3), rng.random() < 0.5, rng.random() < 0.5
        steps = rng.choice([(1, 1), (1, 1), (2, 1), (1, 2), (2, 2), (1, 3)])
        dim = rng.randint(1, (60, 30, 14)[lags - 1])
        dim = max(1, dim // math.prod(steps)) * math.prod(steps) if exact else dim
        rho = [rng.choice([0.0, rng.random(), rng.random() ** 4, 5 * rng.random()]) for _ in range(lags)]
        token_dim = rng.randint(1, 8)
        case = (rho, dim, token_dim, exact, *steps, any_lags)
        found = allocate(
            rho, dim, token_dim, exact_spend=exact, head_step=steps[0], dim_step=steps[1], any_lags=any_lags
        )
        assert found.error == pytest.approx(brute_force(*case), rel=1e-12, abs=1e-12), case
        assert found.spent == dim if exact else found.spent <= dim, case
        assert found.spent == sum(heads * size for heads, size in found.groups)
        assert all(heads % steps[0] == 0 and size % steps[1] == 0 for heads, size in found.groups), case
        assert any_lags or found.lags == tuple(range(1, len(found.groups) + 1)), case


def whole_table(rho: list[float], dim: int, token_dim: int, exact: bool, any_lags: bool) -> float:
    """The same recursion with nothing left out, for cases too large to enumerate."""
    row = np.full(dim + 1, np.inf)
    row[0], best = 0.0, np.inf if exact or any_lags else sum(rho)
    for lag, weight in enumerate(rho, 1):
        new = row + weight if any_lags else np.full(dim + 1, np.inf)
        for spend in range(1, dim + 1):
            pairs = [Group(heads, spend // heads) for heads in range(1, spend + 1) if spend % heads == 0]
            cost = min(bound([0.0] * (lag - 1) + [weight], [pair], token_dim, lags=[lag]) for pair in pairs)
            new[spend:] = np.minimum(new[spend:], row[: dim + 1 - spend] + cost)
        row = new
        if not any_lags or lag == len(rho):
            best = min(best, (row[-1] if exact else row.min()) + sum(rho[lag:]))
    return float(best)


@pytest.mark.parametrize("seed", range(12))
def test_leaving_out_hopeless_entries_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    lags, dim, token_dim = rng.randint(4, 9), rng.randint(80, 180), rng.choice([1, 2, 5, 16, 64])
    exact, any_lags = bool(seed % 2), bool(seed % 4 > 1)
    rho = [rng.random() ** 3 for _ in range(lags)]
    found = allocate(rho, dim, token_dim, exact_spend=exact, any_lags=any_lags)
    assert found.error == pytest.approx(whole_table(rho, dim, token_dim, exact, any_lags), rel=1e-12)


@settings(max_examples=30)
@given(weights, some.integers(1, 300), some.integers(1, 40), some.booleans())
def test_a_larger_budget_never_hurts_where_less_may_be_spent(
    rho: list[float], dim: int, token_dim: int, any_lags: bool
) -> None:
    less = allocate(rho, dim, token_dim, exact_spend=False, any_lags=any_lags)
    more = allocate(rho, dim + 7, token_dim, exact_spend=False, any_lags=any_lags)
    exact = allocate(rho, dim, token_dim, any_lags=any_lags)
    assert more.error <= less.error + 1e-12 <= exact.error + 2e-12
    assert less.error <= sum(rho) + 1e-12, "serving nothing is always possible"


@given(some.integers(1, 12), some.integers(1, 20), some.integers(1, 12), some.integers(1, 20))
def test_more_heads_and_larger_heads_lower_the_bound(heads: int, dim: int, token_dim: int, lag: int) -> None:
    rho = [0.0] * (lag - 1) + [1.0]
    here = bound(rho, [Group(heads, dim)], token_dim, lags=[lag])
    assert bound(rho, [Group(heads + 1, dim)], token_dim, lags=[lag]) < here
    assert bound(rho, [Group(heads, dim + 1)], token_dim, lags=[lag]) <= here


def test_the_bound_is_the_papers_formula() -> None:
    groups = [Group(4, 2), Group(3, 9)]
    expected = 2 * (
        0.5 * (1.1 * math.sqrt(1 - 2 / 8) + 1.3 * math.exp(0.02) / 4) + 0.3 * 1.3 * math.exp(0.04) / 3 + 0.2
    )
    assert bound([0.5, -0.3, 0.2], groups, token_dim=8, norm=2.0, eps=0.1) == pytest.approx(expected, rel=1e-14)
    parts = terms([0.5, -0.3, 0.2], groups, token_dim=8, norm=2.0, eps=0.1)
    assert [part.unserved for part in parts] == [0, 0, 0.4]
    assert sum(part.total for part in parts) == pytest.approx(expected)


def test_lags_with_fewer_heads_than_the_lag_are_named() -> None:
    groups = [Group(8, 8), Group(1, 8), Group(2, 8), Group(4, 8)]
    assert below_lag(groups) == (3,), "one head for lag 2 promises nothing, so it breaks no promise"
    assert below_lag([Group(8, 8)], lags=[9]) == (9,)
    rng = np.random.default_rng(0)
    factors = rng.uniform(0.01, 0.99, (2, 1)) ** np.arange(1, 40)  # two heads, read at lags 1, 2, ...
    coefficients = rng.standard_normal((500, 2)) * 10 ** rng.uniform(-2, 2, (500, 1))
    distance = np.abs(coefficients @ factors - (np.arange(1, 40) == 3)).sum(axis=1)
    assert distance.min() >= 1, "two heads with a linear bias cannot read lag 3, whatever the bound says"


def test_a_four_gram_in_256_dimensions_is_four_groups_of_eight_heads_of_eight() -> None:
    found = allocate(profiles.uniform(4), dim=256, token_dim=8)
    assert found.groups == (Group(8, 8),) * 4
    assert (found.heads, found.spent, found.lags) == (32, 256, (1, 2, 3, 4))


@pytest.mark.parametrize(("groups", "token_dim"), [(1, 16), (2, 8)])
def test_the_curve_of_128_is_lowest_at_eight_heads_per_group(groups: int, token_dim: int) -> None:
    curve = curve_over_heads(profiles.uniform(groups), 128, token_dim, groups)
    best = best_point(curve)
    assert (best.heads_per_group, best.head_dim) == (8, token_dim)
    errors, low = [point.error for point in curve], curve.index(best)
    assert errors[: low + 1] == sorted(errors[: low + 1], reverse=True), "falls before it"
    assert errors[low:] == sorted(errors[low:]), "and rises after it"


def test_any_lags_serves_what_counts() -> None:
    rho = [0.0, 0.0, 1.0]
    nested, free = (allocate(rho, 64, 8, exact_spend=False, any_lags=any_lags) for any_lags in (False, True))
    assert free.lags == (3,) and free.groups == (Group(8, 8),)
    assert free.error < nested.error


def test_equal_answers_are_broken_the_same_way() -> None:
    assert allocate([1.0, 0.0, 0.0], 64, 8).lags == (1,), "a lag that does not count is left out"
    assert allocate([0.0, 0.0], 8, 8, exact_spend=False).groups == (), "nothing to read, nothing spent"
    assert allocate([1.0], 1, 8, exact_spend=False).groups == (), "one head is worse than none"


def test_an_exact_spend_may_need_heads_larger_than_tokens() -> None:
    found = allocate([1.0], dim=14, token_dim=4)
    assert found.groups == (Group(2, 7),)


def test_what_cannot_be_allocated_says_what_can() -> None:
    with pytest.raises(BudgetError, match="multiple of 16, so 100 cannot.*96 and 112.*--at-most"):
        allocate([1.0], 100, 8, head_step=2, dim_step=8)
    assert allocate([1.0], 100, 8, exact_spend=False, head_step=2, dim_step=8).spent == 96
    with pytest.raises(BudgetError, match="at least 1"):
        allocate([1.0], 0, 8)
    with pytest.raises(ShapeError, match="steps are at least 1"):
        allocate([1.0], 8, 8, head_step=0)
    with pytest.raises(ShapeError, match="token_dim must be at least 1"):
        allocate([1.0], 8, 0)
    with pytest.raises(HeadwiseError, match="finite numbers"):
        allocate([1.0, math.nan], 8, 8)
    with pytest.raises(HeadwiseError, match="not negative"):
        allocate([1.0], 8, 8, norm=-1.0)
    with pytest.raises(ShapeError, match="rho has the lags 1 to 1"):
        bound([1.0], [Group(1, 1), Group(1, 1)], 8)
    with pytest.raises(ShapeError, match="lag of its own"):
        bound([1.0, 1.0], [Group(1, 1), Group(1, 1)], 8, lags=[1, 1])
    with pytest.raises(ShapeError, match="at least one head"):
        bound([1.0], [Group(0, 1)], 8)
    with pytest.raises(BudgetError, match="multiple of 3"):
        curve_over_heads([1, 1, 1], 128, 8, groups=3)
    with pytest.raises(ShapeError, match="1 to 1 groups"):
        curve_over_heads([1.0], 128, 8, groups=2)


def test_profiles_sum_to_one_and_fall_as_they_say() -> None:
    assert profiles.uniform(4).tolist() == [0.25] * 4
    shape = profiles.geometric(5, 0.5)
    assert shape.sum() == pytest.approx(1) and np.allclose(shape[1:] / shape[:-1], 0.5)
    assert profiles.power(3, 1).tolist() == pytest.approx([6 / 11, 3 / 11, 2 / 11])


def readings(path: Path, ticks: tuple[int, ...]) -> str:
    rows = ((0.6,) + (0.1,) * (len(ticks) - 1), tuple(float(2 ** -(i + 1)) for i in range(len(ticks))))
    curve = Reading("lags", profiles.READING, "lag", (ticks,) * 2, rows, None, "share", "Invented.", 1, 0)
    Readings("m", None, (curve,), ({},), 1, 0).save(path)
    return str(path)


def test_profiles_can_be_typed_or_read(tmp_path: Path) -> None:
    assert profiles.parse("uniform", 2).tolist() == [0.5, 0.5]
    assert profiles.parse("geometric:0.5", 3).tolist() == profiles.geometric(3, 0.5).tolist()
    assert profiles.parse("power:1.5", 3).tolist() == profiles.power(3, 1.5).tolist()
    assert profiles.parse("3, 2,1").tolist() == [3, 2, 1], "numbers are taken as they are"
    file = readings(tmp_path / "readings.json", (0, 1, 2, 3))
    assert profiles.parse(f"{file}:1").tolist() == pytest.approx([4 / 7, 2 / 7, 1 / 7]), "lag 0 is left out"
    assert profiles.parse(f"{file}:0", lags=2).tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("text", "lags", "says"),
    [
        ("unifrom", 4, "no profile.*Known: uniform"),
        ("uniform", None, "--lags 8"),
        ("geometric:2", 4, "at most 1, not 2"),
        ("power:-1", 4, "0 or more"),
        ("geometric:0.5,0.5", 4, "needs one number"),
        ("1,2", 3, "2 weights are given for 3 lags"),
        ("uniform", 0, "at least one"),
    ],
)
def test_a_profile_that_is_none_says_so(text: str, lags: int | None, says: str) -> None:
    with pytest.raises(HeadwiseError, match=says):
        profiles.parse(text, lags)


def test_readings_without_lags_or_layer_say_so(tmp_path: Path) -> None:
    file = readings(tmp_path / "readings.json", (0, 1, 2))
    with pytest.raises(HeadwiseError, match="no layer '7'; its layers are 0 to 1"):
        profiles.parse(f"{file}:7")
    with pytest.raises(HeadwiseError, match="say which, such as"):
        profiles.parse(file)
    with pytest.raises(HeadwiseError, match="every lag from 1 on"):
        profiles.parse(readings(tmp_path / "gap.json", (0, 1, 3)) + ":0")
    Readings("m", None, (), (), 1, 0).save(tmp_path / "none.json")
    with pytest.raises(HeadwiseError, match="no reading of kind lags.contribution"):
        profiles.parse(f"{tmp_path / 'none.json'}:0")
