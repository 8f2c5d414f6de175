"""B2: does the condition number of attention fall as heads are added, and does that help training?

Measured on the matrix of one image's head outputs side by side (tokens x heads dim), by its extreme singular values, in
every layer, before and after training on CIFAR-10, in two ways of adding heads: at a fixed width, as architectures do
(dimension = width / heads), and at a fixed dimension, as the theorem does (the attention grows). ViT-B's own size is
measured before training only, on the same images enlarged. The reviewers' question: is a better conditioned model one
that learns faster? So the rank correlation of the number with the training loss and with test accuracy is reported, and
one model is trained from initial values whose spectrum alone differs: whether accuracy follows conditioning then.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from scipy import stats

from experiments import _data, _points
from experiments._rates import Ladder
from experiments._stack import Layer, Member, Net, Run, conditioning, stacked
from experiments._tasks import Pictures
from experiments._trials import Trial, run_all
from headwise.progress import Track
from headwise.report.plots import PALETTE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLAIM = "B2"
TITLE = "Conditioning of attention against heads"

ONE = Ladder((1e-3,), (1e-3,))
LADDER = Ladder((2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3), (5e-4, 1e-3, 2e-3))
FLOOR = 1e13  # condition numbers above it are rounding
TILTS = (0.0, 0.5, 1.0, 2.0)  # of initial values: from all directions alike to nearly one


class Plan(NamedTuple):
    """What one size trains."""

    width: int
    depth: int
    heads: tuple[int, ...]  # that share the width
    dim: int
    grown: tuple[int, ...]  # heads of dimension `dim`
    tilts: tuple[float, ...]  # initialisations of the model with `heads[2]` heads
    batch: int
    images: int  # whose head outputs are measured
    base: tuple[int, int, tuple[int, ...], int]  # of ViT-B: width, depth, heads, patches along an edge
    trial: Trial


PLANS = {
    "tiny": Plan(24, 1, (2, 4, 8), 8, (8,), (0.0, 1.0), 8, 4, (24, 1, (2,), 8), Trial(5, 2, (0, 1), ONE)),
    "small": Plan(
        96, 2, (1, 3, 6, 12), 32, (3, 6), (0.0, 1.0), 32, 8, (384, 2, (3, 12), 14), Trial(60, 30, (0, 1, 2), LADDER)
    ),
    "full": Plan(
        192, 4, (3, 6, 12, 24, 48, 1), 32, (3, 12, 24), TILTS, 256, 16, (768, 12, (3, 6, 12, 24, 48), 14),
        Trial(1_113, 300, (0, 1, 2, 3, 4), LADDER),  # 6 epochs
    ),
}  # fmt: skip
WAYS = {"split": "at a fixed width", "grown": "at a fixed dimension"}


def run(size: str, device: str, assets: Path | None, track: Track, parts: MutableMapping[str, Any]) -> dict[str, Any]:
    """Measure and train every number of heads in both ways; what `parts` holds is done already."""
    plan, where = PLANS[size], torch.device(device)
    task = Pictures(_data.images(size, assets, where), plan.batch)
    jobs = {f"base {heads}": partial(at_start, heads, task, plan) for heads in plan.base[2]}
    left = _points.work(jobs, parts, track, "ViT-B's size")
    models, more = run_all(nets_of(plan), task, plan.trial, parts, track, partial(numbers, task=task, plan=plan))
    rows: dict[str, list[dict[str, Any]]] = {"split": [], "grown": [], "tilt": []}
    for name, model in models.items():
        kind, value = name.split()
        rows[kind].append(model | ({"tilt": float(value)} if kind == "tilt" else {}))
    for kind in ("split", "grown"):
        rows[kind].sort(key=lambda row: int(row["heads"]))
    return {
        "seeds": list(plan.trial.seeds),
        "width": plan.width,
        "dim": plan.dim,
        "images": plan.trial.steps * plan.batch,
        "base": [parts[name] for name in jobs if name in parts],
        "split": rows["split"],
        "grown": rows["grown"],
        "tilts": rows["tilt"],
        "base_width": plan.base[0],
        "floor": FLOOR,
        "left_out": left + more,
    }


def nets_of(plan: Plan) -> dict[str, Net]:
    """Heads that share the width, heads of one dimension, and one model from several initialisations."""

    def net(heads: int, dim: int, tilt: float | None = None) -> Net:
        layer = Layer(heads, dim, 2 * plan.width)
        return Net(plan.width, (layer,) * plan.depth, 64, 48, classes=10, patches=True, tilt=tilt)

    middle = plan.heads[min(2, len(plan.heads) - 1)]
    return (
        {f"split {heads}": net(heads, plan.width // heads) for heads in plan.heads}
        | {f"grown {heads}": net(heads, plan.dim) for heads in plan.grown}
        | {f"tilt {tilt:g}": net(middle, plan.width // middle, tilt) for tilt in plan.tilts}
    )


def numbers(trained: Run, task: Pictures, plan: Plan) -> dict[str, Any]:
    """Conditioning per layer and seed before and after training, and how fast it learned."""
    members = [Member(seed, 0.0) for seed in plan.trial.seeds]
    x = _data.patches(task.images.valid[: plan.images]).expand(len(members), -1, -1, -1)
    half = max(1, len(trained.curve) // 2)
    return {
        "head_dim": trained.net.layers[0].dim,
        "start": conditioning(trained.net, stacked(trained.net, members, task.device), x).tolist(),
        "after": conditioning(trained.net, trained.flat, x).tolist(),
        "train_loss": trained.curve[:half].mean(0).tolist(),
    }


def at_start(heads: int, task: Pictures, plan: Plan) -> dict[str, Any]:
    """A ViT of ViT-B's size before training, on images enlarged to its patches."""
    width, depth, _, edge = plan.base
    net = Net(width, (Layer(heads, width // heads, 4 * width),) * depth, edge * edge, 16 * 16 * 3, 10, patches=True)
    pictures = task.images.valid[:4].permute(0, 3, 1, 2).float()
    large = F.interpolate(pictures, size=16 * edge, mode="bilinear").sub(118).div(64)
    x = F.unfold(large, 16, stride=16).transpose(1, 2)[None]
    found = conditioning(net, stacked(net, [Member(0, 0.0)], task.device), x)
    return {"heads": heads, "head_dim": width // heads, "start": found.tolist()}


def number(row: dict[str, Any], when: str) -> list[float]:
    """Per seed: the geometric mean over layers."""
    return torch.tensor(row[when]).log().mean(1).exp().tolist()


def trend(rows: list[dict[str, Any]], when: str) -> float:
    """Rank correlation of the number with heads, over heads and seeds."""
    pairs = [(row["heads"], value) for row in rows for value in number(row, when)]
    if len({heads for heads, _ in pairs}) < 2:
        return 0.0
    return float(stats.spearmanr(*zip(*pairs, strict=True)).statistic)


def link(result: dict[str, Any], when: str, field: str) -> dict[str, float] | None:
    """Rank correlation of the number with `field`, over all trained models."""
    rows = [*result["split"], *result["grown"]]
    x = [value for row in rows for value in number(row, when)]
    return _points.correlation(x, [value for row in rows for value in row[field]])


def within(result: dict[str, Any], when: str, field: str) -> dict[str, float] | None:
    """Rank correlation among models of equal heads: of what each differs by from the mean of its seeds."""
    x: list[float] = []
    y: list[float] = []
    for row in [*result["split"], *result["grown"]]:
        numbers = torch.tensor(number(row, when)).log()
        values = torch.tensor(row[field])
        x += (numbers - numbers.mean()).tolist()
        y += (values - values.mean()).tolist()
    return _points.correlation(x, y)


def measured(result: dict[str, Any]) -> str:
    """Numbers before and after per way, the size of ViT-B, and what they are worth for training."""
    words = []
    for way, label in WAYS.items():
        if not (rows := result[way]):
            continue
        heads = ", ".join(str(row["heads"]) for row in rows)
        for when, name in (("start", "before"), ("after", "after")):
            values = ", ".join(f"{_points.mean(number(row, when)).mean:.0f}" for row in rows)
            words.append(f"{label}, {name} training: {values} (trend {trend(rows, when):+.2f})")
        words[-1] += f" for {heads} heads"
        accuracy = ", ".join(f"{_points.mean(row['accuracy']).mean:.1%}" for row in rows)
        words.append(f"their test accuracy {accuracy}")
    base = ", ".join(f"{row['heads']} heads {_points.mean(number(row, 'start')).mean:.0f}" for row in result["base"])
    links = [
        f"{_points.said(link(result, when, field))} between the number {name} training and {what}"
        for when, name in (("start", "before"), ("after", "after"))
        for field, what in (("train_loss", "the training loss of the first half"), ("accuracy", "test accuracy"))
    ]
    return (
        f"Condition number (geometric mean over layers and images, {len(result['seeds'])} seeds, width "
        f"{result['width']}) {'; '.join(words)}. Width {result['base_width']} as ViT-B, before training: {base} "
        f"(trend {trend(result['base'], 'start'):+.2f}). {'; '.join(links).capitalize()}. Heads move all of these; "
        f"among seeds of equal heads it is {_points.said(within(result, 'after', 'accuracy'))} between the number "
        f"after training and test accuracy. {by_initialisation(result)}".rstrip()
        + _points.edges({f"{row['heads']} heads": row for row in result["split"]})
        + _points.left_out(result)
    )


def by_initialisation(result: dict[str, Any]) -> str:
    """A sentence on models that differ in their initial values alone; empty where none were trained."""
    rows = sorted(result.get("tilts", []), key=lambda row: float(row["tilt"]))
    if len(rows) < 2:
        return ""
    start = ", ".join(f"{_points.mean(number(row, 'start')).mean:.2g}" for row in rows)
    accuracy = ", ".join(f"{_points.mean(row['accuracy']).mean:.1%}" for row in rows)
    gain = _points.difference(rows[0]["accuracy"], rows[-1]["accuracy"])
    return (
        f"With the initial values' spectrum alone changed, the number before training is {start} and accuracy "
        f"{accuracy}: "
        f"best against worst conditioned {gain.signed(4)}."
    )


def draw(result: dict[str, Any], figure: Figure) -> None:
    """Left: the number over heads, before and after. Right: accuracy over the number after training."""
    left, right = figure.subplots(1, 2)
    place = 0
    for way, label in WAYS.items():
        for when in ("start", "after"):
            if rows := result[way]:
                means = [_points.mean(number(row, when)) for row in rows]
                _points.bars(left, [row["heads"] for row in rows], means, f"{label}, {when}", place)
            place += 1
        for row in result[way]:
            right.plot(
                number(row, "after"), row["accuracy"], "os"[way == "grown"], color=PALETTE[place // 2], markersize=4
            )
    left.set_xscale("log", base=2)
    for axes in (left, right):
        axes.set_yscale("log") if axes is left else axes.set_xscale("log")
    left.set_xlabel("heads")
    left.set_ylabel("condition number")
    left.legend(fontsize=7)
    right.set_xlabel("condition number after training")
    right.set_ylabel("test accuracy")
