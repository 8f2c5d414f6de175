"""How well conditioned the outputs of many heads are, side by side, if they were random.

N tokens through `heads` heads of `dim` dimensions give an N x D matrix, `D = heads * dim`. With independent Gaussian
entries its extreme singular values gather at `sqrt D + sqrt N` and `sqrt D - sqrt N`, so more heads bring their ratio
towards 1. Up to D = N the ratio is infinite: below N columns the rows are dependent and `sigma_N` is 0, and at D = N it
is so often tiny that the mean does not exist.
"""

import math
from typing import NamedTuple

import numpy as np

from headwise.errors import HeadwiseError, ShapeError


class Estimate(NamedTuple):
    """A simulated mean and its standard error."""

    mean: float
    standard_error: float


def gaussian(tokens: int, heads: int, dim: int) -> float:
    """`(sqrt D + sqrt N) / (sqrt D - sqrt N)` with `D = heads * dim`; infinite for `D <= N`.

    >>> gaussian(tokens=64, heads=4, dim=64)
    3.0
    """
    width = _width(tokens, heads, dim)
    if width <= tokens:
        return math.inf
    return (math.sqrt(width) + math.sqrt(tokens)) / (math.sqrt(width) - math.sqrt(tokens))


def simulate(tokens: int, heads: int, dim: int, draws: int = 20, seed: int = 0) -> Estimate:
    """Mean and standard error of `sigma_1 / sigma_N` over Gaussian matrices; infinite for `D <= N` (error 0).

    A Gaussian matrix of N rows and D columns has the singular values of Bartlett's triangular factor of N x N, in
    distribution, which is what is drawn: its diagonal is chi with D, D - 1, ... degrees of freedom.
    At `D = N + 1` the mean exists but its variance does not, so there the standard error means little.
    """
    width = _width(tokens, heads, dim)
    if draws < 2:
        raise HeadwiseError(f"{draws} draws give no standard error; ask for at least 2.")
    if width <= tokens:
        return Estimate(math.inf, 0.0)
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(draws):
        factor = np.tril(rng.standard_normal((tokens, tokens)), -1)
        np.fill_diagonal(factor, np.sqrt(rng.chisquare(width - np.arange(tokens))))
        singular = np.linalg.svd(factor, compute_uv=False)
        found.append(float(singular[0] / singular[-1]))
    return Estimate(float(np.mean(found)), float(np.std(found, ddof=1) / math.sqrt(draws)))


def _width(tokens: int, heads: int, dim: int) -> int:
    if min(tokens, heads, dim) < 1:
        raise ShapeError(f"{tokens} tokens, {heads} heads of dimension {dim}: each must be at least 1.")
    return heads * dim
