"""B7: with Nystrom attention on ListOps, does one layer with 4 or more heads beat two layers, and do more heads help?

ListOps is generated here (nested MIN, MAX, MED and SM over digits; shorter than the Long-Range Arena's, whose lists of
up to 2,000 tokens are beyond what is trained here). Models are the benchmark's: width 64, MLP 128, landmarks a tenth of
the length or more. Seeds decide weights and order; lists are the same for all. In 5,000 steps some models of two layers
learn to nest and others do not yet, so that seeds differ by more than heads do; hence 10,000.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from experiments import _listops, _points
from experiments._rates import Ladder
from experiments._stack import even
from experiments._tasks import Sentences
from experiments._trials import Trial, run_all
from headwise.progress import Track
from headwise.report.plots import PALETTE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLAIM = "B7"
TITLE = "ListOps with Nystrom attention"


class Plan(NamedTuple):
    """What one size trains."""

    depths: tuple[int, ...]
    heads: tuple[int, ...]
    width: int
    length: int
    landmarks: int
    counts: tuple[int, int, int]  # lists to train on, to choose rates by, to report
    batch: int
    trial: Trial


LADDER = Ladder((2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3), (1e-3, 2e-3, 4e-3))
PLANS = {
    "tiny": Plan((1, 2), (2, 8), 16, 32, 8, (64, 32, 32), 8, Trial(5, 2, (0, 1), Ladder((1e-3,), (1e-3,)))),
    "small": Plan((1, 2), (2, 4, 8), 64, 64, 16, (2000, 200, 400), 16, Trial(150, 50, (0, 1, 2), LADDER)),
    "full": Plan(
        (1, 2), (2, 4, 8), 64, 256, 32, (40_000, 2_000, 5_000), 64, Trial(10_000, 2_000, tuple(range(10)), LADDER)
    ),
}


def run(size: str, device: str, assets: Path | None, track: Track, parts: MutableMapping[str, Any]) -> dict[str, Any]:
    """Train every depth and number of heads; what `parts` holds is done already."""
    plan, where = PLANS[size], torch.device(device)
    lists = [
        _listops.examples(count, plan.length // 4, plan.length, seed, where) for seed, count in enumerate(plan.counts)
    ]
    task = Sentences(*lists, batch=plan.batch)
    nets = {
        f"{depth} x {heads}": even(
            depth,
            heads,
            plan.width,
            2 * plan.width,
            length=plan.length,
            symbols=_listops.SYMBOLS,
            classes=10,
            landmarks=plan.landmarks,
        )
        for depth in plan.depths  # what the claim compares comes first
        for heads in plan.heads
    }
    models, left = run_all(nets, task, plan.trial, parts, track)
    labels = task.parts["test"].labels
    return {
        "seeds": list(plan.trial.seeds),
        "steps": plan.trial.steps,
        "length": plan.length,
        "chance": float(labels.bincount().max() / len(labels)),  # of always saying the same
        "models": models,
        "left_out": left,
    }


def _pair(result: dict[str, Any], one: tuple[int, int], other: tuple[int, int]) -> _points.Mean | None:
    """Accuracy of one (depth, heads) above another's, if both were trained."""
    models = result["models"]
    names = ["{} x {}".format(*cell) for cell in (one, other)]
    if not set(names) <= set(models):
        return None
    return _points.difference(*(models[name]["accuracy"] for name in names))


def _contests(result: dict[str, Any]) -> dict[str, _points.Mean]:
    """One layer with 4 or more heads against two layers with 2."""
    heads = sorted({model["heads"] for model in result["models"].values()})
    found = {f"1 layer of {count} heads": _pair(result, (1, count), (2, 2)) for count in heads if count >= 4}
    return {name: value for name, value in found.items() if value is not None}


def measured(result: dict[str, Any]) -> str:
    """Accuracies, and the two comparisons of the claim."""
    table = "; ".join(
        f"{m['depth']} layer{'s' * (m['depth'] > 1)}, {m['heads']} heads ({m['parameters'] / 1e3:.0f}k) "
        f"{_points.mean(m['accuracy']).spelled()}"
        for m in result["models"].values()
    )
    contests = "; ".join(f"{name} {value.signed()}" for name, value in _contests(result).items())
    rise = _pair(result, (1, 8), (1, 2))
    deep = _pair(result, (2, 8), (2, 2))
    told = [f"8 heads against 2 in {words} {v.signed()}" for words, v in (("1 layer", rise), ("2 layers", deep)) if v]
    return (
        f"Test accuracy, {len(result['seeds'])} seeds, {result['steps']:,} steps, lists of up to {result['length']} "
        f"tokens (always the same answer: {result['chance']:.3f}): {table}. Against 2 layers of 2 heads: {contests}. "
        f"{'; '.join(told)}.{_points.left_out(result)}"
    )


def draw(result: dict[str, Any], figure: Figure) -> None:
    """Accuracy over heads, a line per depth."""
    axes, models = figure.subplots(), list(result["models"].values())
    for number, depth in enumerate(sorted({model["depth"] for model in models})):
        mine = sorted((m for m in models if m["depth"] == depth), key=lambda model: model["heads"])
        means = [_points.mean(model["accuracy"]) for model in mine]
        label = f"{depth} layer{'s' * (depth > 1)}"
        _points.bars(axes, [model["heads"] for model in mine], means, label, number)
    axes.axhline(result["chance"], color=PALETTE[6], linestyle=":", linewidth=1, label="always the same answer")
    axes.set_xlabel("heads")
    axes.set_ylabel("test accuracy")
    axes.legend(fontsize=8)
