"""Charts as data, and how they are drawn as SVG. `figures` draws the same data with matplotlib.

A `Chart` has two axes and series of points; a `RowChart` has a row per layer or per name. Colours and fonts come from
the page's style.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from headwise.report import _svg as svg
from headwise.report._svg import Scale, line, path, text, titled, xy
from headwise.report._text import short

Point2 = tuple[float, float]
ROW = 13.0  # height of a row


class Axis(NamedTuple):
    """One axis of a chart. A logarithmic one that begins at nothing counts from one."""

    label: str
    ends: Point2
    log: bool = False
    ticks: tuple[tuple[float, str], ...] | None = None  # values and their words; None: round values
    percent: bool = False

    def scale(self, start: float, end: float) -> Scale:
        """From values to coordinates."""
        low, high = self.ends
        shift = 1.0 if self.log and low <= 0 else 0.0
        return Scale(low + shift, (high if high > low else low + 1) + shift, start, end, self.log, shift)

    def words(self, most: int) -> list[tuple[float, str]]:
        """Values to mark, and what to write there."""
        if self.ticks is not None:
            return list(self.ticks)
        values = self.scale(0, 1).ticks(most)
        return [(v, f"{v:.0%}" if self.percent else svg.short_tick(v)) for v in values]


class Series(NamedTuple):
    """Points that belong together: a line, or marks."""

    points: tuple[Point2, ...]
    style: str = "line"  # line, dashed, band (between its intervals), dots (many), dot, ring, diamond, cross
    title: str = ""  # shown when it is pointed at
    name: str = ""  # written beside its last point
    intervals: tuple[Point2, ...] = ()  # low and high, per point
    layer: int | None = None  # which layer it is, so that it can be chosen
    parts: tuple[Series, ...] = ()  # drawn with it
    hidden: tuple[Series, ...] = ()  # drawn once its layer is chosen, with the title in the corner


class Frame(NamedTuple):
    """Where the plot lies in its picture."""

    width: float = 360.0
    left: float = 46.0
    right: float = 352.0
    top: float = 16.0
    bottom: float = 168.0
    style: str = "lines"


WIDE = Frame(380.0, 44.0, 366.0, 20.0, 196.0, "chart")  # the slider under the frontier keeps to it
SQUARE = Frame(310.0, 46.0, 300.0, 14.0, 222.0)


class Chart(NamedTuple):
    """What a picture with two axes shows."""

    title: str  # in words, for those who cannot see it
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    across: tuple[tuple[float, str], ...] = ()  # levels of y, with their words
    upright: tuple[tuple[float, str], ...] = ()  # values of x, with their words
    frame: Frame = Frame()
    cursor: bool = False  # whether the page's slider moves along x


def draw(chart: Chart) -> str:
    """The chart as SVG: grid, levels, series in their order, names that do not lie on each other."""
    frame = chart.frame
    across, up = chart.x.scale(frame.left, frame.right), chart.y.scale(frame.bottom, frame.top)
    body = text(frame.left, frame.top - 8, short(chart.y.label, 40), "m")
    for value, words in chart.y.words(4):
        body += line(frame.left, up(value), frame.right, up(value), "l")
        body += text(frame.left - 5, up(value) + 3, words, "m", "end")
    body += _below(chart, across)
    for level, words in chart.across:
        body += line(frame.left, up(level), frame.right, up(level), "x")
        body += text(frame.right, up(level) - 4, words, "t", "end")
    for value, words in chart.upright:
        body += line(across(value), frame.top, across(value), frame.bottom, "e")
        body += text(across(value) + 4, frame.top + 8, words, "m")
    more = ""
    if chart.cursor:
        ends = [float(f"{end:.6g}") for end in (*across[:4], *up[:4])]
        more = f' data-scale="{json.dumps(ends)}"'
        mark = line(0, frame.top, 0, frame.bottom, "cursor") + svg.circle(0, frame.bottom, 4, "")
        body += f'<g class="cursor">{mark}</g>'
    last = max((s.layer for s in chart.series if s.layer is not None), default=0)
    places = iter(_name_places(chart, up))
    for one in chart.series:
        name = _named(one, across, up, next(places), frame.width) if one.name else ""
        body += _series(one, across, up, frame, last, name)
    return svg.svg(frame.width, frame.bottom + 28, chart.title, body, frame.style, more)


def _below(chart: Chart, across: Scale) -> str:
    """Words under the plot: ticks, and the axis' name between them or, where there are many, beneath."""
    frame, ticks = chart.frame, chart.x.words(6)
    body, ends = "", len(ticks) == 2 and chart.x.ticks is not None
    for place, (value, words) in enumerate(ticks):
        anchor = ("", "end")[place] if ends else "middle"
        body += text(across(value), frame.bottom + 13, words, "m", anchor)
    middle = (frame.left + frame.right) / 2
    return body + text(middle, frame.bottom + (13 if ends else 25), short(chart.x.label, 40), "m", "middle")


def _name_places(chart: Chart, up: Scale) -> list[float]:
    wanted = [up(one.points[-1][1]) for one in chart.series if one.name]
    return svg.spread(wanted, 13, chart.frame.top + 6, chart.frame.bottom - 4)


def _named(one: Series, across: Scale, up: Scale, label_y: float, width: float) -> str:
    """A name beside the last point, on the side where there is room, with a line to it."""
    x, y, words = across(one.points[-1][0]), up(one.points[-1][1]), short(one.name, 26)
    side, anchor = (1, "") if x + 13 + 6 * len(words) < width else (-1, "end")
    strong = "t n" if one.style == "diamond" else "t"
    return line(x + 6 * side, y, x + 11 * side, label_y, "l") + text(
        x + 13 * side, label_y + 3.5, words, strong, anchor
    )


def _series(one: Series, across: Scale, up: Scale, frame: Frame, last: int, name: str = "") -> str:
    body = _marks(one, across, up) + "".join(_series(part, across, up, frame, last) for part in one.parts) + name
    if one.hidden or (one.layer is not None and one.style == "line"):
        inner = "".join(_series(part, across, up, frame, last) for part in one.hidden)
        body += f'<g class="only">{inner}{text(frame.right, 8, one.title, "t n", "end")}</g>'
    if not one.title:
        return body
    return titled(one.title, body, one.layer, None if one.layer is None else one.layer / last if last else 1.0)


def _marks(one: Series, across: Scale, up: Scale) -> str:
    places = [(across(x), up(y)) for x, y in one.points]
    ends = [(across(x), up(low), up(high)) for (x, _), (low, high) in zip(one.points, one.intervals, strict=False)]
    if one.style in ("line", "dashed"):
        return svg.polyline(places, "e" if one.style == "dashed" else "c" if one.layer is None else "y")
    if one.style == "band":
        edge = [f"{xy(x)} {xy(high)}" for x, _, high in ends] + [f"{xy(x)} {xy(low)}" for x, low, _ in reversed(ends)]
        return path(f"M{'L'.join(edge)}z", "band")
    bars = "".join(f"M{xy(x)} {xy(low)}V{xy(high)}" for x, low, high in ends)
    if one.style == "dots":
        return path("".join(f"M{xy(x)} {xy(y)}h0" for x, y in places), "z")
    body = path(bars, {"cross": "x", "bars": "f"}.get(one.style, "w")) if bars else ""
    return body + "".join(_mark(one.style, x, y) for x, y in places)


def _mark(style: str, x: float, y: float) -> str:
    if style == "diamond":
        return svg.diamond(x, y)
    if style == "cross":
        return path(f"M{xy(x - 4)} {xy(y - 4)}l8 8m0 -8l-8 8", "x")
    return svg.circle(x, y, 4, "o" if style == "ring" else "k") if style in ("ring", "dot") else ""


class Bar(NamedTuple):
    """A bar of a row from one value to another."""

    start: float
    end: float
    style: str
    title: str = ""  # shown when it is pointed at
    words: str = ""  # written on it where it is wide enough


class Row(NamedTuple):
    """One row: bars from one value to another, spans (thin lines), and dots, each with its style."""

    label: str
    words: str  # to the right
    title: str = ""
    layer: int | None = None
    bars: tuple[Bar, ...] = ()
    spans: tuple[tuple[float, float, str], ...] = ()
    dots: tuple[tuple[float, str], ...] = ()  # style d: small, of many; k: full; o: ring


class RowChart(NamedTuple):
    """What a picture with a row per layer or name shows, all on one axis."""

    title: str
    ends: Point2
    rows: tuple[Row, ...]
    log: bool = False
    axis: bool = True  # whether its ticks are drawn
    percent: bool = False  # whether they are percentages
    marks: tuple[float, ...] = ()  # values that matter, as dark lines


def draw_rows(chart: RowChart) -> str:
    """The rows as SVG: label, drawing, words."""
    left = 12 + 5.2 * max((len(row.label) for row in chart.rows), default=0)
    scale, bottom = Scale(*chart.ends, left, 226, chart.log), ROW * len(chart.rows) + 4
    body = ""
    for tick in scale.ticks(5) if chart.axis else ():
        body += line(scale(tick), 0, scale(tick), bottom, "l")
        words = f"{tick:.0%}" if chart.percent else svg.short_tick(tick)
        body += text(scale(tick), bottom + 10, words, "s", "middle")
    for index, row in enumerate(chart.rows):
        body += _row(row, scale, ROW * index + 7, left)
    body += "".join(line(scale(mark), 0, scale(mark), bottom, "r") for mark in chart.marks)
    return svg.svg(340, bottom + 12 * chart.axis, chart.title, body, "rows")


def _row(row: Row, scale: Scale, y: float, left: float) -> str:
    body = ""
    for bar in row.bars:
        start, end = scale(bar.start), scale(bar.end)
        drawn = svg.rect(start, y - 4.5, end - start, 9, bar.style)
        if bar.words and end - start > 6 * len(bar.words):
            drawn += text((start + end) / 2, y + 2.6, bar.words, "i", "middle")
        body += titled(bar.title, drawn) if bar.title else drawn
    for start, end, style in row.spans:
        body += line(scale(start), y, scale(end), y, style)
    small = "".join(f"M{xy(scale(value))} {xy(y)}h0" for value, style in row.dots if style == "d")
    body += path(small, "d") if small else ""
    body += "".join(svg.circle(scale(value), y, 3.2, style) for value, style in row.dots if style != "d")
    body += text(left - 8, y + 3, row.label, "m", "end") + text(238, y + 3, row.words, "t")
    return titled(row.title or f"{row.label}: {row.words}", body, row.layer)


def ends_of(values: Iterable[float]) -> Point2:
    """The least and the largest value, apart from each other even where all are the same, or huge."""
    known = list(values)
    low, high = (min(max(end, -1e300), 1e300) for end in (min(known), max(known)))
    size = max(abs(low), abs(high))
    return (low, high) if high - low > 1e-9 * size else (low, low + max(1.0, 0.1 * size))
