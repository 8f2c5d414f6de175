"""The learning rate of a distillation, found by trial: the share of a tensor's size that a step moves it by.

A cut model is near its optimum, and the first steps of Adam move every weight by the whole rate: what trains a fresh
model ruins a lightly damaged one. So rates are tried from the smallest on, each in a short training with warm-up and
decay, and judged on held-out rows. A short training prefers low rates, or none, because what a high rate disturbs at
first is repaired only later. So the highest rate that is nearly as good as the best is chosen, and the longer the
training to come, the larger this tolerance.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from headwise.errors import PlanError
from headwise.files.json import is_number, read_object
from headwise.heal._trainer import Trainer
from headwise.training.loop import Diverged, FitSettings

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
STEPS = (4, 50)  # of a trial, at least and at most
SHARE = 0.03  # of the steps to come
WARM_UP = 0.3  # share of a trial
TOLERANCE = 0.15  # of the best trial's divergence, by which a higher rate may be worse before a long training
HOPELESS = 1.5  # times the best divergence: higher rates are not tried
BAD = 1e9  # in place of a divergence that is not finite
JUDGED = ("divergence", "loss")  # what `Trainer.judge` measures

Trial = dict[str, float]  # a rate, and what `Trainer.judge` measured after it


def steps_of(settings: FitSettings) -> int:
    """Steps of a trial."""
    return max(STEPS[0], min(STEPS[1], round(SHARE * settings.steps)))


def tried(
    trainer: Trainer, settings: FitSettings, start: Trial, progress: Callable[[float], Iterable[object]]
) -> list[Trial]:
    """A trial of each rate, until one is hopeless; the first is no training at all. The weights stay as they were.

    `progress(rate)` gives an iterable that is advanced with every step.
    """
    before, found = trainer.copy(), [_finite({"rate": 0.0, **start})]
    steps = steps_of(settings)
    for rate in RATES:
        short = replace(
            settings, steps=steps, rate=rate, warm_up=WARM_UP, last_rate=0.0, point_every=steps, evaluate_every=0
        )
        try:
            trainer.train(short, trainer.state(short), progress(rate))
            after = trainer.judge()
        except Diverged:
            after = dict.fromkeys(JUDGED, BAD)
        trainer.put_back(before)
        found.append(_finite({"rate": rate, **after}))
        if found[-1]["divergence"] > HOPELESS * min(row["divergence"] for row in found):
            break
    return found


def read_trials(path: Path) -> tuple[Trial, list[Trial]]:
    """What was judged before training, and the trials, as a killed run saved them."""
    advice = "delete it and run again"
    known = read_object(path, advice=advice)
    start, trials = known.get("start"), known.get("trials")
    rows: list[Any] = [start, *trials] if isinstance(trials, list) else [None]
    for names, row in zip([JUDGED, *[(*JUDGED, "rate")] * (len(rows) - 1)], rows, strict=True):
        if not isinstance(row, dict) or not all(is_number(row.get(name)) for name in names):
            raise PlanError(f"{path} does not hold the trials of rates; {advice}.")
    return rows[0], rows[1:]


def best(trials: list[Trial], settings: FitSettings) -> float | None:
    """The highest rate that is nearly as good as the best; None where every rate did harm."""
    trials = [_finite(row) for row in trials]
    least = min(row["divergence"] for row in trials)
    if least >= BAD:
        return None
    longer = math.log(settings.steps / steps_of(settings)) / math.log(1 / SHARE)  # 0: as long as a trial
    worse = max(0.0, TOLERANCE * min(1.0, max(0.0, longer)) * least)  # rounding may make a divergence negative
    return max(row["rate"] for row in trials if row["divergence"] <= least + worse) or None


def _finite(row: Trial) -> Trial:
    """A trial with `BAD` in place of what is not finite, or larger."""
    return {name: min(value, BAD) if math.isfinite(value) else BAD for name, value in row.items()}
