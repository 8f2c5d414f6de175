"""A learning rate for healing, found by trial.

A cut model is near where it should be, and AdamW's first steps move every weight by the whole rate: what trains a
fresh model ruins a lightly damaged one. So rates are tried from the smallest on for a few steps each, and the one that
comes nearest the source on rows that are not learned from is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from headwise.errors import HeadwiseError
from headwise.heal._course import Course
from headwise.train.loop import FitSettings

RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
STEPS = (4, 20)  # of a trial, at least and at most
SHARE = 0.05  # of the steps to come
WARM_UP = 0.5  # share of a trial
BAD = 1e9  # instead of what is no number


def steps_of(settings: FitSettings) -> int:
    """Steps of a trial."""
    return max(STEPS[0], min(STEPS[1], round(SHARE * settings.steps)))


def tried(
    course: Course, settings: FitSettings, start: dict[str, float], said: Callable[[float], Iterable[object]]
) -> list[dict[str, float]]:
    """What `judge` says after a few steps at each rate, until one is clearly worse than the best; nothing is changed.

    `said(rate)` is asked for something to advance step by step, which shows progress.
    """
    before, found = course.copy(), [{"rate": 0.0, **start}]
    steps = steps_of(settings)
    for rate in RATES:
        short = replace(
            settings, steps=steps, rate=rate, warm_up=WARM_UP, last_rate=0.0, point_every=steps, evaluate_every=0
        )
        try:
            course.learn(short, course.state(short), said(rate))
            after = course.judge()
        except HeadwiseError:  # it diverged
            after = {"divergence": BAD, "loss": BAD}
        course.put_back(before)
        found.append(
            {"rate": rate, **{name: min(value, BAD) if value == value else BAD for name, value in after.items()}}
        )
        if found[-1]["divergence"] > 1.2 * min(row["divergence"] for row in found):
            break
    return found


def best(trials: list[dict[str, float]]) -> float | None:
    """The rate that came nearest; None where every one did harm."""
    rate = min(trials, key=lambda row: row["loss"])["rate"]
    return rate or None
