"""What every picture shows, as charts: data for the page, for figures, and for tests. `_chart` draws it."""

import math
from collections.abc import Mapping, Sequence
from statistics import median

from headwise.report import _judged as judged
from headwise.report._bits import WHOLE, BitRow, bit_words, is_coded
from headwise.report._chart import SQUARE, WIDE, Axis, Bar, Chart, Row, RowChart, Series, ends_of
from headwise.report._data import LOG_AXES, Curve, CurveSet, DamageRow, Pair, counts_bytes, value_range
from headwise.report._diagnostics import StripSet
from headwise.report._healing import HealRow, loss_curve
from headwise.report._rivals import Rival, rivals
from headwise.report._sizes import sizes_of
from headwise.report._text import as_number, interval, number
from headwise.report._words import axis_words, known_ends, reading_words
from headwise.runs.dossier import Dossier
from headwise.types import UNITS, Healing, Measure, Verdict
from headwise.types.unit import LABELS
from headwise.types.verdict import LEAST_ROWS


def curves(group: CurveSet) -> Chart:
    """All layers on common axes, early ones faint, late ones strong; details of a layer show when it is chosen."""
    reading, (low, high) = group.reading, group.ticks
    ends = ((float(low), str(low)), (float(high), str(high)))
    x = Axis(axis_words(reading.axis)[:40], (low, high), reading.axis in LOG_AXES, ends)
    guide = [Series(group.curves[0].earlier, "dashed")] if group.guide and group.curves else []
    lines = [_curve(group, curve) for curve in group.curves]
    title = f"{reading_words(reading.kind, reading.axis)}, a line per layer"
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
    title = f"{reading_words(group.kind, group.reading.axis)}, a dot per {axis_words(group.reading.axis)}, by layer"
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
    title = "Damage of every layer at its chosen sizes, predicted before healing, by unit"
    return RowChart(title, (0.0, most), tuple(found))


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


def loss(healing: Healing) -> Chart | None:
    """The loss while healing, and dots on held-out text; None where fewer than two steps were kept."""
    points, held = loss_curve(healing), loss_curve(healing, held_out=True)
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
        spans = ((*ends, "w"),) if (ends := known_ends(measure)) else ()
        rows.append(Row(name, number(measure.value, 3), spans=spans, dots=((measure.value, "o" if spans else "k"),)))
    high = max([1e-12, *(end for m in found.values() for end in (m.value, as_number(m.high) or 0.0))])
    title = ", ".join(f"{name} {number(measure.value)}" for name, measure in found.items())
    return RowChart(title, (0.0, high), tuple(rows), axis=False)


def cuts(pairs: Sequence[Pair]) -> Chart:
    """Predicted across, measured up, both logarithmic, with the diagonal on which they agree."""
    low, high = value_range([value for pair in pairs for value in (pair.predicted, pair.measured)], True)
    layers: dict[int, list[tuple[float, float]]] = {}
    for pair in pairs:
        layers.setdefault(pair.layer, []).append((pair.predicted, pair.measured))
    dots = [Series(tuple(own), "dots", f"layer {layer}", layer=layer) for layer, own in layers.items()]
    diagonal = Series(((low, low), (high, high)), "dashed")
    title = "Damage of single cuts: measured against predicted, a dot per layer and size"
    x, y = Axis("predicted damage", (low, high), True), Axis("measured damage", (low, high), True)
    return Chart(title, x, y, (diagonal, *dots), frame=SQUARE)


def cuts_in_words(pairs: Sequence[Pair]) -> str:
    """How far measured damages of single cuts lie from the predicted ones."""
    ratios = sorted(pair.measured / pair.predicted for pair in pairs)
    low, high = (ratios[int(part * (len(ratios) - 1))] for part in (0.1, 0.9))
    return (
        "A dot per layer and size, late layers stronger; on the dashed line both agree. What was measured is "
        f"{median(ratios):.2g} times what was predicted in the middle, {low:.2g} to {high:.2g} times for four in five. "
        "The plan uses what was measured."
    )


def frontier(dossier: Dossier) -> Chart | None:
    """Least predicted damage by share of the first budget's size, and where plans stand; None where nothing is known.

    Chosen: diamond. Another strategy: ring. Measured: cross, with its interval.
    """
    plan, sweep = dossier.plan, dossier.sweep
    if plan is None or not plan.budgets:
        return None
    solved = sweep is not None and len(sweep.answers) > 1
    found = sweep.answers if sweep and solved else plan.frontier
    points = tuple(sorted((p.share, p.damage) for p in found if math.isfinite(p.share + p.damage)))
    plans = [_rival(row, dossier) for row in rivals(dossier) if row.share is not None]
    if not points and len(plans) < 2:
        return None
    known = [Series(points)] if points else []
    shown = [one for series in (*known, *plans) for one in (series, *series.parts)]
    heights = [y for one in shown for y in (*(y for _, y in one.points), *(end for e in one.intervals for end in e))]
    shares, log = [x for one in shown for x, _ in one.points], any(height > 0 for height in heights)
    low, high = min(shares), max(shares)
    budget = plan.budgets[0]
    title = f"Least damage, predicted before healing, by share of the source's {budget.name}, {len(plans)} plans marked"
    named = {size.budget.key: size.label for size in sizes_of(plan)}
    of = f"the cache at {WHOLE} bits per number" if budget.name == "kv" and is_coded(plan) else named.get(budget.key)
    x = Axis(f"share of {of or budget.name}", (low if low < high else low - 0.1, high), percent=True)
    y = Axis("damage", value_range(heights, log), log)
    return Chart(title, x, y, (*known, *plans), frame=WIDE, cursor=solved and log)


def _rival(row: Rival, dossier: Dossier) -> Series:
    measured = dossier.verdict.damage.get("measured") if dossier.verdict and row.chosen else None
    ends = (known,) if (known := known_ends(measured)) else ()
    share = row.share or 0.0
    cross = () if row.measured is None else (Series(((share, row.measured),), "cross", intervals=ends),)
    words = f"{row.strategy}: predicted before healing {number(row.predicted)}, measured {number(row.measured)}"
    style, name = ("diamond", "this run") if row.chosen else ("ring", row.strategy[:24])
    return Series(((share, row.predicted),), style, words, name, parts=cross)


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
    room = 1.25 * limit  # for words above its line
    heights = [room, *(y for _, y in points), *(end for both in ends for end in both)]
    ticks = tuple((float(q.length), f"{q.length:,}") for q in known)
    return Chart(
        title=f"Change of perplexity at {len(known)} lengths, with 95% intervals and the limit",
        x=Axis("tokens of a row", (points[0][0], points[-1][0]), True, ticks),
        y=Axis("change of perplexity, %", value_range(heights, False)),
        series=(Series(points, "band", intervals=ends), Series(points), *dots),
        across=((limit, f"limit {verdict.max_loss}"),),
        upright=((float(verdict.length), f"calibrated at {verdict.length:,}"),),
    )
