"""The report's pictures as files for papers: one SVG and one PNG each, drawn by matplotlib (extra `plots`).

The same charts as on the page; only the drawing differs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.errors import OutputError
from headwise.files import disk
from headwise.report import _pictures as pictures
from headwise.report._bits import PARTS, WHOLE, bit_rows, bit_words, is_coded
from headwise.report._chart import Axis, Chart, RowChart, Series
from headwise.report._data import curve_sets, damage_rows
from headwise.report._diagnostics import PER_HEAD, strip_set
from headwise.report._healing import healing_parts
from headwise.report._tables import SIZE_LABELS
from headwise.report.plots import PALETTE, SUFFIXES, encoded, new_figure
from headwise.runs.dossier import Dossier
from headwise.runs.lock import locked
from headwise.types import BITS, CUTS, UNITS, Plan, write_atomically
from headwise.types.unit import LABELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLACES = {"qk": 0, "v": 4, "mlp": 2, "bits": 6, "heads": 3, "kv_heads": 5, "weights": 7, "depth": 1, "rank": 8}
COLOURS = {unit: PALETTE[PLACES[unit]] for unit in UNITS}
MARKS = {"diamond": "D", "ring": "o", "dot": "o", "dots": ".", "cross": "x"}
DOTS = {"d": (".", "full"), "k": ("o", "full"), "o": ("o", "none")}
Picture = Plan | Chart | RowChart


def save_figures(dossier: Dossier, folder: Path, overwrite: bool = False) -> list[Path]:
    """Write every picture that the dossier has data for; files that are there already are refused or replaced."""
    figures = ((name, _drawn(picture)) for name, picture in charts(dossier).items())
    drawn = {folder / f"{name}{suffix}": encoded(figure, suffix) for name, figure in figures for suffix in SUFFIXES}
    with disk.explained(folder), locked(folder, "report"):
        for path, content in drawn.items():
            disk.recover_one(path)
            if not overwrite and path.exists() and not (path.is_file() and path.read_bytes() == content):
                raise OutputError(f"{path} exists already; choose another --figures or add --overwrite.")
        for path, content in drawn.items():
            write_atomically(path, content)
    return list(drawn)


def charts(dossier: Dossier) -> dict[str, Picture]:
    """Every picture by its name."""
    found: dict[str, Picture | None] = {"allocation": dossier.plan, "frontier": pictures.frontier(dossier)}
    if dossier.plan is not None and is_coded(dossier.plan):
        found |= {f"bits-{part}": pictures.bits(bit_rows(dossier.plan, part)) for part in PARTS}
    if dossier.plan is not None and dossier.readings is not None:
        found["damage"] = pictures.damage(damage_rows(dossier.readings, dossier.plan))
    readings = dossier.readings
    for group in curve_sets(readings, dossier.plan) if readings is not None else ():
        assert readings is not None
        dots = strip_set(group.reading, readings) if group.reading.axis in PER_HEAD else None
        found[_file_name(group.kind)] = pictures.strips(dots) if dots else pictures.curves(group)
    parts = healing_parts(dossier.healing)
    found |= {_file_name(f"healing-{part}"): pictures.healing(part, rows, parts) for part, rows in parts.items()}
    found["loss"] = pictures.loss(dossier.healing) if dossier.healing else None
    found["lengths"] = pictures.by_length(dossier.verdict) if dossier.verdict else None
    return {name: picture for name, picture in found.items() if picture is not None}


def _file_name(words: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", words).strip("-")[:60] or "reading"


def _drawn(picture: Picture) -> Figure:
    if isinstance(picture, Chart):
        figure = new_figure(4.5, 3.2)
        draw_chart(figure.add_subplot(), picture)
        return figure
    rows = len(picture.keep if isinstance(picture, Plan) else picture.rows)
    figure = new_figure(7.0 if isinstance(picture, Plan) else 4.5, max(2.0, 0.22 * rows + 0.8))
    if isinstance(picture, Plan):
        _allocation(figure, picture)
    else:
        draw_rows(figure.add_subplot(), picture)
    return figure


def draw_chart(axes: Axes, chart: Chart) -> None:
    """A chart with two axes; layers go from dark to light."""
    from matplotlib import colormaps

    last = max((one.layer for one in chart.series if one.layer is not None), default=0)
    for place, one in enumerate(chart.series):
        by_depth = None if one.layer is None else colormaps["cividis"](0.9 * one.layer / max(last, 1))
        colour = by_depth or PALETTE[place % len(PALETTE) if one.name else 0]  # what has no name belongs together
        for part in (one, *one.parts):
            _draw_series(axes, part, chart.y, colour, one.name if part is one else "")
    for level, words in chart.across:
        axes.axhline(level, color=PALETTE[6], linewidth=1, label=_plain(words))
    for value, words in chart.upright:
        axes.axvline(value, color="#999999", linewidth=1, linestyle="--", label=_plain(words))
    if chart.y.log:
        axes.set_yscale("log")
    if chart.x.log:
        axes.set_xscale("symlog" if chart.x.ends[0] < 1 else "log")
    if chart.x.ticks and len(chart.x.ticks) > 2:
        axes.set_xticks([value for value, _ in chart.x.ticks], [words for _, words in chart.x.ticks])
        axes.minorticks_off()
    if chart.x.percent:
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_title(_plain(chart.title.partition(",")[0]), fontsize=8)
    axes.set_xlabel(_plain(chart.x.label))
    axes.set_ylabel(_plain(chart.y.label))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best")


def _draw_series(axes: Axes, one: Series, y: Axis, colour: Any, name: str) -> None:
    floor = y.ends[0] if y.log else float("-inf")  # what lies below a logarithmic axis lies on its floor
    xs, ys = [x for x, _ in one.points], [max(value, floor) for _, value in one.points]
    ends = [(max(low, floor), max(high, floor)) for low, high in one.intervals]
    label = _plain(name) or None
    if one.style == "band":
        axes.fill_between(xs, [a for a, _ in ends], [b for _, b in ends], color=colour, alpha=0.2, linewidth=0)
    elif one.style in ("line", "dashed"):
        style = "--" if one.style == "dashed" else "-"
        axes.plot(xs, ys, style, color="#999999" if one.style == "dashed" else colour, linewidth=1, label=label)
    else:
        pairs = list(zip(ys, ends, strict=False))
        bars = [[v - low for v, (low, _) in pairs], [high - v for v, (_, high) in pairs]]
        fill = "none" if one.style == "ring" else "full"
        more = {"fmt": MARKS.get(one.style, "o"), "color": colour, "capsize": 3, "markersize": 5, "fillstyle": fill}
        axes.errorbar(xs, ys, yerr=bars if ends else None, label=label, **more)


def draw_rows(axes: Axes, chart: RowChart) -> None:
    """A chart with a row per layer or name."""
    styles = {f"u-{unit}": (COLOURS[unit], LABELS[unit]) for unit in UNITS} | {"g": ("#dddddd", "")} | _bit_styles()
    for place, row in enumerate(chart.rows):
        for bar in row.bars:
            colour, label = styles[bar.style]
            known = axes.get_legend_handles_labels()[1]
            more = {"color": colour, "label": None if label in known else label or None}
            axes.barh(place, bar.end - bar.start, left=bar.start, **more)
        for start, end, _ in row.spans:
            axes.plot([start, end], [place, place], color=PALETTE[0], linewidth=1)
        for value, style in row.dots:
            shape, fill = DOTS[style]
            axes.plot(value, place, shape, color=PALETTE[0], fillstyle=fill, markersize=5)
    for mark in chart.marks:
        axes.axvline(mark, color=PALETTE[6], linewidth=1)
    axes.set_yticks(range(len(chart.rows)), [_plain(row.label) for row in chart.rows], fontsize=7)
    axes.invert_yaxis()
    if chart.log:
        axes.set_xscale("log")
    axes.set_title(_plain(chart.title.partition(",")[0]), fontsize=8)
    if chart.percent:
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    if named := dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True)):
        beside = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if chart.percent else {"loc": "best"}
        order = [label for _, label in styles.values() if label in named]
        axes.legend([named[label] for label in order], order, **beside)


def _bit_styles() -> dict[str, tuple[Any, str]]:
    """Colours of numbers by their bits: many bits are dark, none is grey."""
    from matplotlib import colormaps

    shades = {bits: colormaps["cividis_r"](bits / BITS[0]) for bits in BITS}
    colours = {WHOLE: "#000000", **shades, 0: "#dddddd"}
    return {f"bit-{bits}": (colour, bit_words(bits)) for bits, colour in colours.items()}


def _allocation(figure: Figure, plan: Plan) -> None:
    """What stays of every layer: one panel per size, pale behind it what was."""
    units = {unit.size: unit.allow for unit in CUTS}
    labels = {size: words for size, words in SIZE_LABELS.items() if size != "kv_heads"}
    if is_coded(plan):  # dimensions say little of rows in bits
        bytes_of = {"qk_dim": ("k_bytes", "key bytes of a row"), "v_dim": ("v_bytes", "value bytes of a row")}
        units |= {"k_bytes": "qk", "v_bytes": "v"}
        labels = dict(bytes_of.get(size, (size, words)) for size, words in labels.items())
    sizes = list(labels)
    layers = range(len(plan.keep))
    for place, size in enumerate(sizes):
        axes = figure.add_subplot(1, len(sizes), place + 1)
        axes.barh(layers, [getattr(s, size) for s in plan.source.layers], color="#dddddd")
        axes.barh(layers, [getattr(s, size) for s in plan.target.layers], color=COLOURS[units[size]])
        axes.set_xlabel(labels[size])
        axes.locator_params(axis="x", integer=True)
        axes.invert_yaxis()
        axes.grid(False)
        if place:
            axes.set_yticklabels([])
        else:
            axes.set_ylabel("layer")


def _plain(words: str) -> str:
    """Words in which matplotlib sees no formula."""
    return "".join(letter for letter in words if letter.isprintable()).replace("$", r"\$")
