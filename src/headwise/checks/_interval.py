"""How well a mean is known: bootstrap intervals."""

from __future__ import annotations

import numpy as np

RESAMPLES = 2000


def interval(values: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95% bootstrap interval of the mean.

    >>> interval(np.ones(8))
    (1.0, 1.0)
    """
    draws = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile(values[draws].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)
