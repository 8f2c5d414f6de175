"""Softmax saturation and Gaussian conditioning: the papers' formulas against dense matrices and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from headwise.errors import HeadwiseError, ShapeError
from headwise.research.theory import conditioning, saturation


def dense_norm(p: np.ndarray) -> float:
    return float(np.linalg.eigvalsh(np.diag(p) - np.outer(p, p))[-1])


@given(
    some.lists(some.floats(-1, 1), min_size=1, max_size=24),
    some.sampled_from([0.0, 1e-9, 0.1, 1.0, 5.0, 30.0, 700.0]),
    some.integers(1, 3),
)
def test_the_jacobian_norm_equals_the_dense_one(logits: list[float], scale: float, copies: int) -> None:
    p = np.exp(scale * (np.array(logits * copies) - max(logits)))  # copies make ties
    p /= p.sum()
    found = float(saturation.jacobian_norm(p))
    assert found == pytest.approx(dense_norm(p), abs=1e-12)
    top = p.max()
    assert top * (1 - top) - 1e-15 <= found <= min(0.5, top) + 1e-12


@pytest.mark.parametrize(
    ("p", "norm"),
    [
        ([1.0], 0.0),
        ([0.0, 1.0, 0.0], 0.0),
        ([0.5, 0.5], 0.5),
        ([0.25] * 4, 0.25),
        ([0.4, 0.4, 0.2], 0.4),
        ([0.3, 0.7], 2 * 0.3 * 0.7),
        ([1.0, 1e-20], 2e-20),
        ([1.0, 1e-200, 0.0], 2e-200),
        ([0.5, 0.5 - 1e-14, 1e-14], 0.5),
    ],
)
def test_the_jacobian_norm_at_the_edges(p: list[float], norm: float) -> None:
    assert float(saturation.jacobian_norm(p)) == pytest.approx(norm, rel=1e-12, abs=0)


def test_the_jacobian_norm_works_on_any_leading_axes() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((3, 2, 5, 40)) * np.array([0.1, 3.0, 40.0])[:, None, None, None]
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    found = saturation.jacobian_norm(p)
    assert found.shape == (3, 2, 5)
    assert np.allclose(found, np.apply_along_axis(dense_norm, -1, p), atol=1e-12)
    assert np.allclose(saturation.jacobian_norm(p.astype(np.float32)), found, rtol=1e-4, atol=1e-9)
    assert saturation.jacobian_norm(np.empty((0, 4))).shape == (0,)


@pytest.mark.parametrize("p", [[0.5, 0.6], [-0.1, 1.1], [math.nan, 1.0], [[]], 1.0])
def test_what_is_no_probability_is_refused(p: object) -> None:
    with pytest.raises(HeadwiseError, match="probabilities"):
        saturation.jacobian_norm(p)  # type: ignore[arg-type]


@given(some.integers(1, 40), some.floats(0, 4), some.integers(0, 5))
def test_no_softmax_exceeds_the_norm_bound(length: int, logit_bound: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for logits in (rng.uniform(-logit_bound, logit_bound, length), rng.choice([-logit_bound, logit_bound], length)):
        p = np.exp(logits) / np.exp(logits).sum()
        assert float(saturation.jacobian_norm(p)) <= saturation.norm_bound(length, logit_bound) + 1e-15


def moved(logits: np.ndarray, errors: np.ndarray, values: np.ndarray) -> float:
    before, after = (np.exp(s) / np.exp(s).sum() for s in (logits, logits + errors))
    return float(np.linalg.norm((after - before) @ values))


def test_aligned_errors_do_as_much_harm_in_long_contexts_as_in_short_ones() -> None:
    delta = 0.3
    for length in (2, 20, 20_000):
        sides = np.where(np.arange(length) < length // 2, 1.0, -1.0)  # the first half gains
        attained = moved(-delta / 2 * sides, delta * sides, sides[:, None])
        assert attained == pytest.approx(saturation.head_error(length, delta / 2, delta, aligned=True), rel=1e-12)


def test_independent_errors_fall_like_one_over_the_root_of_the_length() -> None:
    rng, lengths, found = np.random.default_rng(0), (16, 64, 256, 1024), []
    for length in lengths:
        logits = rng.uniform(-0.5, 0.5, length)
        values = rng.standard_normal((length, 4))
        values /= np.linalg.norm(values, axis=1, keepdims=True)
        draws = [moved(logits, rng.choice([-0.2, 0.2], length), values) for _ in range(60)]
        found.append(math.sqrt(np.mean(np.square(draws))))
        assert found[-1] <= saturation.head_error(length, 0.5, 0.2, aligned=False)
    slope, error = saturation.fit_slope(lengths, found)
    assert slope == pytest.approx(-0.5, abs=0.1) and error < 0.1


@given(some.integers(2, 5000), some.floats(0, 3), some.floats(0, 500), some.floats(0, 10))
def test_a_head_moves_no_further_than_its_values_allow(length: int, bound: float, error: float, norm: float) -> None:
    aligned, independent = (saturation.head_error(length, bound, error, norm, a) for a in (True, False))
    assert 0 <= independent <= aligned <= 2 * norm


def test_slopes() -> None:
    lengths = np.array([4, 16, 64, 256])
    assert saturation.fit_slope(lengths, 3.0 / lengths) == pytest.approx((-1.0, 0.0), abs=1e-12)
    assert saturation.fit_slope([1, 2], [1, 2]) == (pytest.approx(1.0), math.inf)
    for wrong in ([1.0, 0.0], [1.0], [1.0, math.nan]):
        with pytest.raises(HeadwiseError, match="positive and finite"):
            saturation.fit_slope([1, 2], wrong)
    with pytest.raises(HeadwiseError, match="two different lengths"):
        saturation.fit_slope([2, 2], [1, 1])


def test_saturation_refuses_nonsense() -> None:
    with pytest.raises(HeadwiseError, match="at least one logit"):
        saturation.norm_bound(0, 1.0)
    with pytest.raises(HeadwiseError, match="must be 0 or more"):
        saturation.head_error(4, 1.0, -0.1)
    with pytest.raises(HeadwiseError, match="at least 2"):
        saturation.simulate(4, 1.0, draws=1)


def test_gaussian_conditioning_falls_towards_one() -> None:
    values = [conditioning.gaussian(64, heads, 64) for heads in (1, 2, 4, 64, 10**6)]
    assert values == sorted(values, reverse=True) and values[0] == math.inf and values[2] == 3.0
    assert values[-1] == pytest.approx(1, abs=0.01)
    with pytest.raises(ShapeError, match="at least 1"):
        conditioning.gaussian(4, 0, 4)


def test_simulated_conditioning_agrees_with_the_formula() -> None:
    found = conditioning.simulate(100, 8, 100, draws=10)
    assert found.mean == pytest.approx(conditioning.gaussian(100, 8, 100), rel=0.05)
    assert 0 < found.standard_error < 0.05
    assert conditioning.simulate(100, 8, 100, draws=10) == found, "same seed, same answer"
    assert conditioning.simulate(8, 1, 8).mean == math.inf
    with pytest.raises(HeadwiseError, match="at least 2"):
        conditioning.simulate(4, 2, 4, draws=1)
