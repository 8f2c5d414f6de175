"""What readings and plan say, as plain data: damage by layer, curves, single cuts. Drawing comes after."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from headwise.report._text import as_number
from headwise.types import CUTS, DAMAGE, UNIT_OF, LayerShape, Plan, Reading, Readings

LOG_AXES = {"length", "lag"}  # what matters there is the ratio
LOG_KINDS = {"saturation.jacobian_norm", "lags.contribution", "conditioning.outputs"}


class DamageRow(NamedTuple):
    """Predicted damage of one layer at its chosen sizes, by unit as `--allow` names it."""

    layer: int
    parts: dict[str, float]

    @property
    def total(self) -> float:
        """Damages of units add up."""
        return sum(self.parts.values())


class Curve(NamedTuple):
    """One layer's values by size, thinned to what a small picture can show."""

    layer: int
    points: tuple[tuple[int, float], ...]
    errors: tuple[float, ...] | None
    chosen: tuple[int, float] | None
    earlier: tuple[tuple[int, float], ...]  # the same as an earlier probe had it, or a guide
    note: str = ""  # a few words in the corner, where nothing was chosen


class CurveSet(NamedTuple):
    """One kind of reading over all layers, on common axes."""

    reading: Reading  # the one that is believed
    earlier_probe: str
    ticks: tuple[int, int]
    values: tuple[float, float]
    log: bool
    curves: tuple[Curve, ...]
    used: bool  # whether the plan chose from it
    guide: str = ""  # what the dashed line is, where it is no earlier probe's

    @property
    def kind(self) -> str:
        """What was read."""
        return self.reading.kind


class Pair(NamedTuple):
    """The damage of one size of one layer, as one probe predicted and a later one measured it."""

    kind: str
    layer: int
    size: int
    predicted: float
    measured: float


def cuts_of(plan: Plan, old: LayerShape, new: LayerShape) -> dict[str, int]:
    """Per reading that prices a cut of a layer: the size on its axis."""
    found: dict[str, tuple[str, int]] = {}
    pairs = "qk_pairs_shared" if plan.portable else "qk_pairs"
    for unit in CUTS if not new.gone else ():
        if unit.axis == "qk_width" and (plan.source.grain.folds or unit.curve != pairs):
            continue  # what was folded away is no pair that was dropped
        if new.coded and unit.allow in ("qk", "v") or not new.coded and unit.allow == "bits":
            continue  # one price for everything that is not kept
        if unit.full(new) < unit.full(old):  # of several curves of a unit the last; keys and values in bits add up
            found[unit.curve if unit.allow in ("bits", "weights") else unit.allow] = unit.kind, unit.full(new)
    return dict(found.values())


def chosen_kinds(plan: Plan, layer: int) -> dict[str, int]:
    """Per reading that prices a cut of the plan in a layer: the size on its axis."""
    return cuts_of(plan, plan.source.layers[layer], plan.target.layers[layer])


def layer_damage(readings: Readings, plan: Plan, layer: int, new: LayerShape) -> float | None:
    """What one layer's sizes were predicted to cost; None for a layer that is gone, as those are priced together."""
    old = plan.source.layers[layer]
    if new.gone and not old.gone:
        return None
    found = [_look_up(readings.curve(kind), layer, tick) for kind, tick in cuts_of(plan, old, new).items()]
    return sum(value for value in found if value is not None)


def damage_rows(readings: Readings, plan: Plan) -> tuple[DamageRow, ...]:
    """What every layer's chosen sizes were predicted to cost, by unit; what was not priced is left out."""
    rows = []
    gone = len(plan.target.layers) - len(plan.kept_layers)
    for layer, shape in enumerate(plan.target.layers):
        if shape.gone:  # priced together, so each has its share
            price = _look_up(readings.curve("damage.depth"), 0, gone)
            found: dict[str, float | None] = {"depth": None if price is None else price / gone}
        else:
            found = {}
            for kind, size in chosen_kinds(plan, layer).items():
                price, unit = _look_up(readings.curve(kind), layer, size), UNIT_OF[kind].allow
                known = found.get(unit)
                found[unit] = price if known is None else known + (price or 0.0)
        rows.append(DamageRow(layer, {unit: value for unit, value in found.items() if value is not None}))
    return tuple(rows)


def _look_up(reading: Reading | None, layer: int, tick: int) -> float | None:
    if reading is None or layer >= len(reading.ticks) or tick not in reading.ticks[layer]:
        return None
    return as_number(reading.at(layer, tick))


def curve_sets(readings: Readings, plan: Plan | None) -> tuple[CurveSet, ...]:
    """One set per kind of reading, those that the plan chose from first."""
    kinds = dict.fromkeys(reading.kind for reading in readings.curves)
    sets = [_curve_set(kind, readings, plan) for kind in kinds]
    return tuple(sorted((s for s in sets if s.curves), key=lambda s: not s.used))


def _curve_set(kind: str, readings: Readings, plan: Plan | None) -> CurveSet:
    versions = [reading for reading in readings.curves if reading.kind == kind]
    reading, earlier = versions[-1], versions[0] if len(versions) > 1 else None
    most = 24 if len(reading.ticks) <= 32 else 12
    layers = range(len(reading.ticks))
    curves = tuple(_curve(reading, earlier, layer, chosen_size(reading, plan, layer), most) for layer in layers)
    shown = [v for c in curves for _, v in (*c.points, *c.earlier)]
    sizes = [t for c in curves for t, _ in c.points] or [0]
    log = wants_log(kind, shown)
    used = plan is not None and any(kind in chosen_kinds(plan, i) for i in range(len(plan.keep)))
    known = tuple(curve for curve in curves if curve.points)
    probe = earlier.probe if earlier else ""
    return CurveSet(reading, probe, (min(sizes), max(sizes)), value_range(shown, log), log, known, used)


def _curve(reading: Reading, earlier: Reading | None, layer: int, chosen: int | None, most: int) -> Curve:
    row = [(t, v) for t, v in zip(reading.ticks[layer], reading.values[layer], strict=True) if math.isfinite(v)]
    if counts_bytes(reading) and len(row) > 1:
        row.remove(max(row))  # not coded: twice the bytes of the finest code
    keep = thin([t for t, _ in row], most, chosen, reading.axis in LOG_AXES)
    points = tuple(sorted((t, v) for t, v in row if t in keep))
    errors = None
    if reading.standard_error is not None:
        known = dict(zip(reading.ticks[layer], reading.standard_error[layer], strict=True))
        errors = tuple(as_number(known[t]) or 0.0 for t, _ in points)
    old: tuple[tuple[int, float], ...] = ()
    if earlier is not None and layer < len(earlier.ticks):
        pairs = zip(earlier.ticks[layer], earlier.values[layer], strict=True)
        old = tuple(sorted((t, v) for t, v in pairs if t in keep and math.isfinite(v)))
    mark = next(((t, v) for t, v in points if t == chosen), None)
    return Curve(layer, points, errors, mark, old)


def thin(ticks: list[int], most: int, chosen: int | None, log: bool) -> set[int]:
    """At most about `most` sizes, ends and the chosen one among them; on a logarithmic axis the small ones are kept."""
    if len(ticks) <= most:
        return set(ticks)
    step = (len(ticks) - 1) / (most - 1)
    places = [round(len(ticks) ** (i / (most - 1))) - 1 if log else round(i * step) for i in range(most)]
    return {ticks[i] for i in places} | ({chosen} & set(ticks) if chosen is not None else set())


def chosen_size(reading: Reading, plan: Plan | None, layer: int) -> int | None:
    """The size that the plan took on this reading's axis. Rival query/key curves are marked only where used."""
    if plan is None or layer >= len(plan.target.layers):
        return None
    used = chosen_kinds(plan, layer)
    if reading.kind in used or reading.kind.startswith("damage.qk_"):
        return used.get(reading.kind)
    target = plan.target.layers[layer]
    size = getattr(target, reading.axis, None)
    other = target.coded and reading.axis in ("qk_dim", "v_dim")  # directions of another basis
    return size if isinstance(size, int) and not other else None


def counts_bytes(reading: Reading) -> bool:
    """Whether a reading prices codes by their bytes, which are others in every layer."""
    unit = UNIT_OF.get(reading.kind)
    return unit is not None and unit.allow == "bits"


def byte_steps(reading: Reading, most: int) -> tuple[int, ...]:
    """Even steps over the bytes of all codes, for tables that all layers share; what is not coded is left out."""
    codes = [sorted(row)[: max(1, len(row) - 1)] for row in reading.ticks if row]
    low, high = min((row[0] for row in codes), default=0), max((row[-1] for row in codes), default=0)
    return tuple(dict.fromkeys(round(low + (high - low) * i / (most - 1)) for i in range(most)))


def fitting(sizes: Sequence[int], room: int) -> int | None:
    """The largest size that fits."""
    return max((size for size in sizes if size <= room), default=None)


def at_sizes(reading: Reading, values: Sequence[Sequence[float]], sizes: Sequence[int]) -> list[dict[int, float]]:
    """Every layer's values by size; of codes, which differ by layer, those of the largest that fits each size."""
    rows = [dict(zip(ticks, row, strict=True)) for ticks, row in zip(reading.ticks, values, strict=True)]
    if not counts_bytes(reading):
        return rows
    fits = [{size: fitting(list(row), size) for size in sizes} for row in rows]
    return [{s: row[f] for s, f in own.items() if f is not None} for row, own in zip(rows, fits, strict=True)]


def wants_log(kind: str, values: list[float]) -> bool:
    """Whether values are shown on a logarithmic axis: damages, and what spans much."""
    positive = [v for v in values if v > 0]
    if kind.startswith(DAMAGE) or kind in LOG_KINDS:
        return bool(positive)
    return bool(positive) and len(positive) == len(values) and max(positive) > 30 * min(positive)


def value_range(values: Sequence[float], log: bool) -> tuple[float, float]:
    """Ends of an axis. A logarithmic one shows at most five decades: what is smaller lies on its floor."""
    if log:
        positive = [v for v in values if v > 0] or [1.0]
        high = max(positive)
        low = max(min(positive), high * 1e-5)
        low = low / 3 if any(v < low for v in values) else low  # room for the floor
        return (low, high) if high > low * 1.01 else (low / 10, high)
    low, high = min([0.0, *values]), max([0.0, *values])
    return (low, high) if high > low else (low, low + 1.0)


def cut_pairs(readings: Readings) -> tuple[Pair, ...]:
    """The damage of every cut that two probes priced: the first predicted it, the last measured it."""
    pairs: list[Pair] = []
    for kind in dict.fromkeys(r.kind for r in readings.curves if r.kind.startswith(DAMAGE)):
        versions = [reading for reading in readings.curves if reading.kind == kind]
        first, last = versions[0], versions[-1]
        for layer, (sizes, values) in enumerate(zip(last.ticks, last.values, strict=True) if first is not last else ()):
            for size, value in zip(sizes, values, strict=True):
                before, after = _look_up(first, layer, size), as_number(value)
                if before is not None and after is not None and before > 0 and after > 0:
                    pairs.append(Pair(kind, layer, size, before, after))
    return tuple(pairs)
