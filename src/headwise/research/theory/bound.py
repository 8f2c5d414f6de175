"""The error bound of one attention layer that reads a weighted sum of past tokens.

The target is `y_t = sum_i rho_i x_{t-i}`; tokens have `token_dim` dimensions and norm at most `norm`. Group m serves
lag m with `heads` heads of `dim` dimensions each, and everything together spends `D = sum_m H_m d_m`. Then

    E_D <= sum_{m=1..M} |rho_m| B ( (1+eps) [d_m <= d] sqrt(1 - d_m/d) + 1.3 e^{0.02 m} / H_m ) + sum_{k>M} |rho_k| B

The first part is what a head too small for a token cannot see, the second what few heads cannot tell apart in time, the
last what nobody reads. It is given here as the paper states it. For heads whose weights come from a linear position
bias the second part holds only where `H_m >= m`: with fewer heads than the lag nothing below 1 can be reached
(`experiments/a1_bound.py` has the proof); `below_lag` names those lags.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwise.errors import HeadwiseError, ShapeError

Floats = NDArray[np.float64]
Weights = Sequence[float] | Floats

HEADS_CONSTANT = 1.3
HEADS_GROWTH = 0.02  # per lag, in the exponent


class Group(NamedTuple):
    """The heads that serve one lag; group m, counted from 1, serves lag m unless other lags are named."""

    heads: int
    dim: int  # of each head


class Term(NamedTuple):
    """What one lag adds to the bound; `total` is the sum of the three parts."""

    lag: int
    group: Group | None  # None: the lag is not served
    dimension: float
    heads: float
    unserved: float

    @property
    def total(self) -> float:
        return self.dimension + self.heads + self.unserved


def dimension_term(dim: int, token_dim: int, eps: float = 0.0) -> float:
    """`(1+eps) [d_m <= d] sqrt(1 - d_m/d)`: the part of a token that a head of `dim` dimensions loses, 0 if it fits."""
    return (1 + eps) * math.sqrt(max(0.0, 1 - dim / token_dim))


def heads_term(heads: int, lag: int) -> float:
    """`1.3 e^{0.02 m} / H_m`: how badly `heads` heads tell lag m from the others."""
    return HEADS_CONSTANT * math.exp(HEADS_GROWTH * lag) / heads


def terms(
    rho: Weights,
    groups: Sequence[Group],
    token_dim: int,
    norm: float = 1.0,
    eps: float = 0.0,
    lags: Sequence[int] | None = None,
) -> tuple[Term, ...]:
    """The bound lag by lag: one term for every entry of `rho`. `lags` says which lag each group serves, if not 1..M."""
    weights = check(rho, token_dim, norm, eps) * norm
    served = range(1, len(groups) + 1) if lags is None else lags
    if len(served) != len(groups) or len(set(served)) != len(served):
        raise ShapeError(f"{len(groups)} groups for the lags {list(served)}: give every group a lag of its own.")
    if any(lag < 1 or lag > len(weights) for lag in served):
        raise ShapeError(f"groups serve the lags {list(served)}, rho has the lags 1 to {len(weights)}.")
    if any(group.heads < 1 or group.dim < 1 for group in groups):
        raise ShapeError(f"a group needs at least one head of one dimension; given: {list(map(tuple, groups))}.")
    by_lag = dict(zip(served, groups, strict=True))
    found = []
    for lag, weight in enumerate(weights.tolist(), 1):
        if (group := by_lag.get(lag)) is None:
            found.append(Term(lag, None, 0.0, 0.0, weight))
        else:
            lost = weight * dimension_term(group.dim, token_dim, eps)
            found.append(Term(lag, group, lost, weight * heads_term(group.heads, lag), 0.0))
    return tuple(found)


def bound(
    rho: Weights,
    groups: Sequence[Group],
    token_dim: int,
    norm: float = 1.0,
    eps: float = 0.0,
    lags: Sequence[int] | None = None,
) -> float:
    """The bound on `E_D` for given groups; see the top of this file.

    >>> round(bound([1.0], [Group(heads=8, dim=16)], token_dim=16), 4)
    0.1658
    """
    return math.fsum(term.total for term in terms(rho, groups, token_dim, norm, eps, lags))


def below_lag(groups: Sequence[Group], lags: Sequence[int] | None = None) -> tuple[int, ...]:
    """The lags served by fewer heads than the lag, though by enough that the bound promises to gain something."""
    served = range(1, len(groups) + 1) if lags is None else lags
    pairs = zip(served, groups, strict=True)
    return tuple(lag for lag, group in pairs if group.heads < lag and heads_term(group.heads, lag) < 1)


def check(rho: Weights, token_dim: int, norm: float, eps: float) -> Floats:
    """`|rho|` as an array, after refusing what makes no sense."""
    weights = np.abs(np.asarray(rho, dtype=np.float64))
    if weights.ndim != 1 or not len(weights) or not np.isfinite(weights).all():
        raise HeadwiseError("rho must be a list of one or more finite numbers, one per lag, such as 0.5,0.3,0.2.")
    if token_dim < 1:
        raise ShapeError(f"tokens of dimension {token_dim} carry nothing; token_dim must be at least 1.")
    if not (math.isfinite(norm) and norm >= 0 and math.isfinite(eps) and eps >= 0):
        raise HeadwiseError(f"norm is {norm} and eps is {eps}; both must be finite and not negative.")
    return weights
