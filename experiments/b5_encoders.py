"""B5: does an encoder of 10 layers with twice the heads match one of 16 layers on GLUE?

A scaled-down Crammed BERT pair (width 256 instead of 768; rotary positions, RMS norms, gated MLP, no biases) learns
masked text, then each is fine-tuned on SST-2, MRPC and STS-B from every pretraining seed. Controls: the shorter
model without the extra heads, and a narrow 16-layer model with its parameters. The rate of pretraining is chosen by the
same rule for all (`_rates`) with a seed that is used for nothing else, those of fine-tuning on examples taken from the
training sets; scores are those of the development sets (Matthews correlation for CoLA, Spearman's for STS-B, whose
scores are rounded to six classes, accuracy otherwise), averaged over tasks.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from scipy import stats

from experiments import _data, _points, _rates
from experiments._stack import Member, Net, Run, even, named, train, working
from experiments._tasks import TUNING_SEED, Masked, Sentences, facts, learn_at
from headwise.progress import Track

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLAIM = "B5"
TITLE = "Encoders: 10 layers of 8 heads against 16 of 4"

DEEP, LEAN = "deep", "lean"
BEGUN = 0.7  # share of the loss of knowing nothing, above which pretraining has hardly begun
LADDER = _rates.Ladder((2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3), (5e-4, 1e-3, 2e-3))
TUNE_RATES = (5e-5, 1e-4, 3e-4, 1e-3)
CLASSES = {"STS-B": 6}
SCORES = {"CoLA": "matthews", "STS-B": "spearman"}


class Plan(NamedTuple):
    """What one size trains: depth, heads, width, MLP width per model; steps and length per GLUE task."""

    shapes: dict[str, tuple[int, int, int, int]]
    length: int
    batch: int
    steps: int
    tuning_steps: int
    seeds: tuple[int, ...]
    ladder: _rates.Ladder
    valid_rows: int
    tasks: dict[str, tuple[int, int]]
    tune_batch: int


SHAPES = {
    DEEP: (16, 4, 256, 704),
    LEAN: (10, 8, 256, 704),
    "lean, 4 heads": (10, 4, 256, 704),
    "narrow deep": (16, 4, 208, 544),  # the lean model's parameters
}
PLANS = {
    "tiny": Plan(
        {DEEP: (2, 2, 16, 32), LEAN: (1, 4, 16, 32)},
        16,
        4,
        3,
        2,
        (0, 1),
        _rates.Ladder((1e-3,), (1e-3,)),
        8,
        {"CoLA": (3, 8), "STS-B": (3, 16)},
        4,
    ),
    "small": Plan(
        {name: (depth // 4, heads, width // 4, mlp // 4) for name, (depth, heads, width, mlp) in SHAPES.items()},
        64,
        16,
        150,
        50,
        (0, 1, 2),
        LADDER,
        64,
        {"CoLA": (60, 32), "RTE": (40, 64)},
        16,
    ),
    "full": Plan(
        SHAPES,
        128,
        64,
        7500,  # 61M tokens
        1200,
        (0, 1, 2),
        LADDER,
        512,
        {"SST-2": (2000, 56), "MRPC": (600, 128), "STS-B": (900, 96)},
        32,
    ),
}


def run(size: str, device: str, assets: Path | None, track: Track, parts: MutableMapping[str, Any]) -> dict[str, Any]:
    """Pretrain and fine-tune every model; what `parts` holds is done already."""
    plan, where = PLANS[size], torch.device(device)
    texts = _data.texts("text", size, assets, where)
    pretraining = Masked(texts, plan.length, plan.batch, plan.valid_rows)
    tasks = {name: sentences(name, size, assets, where, plan) for name in plan.tasks}
    left = []
    for name, shape in plan.shapes.items():
        net = even(*shape, length=plan.length, symbols=texts.vocabulary, rotary=True)
        left += _rates.search({name: partial(attempt, net, pretraining, plan)}, plan.ladder, parts, track, name)
        if (found := _rates.best(name, plan.ladder, parts)) is not None:
            job = partial(measure, net, pretraining, tasks, plan, found["rate"])
            left += _points.work({name: job}, parts, track, name)
    _points.need([name for name in (DEEP, LEAN) if name not in parts])
    return {
        "seeds": list(plan.seeds),
        "tokens": plan.steps * plan.batch * plan.length,
        "vocabulary": texts.vocabulary,
        "tasks": list(plan.tasks),
        "models": {name: _rates.best(name, plan.ladder, parts) | parts[name] for name in plan.shapes if name in parts},
        "left_out": left,
    }


def sentences(name: str, size: str, assets: Path | None, device: torch.device, plan: Plan) -> Sentences:
    """A GLUE task; a tenth of its training examples chooses the rate."""
    examples, dev = _data.glue(name, size, assets, device, plan.tasks[name][1])
    border = len(examples.labels) * 9 // 10
    return Sentences(examples.rows(slice(0, border)), examples.rows(slice(border, None)), dev, plan.tune_batch)


def attempt(net: Net, task: Masked, plan: Plan, rates: Sequence[float]) -> list[dict[str, Any]]:
    """Masked losses at some rates, of a seed that only chooses among them."""
    runs = learn_at(net, task, [TUNING_SEED], plan.tuning_steps, rates)
    return [{"tried": _points.column(task.score(run), "loss")[0]} for run in runs]


def measure(net: Net, pretraining: Masked, tasks: dict[str, Sentences], plan: Plan, rate: float) -> dict[str, Any]:
    """One model: pretrained with every seed, each of them fine-tuned on every task."""
    (trained,) = learn_at(net, pretraining, plan.seeds, plan.steps, [rate])
    return {
        "masked_loss": _points.column(pretraining.score(trained), "loss"),
        "glue": {
            name: fine_tune(trained, task, plan.tasks[name][0], plan, CLASSES.get(name, 2))
            for name, task in tasks.items()
        },
        "rate": rate,
        **facts(net, trained, plan.steps, pretraining.batch),
    }


def fine_tune(pretrained: Run, task: Sentences, steps: int, plan: Plan, classes: int) -> dict[str, Any]:
    """Scores per seed on the development set, at the rate that is best on held-out training examples."""
    net, seeds = pretrained.net._replace(classes=classes), list(plan.seeds)
    members = [Member(seed, rate) for rate in TUNE_RATES for seed in seeds]
    rng = torch.Generator().manual_seed(0)
    answer = (torch.randn(1, net.width * classes, generator=rng) * 0.02).to(task.device).expand(len(members), -1)
    start = torch.cat([pretrained.flat.repeat(len(TUNE_RATES), 1), answer], 1)
    run = train(net, members, task.loss(net, [m.seed for m in members], steps), steps, task.device, start)
    tried = torch.tensor(_points.column(task.score(run), "loss")).view(len(TUNE_RATES), -1).mean(1)
    best = int(tried.argmin())
    chosen = Run(net, run.flat[best * len(seeds) : (best + 1) * len(seeds)], run.step_seconds, run.curve)
    labels = task.parts["test"].labels
    return {
        "rate": TUNE_RATES[best],
        "rates": dict(zip(map(str, TUNE_RATES), tried.tolist(), strict=True)),
        "majority": float(labels.bincount().max() / len(labels)),
        "accuracy": _points.column(task.score(chosen, "test"), "accuracy"),
        **correlations(chosen, task),
    }


@torch.no_grad()
def correlations(run: Run, task: Sentences) -> dict[str, list[float]]:
    """Per seed on the development set: Matthews' correlation of two classes, Spearman's of more."""
    w = named(run.net, run.flat.to(working(task.device)))
    pairs = [
        task.answers(run.net, w, slice(at, min(task.held("test"), at + 64)), "test")
        for at in range(0, task.held("test"), 64)
    ]
    answers = torch.cat([a.float() for a, _ in pairs], 1).softmax(-1)
    true = torch.cat([targets for _, targets in pairs], 1).cpu().numpy()
    if run.net.classes == 2:
        said, name, measure = answers.argmax(-1).cpu().numpy(), "matthews", np.corrcoef
    else:
        expected = answers @ torch.arange(float(run.net.classes), device=answers.device)
        said, name, measure = expected.cpu().numpy(), "spearman", _spearman
    found = []
    for a, b in zip(said, true, strict=True):
        constant = len(set(a.tolist())) < 2 or len(set(b.tolist())) < 2
        found.append(0.0 if constant else float(measure(a, b)[0, 1]))
    return {name: found}


def _spearman(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.corrcoef(stats.rankdata(a), stats.rankdata(b))


def points(model: dict[str, Any], task: str) -> list[float]:
    """A task's score per seed, in points."""
    return [100 * value for value in model["glue"][task][SCORES.get(task, "accuracy")]]


def average(model: dict[str, Any]) -> list[float]:
    """Over tasks, per seed."""
    return [float(value) for value in np.mean([points(model, task) for task in model["glue"]], axis=0)]


def measured(result: dict[str, Any]) -> str:
    """Averages, tasks, and differences from the deep model."""
    models = result["models"]
    table = "; ".join(
        f"{name} ({m['depth']} layers, {m['heads']} heads, width {m['width']}, {m['parameters'] / 1e6:.1f}M, "
        f"masked loss {_points.mean(m['masked_loss']).spelled()}): average {_points.mean(average(m)).spelled(1)} ("
        + ", ".join(f"{task} {_points.mean(points(m, task)).mean:.1f}" for task in m["glue"])
        + ")"
        for name, m in models.items()
    )
    told = "; ".join(
        f"{name} {_points.difference(average(m), average(models[DEEP])).signed(1)} points, masked loss "
        f"{_points.difference(m['masked_loss'], models[DEEP]['masked_loss']).signed()}"
        for name, m in models.items()
        if name != DEEP
    )
    seeds, tokens = len(result["seeds"]), result["tokens"]
    chance, deep = math.log(_data.VOCABULARY), _points.mean(models[DEEP]["masked_loss"]).mean
    ends = (
        f" A masked loss of {deep:.1f}, where knowing nothing costs {chance:.1f}, says that pretraining had hardly "
        "begun: this pair compares encoders at the start of their training."
        * (deep > BEGUN * chance)
        + _points.edges(models)
        + _points.left_out(result)
    )
    return f"{seeds} seeds, {tokens:,} tokens of pretraining: {table}. Against deep: {told}.{ends}"


def draw(result: dict[str, Any], figure: Figure) -> None:
    """Scores per task and on average; masked loss over parameters."""
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    tasks = [*result["tasks"], "average"]
    for number, (name, model) in enumerate(result["models"].items()):
        means = [_points.mean(points(model, task)) for task in result["tasks"]] + [_points.mean(average(model))]
        _points.bars(left, [place + 0.12 * number for place in range(len(tasks))], means, name, number, line=False)
        loss = _points.mean(model["masked_loss"])
        _points.bars(right, [model["parameters"] / 1e6], [loss], name, number, line=False)
    left.set_xticks(range(len(tasks)), tasks)
    left.set_ylabel("score (points)")
    left.legend(fontsize=7)
    right.set_xlabel("million parameters")
    right.set_ylabel("masked loss (nats)")
