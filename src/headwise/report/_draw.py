"""Pictures as SVG. Each takes the data of one picture; colours and fonts come from the page's style."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from headwise.report._checked import Mark, Pair
from headwise.report._data import UNIT_LABELS, Curve, CurveSet, DamageRow, Frontier, HealRow, value_range
from headwise.report._diagnostics import StripSet
from headwise.report._facts import Measure
from headwise.report._judged import ByLength
from headwise.report._svg import (
    Scale,
    circle,
    diamond,
    line,
    path,
    polyline,
    rect,
    short_tick,
    spread,
    svg,
    text,
    titled,
    xy,
)
from headwise.report._text import number, short
from headwise.types import UNITS
from headwise.types.verdict import LEAST_ROWS

ROW = 13.0  # height of a layer's row


def draw_measure(measure: Measure) -> str:
    """Two bars from zero, before above after; where an interval is known, points on an axis that shows its width."""
    shown = [v for v in (measure.before, measure.after, measure.high) if v is not None]
    if not shown or max(shown) <= 0:
        return ""
    label = f"{measure.label}: {number(measure.before)} before, {number(measure.after)} after"
    if measure.low is not None and measure.high is not None and measure.after is not None:
        return svg(202, 18, f"{label}, {measure.range} {measure.interval}", _points(measure))
    scale = Scale(0.0, max(shown), 0.0, 200.0)
    body = rect(0, 0, scale(measure.before), 7, "g") if measure.before is not None else ""
    if measure.after is not None:
        body += rect(0, 10, scale(measure.after), 7, "k")
    return svg(202, 18, label, body)


def _points(measure: Measure) -> str:
    """A ring before, a dot with its interval after; the axis need not begin at zero."""
    assert measure.low is not None and measure.high is not None and measure.after is not None
    known = [v for v in (measure.before, measure.after, measure.low, measure.high) if v is not None]
    low, high = min(known), max(known)
    margin = (high - low) * 0.15 or abs(high) * 0.1 or 1.0
    scale = Scale(low - margin, high + margin, 0.0, 200.0)
    body = line(0, 9, 200, 9, "l")
    left, right = scale(measure.low), scale(measure.high)
    body += path(f"M{xy(left)} 9H{xy(right)}M{xy(left)} 4V14M{xy(right)} 4V14", "w")
    body += circle(scale(measure.before), 9, 4, "o") if measure.before is not None else ""
    return body + circle(scale(measure.after), 9, 4.4, "k")


def draw_damage(rows: tuple[DamageRow, ...]) -> str:
    """A stacked bar per layer, units in the same order everywhere."""
    most = max((sum(max(0.0, v) for v in row.parts.values()) for row in rows), default=0.0)
    scale = Scale(0.0, most if most > 0 else 1.0, 0.0, 266.0)
    body = ""
    for row in rows:
        x, y = 22.0, ROW * row.layer + 2
        inner = text(16, y + 8, row.layer, "m", "end")
        for unit in UNITS:
            value = row.parts.get(unit)
            if value is not None:
                width = scale(max(0.0, value))
                inner += titled(
                    f"layer {row.layer}, {UNIT_LABELS[unit]}: damage {number(value)}",
                    rect(x, y, width, 9, f"u-{unit}"),
                )
                x += width
        inner += text(x + 5, y + 8, number(row.total) if row.parts else "nothing cut", "t" if row.parts else "m")
        body += f'<g data-layer="{row.layer}">{inner}</g>'
    return svg(340, ROW * len(rows) + 2, "Predicted damage of every layer at its chosen sizes, by unit", body, "rows")


def draw_lines(group: CurveSet) -> str:
    """All layers on common axes, early ones faint, late ones strong; details of a layer show when it is chosen."""
    left, right, top, bottom = 46.0, 352.0, 16.0, 168.0
    across, up = _across(group, left, right), Scale(*group.values, bottom, top, group.log)
    body = ""
    for tick in up.ticks(4):
        words = short_tick(tick) if group.log else number(tick, 3)
        body += line(left, up(tick), right, up(tick), "l") + text(left - 5, up(tick) + 3, words, "m", "end")
    low, high = group.ticks
    body += text(left, bottom + 13, low, "m") + text(right, bottom + 13, high, "m", "end")
    body += text((left + right) / 2, bottom + 13, short(group.axis.replace("_", " "), 30), "m", "middle")
    body += text(left, 8, short(group.unit, 40), "m")
    if group.guide and group.curves:
        body += polyline([(across(t), up(v)) for t, v in group.curves[0].earlier], "e")
    last = max((curve.layer for curve in group.curves), default=0)
    body += "".join(_line(group, curve, across, up, curve.layer / last if last else 1.0) for curve in group.curves)
    return svg(360, 184, f"{group.kind} by {group.axis}, a line per layer", body, "lines")


def _line(group: CurveSet, curve: Curve, across: Callable[[float], float], up: Scale, depth: float) -> str:
    """One layer's line; its error bars, its earlier line and its name only when it is chosen."""
    whole = group.kind == "damage.depth"
    name = "the model" if whole else f"layer {curve.layer}"
    shape, inner = polyline([(across(t), up(v)) for t, v in curve.points], "y"), ""
    if len(curve.earlier) > 1 and not group.guide:
        inner += polyline([(across(t), up(v)) for t, v in curve.earlier], "e")
    if curve.errors:
        ends = [(t, v - e, v + e) for (t, v), e in zip(curve.points, curve.errors, strict=True) if e > 0]
        inner += path("".join(f"M{xy(across(t))} {xy(up(a))}V{xy(up(b))}" for t, a, b in ends), "f")
    words = name
    if curve.chosen:
        words += f" keeps {curve.chosen[0]}: {number(curve.chosen[1], 3)}"
        shape += diamond(across(curve.chosen[0]), up(curve.chosen[1]), 3, "k b")
    elif curve.note:
        words += f", {curve.note}"
    inner += text(352, 8, words, "t n", "end")
    return titled(words, f'{shape}<g class="only">{inner}</g>', None if whole else curve.layer, depth)


def _across(group: CurveSet, left: float, right: float) -> Callable[[float], float]:
    """The horizontal place of a size; a logarithm that begins at nothing counts from one."""
    low, high = group.ticks
    shift = 1 if group.log_across and low < 1 else 0
    scale = Scale(low + shift, (high if high > low else low + 1) + shift, left, right, group.log_across)
    return lambda tick: scale(tick + shift)


def draw_strips(group: StripSet) -> str:
    """A row per layer, a dot per head; the full size as a ghost behind, the values that matter as dark lines."""
    scale, bottom = Scale(*group.values, 24, 226), ROW * len(group.strips) + 4
    body = ""
    for tick in scale.ticks(6):
        body += line(scale(tick), 0, scale(tick), bottom, "l")
        body += text(scale(tick), bottom + 10, number(tick, 2), "s", "middle")
    for index, strip in enumerate(group.strips):
        y = ROW * index + 7
        row = rect(scale(0.0), y - 4.5, scale(strip.full) - scale(0.0), 9, "g") if strip.full else ""
        row += path("".join(f"M{xy(scale(value))} {xy(y)}h0" for value in strip.values), "d")
        row += text(16, y + 3, strip.layer, "m", "end") + text(238, y + 3, strip.words, "t")
        body += titled(f"layer {strip.layer}: {strip.words}", row, strip.layer)
    body += "".join(line(scale(mark), 0, scale(mark), bottom, "r") for mark in group.marks)
    return svg(340, bottom + 12, f"{group.kind} of every {group.axis.replace('_', ' ')}, per layer", body, "rows")


FRAME = (44.0, 366.0, 20.0, 196.0)  # of the frontier's plot: left, right, top, bottom; the slider below keeps to it


def draw_frontier(data: Frontier) -> str:
    """Damage by share, the chosen point and the baselines with their names, and a cursor for the slider."""
    shares = [s for s, _ in data.points] + [m.share for m in data.marks if m.share is not None]
    damages = [d for _, d in data.points] + [m.predicted for m in data.marks if m.predicted is not None]
    damages += [m.measured for m in data.marks if m.measured is not None] + list(data.measured or ())
    log, (left, right, top, bottom) = any(d > 0 for d in damages), FRAME
    low, high = min(shares), max(shares)
    across = Scale(low if low < high else low - 0.1, high, left, right)
    up = Scale(*value_range(damages, log), bottom, top, log)
    body = text(left, 9, "predicted damage", "m")
    for tick in up.ticks(4):
        words = short_tick(tick) if log else number(tick)
        body += line(left, up(tick), right, up(tick), "l") + text(left - 5, up(tick) + 4, words, "m", "end")
    body += "".join(text(across(t), bottom + 14, f"{t:.0%}", "m", "middle") for t in across.ticks(6))
    body += text(right, 9, f"by share of {data.budget}", "m", "end")
    label = (
        f"Least predicted damage by share of the source's {data.budget} ({data.unit}), {len(data.marks)} plans marked"
    )
    more = ""
    if data.solved and log:
        ends = [*across[:4], *up[:4]]
        more = f' data-scale="{json.dumps([float(f"{end:.6g}") for end in ends])}"'
        body += f'<g class="cursor">{line(0, top, 0, bottom, "cursor")}{circle(0, bottom, 4, "")}</g>'
    body += polyline([(across(s), up(d)) for s, d in data.points], "c") if data.points else ""
    return svg(380, bottom + 20, label, body + _marks(data, across, up), "chart", more)


def _marks(data: Frontier, across: Scale, up: Scale) -> str:
    """Chosen: diamond. Baseline: ring. Measured: cross, with its interval. Names beside, never on each other."""
    points = [(mark, across(mark.share or 0.0), up(mark.predicted or 0.0)) for mark in data.marks]
    body = ""
    for (mark, x, y), label_y in zip(points, spread([y for _, _, y in points], 13, 26, FRAME[3] - 4), strict=True):
        shape = diamond(x, y, 6, "k b") if mark.chosen else circle(x, y, 4, "o")
        if mark.measured is not None:
            low, middle, high = data.measured if mark.chosen and data.measured else (mark.measured,) * 3
            cross = f"M{xy(x - 4)} {xy(up(middle) - 4)}l8 8m0 -8l-8 8"
            shape += path(f"{cross}M{xy(x)} {xy(up(low))}V{xy(up(high))}", "x")
        name = short(mark.strategy, 24)
        side, anchor = (1, "") if x + 13 + 6 * len(name) < 380 else (-1, "end")
        shape += line(x + 6 * side, y, x + 11 * side, label_y, "l")
        shape += text(x + 13 * side, label_y + 3.5, name, "t n" if mark.chosen else "t", anchor)
        words = f"{mark.strategy}: predicted {number(mark.predicted)}, measured {number(mark.measured)}"
        body += titled(words, shape)
    return body


def draw_by_length(data: ByLength) -> str:
    """Change of perplexity over length, logarithmic across: a line with its band, the limit, the calibrated length."""
    left, right, top, bottom = 46.0, 352.0, 16.0, 168.0
    shown = [v for s in data.steps for v in (s.change, s.low, s.high)]
    across = Scale(data.steps[0].length, data.steps[-1].length, left, right, True)
    up = Scale(*value_range([data.limit, *shown], False), bottom, top)
    body = text(left, 8, "change of perplexity, %", "m") + _grid(up, left, right)
    body += "".join(text(across(s.length), bottom + 13, f"{s.length:,}", "m", "middle") for s in data.steps)
    forth = [f"{xy(across(s.length))} {xy(up(s.high))}" for s in data.steps]
    back = [f"{xy(across(s.length))} {xy(up(s.low))}" for s in reversed(data.steps)]
    body += path(f"M{'L'.join([*forth, *back])}z", "band")
    level, at = up(data.limit), across(data.calibrated)
    body += line(left, level, right, level, "x") + text(right, level - 4, f"limit {data.limit_text}", "t", "end")
    body += line(at, top, at, bottom, "e") + text(at + 4, top + 8, f"calibrated at {data.calibrated:,}", "m")
    body += polyline([(across(s.length), up(s.change)) for s in data.steps], "c")
    for s in data.steps:
        words = (
            f"{s.length:,} tokens: {number(s.change, 3)}% ({number(s.low, 3)} to {number(s.high, 3)}), {s.rows} rows"
        )
        body += titled(words, circle(across(s.length), up(s.change), 4, "k" if s.rows >= LEAST_ROWS else "o"))
    body += text((left + right) / 2, bottom + 25, "tokens of a row", "m", "middle")
    label = f"Change of perplexity at {len(data.steps)} lengths, with 95% intervals and the limit"
    return svg(360, bottom + 28, label, body, "lines")


def _grid(up: Scale, left: float, right: float) -> str:
    """Lines across at round values, with their numbers."""
    return "".join(
        line(left, up(t), right, up(t), "l") + text(left - 5, up(t) + 3, number(t, 3), "m", "end") for t in up.ticks(4)
    )


def draw_scatter(pairs: Sequence[Pair]) -> str:
    """Predicted across, measured up, both logarithmic, with the diagonal on which they agree."""
    shown = [value for pair in pairs for value in (pair.predicted, pair.measured) if value > 0]
    ends = value_range(shown, True)
    across, up = Scale(*ends, 46, 300, True), Scale(*ends, 222, 14, True)
    body = ""
    for tick in up.ticks(5):
        body += line(46, up(tick), 300, up(tick), "l") + text(41, up(tick) + 3, short_tick(tick), "m", "end")
        body += text(across(tick), 235, short_tick(tick), "m", "middle")
    body += line(across(ends[0]), up(ends[0]), across(ends[1]), up(ends[1]), "e")
    body += text(173, 250, "as predicted", "m", "middle") + text(46, 8, "as measured", "m")
    last = max(pair.layer for pair in pairs)
    layers: dict[int, list[Pair]] = {}
    for pair in pairs:
        layers.setdefault(pair.layer, []).append(pair)
    for layer, own in layers.items():
        dots = "".join(f"M{xy(across(p.predicted))} {xy(up(p.measured))}h0" for p in own)
        body += titled(f"layer {layer}", path(dots, "z"), layer, layer / last if last else 1.0)
    return svg(
        310, 254, "Price of single cuts: as measured against as predicted, a dot per layer and size", body, "lines"
    )


def draw_marks(marks: Sequence[Mark]) -> str:
    """A few numbers on one axis from zero, each with its name, and an interval where one is known."""
    high = max([1e-12, *(value for mark in marks for value in (mark.value, mark.high or 0.0))])
    scale, body = Scale(0.0, high, 130, 300), ""
    for index, mark in enumerate(marks):
        y = 20.0 * index + 10
        body += text(122, y + 3, short(mark.name, 26), "t", "end") + line(130, y, 300, y, "l")
        if mark.low is not None and mark.high is not None:
            body += path(f"M{xy(scale(mark.low))} {xy(y)}H{xy(scale(mark.high))}", "w")
        body += circle(scale(mark.value), y, 3.4, "k" if mark.low is None else "o")
        body += text(308, y + 3, number(mark.value, 3), "t")
    words = ", ".join(f"{mark.name} {number(mark.value)}" for mark in marks)
    return svg(350, 20 * len(marks) + 4, words, body, "rows")


def draw_loss(points: Sequence[tuple[float, float]], label: str, held: Sequence[tuple[float, float]] = ()) -> str:
    """One falling line, and dots on text that was kept from it."""
    xs, ys = [x for x, _ in points], [y for _, y in (*points, *held)]
    across, up = Scale(*_ends(xs), 46, 352), Scale(*_ends(ys), 168, 16)
    body = text(46, 8, label, "m")
    body += _grid(up, 46, 352)
    body += text(46, 181, number(min(xs)), "m") + text(352, 181, f"step {number(max(xs))}", "m", "end")
    body += polyline([(across(x), up(y)) for x, y in points], "c")
    body += "".join(titled(f"step {number(x)}: {number(y, 3)}", circle(across(x), up(y), 3.2, "k")) for x, y in held)
    return svg(360, 184, f"{label} while healing", body, "lines")


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """The least and the largest value, apart from each other even where all are the same, or huge."""
    low, high = (min(max(end, -1e300), 1e300) for end in (min(values), max(values)))
    size = max(abs(low), abs(high))
    return (low, high) if high - low > 1e-9 * size else (low, low + max(1.0, 0.1 * size))


def draw_healing(part: str, rows: tuple[HealRow, ...], ends: tuple[float, float], log: bool) -> str:
    """Per layer, the error before (ring) and after (dot) healing, between `ends`, which all parts share."""
    scale = Scale(*ends, 30, 226, log)
    bottom = ROW * len(rows) + 4
    body = ""
    for tick in scale.ticks(4):
        x = scale(tick)
        body += line(x, 0, x, bottom, "l") + text(x, bottom + 10, number(tick, 2), "s", "middle")
    for index, row in enumerate(rows):
        x, end, y = scale(row.before), scale(row.after), ROW * index + 7
        words = f"{number(row.before, 3)} → {number(row.after, 3)}"
        marks = line(x, y, end, y, "c") + circle(x, y, 3.2, "o") + circle(end, y, 3.2, "k")
        numbers = text(16, y + 3, row.layer, "m", "end") + text(238, y + 3, words, "t")
        body += titled(f"layer {row.layer}, {part}: {words}", marks + numbers, row.layer)
    return svg(340, bottom + 12, f"Relative error of {part} per layer, before and after healing", body, "rows")
