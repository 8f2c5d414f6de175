"""A5: does the same analysis cover the first step of induction heads and a nonlinear target?

Three tasks on the tokens and the layer of A4 (256 dimensions cut into equal heads, linear positions):

- previous token, the first step of induction: `y_t = x_{t-1}`, a single lag;
- induction whole: `A B ... A` is to be completed with B by two layers, of which the first is swept and the second has
  one head; nobody tells the first layer to look at the previous token, so how its map spreads over lags is measured;
- nonlinear: `y_t = sum_i tanh(2 A_i x_{t-i}) / 4` over four lags with random rotations A_i, and a small tanh layer
  between heads and output.

For each the exact solver of the bound names the best number of heads. Induction as a whole is reported only: the claim
is about its first step.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from experiments import _points, _sweep
from experiments._ngram import TOKEN_DIM, Effort, Point, Task, measure
from headwise.progress import Track
from headwise.report.plots import PALETTE
from headwise.research.theory.allocation import allocate
from headwise.research.theory.bound import Group, bound

CLAIM = "A5"
TITLE = "Induction's first step and a nonlinear target"

DIM = 256
TASKS = {
    "previous token": Task((1.0,)),
    "induction": Task((1.0,), induction=True, length=16),
    "nonlinear": Task((0.25,) * 4, hidden=64, bend=2.0),
}
JUDGED = ("previous token", "nonlinear")
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 6e-2, 0.12, 0.24)


class Plan(NamedTuple):
    """What one size trains."""

    line: tuple[int, ...]
    effort: Effort


PLANS = {
    "tiny": Plan((8, 32, 64), Effort(8, 2, 2, 1, (1e-2, 3e-2), 2)),
    "small": Plan((4, 8, 16, 32, 64, 128), Effort(400, 8, 5, 1, (1e-2, 3e-2))),
    "full": Plan((4, 8, 16, 32, 64, 128), Effort(5000, 32, 64, 4, RATES)),
}


def run(size: str, device: str, assets: Path | None, track: Track, parts: MutableMapping[str, Any]) -> dict[str, Any]:
    """Sweep heads on every task; what `parts` holds is done already."""
    plan, where = PLANS[size], torch.device(device)
    points = [Point(heads, DIM // heads) for heads in plan.line]
    jobs = {
        f"{name}: {point.key}": partial(measure, TASKS[name], point, plan.effort, where)
        for name in sorted(TASKS, key=lambda name: name not in JUDGED)  # what the claim is about comes first
        for point in points
    }
    needed = [name for name in jobs if name.startswith(JUDGED)]
    left = _points.work(jobs, parts, track, "tasks x heads", needed)
    found = {}
    for name, task in TASKS.items():
        rows = [parts[key] for point in points if (key := f"{name}: {point.key}") in parts]
        if len(rows) < len(points):
            continue
        found[name] = {
            "theory": theory(task, plan.line),
            "trained": _sweep.compare(rows),
            "trained_norm": _sweep.compare(rows, "norm"),
            "rows": rows,
        }
    sizes = {"seeds": plan.effort.seeds, "steps": plan.effort.steps, "batch": plan.effort.batch}
    return {**sizes, "tasks": found, "left_out": left}


def theory(task: Task, line: tuple[int, ...]) -> dict[str, Any]:
    """The best allocation for the task's lags, and the bound where the line divides among them."""
    best, lags = allocate(task.rho, DIM, TOKEN_DIM), len(task.rho)
    curve = [bound(task.rho, [Group(h // lags, DIM // h)] * lags, TOKEN_DIM) for h in line]
    return {
        "groups": [list(group) for group in best.groups],
        "heads": best.heads,
        "nearest": min(line, key=lambda heads: abs(np.log(heads / best.heads))),
        "error": best.error,
        "bound": curve,
    }


def measured(result: dict[str, Any]) -> str:
    """Per task: best number of heads, theory's, and both ends of the curve."""
    parts = []
    for name, task in result["tasks"].items():
        trained, heads = task["trained"], task["theory"]["nearest"]
        best, first, last = _sweep.at(trained, trained["best"]), trained["points"][0], trained["points"][-1]
        parts.append(
            f"{name.capitalize()}: best {best['heads']} heads ({_sweep.spelled(best)}, chance "
            f"{best['chance_best']:.0%}), not significantly worse {', '.join(map(str, _sweep.among_best(trained)))}; "
            f"theory {heads}, {_sweep.times(_sweep.at(trained, heads))} times the best; ends: {first['heads']} heads "
            f"{_sweep.times(first)} times, {last['heads']} heads {_sweep.times(last)} times."
        )
    if "induction" in result["tasks"]:
        one, other = previous_share(result), max(lags_beside_previous(result))
        parts.append(
            f"Trained on induction alone, the first layer puts {one.mean():.0%} ± {one.std():.0%} of its map on the "
            f"previous token; of other lags none has more than {other:.0%}."
        )
    parts.append(f"Relative squared errors, {result['seeds']} seeds, {result['steps']:,} steps.")
    return " ".join(parts) + _points.left_out(result)


def _shares(result: dict[str, Any]) -> np.ndarray[Any, Any]:
    """How the first layer's map spreads over lags on the whole task, one row per layer that was trained."""
    return np.concatenate([np.asarray(row["lag_shares"]) for row in result["tasks"]["induction"]["rows"]])


def previous_share(result: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The share of lag 1, one entry per layer that was trained."""
    return _shares(result)[:, 1]


def lags_beside_previous(result: dict[str, Any]) -> list[float]:
    """Mean shares of all lags but the first."""
    return [float(share) for share in np.delete(_shares(result).mean(0), 1)]


def draw(result: dict[str, Any], figure: Any) -> None:
    """Error over heads for every task, with the bound."""
    panels = figure.subplots(1, len(result["tasks"]))
    for number, (axes, (name, task)) in enumerate(zip(panels, result["tasks"].items(), strict=True)):
        heads = [point["heads"] for point in task["trained"]["points"]]
        if name in JUDGED:
            label = "bound" if name == JUDGED[0] else "bound, linear target"
            axes.plot(heads, task["theory"]["bound"], color=PALETTE[6], linestyle="--", linewidth=1.2, label=label)
        _sweep.plot(axes, task["trained_norm"], "trained", number)
        _sweep.over_heads(axes, heads, task["theory"]["nearest"])
        axes.set_ylabel("error (root mean square norm)" if not number else "error")
        axes.set_title(name, fontsize=9)
        axes.set_ylim(top=1.5 * axes.get_ylim()[1])  # room for the legend
        axes.legend(fontsize=7, loc="upper left")
