"""B3: do fewer layers with more heads beat the deep original, and does a wider MLP help far less?

The paper's grid for ViT-B on ImageNet (depth x heads x MLP width) on CIFAR-10 (patch 4, width 192), and beyond it
several seeds, a rate per model by the same rule (`_rates`), parameters, FLOPs and measured time of every point. Heads
share the width, as in the paper, so more heads cost nothing in parameters. Rates are chosen on images of their own;
accuracy is reported on the test set.

The original is the deepest model with 3 heads of 64 and the wide MLP, as ViT-B's 12 heads are of 64. Its rival is, of
the models of at most two thirds of its depth with at least as many heads and fewer parameters, the one of least loss on
the images that choose rates, so that the test set chooses nothing. Confirmed: the rival is significantly better, and
more heads gain more than a wider MLP does at those depths. With conditions: its mean is not worse by `MARGIN`, or only
the first half holds. Refuted: it is worse.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from experiments import _data, _points, _rates
from experiments._stack import Member, Net, conditioning, even, stacked
from experiments._tasks import Pictures, facts, learn_at, times
from headwise.progress import Track

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLAIM = "B3"
TITLE = "Depth, heads and MLP width of a ViT on CIFAR-10"
SAYS = "A ViT of 8 layers with 12 or more heads beats the 12-layer original; widening the MLP helps far less."

WIDTH = 192
MARGIN = 0.005  # of accuracy
LADDER = _rates.Ladder((1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3), (5e-4, 1e-3))
PRICES = {"parameters": "parameters", "flops": "FLOPs", "seconds": "seconds"}
MEASURED = 8  # images whose head outputs are measured


class Plan(NamedTuple):
    """What one size trains."""

    width: int
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    mlps: tuple[int, ...]
    steps: int
    batch: int
    seeds: tuple[int, ...]
    timing_steps: int
    ladder: _rates.Ladder = LADDER

    @property
    def cells(self) -> list[tuple[int, int, int]]:
        """Depth, heads, MLP width: the original first, what it is not compared with last (`later`)."""
        every = [(d, h, m) for m in reversed(self.mlps) for d in reversed(self.depths) for h in self.heads]
        return sorted(every, key=lambda cell: (cell != self.original, self.later(cell)))

    def later(self, cell: tuple[int, int, int]) -> bool:
        """Narrow MLPs in the deepest models and between the ends of heads can wait until all others are done."""
        depth, heads, mlp = cell
        return mlp != self.mlps[-1] and (depth == self.depths[-1] or heads not in (self.heads[0], self.heads[-1]))

    @property
    def original(self) -> tuple[int, int, int]:
        return self.depths[-1], self.heads[0], self.mlps[-1]


PLANS = {
    "tiny": Plan(24, (1, 2), (1, 3), (24, 48), 5, 8, (0, 1), 5, _rates.Ladder((5e-4, 1e-3), (5e-4, 1e-3))),
    "small": Plan(96, (2, 4), (3, 6), (192,), 60, 32, (0, 1, 2), 6),
    "full": Plan(WIDTH, (2, 4, 8, 12), (3, 6, 12), (384, 768), 880, 256, (0, 1, 2), 25),
}


def run(size: str, device: str, assets: Path | None, track: Track, parts: MutableMapping[str, Any]) -> dict[str, Any]:
    """Train every cell; what `parts` holds is done already."""
    plan, where = PLANS[size], torch.device(device)
    task = Pictures(_data.images(size, assets, where), plan.batch)
    nets = {key(cell): vit(cell[0], cell[1], plan.width, cell[2]) for cell in plan.cells}
    attempts = {name: partial(attempt, net, task, plan) for name, net in nets.items()}
    timing = f"times of {len(nets)}"
    left = _points.work({timing: lambda: times(nets, task, plan.timing_steps, turns=2)}, parts, track, "times")
    for late in (False, True):
        group = {key(cell): attempts[key(cell)] for cell in plan.cells if plan.later(cell) is late}
        left += _rates.search(group, plan.ladder, parts, track, "depth x heads x MLP")
    cells = {name: cell for name in nets if (cell := _rates.best(name, plan.ladder, parts)) is not None}
    _points.need([name for name in list(nets)[:2] if name not in cells])
    _points.timed(parts, timing, cells, plan.steps)
    return {
        "seeds": list(plan.seeds),
        "images": plan.steps * plan.batch,
        "original": key(plan.original),
        "cells": cells,
        "timed_alone": timing in parts,
        "left_out": left,
    }


def key(cell: tuple[int, int, int]) -> str:
    return "{} layers, {} heads, MLP {}".format(*cell)


def vit(depth: int, heads: int, width: int, mlp: int) -> Net:
    """A small ViT that averages its patches."""
    return even(depth, heads, width, mlp, length=64, symbols=48, classes=10, patches=True)


def attempt(net: Net, task: Pictures, plan: Plan, rates: Sequence[float]) -> list[dict[str, Any]]:
    """All seeds of one cell at some rates: compared on held-out images, reported on others."""
    start = stacked(net, [Member(seed, 0.0) for seed in plan.seeds], task.device)
    x = _data.patches(task.images.valid[:MEASURED]).expand(len(plan.seeds), -1, -1, -1)
    found = []
    for trained in learn_at(net, task, plan.seeds, plan.steps, rates):
        scores = task.score(trained, "test")
        found.append(
            {
                "tried": _points.mean(_points.column(task.score(trained), "loss")).mean,
                "accuracy": _points.column(scores, "accuracy"),
                "loss": _points.column(scores, "loss"),
                **facts(net, trained, plan.steps, plan.batch),
                "conditioning_start": conditioning(net, start, x).mean(0).tolist(),
                "conditioning_after": conditioning(net, trained.flat, x).mean(0).tolist(),
            }
        )
    return found


def gains(result: dict[str, Any], field: str) -> list[float]:
    """Accuracy gained by each step up in `field`, other sizes equal, among models shallower than the original."""
    cells, others = list(result["cells"].values()), {"depth", "heads", "mlp"} - {field}
    deep = result["cells"][result["original"]]["depth"]
    found = []
    for a in cells:
        above = [b for b in cells if b[field] > a[field] and all(b[k] == a[k] for k in others)]
        if above and a["depth"] <= deep * 2 / 3:
            b = min(above, key=lambda row: row[field])
            found.append(float(_points.difference(b["accuracy"], a["accuracy"]).mean))
    return found


def rival(result: dict[str, Any], price: str = "parameters") -> str | None:
    """The model that is best on held-out images, of those of at most two thirds of the original's depth, with its heads
    or more, at a lower price."""
    first = result["cells"][result["original"]]
    able = {
        name: cell["rates"][str(cell["rate"])]
        for name, cell in result["cells"].items()
        if cell["depth"] <= first["depth"] * 2 / 3 and cell["heads"] >= first["heads"]
        if price in cell and price in first and cell[price] < first[price]
    }
    return min(able, key=lambda name: able[name]) if able else None


def gained(result: dict[str, Any], name: str) -> _points.Mean:
    """Accuracy above the original's, on the test set."""
    cells = result["cells"]
    return _points.difference(cells[name]["accuracy"], cells[result["original"]]["accuracy"])


def front(result: dict[str, Any], price: str) -> list[str]:
    """Models that no other beats in accuracy at the same price or less, cheapest first."""
    priced = [(name, cell) for name, cell in result["cells"].items() if price in cell]
    rows = sorted(priced, key=lambda item: (item[1][price], -_points.mean(item[1]["accuracy"]).mean))
    best, found = -1.0, []
    for name, cell in rows:
        if (accuracy := _points.mean(cell["accuracy"]).mean) > best:
            best, found = accuracy, [*found, name]
    return found


def measured(result: dict[str, Any]) -> str:
    """The original, the best rival, gains of heads, MLP width and depth, and the fronts."""
    cells, first = result["cells"], result["cells"][result["original"]]
    words = []
    prices: dict[str, list[str]] = {}
    for price, label in PRICES.items():
        if (best := rival(result, price)) is not None:
            prices.setdefault(best, []).append(label)
    for best, labels in prices.items():
        share = 1 - cells[best]["parameters"] / first["parameters"]
        words.append(
            f"With fewer {' and fewer '.join(labels)} and at most two thirds of its depth, {best} was best on held-out "
            f"images ({share:.0%} fewer parameters, {first['flops'] / cells[best]['flops']:.1f} times fewer FLOPs"
            f"{_points.faster(cells[best], first, 1)}): {gained(result, best).signed(4)} of accuracy on the test set."
        )
    for field, name in (("heads", "more heads"), ("mlp", "the wider MLP"), ("depth", "more layers")):
        if steps := gains(result, field):
            words.append(f"A step to {name} gains {_points.mean(steps).signed(4)} over {len(steps)} pairs.")
    if not gains(result, "mlp"):
        words.append("The wider MLP has nothing to be compared with yet.")
    for price, name in PRICES.items():
        words.append(f"Best for its {name}: {'; '.join(front(result, price))}.")
    return (
        f"{len(cells)} models, {len(result['seeds'])} seeds each, {result['images']:,} images. The original "
        f"({result['original']}, {first['parameters'] / 1e6:.2f}M): {_points.mean(first['accuracy']).spelled(4)}. "
        + " ".join(words)
        + _points.edges(cells)
        + _points.left_out(result)
        + _points.whose_times(result)
    )


def verdict(result: dict[str, Any]) -> str:
    """By the rival and by what heads gain against MLP width."""
    if (best := rival(result)) is None:
        return "refuted"
    found = gained(result, best)
    heads, mlp = (gains(result, field) for field in ("heads", "mlp"))
    more = bool(heads and mlp) and _points.mean(heads).mean > _points.mean(mlp).mean
    if found.low > 0:
        return "confirmed" if more else "confirmed with conditions"
    return "confirmed with conditions" if found.mean > -MARGIN else "refuted"


def draw(result: dict[str, Any], figure: Figure) -> None:
    """Test accuracy over parameters, FLOPs and seconds; a colour per number of heads, the original ringed."""
    panels = figure.subplots(1, 3, sharey=True)
    units = (("parameters", 1e6, "million parameters"), ("flops", 1e15, "PFLOP"), ("seconds", 1.0, "seconds per model"))
    for axes, (price, unit, label) in zip(panels, units, strict=True):
        cells = [cell for cell in result["cells"].values() if price in cell]
        for number, heads in enumerate(sorted({cell["heads"] for cell in cells})):
            mine = sorted((c for c in cells if c["heads"] == heads), key=lambda cell: cell[price])
            means = [_points.mean(cell["accuracy"]) for cell in mine]
            _points.bars(axes, [cell[price] / unit for cell in mine], means, f"{heads} heads", number, line=False)
        first = result["cells"][result["original"]]
        place = first[price] / unit, _points.mean(first["accuracy"]).mean
        axes.plot(*place, marker="o", markersize=12, fillstyle="none", color="black")
        axes.set_xlabel(label)
    panels[0].set_ylabel("test accuracy")
    panels[0].legend(fontsize=7)
