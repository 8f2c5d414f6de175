"""Trains every model of an experiment by one rule: a rate found on a ladder in a shorter training, then all seeds.

The rate is chosen with a seed of its own on rows that are not reported. While the best rate tried is the lowest or the
highest, the next is tried too (`_rates`); a model whose best rate stays at an edge is not `settled`, and a comparison
with it is void. Every rate and every model is a part of its own, so that a killed experiment resumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from experiments import _points, _rates
from experiments._stack import Net, Run
from experiments._tasks import TUNING_SEED, Task, facts, learn_at
from headwise.errors import HeadwiseError
from headwise.progress import Track

ENOUGH = 300  # steps after which a model should have begun to learn
LEARNED = 0.95  # of the loss of knowing nothing: above it a model has not
Report = Callable[[Run], dict[str, Any]]  # what is told of a trained stack beside its scores


class Trial(NamedTuple):
    """How long and how often every model is trained."""

    steps: int
    tuning_steps: int
    seeds: tuple[int, ...]
    ladder: _rates.Ladder


def run_all(
    nets: Mapping[str, Net],
    task: Task,
    trial: Trial,
    parts: MutableMapping[str, Any],
    track: Track,
    report: Report = lambda run: {},
    needed: int = 2,
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Tune and train all models while time is left; the models, and the names of what was left out.

    Models are taken in their order, each to its end; without the first `needed` there is no result.
    """
    left: list[str] = []
    for name, net in nets.items():
        left += _rates.search({name: partial(_attempt, net, task, trial)}, trial.ladder, parts, track, f"{name}: rates")
        if not any(done in parts for done in nets):
            _sane(name, net, trial, parts)
        if (found := _rates.best(name, trial.ladder, parts)) is not None:
            job = partial(_train, net, task, trial, found["rate"], report)
            left += _points.work({name: job}, parts, track, name)
    models = {name: _whole(name, trial, parts) for name in nets if name in parts}
    _points.need([name for name in list(nets)[:needed] if name not in models])
    return models, left


def _sane(name: str, net: Net, trial: Trial, parts: Mapping[str, Any]) -> None:
    """Stop where a model learned nothing at any rate: no verdict could follow."""
    losses, nothing = _rates.tried(name, trial.ladder, parts), math.log(net.classes or net.symbols)
    if losses and trial.tuning_steps >= ENOUGH and min(losses.values()) > LEARNED * nothing:
        raise HeadwiseError(
            f"{name} has a loss of {min(losses.values()):.2f} after {trial.tuning_steps} steps at its best rate, where "
            f"knowing nothing costs {nothing:.2f}; nothing more is trained. Look at the data that --assets names."
        )


def _whole(name: str, trial: Trial, parts: Mapping[str, Any]) -> dict[str, Any]:
    return (_rates.best(name, trial.ladder, parts) or {}) | parts[name] | {"tuning_steps": trial.tuning_steps}


def _attempt(net: Net, task: Task, trial: Trial, rates: Sequence[float]) -> list[dict[str, Any]]:
    """Held-out losses at some rates in the shorter training."""
    runs = learn_at(net, task, [TUNING_SEED], trial.tuning_steps, rates)
    return [{"tried": _points.column(task.score(run), "loss")[0]} for run in runs]


def _train(net: Net, task: Task, trial: Trial, rate: float, report: Report) -> dict[str, Any]:
    """All seeds at one rate, scored on rows that chose nothing."""
    (trained,) = learn_at(net, task, trial.seeds, trial.steps, [rate])
    scores = task.score(trained, "test")
    return {
        "loss": _points.column(scores, "loss"),
        "accuracy": _points.column(scores, "accuracy"),
        **facts(net, trained, trial.steps, task.batch),
        **report(trained),
    }
