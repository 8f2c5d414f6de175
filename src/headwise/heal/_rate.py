"""A rate for healing, found by trial: the share of a tensor's size that a step moves it by.

A cut model is near where it should be, and the first steps of Adam move every weight by the whole rate: what trains a
fresh model ruins a lightly damaged one. So rates are tried from the smallest on, each in a whole small course of its
own that rises and falls, and judged on rows that are not learned from. A short course prefers low rates, or none,
because what a high one disturbs at first is made good only later: taken is the highest that is nearly as good as the
best, the nearer the shorter the course to come is. What comes out of a course is never worse than its start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError, PlanError
from headwise.files.json import is_number, read_object
from headwise.heal._course import Course
from headwise.training.loop import FitSettings

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
STEPS = (4, 50)  # of a trial, at least and at most
SHARE = 0.03  # of the steps to come
WARM_UP = 0.3  # share of a trial
NEARLY = 0.15  # of the best trial's divergence, by which a higher rate may be worse before a long course
HOPELESS = 1.5  # times the best divergence: higher rates are not tried
BAD = 1e9  # instead of what is no number
JUDGED = ("divergence", "loss")


def steps_of(settings: FitSettings) -> int:
    """Steps of a trial."""
    return max(STEPS[0], min(STEPS[1], round(SHARE * settings.steps)))


def tried(
    course: Course, settings: FitSettings, start: dict[str, float], said: Callable[[float], Iterable[object]]
) -> list[dict[str, float]]:
    """What `judge` says after a small course at each rate, until one is hopeless; nothing is changed.

    `said(rate)` is asked for something to advance step by step, which shows progress.
    """
    before, found = course.copy(), [_finite({"rate": 0.0, **start})]
    steps = steps_of(settings)
    for rate in RATES:
        short = replace(
            settings, steps=steps, rate=rate, warm_up=WARM_UP, last_rate=0.0, point_every=steps, evaluate_every=0
        )
        try:
            course.learn(short, course.state(short), said(rate))
            after = course.judge()
        except HeadwiseError:  # it diverged
            after = dict.fromkeys(JUDGED, BAD)
        course.put_back(before)
        found.append(_finite({"rate": rate, **after}))
        if found[-1]["divergence"] > HOPELESS * min(row["divergence"] for row in found):
            break
    return found


def read_trials(path: Path) -> tuple[dict[str, float], list[dict[str, float]]]:
    """What was judged before anything was learned, and what each rate came to, as a run that was killed left them."""
    advice = "delete it and run again"
    known = read_object(path, advice=advice)
    start, trials = known.get("start"), known.get("trials")
    rows: list[Any] = [start, *trials] if isinstance(trials, list) else [None]
    for names, row in zip([JUDGED, *[(*JUDGED, "rate")] * (len(rows) - 1)], rows, strict=True):
        if not isinstance(row, dict) or not all(is_number(row.get(name)) for name in names):
            raise PlanError(f"{path} does not hold the trials of rates; {advice}.")
    return rows[0], rows[1:]


def best(trials: list[dict[str, float]], settings: FitSettings) -> float | None:
    """The highest rate that came nearly as near as any, or as it was near before; None where every one did harm."""
    trials = [_finite(row) for row in trials]
    first = min(trials, key=lambda row: row["loss"])
    longer = math.log(settings.steps / steps_of(settings)) / math.log(1 / SHARE)  # 0: as long as a trial
    worse = NEARLY * min(1.0, max(0.0, longer)) * first["divergence"]  # the text's own surprise, if it counts, is not
    if first["loss"] >= BAD:
        return None
    if not 0 <= worse < BAD * NEARLY:
        worse = 0.0
    return max(row["rate"] for row in trials if row["loss"] <= first["loss"] + worse) or None


def _finite(row: dict[str, float]) -> dict[str, float]:
    """The same with `BAD` for what is not a number, infinite, or larger."""
    return {name: min(value, BAD) if math.isfinite(value) else BAD for name, value in row.items()}
