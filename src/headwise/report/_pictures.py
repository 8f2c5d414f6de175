"""What every picture shows, as charts: data for the page, for figures, and for tests. `_chart` draws it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from headwise.report import _judged as judged
from headwise.report._bits import WHOLE, BitRow, bit_words, is_coded
from headwise.report._chart import SQUARE, WIDE, Axis, Bar, Chart, Row, RowChart, Series, ends_of
from headwise.report._data import LOG_AXES, Curve, CurveSet, DamageRow, Pair, counts_bytes, value_range
from headwise.report._diagnostics import StripSet
from headwise.report._facts import Fact
from headwise.report._healing import HealRow, held_out_curve, loss_curve
from headwise.report._rivals import Rival, rivals
from headwise.report._svg import Scale, circle, line, path, rect, svg, xy
from headwise.report._text import as_number, interval, number
from headwise.runs.dossier import Dossier
from headwise.types import UNITS, Measure, Verdict
from headwise.types.unit import LABELS
from headwise.types.verdict import LEAST_ROWS


def curves(group: CurveSet) -> Chart:
    """All layers on common axes, early ones faint, late ones strong; details of a layer show when it is chosen."""
    reading, (low, high) = group.reading, group.ticks
    words = reading.axis.replace("_", " ")
    ends = ((float(low), str(low)), (float(high), str(high)))
    x = Axis(words[:30], (low, high), reading.axis in LOG_AXES, ends)
    guide = [Series(group.curves[0].earlier, "dashed")] if group.guide and group.curves else []
    lines = [_curve(group, curve) for curve in group.curves]
    title = f"{reading.kind} by {reading.axis}, a line per layer"
    return Chart(title, x, Axis(reading.unit, group.values, group.log), (*guide, *lines))


def _curve(group: CurveSet, curve: Curve) -> Series:
    whole = group.kind == "damage.depth"
    words, hidden = "the model" if whole else f"layer {curve.layer}", []
    if curve.chosen:
        unit = " bytes" if counts_bytes(group.reading) else ""
        words += f" keeps {curve.chosen[0]}{unit}: {number(curve.chosen[1], 3)}"
    elif curve.note:
        words += f", {curve.note}"
    if len(curve.earlier) > 1 and not group.guide:
        hidden.append(Series(curve.earlier, "dashed"))
    if curve.errors:
        known = [(point, error) for point, error in zip(curve.points, curve.errors, strict=True) if error > 0]
        ends = tuple((v - error, v + error) for (_, v), error in known)
        hidden.append(Series(tuple(point for point, _ in known), "bars", intervals=ends))
    mark = (Series((curve.chosen,), "diamond"),) if curve.chosen else ()
    layer = None if whole else curve.layer
    return Series(curve.points, "line", words, layer=layer, parts=mark, hidden=tuple(hidden))


def strips(group: StripSet) -> RowChart:
    """A row per layer, a dot per head; the full size as a ghost behind, the values that matter as dark lines."""
    rows = []
    for strip in group.strips:
        full = (Bar(0.0, strip.full, "g"),) if strip.full else ()
        dots = tuple((value, "d") for value in strip.values)
        title = f"layer {strip.layer}: {strip.words}"
        rows.append(Row(str(strip.layer), strip.words, title, strip.layer, full, dots=dots))
    title = f"{group.kind} of every {group.reading.axis.replace('_', ' ')}, per layer"
    return RowChart(title, group.values, tuple(rows), marks=group.marks)


def damage(rows: Sequence[DamageRow]) -> RowChart:
    """A stacked bar per layer, units in the same order everywhere."""
    found = []
    for row in rows:
        bars, start = [], 0.0
        for unit in (unit for unit in UNITS if unit in row.parts):
            value = max(0.0, row.parts[unit])
            words = f"layer {row.layer}, {LABELS[unit]}: damage {number(row.parts[unit])}"
            bars.append(Bar(start, start + value, f"u-{unit}", words))
            start += value
        words = number(row.total) if row.parts else "nothing cut"
        found.append(Row(str(row.layer), words, f"layer {row.layer}: {words}", row.layer, tuple(bars)))
    most = max((bar.end for row in found for bar in row.bars), default=0.0) or 1.0
    title = "Predicted damage of every layer at its chosen sizes, by unit"
    return RowChart(title, (0.0, most), tuple(found), axis=False)


def bits(rows: Sequence[BitRow]) -> RowChart:
    """A row per layer, from the most important number of a cached row to the least, coloured by bits."""
    found = []
    for row in rows:
        bars, start = [], 0
        for width, count in row.spans:
            kept = f"in {bit_words(width)}" if width else bit_words(0)
            title = f"layer {row.layer}, {row.part}: {count:,} of {row.full:,} coefficients {kept}"
            bars.append(Bar(start / row.full, (start + count) / row.full, f"bit-{width}", title, str(width)))
            start += count
        words = f"{row.mean:.1f} bits"
        title = f"layer {row.layer}, {row.part}: {words}, {row.kept:,} of {row.full:,} coefficients kept"
        found.append(Row(str(row.layer), words, title, row.layer, tuple(bars)))
    part = rows[0].part if rows else ""
    title = f"Bits of cached {part} by layer, from the most important coefficient of a row to the least"
    return RowChart(title, (0.0, 1.0), tuple(found), percent=True)


def healing(part: str, rows: Sequence[HealRow], every: Mapping[str, Sequence[HealRow]]) -> RowChart:
    """Per layer, the error before (ring) and after (dot) healing, on an axis that every part shares."""
    values = [value for known in every.values() for row in known for value in (row.before, row.after)]
    log = bool(values) and min(values) > 0 and max(values) > 10 * min(values)
    found = []
    for row in rows:
        words = f"{number(row.before, 3)} → {number(row.after, 3)}"
        title, dots = f"layer {row.layer}, {part}: {words}", ((row.before, "o"), (row.after, "k"))
        spans = ((row.before, row.after, "c"),)
        found.append(Row(str(row.layer), words, title, row.layer, spans=spans, dots=dots))
    title = f"Relative error of {part} per layer, before and after healing"
    return RowChart(title, value_range(values, log), tuple(found), log)


def loss(record: dict[str, Any]) -> Chart | None:
    """The loss while healing, and dots on held-out text; None where fewer than two steps were kept."""
    points, held = loss_curve(record), held_out_curve(record)
    if len(points) < 2:
        return None
    steps = ends_of(x for x, _ in points)
    ticks = ((points[0][0], number(points[0][0])), (points[-1][0], f"step {number(points[-1][0])}"))
    dots = [Series(((x, y),), "dot", f"step {number(x)}: {number(y, 3)}") for x, y in held]
    y = Axis("loss", ends_of(y for _, y in (*points, *held)))
    return Chart("loss while healing", Axis("", steps, ticks=ticks), y, (Series(points), *dots))


def marks(found: Mapping[str, Measure]) -> RowChart:
    """A few numbers on one axis from zero, each with its name, and an interval where one is known."""
    rows = []
    for name, measure in found.items():
        ends = as_number(measure.low), as_number(measure.high)
        spans = ((ends[0], ends[1], "w"),) if ends[0] is not None and ends[1] is not None else ()
        rows.append(Row(name, number(measure.value, 3), spans=spans, dots=((measure.value, "o" if spans else "k"),)))
    high = max([1e-12, *(end for m in found.values() for end in (m.value, as_number(m.high) or 0.0))])
    title = ", ".join(f"{name} {number(measure.value)}" for name, measure in found.items())
    return RowChart(title, (0.0, high), tuple(rows), axis=False)


def prices(pairs: Sequence[Pair]) -> Chart:
    """Predicted across, measured up, both logarithmic, with the diagonal on which they agree."""
    low, high = value_range([value for pair in pairs for value in (pair.predicted, pair.measured)], True)
    layers: dict[int, list[tuple[float, float]]] = {}
    for pair in pairs:
        layers.setdefault(pair.layer, []).append((pair.predicted, pair.measured))
    dots = [Series(tuple(own), "dots", f"layer {layer}", layer=layer) for layer, own in layers.items()]
    diagonal = Series(((low, low), (high, high)), "dashed")
    title = "Price of single cuts: as measured against as predicted, a dot per layer and size"
    x, y = Axis("as predicted", (low, high), True), Axis("as measured", (low, high), True)
    return Chart(title, x, y, (diagonal, *dots), frame=SQUARE)


def prices_in_words(pairs: Sequence[Pair]) -> str:
    """How far the measured prices lie from the predicted ones."""
    ratios = sorted(pair.measured / pair.predicted for pair in pairs)
    low, high = (ratios[int(part * (len(ratios) - 1))] for part in (0.1, 0.9))
    return (
        "A dot per layer and size, late layers stronger; on the dashed line both agree. Measured prices are "
        f"{median(ratios):.2g} times the predicted ones in the middle, {low:.2g} to {high:.2g} times for four in five. "
        "The plan uses the measured ones."
    )


def frontier(dossier: Dossier) -> Chart | None:
    """Least damage by share of the first budget's price, and where the plans stand; None where nothing is known.

    Chosen: diamond. Another strategy: ring. Measured: cross, with its interval.
    """
    plan, sweep = dossier.plan, dossier.sweep
    if plan is None or not plan.budgets:
        return None
    solved = sweep is not None and len(sweep.answers) > 1
    found = sweep.answers if sweep and solved else plan.frontier
    points = tuple(sorted((p.share, p.damage) for p in found if math.isfinite(p.share + p.damage)))
    plans = [_rival(row, dossier) for row in rivals(dossier) if row.share is not None and row.predicted is not None]
    if not points and len(plans) < 2:
        return None
    known = [Series(points)] if points else []
    shown = [one for series in (*known, *plans) for one in (series, *series.parts)]
    heights = [y for one in shown for y in (*(y for _, y in one.points), *(end for e in one.intervals for end in e))]
    shares, log = [x for one in shown for x, _ in one.points], any(height > 0 for height in heights)
    low, high = min(shares), max(shares)
    budget = plan.budgets[0]
    title = f"Least predicted damage by share of the source's {budget.name} ({budget.unit}), {len(plans)} plans marked"
    of = f"the cache at {WHOLE} bits a number" if budget.name == "kv" and is_coded(plan) else budget.name
    x = Axis(f"share of {of}", (low if low < high else low - 0.1, high), percent=True)
    y = Axis("predicted damage", value_range(heights, log), log)
    return Chart(title, x, y, (*known, *plans), frame=WIDE, cursor=solved and log)


def _rival(row: Rival, dossier: Dossier) -> Series:
    measured = dossier.verdict.damage.get("measured") if dossier.verdict and row.chosen else None
    ends = (as_number(measured.low), as_number(measured.high)) if measured else (None, None)
    cross: tuple[Series, ...] = ()
    share, predicted = row.share or 0.0, row.predicted or 0.0
    if row.measured is not None:
        known = ((ends[0], ends[1]),) if ends[0] is not None and ends[1] is not None else ()
        cross = (Series(((share, row.measured),), "cross", intervals=known),)
    words = f"{row.strategy}: predicted {number(row.predicted)}, measured {number(row.measured)}"
    style = "diamond" if row.chosen else "ring"
    return Series(((share, predicted),), style, words, row.strategy[:24], parts=cross)


def by_length(verdict: Verdict) -> Chart | None:
    """Change of perplexity over length with its band, the limit and the calibrated length; None below two lengths."""
    known = [q for q in verdict.lengths if all(map(math.isfinite, (q.damage, q.low, q.high)))]
    if len(known) < 2:
        return None
    points = tuple((float(q.length), judged.change(q.damage)) for q in known)
    ends = tuple((judged.change(q.low), judged.change(q.high)) for q in known)
    dots = []
    for q, point, (low, high) in zip(known, points, ends, strict=True):
        words = f"{q.length:,} tokens: {number(point[1], 3)}% ({interval(low, high, 3)}), {q.rows} rows"
        dots.append(Series((point,), "dot" if q.rows >= LEAST_ROWS else "ring", words))
    limit = judged.change(verdict.limit)
    heights = [limit, *(y for _, y in points), *(end for both in ends for end in both)]
    ticks = tuple((float(q.length), f"{q.length:,}") for q in known)
    return Chart(
        title=f"Change of perplexity at {len(known)} lengths, with 95% intervals and the limit",
        x=Axis("tokens of a row", (points[0][0], points[-1][0]), True, ticks),
        y=Axis("change of perplexity, %", value_range(heights, False)),
        series=(Series(points, "band", intervals=ends), Series(points), *dots),
        across=((limit, f"limit {verdict.max_loss}"),),
        upright=((float(verdict.length), f"calibrated at {verdict.length:,}"),),
    )


def draw_fact(fact: Fact) -> str:
    """Two bars from zero, before above after; where an interval is known, points on an axis that shows its width."""
    shown = [v for v in (fact.before, fact.after, fact.high) if v is not None]
    if not shown or max(shown) <= 0:
        return ""
    label = f"{fact.label}: {number(fact.before)} before, {number(fact.after)} after"
    if fact.interval and fact.after is not None:
        return svg(202, 18, f"{label}, {fact.range} {fact.interval}", _points(fact, fact.after))
    scale = Scale(0.0, max(shown), 0.0, 200.0)
    body = rect(0, 0, scale(fact.before), 7, "g") if fact.before is not None else ""
    body += rect(0, 10, scale(fact.after), 7, "k") if fact.after is not None else ""
    return svg(202, 18, label, body)


def _points(fact: Fact, after: float) -> str:
    """A ring before, a dot with its interval after; the axis need not begin at zero."""
    known = [v for v in (fact.before, after, fact.low, fact.high) if v is not None]
    low, high = min(known), max(known)
    margin = (high - low) * 0.15 or abs(high) * 0.1 or 1.0
    scale = Scale(low - margin, high + margin, 0.0, 200.0)
    left, right = scale(fact.low or 0.0), scale(fact.high or 0.0)
    body = line(0, 9, 200, 9, "l") + path(f"M{xy(left)} 9H{xy(right)}M{xy(left)} 4V14M{xy(right)} 4V14", "w")
    body += circle(scale(fact.before), 9, 4, "o") if fact.before is not None else ""
    return body + circle(scale(after), 9, 4.4, "k")
