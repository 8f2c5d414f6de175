"""A2: the allocation problem has a best trade-off, and it can be found exactly.

The solver is held against the enumeration of every allocation on random small cases, timed at D = 8192 with 64 lags,
and solved for several weights of lags, beside both ends of the trade-off (heads of one dimension, heads as large as the
group's share).
"""

from __future__ import annotations

import itertools
import math
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.research.theory import profiles
from headwise.research.theory.allocation import allocate
from headwise.research.theory.bound import Group, Weights, bound

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headwise.progress import Track

CLAIM = "A2"
TITLE = "The best groups of heads for a budget"
CASES = {"tiny": 20, "small": 500, "full": 2000}
PROFILES = ("uniform", "geometric:0.9", "geometric:0.7", "power:0.5", "power:1.5")
DIM, LAGS, TOKEN_DIM = 8192, 64, 64
BUDGETS = (256, 512, 1024, 2048, 4096, 8192)
SEED = 0
EQUAL = 1e-12


def run(size: str, device: str, assets: Path | None, track: Track) -> dict[str, Any]:
    """Random cases, large cases, and the least bound over the budget for every profile."""
    rng = random.Random(SEED)
    gaps = [gap(rng) for _ in track(range(CASES[size]), "cases")]
    return {
        "seeds": [SEED],
        "cases": len(gaps),
        "different": sum(abs(value) > EQUAL for value in gaps),
        "largest_gap": max(map(abs, gaps)),
        "large": [large(name, exact) for name in track(PROFILES, "large") for exact in (True, False)],
        "frontier": [frontier(name) for name in track(PROFILES, "budgets")],
        "dims": list(BUDGETS),
    }


def gap(rng: random.Random) -> float:
    """Solver less enumeration on one random case, relative to serving nothing."""
    lags, exact, any_lags = rng.randint(1, 3), rng.random() < 0.5, rng.random() < 0.5
    head_step, dim_step = rng.choice([(1, 1), (1, 1), (2, 1), (1, 2), (2, 2)])
    step = head_step * dim_step
    dim = step * rng.randint(1, max(1, (60, 30, 14)[lags - 1] // step))
    rho = [rng.random() ** rng.choice([1, 4]) for _ in range(lags)]
    token_dim = rng.randint(1, 8)
    steps = {"head_step": head_step, "dim_step": dim_step}
    found = allocate(rho, dim, token_dim, exact_spend=exact, any_lags=any_lags, **steps)
    return (found.error - enumerate_all(rho, dim, token_dim, exact, any_lags, **steps)) / sum(rho)


def enumerate_all(
    rho: list[float], dim: int, token_dim: int, exact: bool, any_lags: bool, head_step: int, dim_step: int
) -> float:
    """The least bound over every allocation there is."""
    sizes = [Group(h, d) for h in range(head_step, dim + 1, head_step) for d in range(dim_step, dim // h + 1, dim_step)]
    every = range(1, len(rho) + 1)
    best = math.inf
    for count in range(len(rho) + 1):
        for lags in itertools.combinations(every, count) if any_lags else [tuple(every[:count])]:
            for groups in itertools.product(sizes, repeat=count):
                spent = sum(group.heads * group.dim for group in groups)
                if spent == dim or (not exact and spent < dim):
                    best = min(best, bound(rho, groups, token_dim, lags=lags))
    return best


def large(profile: str, exact: bool) -> dict[str, Any]:
    """One large case: its time, its answer, and what the two ends of the trade-off would give with as many groups."""
    rho = profiles.parse(profile, LAGS)
    start = time.perf_counter()
    best = allocate(rho, DIM, TOKEN_DIM, exact_spend=exact)
    seconds = time.perf_counter() - start
    return {
        "rho": profile,
        "exact_spend": exact,
        "seconds": seconds,
        "error": best.error,
        "spent": best.spent,
        "groups": len(best.groups),
        "heads": [group.heads for group in best.groups],
        "dims": [group.dim for group in best.groups],
        "ends": ends(rho, len(best.groups)),
    }


def ends(rho: Weights, groups: int) -> dict[str, float]:
    """The bound with as many heads as possible, and with a single head, in each of so many equal groups."""
    share = DIM // max(groups, 1)
    return {
        "most_heads": bound(rho, [Group(share, 1)] * groups, TOKEN_DIM),
        "one_head": bound(rho, [Group(1, share)] * groups, TOKEN_DIM),
    }


def frontier(profile: str) -> dict[str, Any]:
    """The least bound and what it takes, for every budget."""
    found = [allocate(profiles.parse(profile, LAGS), dim, TOKEN_DIM, exact_spend=False) for dim in BUDGETS]
    return {
        "rho": profile,
        "error": [best.error for best in found],
        "groups": [len(best.groups) for best in found],
        "heads": [best.heads for best in found],
    }


def measured(result: dict[str, Any]) -> str:
    """The numbers in words."""
    slowest = max(row["seconds"] for row in result["large"])
    answers = "; ".join(
        f"{row['rho']}: {row['groups']} groups of {min(row['heads'])} to {max(row['heads'])} heads, {row['error']:.3f}"
        for row in result["large"]
        if row["exact_spend"]
    )
    return (
        f"Equal to the enumeration of all allocations in {result['cases'] - result['different']} of {result['cases']} "
        f"random cases (largest difference {result['largest_gap']:.0e}); D = {DIM} with {LAGS} lags takes at most "
        f"{slowest:.2f} s, proven optimal. The answer follows the weights of lags (groups and error: {answers})."
    )


def draw(result: dict[str, Any], figure: Figure) -> None:
    """Left the heads that each lag gets, right the least bound over the budget."""
    left, right = figure.subplots(1, 2)
    for row in result["large"]:
        if row["exact_spend"]:
            left.plot(range(1, row["groups"] + 1), row["heads"], marker=".", label=row["rho"])
    left.set_xlabel("lag")
    left.set_ylabel(f"heads at D = {DIM}, d = {TOKEN_DIM}")
    left.legend(fontsize=8)
    for row in result["frontier"]:
        right.plot(result["dims"], row["error"], marker="o", label=row["rho"])
    right.set_xscale("log", base=2)
    right.set_xlabel("budget D")
    right.set_ylabel("least bound on the error")
    right.set_ylim(0, None)
