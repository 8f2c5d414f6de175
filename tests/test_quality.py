"""Error bars and expectations: what the certificate's numbers mean."""

from __future__ import annotations

import numpy as np
import pytest

from headwise.checks.quality import Comparison, interval


def comparison(damage, kl):
    zeros = np.zeros(len(damage))
    return Comparison(zeros + 2.0, zeros + 2.0 + np.asarray(damage), zeros + kl, zeros + 1.0)


def test_the_interval_holds_the_mean_and_shrinks_with_more_text():
    draw = np.random.default_rng(1)
    few, many = draw.normal(0.1, 0.05, 20), draw.normal(0.1, 0.05, 2000)
    for values in (few, many):
        low, high = interval(values)
        assert low < values.mean() < high
    assert np.ptp(interval(many)) < 0.3 * np.ptp(interval(few))


def test_perplexity_bounds_are_those_of_the_damage():
    found = comparison([0.1, 0.2, 0.3, 0.2], 0.2)
    summary, damage = found.summary(), found.damage()
    assert summary["perplexity_after_low"] == pytest.approx(
        summary["perplexity_before"] * np.exp(damage["measured_low"])
    )
    assert summary["perplexity_after"] == pytest.approx(summary["perplexity_before"] * np.exp(damage["measured"]))


def test_expected_damage_trusts_the_loss_when_it_is_known_well():
    sharp, vague = comparison([0.010, 0.011] * 50, 0.02), comparison([0.5, -0.5] * 5, 0.02)
    assert sharp.expected_damage() == pytest.approx(0.0105, rel=0.05), "much text: the loss itself"
    assert vague.expected_damage() == pytest.approx(0.02, rel=0.1), "little text: the KL"
    assert comparison([0.0] * 4, 0.0).expected_damage() == 0.0
