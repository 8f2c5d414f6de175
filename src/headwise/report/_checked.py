"""Predictions beside measurements, as plain data: prices of single cuts, and the damage of the whole plan."""

from __future__ import annotations

from statistics import median
from typing import Any, NamedTuple

from headwise.report._text import as_number, number
from headwise.types import Dossier, Readings


class Pair(NamedTuple):
    """The price of one size of one layer, as one probe predicted and a later one measured it."""

    kind: str
    layer: int
    size: int
    predicted: float
    measured: float


class Mark(NamedTuple):
    """A named number, with its interval where one is known."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None


def price_pairs(readings: Readings) -> tuple[Pair, ...]:
    """Every price that two probes gave: the first predicted it, the last measured it."""
    pairs: list[Pair] = []
    for kind in dict.fromkeys(r.kind for r in readings.curves if r.kind.startswith("damage.")):
        versions = [reading for reading in readings.curves if reading.kind == kind]
        if len(versions) < 2:
            continue
        first, last = versions[0], versions[-1]
        for layer, (sizes, values) in enumerate(zip(last.ticks, last.values, strict=True)):
            known = dict(zip(first.ticks[layer], first.values[layer], strict=True)) if layer < len(first.ticks) else {}
            for size, value in zip(sizes, values, strict=True):
                before, after = as_number(known.get(size)), as_number(value)
                if before is not None and after is not None and before > 0 and after > 0:
                    pairs.append(Pair(kind, layer, size, before, after))
    return tuple(pairs)


def pairs_in_words(pairs: tuple[Pair, ...]) -> str:
    """How far the measured prices lie from the predicted ones."""
    ratios = sorted(pair.measured / pair.predicted for pair in pairs)
    low, high = (ratios[int(part * (len(ratios) - 1))] for part in (0.1, 0.9))
    return (
        f"A dot per layer and size, late layers stronger; on the dashed line both agree. Measured prices are "
        f"{median(ratios):.2g} times the predicted ones in the middle, {low:.2g} to {high:.2g} times for four in five. "
        "The plan uses the measured ones."
    )


def damage_marks(dossier: Dossier) -> tuple[Mark, ...]:
    """The whole plan's damage: as the sum of its prices, as rehearsed on calibration text, as measured."""
    values: dict[str, Any] = dict(dossier.verdict.damage) if dossier.verdict else {}
    plan = dossier.plan.predicted_damage if dossier.plan else None
    summed = as_number(values.get("sum_of_prices", plan))
    rehearsed = as_number(values.get("predicted")) if "sum_of_prices" in values else None
    measured, low, high = (as_number(values.get(name)) for name in ("measured", "measured_low", "measured_high"))
    marks = [Mark("sum of prices", summed)] if summed is not None else []
    marks += [Mark("rehearsed", rehearsed)] if rehearsed is not None else []
    return (*marks, Mark("measured", measured, low, high)) if measured is not None else tuple(marks)


def recovery_in_words(healing: dict[str, Any] | None) -> str:
    """What healing recovered of the damage, on text that nothing was fitted to; empty where that was not measured."""
    before, after = (as_number((healing or {}).get(name)) for name in ("rehearsed_before", "rehearsed"))
    if before is None or after is None or before <= 0:
        return ""
    share = f"{1 - after / before:.0%} recovered" if after <= before else "nothing recovered"
    return f"damage {number(before, 3)} before healing, {number(after, 3)} after: {share}"


def not_kept_in_words(healing: dict[str, Any] | None) -> str:
    """Which stage of a healing did harm and was not kept; empty where all were."""
    reason = (healing or {}).get("reason") if (healing or {}).get("kept") is False else None
    return f"{str(reason)[:1].upper()}{str(reason)[1:]}" if reason else ""


def loss_curve(healing: dict[str, Any]) -> tuple[tuple[float, float], ...]:
    """Step and loss of a healing that trains, where it kept them: as numbers, pairs or records."""
    found: list[tuple[float, float]] = []
    rows = healing.get("curve")
    for index, row in enumerate(rows if isinstance(rows, (list, tuple)) else ()):
        if isinstance(row, dict):
            step, loss = row.get("step", index), next((row[k] for k in ("loss", "kl", "value") if k in row), None)
        elif isinstance(row, (list, tuple)) and len(row) == 2:
            step, loss = row
        else:
            step, loss = index, row
        step, loss = as_number(step), as_number(loss)
        if step is not None and loss is not None:
            found.append((step, loss))
    return tuple(sorted(found))


def held_out_curve(healing: dict[str, Any]) -> tuple[tuple[float, float], ...]:
    """Step and loss on text that a healing did not learn from, where it looked."""
    rows = healing.get("curve")
    looked = [row for row in rows if isinstance(row, dict) and "held_out" in row] if isinstance(rows, list) else []
    return loss_curve({"curve": [[row.get("step"), row["held_out"]] for row in looked]})
