"""B3: do fewer layers with more heads beat the deep original, and does a wider MLP help far less?

The paper's grid for ViT-B on ImageNet (depth x heads x MLP width) on all of CIFAR-10 (patch 4, width 192), with several
seeds and a rate per model by the same rule (`_trials`). "More heads" has two readings: heads that split a fixed width,
which cost no parameters, and heads of one dimension that widen attention (`grown`), which the paper's parameter counts
suggest for some models. Both are trained. The original is the deepest model with 3 heads of 64 and the wide MLP, as
ViT-B's 12 heads are of 64. Rates are chosen on images of their own; accuracy is reported on the test set.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from experiments import _data, _points
from experiments._rates import Ladder
from experiments._stack import Layer, Member, Net, Run, conditioning, stacked
from experiments._tasks import Pictures
from experiments._trials import Trial, run_all
from headwise.progress import Track

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLAIM = "B3"
TITLE = "Depth, heads and MLP width of a ViT on CIFAR-10"
HEAD = 64  # dimension of heads that widen attention
LADDER = Ladder((6.25e-5, 1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3), (5e-4, 1e-3, 2e-3))
PRICES = {"parameters": (1e6, "million parameters"), "flops": (1e15, "PFLOP")}
MEASURED = 8  # images whose head outputs are measured


class Cell(NamedTuple):
    """One model."""

    depth: int
    heads: int
    mlp: int
    way: str = "split"

    @property
    def key(self) -> str:
        return f"{self.depth} layers, {self.heads} heads, MLP {self.mlp}" + (", grown" if self.way == "grown" else "")


class Plan(NamedTuple):
    """What one size trains: the original first, then what the claim compares, then the rest."""

    width: int
    depths: tuple[int, ...]
    heads: tuple[int, int]
    mlps: tuple[int, int]
    batch: int
    trial: Trial

    @property
    def cells(self) -> list[Cell]:
        (few, many), (narrow, broad) = self.heads, self.mlps
        deep, middle, shallow = self.depths[0], self.depths[1], self.depths[-1]
        judged = [Cell(deep, few, broad), Cell(middle, many, broad), Cell(middle, many, broad, "grown")]
        grid = [Cell(shallow, heads, mlp) for mlp in (broad, narrow) for heads in (few, many)]  # the cheapest
        split = [Cell(depth, heads, broad) for depth in self.depths for heads in (few, many)]
        grown = [Cell(depth, many, broad, "grown") for depth in self.depths]
        thin = [Cell(depth, heads, narrow) for depth in self.depths[1:] for heads in (few, many)]
        return list(dict.fromkeys([*judged, *grid, *split, *grown, *thin]))


PLANS = {
    "tiny": Plan(24, (3, 2), (1, 4), (24, 48), 8, Trial(5, 2, (0, 1), Ladder((1e-3,), (1e-3,)))),
    "small": Plan(96, (4, 2), (3, 6), (192, 384), 32, Trial(60, 30, (0, 1, 2), LADDER)),
    "full": Plan(192, (12, 8, 4), (3, 12), (384, 768), 256, Trial(1_855, 370, (0, 1, 2, 3, 4), LADDER)),  # 10 epochs
}


def run(size: str, device: str, assets: Path | None, track: Track, parts: MutableMapping[str, Any]) -> dict[str, Any]:
    """Train every cell; what `parts` holds is done already."""
    plan, where = PLANS[size], torch.device(device)
    task = Pictures(_data.images(size, assets, where), plan.batch)
    nets = {cell.key: vit(cell, plan.width) for cell in plan.cells}

    def numbers(trained: Run) -> dict[str, Any]:
        members = [Member(seed, 0.0) for seed in plan.trial.seeds]
        x = _data.patches(task.images.valid[:MEASURED]).expand(len(members), -1, -1, -1)
        start = conditioning(trained.net, stacked(trained.net, members, task.device), x)
        return {
            "conditioning_start": start.mean(0).tolist(),
            "conditioning_after": conditioning(trained.net, trained.flat, x).mean(0).tolist(),
        }

    cells, left = run_all(nets, task, plan.trial, parts, track, numbers)
    for cell in plan.cells:
        if cell.key in cells:
            cells[cell.key]["way"] = cell.way
    return {
        "seeds": list(plan.trial.seeds),
        "images": plan.trial.steps * plan.batch,
        "training_images": task.count,
        "original": plan.cells[0].key,
        "cells": cells,
        "left_out": left,
    }


def vit(cell: Cell, width: int) -> Net:
    """A small ViT that averages its patches."""
    dim = width // cell.heads if cell.way == "split" else HEAD if width >= HEAD else 8
    return Net(width, (Layer(cell.heads, dim, cell.mlp),) * cell.depth, 64, 48, classes=10, patches=True)


def measured(result: dict[str, Any]) -> str:
    """Accuracy of every model, against the original."""
    cells, first = result["cells"], result["cells"][result["original"]]
    table = "; ".join(
        f"{name} ({cell['parameters'] / 1e6:.2f}M) {_points.mean(cell['accuracy']).spelled(4)}"
        + (f", {_points.difference(cell['accuracy'], first['accuracy']).signed(4)}" if cell is not first else "")
        for name, cell in cells.items()
    )
    return (
        f"Test accuracy, and what it is above the original's ({result['original']}), {len(result['seeds'])} seeds, "
        f"{result['images']:,} images seen: {table}.{_points.edges(cells)}{_points.left_out(result)}"
        f"{_points.whose_times(result)}"
    )


def draw(result: dict[str, Any], figure: Figure) -> None:
    """Test accuracy over parameters and FLOPs; a colour per number of heads, the original ringed."""
    panels = figure.subplots(1, len(PRICES), sharey=True)
    cells, first = list(result["cells"].values()), result["cells"][result["original"]]
    kinds = sorted({(cell["heads"], cell.get("way", "split")) for cell in cells}, key=lambda kind: (kind[1], kind[0]))
    for axes, (price, (unit, label)) in zip(panels, PRICES.items(), strict=True):
        for number, (heads, way) in enumerate(kinds):
            mine = [cell for cell in cells if (cell["heads"], cell.get("way", "split")) == (heads, way)]
            mine.sort(key=lambda cell: float(cell[price]))
            means = [_points.mean(cell["accuracy"]) for cell in mine]
            words = f"{heads} heads" + (", grown" if way == "grown" else "")
            _points.bars(axes, [cell[price] / unit for cell in mine], means, words, number, line=False)
        place = first[price] / unit, _points.mean(first["accuracy"]).mean
        axes.plot(*place, marker="o", markersize=12, fillstyle="none", color="black")
        axes.set_xlabel(label)
    panels[0].set_ylabel("test accuracy")
    panels[0].legend(fontsize=7)
