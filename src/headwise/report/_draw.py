"""Pictures as SVG. Each takes the data of one picture; colours and fonts come from the page's style."""

from __future__ import annotations

from collections.abc import Callable

from headwise.report._data import (
    UNIT_LABELS,
    Curve,
    CurveSet,
    DamageRow,
    Frontier,
    HealRow,
    MapBar,
    MapPanel,
    value_range,
)
from headwise.report._diagnostics import StripSet
from headwise.report._facts import Measure
from headwise.report._svg import Scale, circle, diamond, line, path, polyline, rect, spread, svg, text, titled, xy
from headwise.report._text import number, short
from headwise.types import UNITS

ROW = 13.0  # height of a layer's row


def draw_measure(measure: Measure) -> str:
    """Two bars from zero, before above after, with the interval as a whisker."""
    shown = [v for v in (measure.before, measure.after, measure.high) if v is not None]
    if not shown or max(shown) <= 0:
        return ""
    scale = Scale(0.0, max(shown), 0.0, 200.0)
    body = rect(0, 0, scale(measure.before), 7, "g") if measure.before is not None else ""
    if measure.after is not None:
        body += rect(0, 10, scale(measure.after), 7, "k")
    if measure.low is not None and measure.high is not None:
        left, right = scale(measure.low), scale(measure.high)
        body += path(f"M{xy(left)} 13.5H{xy(right)}M{xy(left)} 9V18M{xy(right)} 9V18", "w")
    label = f"{measure.label}: {number(measure.before)} before, {number(measure.after)} after"
    return svg(202, 18, label, body)


def draw_map(panel: MapPanel, label: str) -> str:
    """One size of all layers, layers down: kept filled, removed ghosted."""
    body = "".join(titled(bar.title, _map_row(panel, bar)) for bar in panel.bars)
    height = ROW * len(panel.bars) + 2
    return svg(180, height, f"{label} per layer, before and after: {panel.share:.0%} kept", body, "map")


def _map_row(panel: MapPanel, bar: MapBar) -> str:
    left, width, y = 20.0, 98.0, ROW * bar.layer + 2
    changed = bar.before != bar.after
    words = f"{bar.before}→{bar.after}" if changed else str(bar.after)
    numbers = text(16, y + 8, bar.layer, "m", "end") + text(122, y + 8, words, "t" if changed else "m")
    if bar.kept is not None:
        return numbers + _head_cells(bar, left, width * bar.before / panel.full, y)
    scale = Scale(0.0, panel.full, 0.0, width)
    bars = rect(left, y, scale(bar.before), 9, "g")
    if bar.through > bar.after:
        bars += rect(left, y, scale(bar.through), 9, "h")
    return numbers + bars + rect(left, y, scale(bar.after), 9, "k")


def _head_cells(bar: MapBar, left: float, width: float, y: float) -> str:
    """A cell per head, those that share a key/value head close together."""
    if not bar.before:
        return ""
    kept, pitch = set(bar.kept or ()), width / bar.before
    groups = -(-bar.before // bar.group)
    inner, outer = (
        (min(0.8, pitch * 0.2), min(2.5, pitch * 0.5)) if bar.group > 1 and groups > 1 else (min(1.2, pitch * 0.2),) * 2
    )
    cell = (width - inner * (bar.before - groups) - outer * groups) / bar.before
    paths = {"k": "", "g": ""}
    for head in range(bar.before):
        group = head // bar.group
        x = left + head * cell + inner * (head - group) + outer * group
        paths["k" if head in kept else "g"] += f"M{xy(x)} {xy(y)}h{cell:.2f}v9h-{cell:.2f}z"
    return "".join(path(where, name) for name, where in paths.items() if where)


def draw_damage(rows: tuple[DamageRow, ...]) -> str:
    """A stacked bar per layer, units in the same order everywhere."""
    most = max((sum(max(0.0, v) for v in row.parts.values()) for row in rows), default=0.0)
    scale = Scale(0.0, most if most > 0 else 1.0, 0.0, 266.0)
    body = ""
    for row in rows:
        x, y = 22.0, ROW * row.layer + 2
        body += text(16, y + 8, row.layer, "m", "end")
        for unit in UNITS:
            value = row.parts.get(unit)
            if value is not None:
                width = scale(max(0.0, value))
                body += titled(
                    f"layer {row.layer}, {UNIT_LABELS[unit]}: damage {number(value)}",
                    rect(x, y, width, 9, f"u-{unit}"),
                )
                x += width
        body += text(x + 5, y + 8, number(row.total) if row.parts else "nothing cut", "t" if row.parts else "m")
    return svg(340, ROW * len(rows) + 2, "Predicted damage of every layer at its chosen sizes, by unit", body, "rows")


def draw_curve(group: CurveSet, curve: Curve) -> str:
    """One small multiple; axes are the same in the whole group."""
    low, high = group.ticks
    across = _across(group)
    up = Scale(*group.values, 68, 14, group.log)
    body = text(30, 9, "the model" if group.kind == "damage.depth" else f"layer {curve.layer}", "t")
    ticks = up.ticks(3)
    body += path("".join(f"M30 {xy(up(tick))}h98" for tick in ticks), "l")
    for tick in (ticks[0], ticks[-1]):
        plain = not group.log or ticks[0] >= 1e-3
        words = number(tick, 3) if plain else f"{tick:.0e}".replace("e-0", "e-").replace("e+0", "e")
        body += text(27, up(tick) + 2.5, words, "s", "end")
    body += text(30, 79, low, "s") + text(128, 79, high, "s", "end")
    if len(curve.earlier) > 1:
        body += polyline([(across(t), up(v)) for t, v in curve.earlier], "e")
    if curve.errors:
        ends = [(t, v - e, v + e) for (t, v), e in zip(curve.points, curve.errors, strict=True) if e > 0]
        body += path("".join(f"M{xy(across(t))} {xy(up(a))}V{xy(up(b))}" for t, a, b in ends), "f")
    body += polyline([(across(t), up(v)) for t, v in curve.points], "c")
    label = f"layer {curve.layer}: {group.kind} by {group.axis}"
    if curve.chosen:
        label += f", chosen {curve.chosen[0]} at {number(curve.chosen[1])}"
        body += diamond(across(curve.chosen[0]), up(curve.chosen[1]), 4, "k")
        body += text(128, 9, f"keeps {curve.chosen[0]}", "t", "end")
    elif curve.note:
        body += text(128, 9, curve.note, "m", "end")
    return svg(132, 82, label, titled(label, body), "mini")


def _across(group: CurveSet) -> Callable[[float], float]:
    """The horizontal place of a size; a logarithm that begins at nothing counts from one."""
    low, high = group.ticks
    shift = 1 if group.log_across and low < 1 else 0
    scale = Scale(low + shift, (high if high > low else low + 1) + shift, 30, 128, group.log_across)
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
        body += titled(f"layer {strip.layer}: {strip.words}", row)
    body += "".join(line(scale(mark), 0, scale(mark), bottom, "r") for mark in group.marks)
    return svg(340, bottom + 12, f"{group.kind} of every {group.axis.replace('_', ' ')}, per layer", body, "rows")


def draw_frontier(data: Frontier) -> str:
    """Damage by share, the chosen point and the baselines with their names."""
    shares = [s for s, _ in data.points] + [m.share for m in data.marks if m.share is not None]
    damages = [d for _, d in data.points] + [m.predicted for m in data.marks if m.predicted is not None]
    damages += [m.measured for m in data.marks if m.measured is not None] + list(data.measured or ())
    log = any(d > 0 for d in damages)
    low, high = min(shares), max(shares)
    across = Scale(low if low < high else low - 0.1, high, 56, 410)
    up = Scale(*value_range(damages, log), 238, 22, log)
    body = text(56, 9, "damage", "m")
    body += "".join(line(56, up(t), 410, up(t), "l") + text(51, up(t) + 4, number(t), "m", "end") for t in up.ticks())
    body += "".join(text(across(t), 256, f"{t:.0%}", "m", "middle") for t in across.ticks(8))
    body += text(233, 276, f"share of the source's {data.budget} ({data.unit})", "m", "middle")
    body += polyline([(across(s), up(d)) for s, d in data.points], "c") if data.points else ""
    body += "".join(titled(f"{s:.1%}: {number(d)}", circle(across(s), up(d), 2.2, "k")) for s, d in data.points)
    label = f"Frontier of damage against {data.budget}, with {len(data.marks)} plans marked"
    return svg(430, 284, label, body + _marks(data, across, up), "chart")


def _marks(data: Frontier, across: Scale, up: Scale) -> str:
    """Chosen: diamond. Baseline: ring. Measured: cross, with its interval. Names beside, never on each other."""
    points = [(mark, across(mark.share or 0.0), up(mark.predicted or 0.0)) for mark in data.marks]
    body = ""
    for (mark, x, y), label_y in zip(points, spread([y for _, _, y in points], 13, 16, 236), strict=True):
        shape = diamond(x, y, 6.5, "k b") if mark.chosen else circle(x, y, 4, "o")
        if mark.measured is not None:
            low, middle, high = data.measured if mark.chosen and data.measured else (mark.measured,) * 3
            cross = f"M{xy(x - 4)} {xy(up(middle) - 4)}l8 8m0 -8l-8 8"
            shape += path(f"{cross}M{xy(x)} {xy(up(low))}V{xy(up(high))}", "x")
        name = short(mark.strategy, 24)
        side, anchor = (1, "") if x + 13 + 5.6 * len(name) < 430 else (-1, "end")
        shape += line(x + 6 * side, y, x + 11 * side, label_y, "l")
        shape += text(x + 13 * side, label_y + 3.5, name, "t n" if mark.chosen else "t", anchor)
        words = f"{mark.strategy}: predicted {number(mark.predicted)}, measured {number(mark.measured)}"
        body += titled(words, shape)
    return body


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
        body += titled(f"layer {row.layer}, {part}: {words}", marks + numbers)
    return svg(340, bottom + 12, f"Relative error of {part} per layer, before and after healing", body, "rows")
