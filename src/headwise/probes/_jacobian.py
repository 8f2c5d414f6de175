"""The norm of the softmax Jacobian `J = diag(p) - p p'`: how strongly attention weights react to their logits.

NumPy alone, so that `headwise theory` can use it without torch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headwise.errors import HeadwiseError

Floats = NDArray[np.float64]
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
