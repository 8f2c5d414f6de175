"""The report's pictures as files for papers: one SVG and one PNG each, drawn by matplotlib (extra `plots`)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.errors import OutputError
from headwise.report import data
from headwise.report.plots import PALETTE, SUFFIXES, new_figure, save
from headwise.types import UNITS, Dossier, Plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "qk": PALETTE[0],
    "v": PALETTE[4],
    "mlp": PALETTE[2],
    "heads": PALETTE[3],
    "kv_heads": PALETTE[5],
    "depth": PALETTE[1],
}
PER_HEAD = ("query_head", "kv_head")
Drawing = Callable[["Figure"], None]


def save_figures(dossier: Dossier, folder: Path, overwrite: bool = False) -> list[Path]:
    """Write every picture that the dossier has data for; files that are there already are refused or replaced."""
    made = drawings(dossier)
    paths = [folder / f"{name}{suffix}" for name in made for suffix in SUFFIXES]
    if (there := [path for path in paths if path.exists()]) and not overwrite:
        raise OutputError(f"{there[0]} exists already; choose another --figures or add --overwrite.")
    for name, (size, draw) in made.items():
        figure = new_figure(*size)
        draw(figure)
        for suffix in SUFFIXES:
            save(figure, folder / f"{name}{suffix}")
    return paths


def drawings(dossier: Dossier) -> dict[str, tuple[tuple[float, float], Drawing]]:
    """Name, size in inches and drawing of every picture."""
    found: dict[str, tuple[tuple[float, float], Drawing]] = {}
    plan, readings = dossier.plan, dossier.readings
    if plan is not None:
        tall = max(2.0, 0.22 * len(plan.keep) + 0.8)
        found["allocation"] = ((7.0, tall), lambda figure: _allocation(figure, plan))
        if (frontier := data.frontier(dossier)) is not None:
            found["frontier"] = ((4.5, 3.2), lambda figure: _frontier(figure, frontier))
        if readings is not None:
            rows = data.damage_rows(readings, plan)
            found["damage"] = ((4.5, tall), lambda figure: _damage(figure, rows))
    for group in data.curve_sets(readings, plan) if readings is not None else ():
        name = re.sub(r"[^A-Za-z0-9]+", "-", group.kind).strip("-")[:60] or "reading"
        draw = _grid if group.axis in PER_HEAD else _curves
        found[name] = ((4.5, 3.0), lambda figure, draw=draw, group=group: draw(figure, group))  # type: ignore[misc]
    parts = data.healing_parts(dossier.healing or {})
    if parts:
        found["healing"] = ((4.5, 3.0), lambda figure: _healing(figure, parts))
    return found


def _allocation(figure: Figure, plan: Plan) -> None:
    """What stays of every layer: one panel per size, pale behind it what was."""
    sizes = (("query_heads", "query heads", "heads"), ("qk_dim", "query/key dim", "qk"), ("v_dim", "value dim", "v"),
             ("mlp_width", "MLP width", "mlp"))  # fmt: skip
    layers = range(len(plan.keep))
    for place, (size, label, unit) in enumerate(sizes):
        axes = figure.add_subplot(1, len(sizes), place + 1)
        axes.barh(layers, [getattr(s, size) for s in plan.source.layers], color="#dddddd")
        axes.barh(layers, [getattr(s, size) for s in plan.target.layers], color=COLOURS[unit])
        axes.set_xlabel(label)
        axes.locator_params(axis="x", integer=True)
        axes.invert_yaxis()
        axes.grid(False)
        if place:
            axes.set_yticklabels([])
        else:
            axes.set_ylabel("layer")


def _frontier(figure: Figure, found: Any) -> None:
    """Least predicted damage by share of the budget, with the plans that were compared."""
    axes = figure.add_subplot()
    points = [(share, damage) for share, damage in found.points if damage > 0]
    if points:
        axes.plot(*zip(*points, strict=True), color=PALETTE[0], label="exact, least possible")
    for mark, colour in zip(found.marks, PALETTE[1:], strict=False):
        if mark.predicted and mark.predicted > 0:
            shape = "D" if mark.chosen else "o"
            name = f"{mark.strategy} (this run)" if mark.chosen else mark.strategy
            axes.plot(mark.share, mark.predicted, shape, color=colour, label=name)
    if found.measured:
        low, middle, high = found.measured
        share = found.marks[0].share if found.marks else None
        if share is not None and low > 0:
            bars = [[middle - low], [high - middle]]
            axes.errorbar([share], [middle], yerr=bars, fmt="x", color=PALETTE[6], capsize=3, label="measured, healed")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel(f"share of the source's {found.budget}")
    axes.set_ylabel("damage")
    axes.legend(loc="best")


def _damage(figure: Figure, rows: Any) -> None:
    """Predicted damage of every layer, by unit."""
    axes = figure.add_subplot()
    start = [0.0] * len(rows)
    for unit in UNITS:
        values = [max(0.0, row.parts.get(unit, 0.0)) for row in rows]
        if any(values):
            axes.barh(
                [row.layer for row in rows], values, left=start, color=COLOURS[unit], label=data.UNIT_LABELS[unit]
            )
            start = [a + b for a, b in zip(start, values, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("predicted damage")
    axes.set_ylabel("layer")
    if any(start):
        axes.legend(loc="best")


def _curves(figure: Figure, group: Any) -> None:
    """A line per layer, from the first (dark) to the last (light); the chosen sizes marked."""
    from matplotlib import colormaps

    axes, last = figure.add_subplot(), max(1, len(group.curves) - 1)
    for curve in group.curves:
        colour = colormaps["cividis"](0.9 * curve.layer / max(last, curve.layer, 1))
        values = [max(v, group.values[0]) if group.log else v for _, v in curve.points]
        axes.plot([t for t, _ in curve.points], values, color=colour, linewidth=1)
        if curve.chosen:
            axes.plot(curve.chosen[0], max(curve.chosen[1], group.values[0]), "D", color=colour, markersize=4)
    if group.log:
        axes.set_yscale("log")
    if group.log_across:
        axes.set_xscale("symlog" if group.ticks[0] < 1 else "log")
    axes.set_title(_plain(group.kind))
    axes.set_xlabel(_plain(group.axis.replace("_", " ")))
    axes.set_ylabel(_plain(group.unit))


def _grid(figure: Figure, group: Any) -> None:
    """A cell per layer and head: heads have no order, so no line joins them."""
    axes = figure.add_subplot()
    wide = max(len(curve.points) for curve in group.curves)
    rows = [[v for _, v in curve.points] + [float("nan")] * (wide - len(curve.points)) for curve in group.curves]
    image = axes.imshow(rows, cmap="cividis", aspect="auto", interpolation="nearest")
    axes.grid(False)
    figure.colorbar(image, ax=axes, label=_plain(group.unit or group.kind))
    axes.set_title(_plain(group.kind))
    axes.set_xlabel(_plain(group.axis.replace("_", " ")))
    axes.set_ylabel("layer")


def _plain(words: str) -> str:
    """Words in which matplotlib sees no formula."""
    return "".join(letter for letter in words if letter.isprintable()).replace("$", r"\$")


def _healing(figure: Figure, parts: Any) -> None:
    """Error of every layer before and after the repair."""
    axes = figure.add_subplot()
    for (part, rows), colour in zip(parts.items(), PALETTE, strict=False):
        layers = [row.layer for row in rows]
        axes.plot(
            layers, [row.before for row in rows], "o--", fillstyle="none", color=colour, label=f"{_plain(part)}, before"
        )
        axes.plot(layers, [row.after for row in rows], "o-", color=colour, label=f"{_plain(part)}, after")
    axes.set_xlabel("layer")
    axes.set_ylabel("relative error")
    axes.legend(loc="best")
