"""B2: does the condition number of attention fall as heads are added, and does that help training?

Measured on the matrix of one image's head outputs side by side (tokens x heads dim), by its extreme singular values, in
every layer, before and after training on CIFAR-10, in two ways of adding heads: at a fixed width, as architectures do
(dimension = width / heads), and at a fixed dimension, as the theorem does (the attention grows). ViT-B's own size is
measured before training only, on the same images enlarged. The reviewers' question: is a better conditioned model one
that learns faster? So the rank correlation of the number with the training loss and with test accuracy is reported.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from scipy import stats

from experiments import _data, _points
from experiments._stack import Layer, Member, Net, conditioning, stacked, train
from experiments._tasks import Pictures, facts
from headwise.progress import Track
from headwise.report.plots import PALETTE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLAIM = "B2"
TITLE = "Conditioning of attention against heads"

RATES = (1e-3, 2e-3)
FLOOR = 1e13  # condition numbers above it are rounding


class Plan(NamedTuple):
    """What one size trains."""

    width: int
    depth: int
    heads: tuple[int, ...]  # that share the width
    dim: int
    grown: tuple[int, ...]  # heads of dimension `dim`
    steps: int
    batch: int
    seeds: tuple[int, ...]
    images: int  # whose head outputs are measured
    base: tuple[int, int, tuple[int, ...], int]  # of ViT-B: width, depth, heads, patches along an edge


PLANS = {
    "tiny": Plan(24, 2, (1, 2, 4, 8), 8, (8, 10), 5, 8, (0, 1), 4, (24, 1, (2, 4), 8)),
    "small": Plan(96, 2, (1, 3, 6, 12), 32, (3, 6), 60, 32, (0, 1, 2), 8, (384, 2, (3, 6, 12), 14)),
    "full": Plan(
        192, 4, (1, 2, 3, 6, 12, 24, 48), 32, (3, 12, 24), 500, 256, (0, 1, 2), 16, (768, 12, (3, 6, 12, 24, 48), 14)
    ),
}
WAYS = {"split": "at a fixed width", "grown": "at a fixed dimension"}


def run(size: str, device: str, assets: Path | None, track: Track, parts: MutableMapping[str, Any]) -> dict[str, Any]:
    """Measure and train every number of heads in both ways; what `parts` holds is done already."""
    plan, where = PLANS[size], torch.device(device)
    task = Pictures(_data.images(size, assets, where), plan.batch)
    jobs = {}
    for heads in plan.base[2]:
        jobs[f"base {heads}"] = lambda heads=heads: at_start(heads, task, plan)
    for heads in plan.heads:
        jobs[f"split {heads}"] = lambda heads=heads: measure(heads, plan.width // heads, task, plan)
    for heads in plan.grown:
        jobs[f"grown {heads}"] = lambda heads=heads: measure(heads, plan.dim, task, plan)
    left = _points.work(jobs, parts, track, "heads", [f"split {heads}" for heads in plan.heads[:2]])
    rows: dict[str, list[dict[str, Any]]] = {"base": [], "split": [], "grown": []}
    for name in jobs:
        if name in parts:
            rows[name.split()[0]].append(parts[name])
    return {
        "seeds": list(plan.seeds),
        "width": plan.width,
        "dim": plan.dim,
        "images": plan.steps * plan.batch,
        **rows,
        "base_width": plan.base[0],
        "floor": FLOOR,
        "left_out": left,
    }


def net_of(heads: int, dim: int, plan: Plan) -> Net:
    layer = Layer(heads, dim, 2 * plan.width)
    return Net(plan.width, (layer,) * plan.depth, 64, 48, classes=10, patches=True)


def measure(heads: int, dim: int, task: Pictures, plan: Plan) -> dict[str, Any]:
    """One number of heads: conditioning per layer and seed before and after training, loss and accuracy."""
    net, seeds = net_of(heads, dim, plan), list(plan.seeds)
    members = [Member(seed, rate) for rate in RATES for seed in seeds]
    trained = train(net, members, task.loss(net, [m.seed for m in members], plan.steps), plan.steps, task.device)
    tried = torch.tensor([score["loss"] for score in task.score(trained)]).view(len(RATES), -1).mean(1)
    best = int(tried.argmin())
    chosen = slice(best * len(seeds), (best + 1) * len(seeds))
    x = _data.patches(task.images.valid[: plan.images]).expand(len(seeds), -1, -1, -1)
    scores = task.score(trained, "test")[chosen]
    return {
        "rate": RATES[best],
        **facts(net, trained, plan.steps, plan.batch),
        "head_dim": dim,
        "start": conditioning(net, stacked(net, members[chosen], task.device), x).tolist(),
        "after": conditioning(net, trained.flat[chosen], x).tolist(),
        "train_loss": trained.curve[: max(1, plan.steps // 2), chosen].mean(0).tolist(),  # how fast it learns
        "loss": _points.column(scores, "loss"),
        "accuracy": _points.column(scores, "accuracy"),
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
        f"after training and test accuracy.{rates(result)}{_points.left_out(result)}"
    )


def rates(result: dict[str, Any]) -> str:
    """A sentence on rates, where the lowest was best for all: lower ones might have moved models."""
    found = {row["rate"] for row in [*result["split"], *result["grown"]]}
    return f" All learned best at {min(found):g}, the lowest rate tried." if found == {min(RATES)} else ""


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
