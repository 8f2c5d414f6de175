"""How softmax attention saturates: the norm of its Jacobian `J = diag(p) - p p'`, bounds on it, and what follows.

Two things are easily confused. The Jacobian's norm falls like 1/L for logits in [-c, c] (`norm_bound`). The error of a
head's output does not follow from it alone: L logits are wrong at once, and L values are summed. If the errors may be
aligned with the values, nothing is gained by length; if they are drawn alike and independently of the values, the
output error falls like 1/sqrt(L) (`head_error`). Neither gives 1/L.
"""

import math

import numpy as np
from numpy.typing import ArrayLike

from headwise.errors import HeadwiseError
from headwise.probes._jacobian import jacobian_norm
from headwise.research.theory.conditioning import Estimate


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
