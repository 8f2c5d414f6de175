"""What each picture shows, as plain data: tests look here, drawing comes after."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from headwise.report._facts import Comparison, comparisons
from headwise.report._text import as_number
from headwise.types import UNITS, Dossier, LayerShape, Plan, Reading, Readings

SIZES = ("query_heads", "kv_heads", "qk_dim", "v_dim", "mlp_width")
LABELS = {
    "query_heads": "query heads",
    "kv_heads": "key/value heads",
    "qk_dim": "query/key dim",
    "v_dim": "value dim",
    "mlp_width": "MLP width",
}
UNIT_LABELS = {
    "qk": "query/key dim",
    "v": "value dim",
    "mlp": "MLP width",
    "heads": "query heads",
    "kv_heads": "key/value heads",
    "depth": "whole layer",
}


class DamageRow(NamedTuple):
    """Predicted damage of one layer at its chosen sizes, by unit."""

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

    kind: str
    axis: str
    unit: str
    meaning: str
    probe: str
    earlier_probe: str
    tokens: int
    ticks: tuple[int, int]
    values: tuple[float, float]
    log: bool
    curves: tuple[Curve, ...]
    used: bool  # whether the plan chose from it
    log_across: bool = False
    guide: str = ""  # what the dashed line is, where it is no earlier probe's


class Frontier(NamedTuple):
    """Least damage by share of the first budget's price, where the plan and the others stand."""

    budget: str
    unit: str
    points: tuple[tuple[float, float], ...]
    marks: tuple[Comparison, ...]
    measured: tuple[float, float, float] | None  # of the chosen: low, middle, high
    solved: bool = False  # whether every point has a plan behind it that the slider can show


class HealRow(NamedTuple):
    """Relative error of one part of one layer before and after healing."""

    layer: int
    before: float
    after: float


def chosen_kinds(plan: Plan, layer: int) -> dict[str, tuple[str, int]]:
    """Per unit that the plan cuts in a layer: the reading that prices the cut, and the size on its axis."""
    return _priced_by(plan, plan.source.layers[layer], plan.target.layers[layer])


def _priced_by(plan: Plan, old: LayerShape, new: LayerShape) -> dict[str, tuple[str, int]]:
    kinds: dict[str, tuple[str, int]] = {}
    if new.gone:
        return kinds
    if new.qk_width < old.qk_width and not plan.source.grain.folds:
        kinds["qk"] = ("damage.qk_pairs_shared" if plan.portable else "damage.qk_pairs", new.qk_width)
    elif new.qk_dim < old.qk_dim:
        kinds["qk"] = ("damage.qk_projected", new.qk_dim)
    for unit, size in (("v", "v_dim"), ("mlp", "mlp_width"), ("heads", "queries_per_group"), ("kv_heads", "kv_heads")):
        if getattr(new, size) < getattr(old, size):
            kinds[unit] = (f"damage.{unit}", getattr(new, size))
    return kinds


def layer_damage(readings: Readings, plan: Plan, layer: int, new: LayerShape) -> float | None:
    """What one layer's sizes were predicted to cost; None for a layer that is gone, as those are priced together."""
    old = plan.source.layers[layer]
    if new.gone and not old.gone:
        return None
    found = [_look_up(readings.curve(kind), layer, tick) for kind, tick in _priced_by(plan, old, new).values()]
    return sum(value for value in found if value is not None)


def damage_rows(readings: Readings, plan: Plan) -> tuple[DamageRow, ...]:
    """What every layer's chosen sizes were predicted to cost, by unit; what was not priced is left out."""
    rows = []
    gone = len(plan.target.layers) - len(plan.kept_layers)
    for layer, shape in enumerate(plan.target.layers):
        if shape.gone:  # priced together, so each has its share
            price = _look_up(readings.curve("damage.depth"), 0, gone)
            rows.append(DamageRow(layer, {} if price is None else {"depth": price / gone}))
            continue
        kinds = chosen_kinds(plan, layer)
        found = {
            unit: _look_up(readings.curve(kinds[unit][0]), layer, kinds[unit][1]) for unit in UNITS if unit in kinds
        }
        rows.append(DamageRow(layer, {unit: value for unit, value in found.items() if value is not None}))
    return tuple(rows)


def _look_up(reading: Reading | None, layer: int, tick: int) -> float | None:
    if reading is None or layer >= len(reading.ticks) or tick not in reading.ticks[layer]:
        return None
    return as_number(reading.at(layer, tick))


LOG_AXES = {"length", "lag"}  # what matters there is the ratio
LOG_KINDS = {"saturation.jacobian_norm", "lags.contribution"}


def curve_sets(readings: Readings, plan: Plan | None) -> tuple[CurveSet, ...]:
    """One set per kind of reading, those that the plan chose from first."""
    kinds = dict.fromkeys(reading.kind for reading in readings.curves)
    sets = [_curve_set(kind, readings, plan) for kind in kinds]
    return tuple(sorted((s for s in sets if s.curves), key=lambda s: not s.used))


def _curve_set(kind: str, readings: Readings, plan: Plan | None) -> CurveSet:
    versions = [reading for reading in readings.curves if reading.kind == kind]
    reading, earlier = versions[-1], versions[0] if len(versions) > 1 else None
    most = 24 if len(reading.ticks) <= 32 else 12
    curves = tuple(
        _curve(reading, earlier, layer, chosen_size(reading, plan, layer), most) for layer in range(len(reading.ticks))
    )
    shown = [v for c in curves for _, v in (*c.points, *c.earlier)]
    sizes = [t for c in curves for t, _ in c.points] or [0]
    log = wants_log(kind, shown)
    used = plan is not None and any(kind == k for i in range(len(plan.keep)) for k, _ in chosen_kinds(plan, i).values())
    return CurveSet(
        kind=kind,
        axis=reading.axis,
        unit=reading.unit,
        meaning=reading.meaning,
        probe=reading.probe,
        earlier_probe=earlier.probe if earlier else "",
        tokens=reading.tokens,
        ticks=(min(sizes), max(sizes)),
        values=value_range(shown, log),
        log=log,
        curves=tuple(c for c in curves if c.points),
        used=used,
        log_across=reading.axis in LOG_AXES,
    )


def _curve(reading: Reading, earlier: Reading | None, layer: int, chosen: int | None, most: int) -> Curve:
    row = [(t, v) for t, v in zip(reading.ticks[layer], reading.values[layer], strict=True) if math.isfinite(v)]
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
    used = dict(chosen_kinds(plan, layer).values())
    if reading.kind in used or reading.kind.startswith("damage.qk_"):
        return used.get(reading.kind)
    size = getattr(plan.target.layers[layer], reading.axis, None)
    return size if isinstance(size, int) else None


def wants_log(kind: str, values: list[float]) -> bool:
    positive = [v for v in values if v > 0]
    if kind.startswith("damage.") or kind in LOG_KINDS:
        return bool(positive)
    return bool(positive) and len(positive) == len(values) and max(positive) > 30 * min(positive)


def value_range(values: list[float], log: bool) -> tuple[float, float]:
    """Ends of an axis. A logarithmic one shows at most five decades: what is smaller lies on its floor."""
    if log:
        positive = [v for v in values if v > 0] or [1.0]
        high = max(positive)
        low = max(min(positive), high * 1e-5)
        low = low / 3 if any(v < low for v in values) else low  # room for the floor
        return (low, high) if high > low * 1.01 else (low / 10, high)
    low, high = min([0.0, *values]), max([0.0, *values])
    return (low, high) if high > low else (low, low + 1.0)


def frontier(dossier: Dossier) -> Frontier | None:
    """The frontier with its marks; None where there is nothing to draw."""
    plan = dossier.plan
    if plan is None or not plan.budgets:
        return None
    solved = dossier.sweep is not None and len(dossier.sweep.answers) > 1
    found = dossier.sweep.answers if dossier.sweep and solved else plan.frontier
    points = tuple(sorted((p.share, p.damage) for p in found if math.isfinite(p.share + p.damage)))
    marks = tuple(m for m in comparisons(dossier) if m.share is not None and m.predicted is not None)
    if not points and len(marks) < 2:
        return None
    damage = dossier.verdict.damage if dossier.verdict else {}
    middle = as_number(damage.get("measured"))
    low, high = (as_number(damage.get(f"measured_{end}")) for end in ("low", "high"))
    measured = None if middle is None else (middle if low is None else low, middle, middle if high is None else high)
    return Frontier(plan.budgets[0].name, plan.budgets[0].unit, points, marks, measured, solved)


def healing_parts(healing: dict[str, Any]) -> dict[str, tuple[HealRow, ...]]:
    """Rows per part of a layer, such as attention and mlp; whatever is not a pair of numbers is left out."""
    parts: dict[str, list[HealRow]] = {}
    layers = healing.get("layers")
    for index, layer in enumerate(layers if isinstance(layers, (list, tuple)) else ()):
        for part, gain in layer.items() if isinstance(layer, dict) else ():
            if not isinstance(gain, dict):
                continue
            before, after = as_number(gain.get("error_before")), as_number(gain.get("error_after"))
            if before is not None and after is not None:
                parts.setdefault(str(part), []).append(HealRow(index, before, after))
    return {part: tuple(rows) for part, rows in parts.items()}


def healing_range(parts: dict[str, tuple[HealRow, ...]]) -> tuple[tuple[float, float], bool]:
    """Ends of the axis that all parts share, and whether it is logarithmic: only where no error is nothing."""
    values = [v for rows in parts.values() for row in rows for v in (row.before, row.after)]
    log = bool(values) and min(values) > 0 and max(values) > 10 * min(values)
    return value_range(values, log), log
