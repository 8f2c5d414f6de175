"""How softmax attention saturates: the norm of its Jacobian `J = diag(p) - p p'`, bounds on it, and what follows.

Two things are easily confused. The Jacobian's norm falls like 1/L for logits in [-c, c] (`norm_bound`). The error of a
head's output does not follow from it alone: L logits are wrong at once, and L values are summed. If the errors may be
aligned with the values, nothing is gained by length; if they are drawn alike and independently of the values, the
output error falls like 1/sqrt(L) (`head_error`). Neither gives 1/L.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from headwise.errors import HeadwiseError
from headwise.research.theory.bound import Floats
from headwise.research.theory.conditioning import Estimate

BLOCK = 1 << 17  # entries worked on at once: they stay in the processor's cache
STEPS = 60  # of the root finder; bisection alone would need 45
PRECISION = 1e-14  # relative
SUM_TOLERANCE = 0.05  # softmax in half precision is off by about a percent


def jacobian_norm(p: ArrayLike) -> Floats:
    """Largest eigenvalue of `diag(p) - p p'` for probabilities along the last axis: O(L) per row, no L x L matrix.

    It is a diagonal plus a matrix of rank one, so its eigenvalues solve `sum_i p_i^2 / (p_i - lam) = 1`; as p sums to
    one that is `sum_i p_i / (p_i - lam) = 0`, in which nothing cancels when one entry is nearly 1. The largest root
    lies between the second largest and the largest entry (on them if they tie), and also between `a (1-a)` (Rayleigh
    quotient of that unit vector) and `2 a (1-a)` (Gershgorin) with `a` the largest entry. Each step replaces all but
    the largest pole by one pole at the second largest entry with the right value and slope and solves the quadratic;
    a step that leaves the bracket becomes a bisection. Relative error about 1e-14. Rows are scaled to sum to one.

    >>> jacobian_norm([0.25, 0.25, 0.25, 0.25]).item()
    0.25
    """
    rows = np.asarray(p, dtype=np.float64)
    if rows.ndim == 0 or not rows.shape[-1]:
        raise HeadwiseError("probabilities must have at least one entry along their last axis.")
    flat = rows.reshape(-1, rows.shape[-1])
    found = np.empty(len(flat))
    step = max(1, BLOCK // flat.shape[1])
    for start in range(0, len(flat), step):
        found[start : start + step] = _norms(flat[start : start + step])
    return found.reshape(rows.shape[:-1])


def _norms(p_RL: Floats) -> Floats:
    """`jacobian_norm` of a few rows."""
    total = p_RL.sum(axis=1, keepdims=True)
    if not (np.isfinite(total).all() and (p_RL >= 0).all() and (np.abs(total - 1) <= SUM_TOLERANCE).all()):
        raise HeadwiseError("rows must be probabilities: not negative, finite, and summing to one along the last axis.")
    rest = p_RL / total
    top = rest.argmax(axis=1)
    every = np.arange(len(rest))
    first = rest[every, top]
    rest[every, top] = 0.0  # an entry of 0 adds nothing to the sum
    second, others = rest.max(axis=1), rest.sum(axis=1)  # others = 1 - first, without cancellation
    low, high = np.maximum(second, first * others), np.minimum(first, 2 * first * others)
    wide = np.flatnonzero(
        high - low > PRECISION * high
    )  # elsewhere a tie, one-hot or a single entry: low is the answer
    if len(wide):
        low[wide] = _roots(rest[wide], first[wide], second[wide], low[wide], high[wide])
    found: Floats = low
    return found


def _roots(rest_RL: Floats, first: Floats, second: Floats, low: Floats, high: Floats) -> Floats:
    """The root of `first/(first-x) = sum rest/(x-rest)` in each row's bracket; the difference rises with x.

    After the first step the quadratic's root is never below the true one, so the steps come down to it.
    """
    x, active = (low + high) / 2, np.arange(len(low))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # a step onto a pole becomes a bisection
        for step in range(STEPS):
            a, b, at = first[active], second[active], x[active]
            ratio_RL = (at - b)[:, None] / (at[:, None] - rest_RL)  # at most 1: nothing overflows
            value = np.einsum("rl,rl->r", ratio_RL, rest_RL) / (at - b)
            ratio_RL *= ratio_RL
            s = np.einsum("rl,rl->r", ratio_RL, rest_RL)
            above = a / (a - at) > value
            bottom, top = np.where(above, low[active], at), np.where(above, at, high[active])
            new = b + _quadratic(value - s / (at - b), a, s, a - b)
            fits = (new > bottom) & (new <= top * (1 + 10 * PRECISION)) & (step % 8 != 7)
            new = np.where(fits, np.minimum(new, top), (bottom + top) / 2)
            low[active], high[active], x[active] = bottom, top, new
            keep = (np.abs(new - at) > PRECISION * at) & (top - bottom > PRECISION * at)
            if not keep.any():
                break
            if not keep.all():
                active, rest_RL = active[keep], rest_RL[keep]
    return x


def _quadratic(r: Floats, a: Floats, s: Floats, gap: Floats) -> Floats:
    """The positive root y of `a y = (r y + s) (gap - y)`, by the formula that does not cancel."""
    half = a + s - r * gap
    root = np.sqrt(half * half + 4 * r * s * gap)
    return np.where(half >= 0, 2 * s * gap / (half + root), (root - half) / (2 * r))


def norm_bound(length: int, logit_bound: float) -> float:
    """`min(1/2, e^{2c}/L)`: no softmax over L logits in [-c, c] has a Jacobian of larger norm.

    Proof. `p p'` is positive, so the norm of `diag(p) - p p'` is at most the largest entry of p.
    That entry is `e^{s_i} / sum_j e^{s_j} <= e^c / (L e^{-c}) = e^{2c}/L`.
    By Gershgorin the norm is also at most the largest row sum, `2 p_i (1 - p_i) <= 1/2`.
    """
    _check(length, logit_bound)
    return 0.0 if length == 1 else min(0.5, _largest(length, logit_bound))


def head_error(length: int, logit_bound: float, logit_error: float, norm: float = 1.0, aligned: bool = True) -> float:
    """How far a head's output `z = sum_i p_i v_i` can move when each of its L logits is wrong by at most `delta`.

    Logits lie in [-c, c], values have norm at most R. What can be said depends on what is assumed of the errors e_i:

    - `aligned`: nothing. The new weights are `p_i e^{e_i} / sum_j p_j e^{e_j}`. No set of keys can gain more than
      `tanh(delta/2)` of weight (errors +delta on it, -delta off it, weight `1/(1+e^delta)` before), so
      `|dz| <= R |dp|_1 <= 2 R tanh(delta/2)`, about `R delta`. Logits -delta/2 and +delta/2 on two halves, values v and
      -v there, attain it at every even L: long context does not help. The Jacobian's norm says no more:
      `|dz| <= |V| |J| |e| <= R sqrt(L) e^{2c}/L delta sqrt(L)`.
    - not `aligned`: the e_i are independent, identically distributed, and independent of p and v; the answer is a root
      mean square. With `w_i = e^{e_i}` of mean mu, `dz = sum_i p_i (w_i - mu)(v_i - z) / sum_i p_i w_i`, for
      `sum_i p_i (v_i - z) = 0`. The denominator is at least `e^-delta`, the spread of w at most `sinh(delta)`, and
      `sum_i p_i^2 |v_i - z|^2 <= max p * R^2`. So `e^delta sinh(delta) R min(1, e^c/sqrt(L))`: the rate is 1/sqrt(L).

    Cutting dimensions makes errors that depend on the keys, as the values do: a real head lies between the two.
    """
    _check(length, logit_bound)
    if not (logit_error >= 0 and norm >= 0 and math.isfinite(norm)):
        raise HeadwiseError(f"logit_error is {logit_error} and norm is {norm}; both must be 0 or more.")
    worst = 0.0 if length == 1 else 2 * norm * math.tanh(logit_error / 2)
    if aligned or logit_error > 300:  # beyond, the other bound overflows
        return worst
    spread = math.exp(logit_error) * math.sinh(logit_error)
    return min(worst, spread * norm * math.sqrt(min(1.0, _largest(length, logit_bound))))


def enough_dim(
    logit_errors: Sequence[float],
    tolerance: float,
    length: int,
    logit_bound: float,
    norm: float = 1.0,
    aligned: bool = True,
) -> int:
    """The fewest dimensions that keep `head_error` within a tolerance.

    `logit_errors[r]` bounds the logit error with r dimensions kept, from 0 to all: measured, or the tail of a spectrum.
    """
    for dim, error in enumerate(logit_errors):
        if head_error(length, logit_bound, error, norm, aligned) <= tolerance:
            return dim
    raise HeadwiseError(
        f"no dimension keeps the head's error within {tolerance}: the smallest logit error given is "
        f"{min(logit_errors, default=math.inf)}; raise the tolerance or give more dimensions."
    )


def simulate(length: int, logit_bound: float, draws: int = 100, seed: int = 0) -> Estimate:
    """The norm's mean over Gaussian logits of standard deviation c/2, clipped to [-c, c]."""
    _check(length, logit_bound)
    if draws < 2:
        raise HeadwiseError(f"{draws} draws give no standard error; ask for at least 2.")
    drawn = np.random.default_rng((seed, length)).standard_normal((draws, length)) * logit_bound / 2
    weights = np.exp(np.clip(drawn, -logit_bound, logit_bound) - logit_bound)
    norms = jacobian_norm(weights / weights.sum(axis=1, keepdims=True))
    return Estimate(float(norms.mean()), float(norms.std(ddof=1) / math.sqrt(draws)))


def fit_slope(lengths: ArrayLike, values: ArrayLike) -> tuple[float, float]:
    """Slope of log(value) over log(length) by least squares, and its standard error; infinite for two points."""
    x, y = np.asarray(lengths, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1 or not ((x > 0) & (y > 0) & np.isfinite(x) & np.isfinite(y)).all():
        raise HeadwiseError("a slope needs as many lengths as values, all of them positive and finite.")
    x, y = np.log(x), np.log(y)
    if len(np.unique(x)) < 2:
        raise HeadwiseError("a slope needs at least two different lengths.")
    x, y = x - x.mean(), y - y.mean()
    slope = float(x @ y / (x @ x))
    if len(x) == 2:
        return slope, math.inf
    rest = y - slope * x
    return slope, math.sqrt(float(rest @ rest) / (len(x) - 2) / float(x @ x))


def _largest(length: int, logit_bound: float) -> float:
    """`e^{2c}/L`, without overflow."""
    return math.exp(min(2 * logit_bound - math.log(length), 700.0))


def _check(length: int, logit_bound: float) -> None:
    if length < 1 or not logit_bound >= 0:
        raise HeadwiseError(f"{length} logits within {logit_bound}: give at least one logit and a bound of 0 or more.")
