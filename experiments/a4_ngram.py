"""A4: is a 4-gram learned best by 32 heads of dimension 8, where the bound has its minimum?

The target is `y_t = (x_{t-1} + ... + x_{t-4}) / 4` on random tokens of dimension 8 and norm 1, the learner one softmax
attention layer without MLP whose heads share D = 256 dimensions. Theory's best is 4 groups x 8 heads = 32 heads of
dimension 8, which is the token dimension: "8 heads" in the paper is per group, 32 in all, and no contradiction.

The setting is that of the theory: beside content (which starts at zero) a head knows the distance only through a linear
bias with a learned slope, so its attention is an exponential of the distance and a lag has to be made from several
heads; that is where the bound's 1/H comes from. Three controls say why training agrees or does not: a free bias per
distance (one head per lag is enough), rotary positions, and untrained heads whose output map is solved for exactly,
which shows what heads could do if training found it.

Every point has its rate chosen on seeds of its own.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from experiments import _sweep
from experiments._ngram import TOKEN_DIM, Effort, Point, Task, measure, solved
from headwise.progress import Track
from headwise.report.plots import PALETTE
from headwise.research.theory.allocation import allocate
from headwise.research.theory.bound import Group, bound

CLAIM = "A4"
TITLE = "A 4-gram learned with 256 dimensions"

DIM = 256
RHO = (0.25,) * 4
TASK = Task(RHO)
LINE = (4, 8, 16, 32, 64, 128)  # heads of dimension 256 / heads
OFF_LINE = tuple((h, d) for h in (4, 8, 16, 32, 64) for d in (2, 4, 8, 16, 32) if h * d < DIM)
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 6e-2)


class Plan(NamedTuple):
    """What one size trains."""

    line: tuple[int, ...]
    effort: Effort
    controls: tuple[str, ...]
    control_effort: Effort
    grid: tuple[tuple[int, int], ...]
    grid_effort: Effort


def _plan(line: tuple[int, ...], effort: Effort, controls: tuple[str, ...], steps: int, grid: bool, few: int) -> Plan:
    return Plan(
        line, effort, controls, effort._replace(steps=steps), OFF_LINE if grid else (), effort._replace(seeds=few)
    )


PLANS = {
    "tiny": _plan((8, 32, 64), Effort(8, 2, 2, 1, (1e-2, 3e-2), 2), ("table",), 8, False, 1),
    "small": _plan(LINE, Effort(800, 8, 5, 1, (1e-2, 3e-2)), ("table",), 400, False, 1),
    "full": _plan(LINE, Effort(8000, 32, 12, 2, RATES), ("table", "rotary"), 3000, True, 6),
}


def run(size: str, device: str, assets: Path | None, track: Track, parts: MutableMapping[str, Any]) -> dict[str, Any]:
    """Train every point of the plan; what `parts` holds is done already."""
    plan, where = PLANS[size], torch.device(device)
    jobs = [(Point(h, DIM // h), plan.effort) for h in plan.line]
    jobs += [(Point(h, DIM // h, kind), plan.control_effort) for kind in plan.controls for h in plan.line]
    jobs += [(Point(*cell), plan.grid_effort) for cell in plan.grid]
    for point, effort in track(jobs, "4-gram: heads x dimension"):
        if point.key not in parts:
            parts[point.key] = measure(TASK, point, effort, where)
    for heads in plan.line:
        if (key := f"solved {heads}") not in parts:
            wrong = solved(TASK, Point(heads, DIM // heads), plan.effort, 0, where)
            parts[key] = {"heads": heads, "dim": DIM // heads, "error": wrong}

    def line(kind: str) -> list[dict[str, Any]]:
        return [parts[Point(h, DIM // h, kind).key] for h in plan.line]

    grid = [parts[Point(*cell).key] for cell in plan.grid]
    return {
        "seeds": plan.effort.seeds,
        "steps": plan.effort.steps,
        "batch": plan.effort.batch,
        "theory": theory(plan.line),
        "trained": _sweep.compare(line("linear")),
        "trained_norm": _sweep.compare(line("linear"), "norm"),
        "controls": {kind: _sweep.compare(line(kind), "norm") for kind in plan.controls},
        "solved": _sweep.compare([parts[f"solved {h}"] for h in plan.line]),
        "same_heads": same_heads(grid + line("linear")),
        "rows": line("linear") + [row for kind in plan.controls for row in line(kind)] + grid,
    }


def theory(line: tuple[int, ...]) -> dict[str, Any]:
    """The best allocation and the bound at every point of the line, four equal groups each."""
    best = allocate(RHO, DIM, TOKEN_DIM)
    curve = [bound(RHO, [Group(h // len(RHO), DIM // h)] * len(RHO), TOKEN_DIM) for h in line]
    groups = [list(group) for group in best.groups]
    return {"groups": groups, "heads": best.heads, "error": best.error, "line": list(line), "bound": curve}


def same_heads(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the head dimension does at one number of heads: errors against those at the token dimension."""
    errors = {(row["heads"], row["dim"]): row["error"] for row in rows}
    found = []
    for (heads, dim), wrong in errors.items():
        if heads in (16, 32) and dim != TOKEN_DIM and (heads, TOKEN_DIM) in errors:
            found.append({"heads": heads, "dim": dim, **_sweep.ratio(wrong, errors[heads, TOKEN_DIM])})
    return sorted(found, key=lambda row: (row["heads"], row["dim"]))


def measured(result: dict[str, Any]) -> str:
    """Best and expected number of heads with intervals, against the bound, and what the controls say."""
    trained, theirs = result["trained"], result["theory"]
    best, expected = (_sweep.at(trained, heads) for heads in (trained["best"], theirs["heads"]))
    groups, size, dim = len(theirs["groups"]), *theirs["groups"][0]
    norm = result["trained_norm"]["points"]
    within = ", ".join(f"{p['error']:.3f} against {b:.3f}" for p, b in zip(norm, theirs["bound"], strict=True))
    lines = [
        f"Theory: {groups} groups x {size} heads = {theirs['heads']} heads of dimension {dim}, the token dimension. "
        f"Trained ({result['seeds']} seeds, {result['steps']:,} steps, relative squared error): best {best['heads']} "
        f"heads of dimension {best['dim']}, {_sweep.spelled(best)} (chance of being best {best['chance_best']:.0%}); "
        f"not significantly worse: {', '.join(map(str, _sweep.among_best(trained)))} heads; "
        f"{theirs['heads']} heads: {_sweep.spelled(expected)}, {_sweep.times(expected)} times the best.",
        f"In the norm of the bound, trained against bound at {', '.join(map(str, theirs['line']))} heads: {within}.",
        _why(result),
    ]
    return " ".join(lines)


def _why(result: dict[str, Any]) -> str:
    exact, trained = result["solved"]["points"], result["trained"]["points"]
    factor = max(point["error"] for point in trained) / min(point["error"] for point in trained)
    added = _sweep.at(result["solved"], result["theory"]["heads"])["error"] / exact[-1]["error"]
    parts = [
        f"Between the worst and the best number of heads lies a factor {factor:.2f} after training; with outputs "
        f"solved for exactly on untrained heads the error goes {', '.join(format(p['error'], '.2g') for p in exact)}"
        + " (heads below the token dimension share a lag without loss, which the bound does not count)"
        * (added > 0.9)
    ]
    dims = [
        f"{row['heads']} heads of dimension {row['dim']} instead of {TOKEN_DIM}: {_sweep.times(row)} times the error"
        for row in result["same_heads"]
    ]
    free = [
        f"with {'a free bias per distance' if kind == 'table' else f'{kind} positions'} best at {found['best']} heads "
        f"(error norm {_sweep.spelled(_sweep.at(found, found['best']))})"
        for kind, found in result["controls"].items()
    ]
    return "; ".join([*parts, *dims, *free]) + "."


def draw(result: dict[str, Any], figure: Any) -> None:
    """Left: error over heads at H d = 256, bound and controls. Right: the whole grid, if it was trained."""
    cells = {(r["heads"], r["dim"]): float(np.exp(np.log(r["error"]).mean())) for r in _linear(result)}
    full = len({heads * dim for heads, dim in cells}) > 1
    panels = figure.subplots(1, 2, width_ratios=(1.25, 1)) if full else [figure.subplots()]
    axes, theirs = panels[0], result["theory"]
    axes.plot(theirs["line"], theirs["bound"], color=PALETTE[6], linestyle="--", linewidth=1.2, label="bound")
    _sweep.plot(axes, result["trained_norm"], "trained, linear positions", 0)
    power = sum(weight**2 for weight in RHO)  # of the target: independent tokens of norm 1
    exact = [{**p, **{k: (p[k] * power) ** 0.5 for k in ("error", "low", "high")}} for p in result["solved"]["points"]]
    _sweep.plot(axes, {"points": exact}, "untrained, outputs solved for", 1)
    for number, (kind, found) in enumerate(result["controls"].items(), 2):
        _sweep.plot(axes, found, f"trained, {kind} positions", number)
    _sweep.over_heads(axes, theirs["line"], theirs["heads"])
    axes.set_ylabel("error (root mean square norm)")
    axes.set_title(f"{DIM} dimensions cut into heads; theory: {theirs['heads']}", fontsize=9)
    axes.set_ylim(top=12 * max(theirs["bound"]))  # room for the legend
    axes.legend(fontsize=7, loc="upper left")
    if full:
        _heat(panels[1], cells, (theirs["heads"], theirs["groups"][0][1]))


def _linear(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if row["positions"] == "linear"]


def _heat(axes: Any, cells: dict[tuple[int, int], float], best: tuple[int, int]) -> None:
    """Errors of all heads and dimensions that were trained; theory's best is framed."""
    heads, dims = (sorted({cell[axis] for cell in cells}) for axis in (0, 1))
    table = np.full((len(dims), len(heads)), np.nan)
    for (h, d), error in cells.items():
        table[dims.index(d), heads.index(h)] = error
    axes.imshow(np.log10(table), origin="lower", aspect="auto", cmap="cividis")
    middle = np.nanmean(np.log10(table))
    for (h, d), error in cells.items():
        dark = np.log10(error) < middle
        place = heads.index(h), dims.index(d)
        axes.text(*place, f"{error:.3f}", ha="center", va="center", fontsize=6.5, color="white" if dark else "black")
        if (h, d) == best:
            axes.plot(*place, marker="s", markersize=24, fillstyle="none", color=PALETTE[1], markeredgewidth=2)
    axes.set_xticks(range(len(heads)), map(str, heads))
    axes.set_yticks(range(len(dims)), map(str, dims))
    axes.grid(False)
    axes.set_xlabel("heads")
    axes.set_ylabel("head dimension")
    axes.set_title("relative squared error; framed: theory", fontsize=9)
