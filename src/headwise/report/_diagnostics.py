"""What the layers do, as plain data: every reading that is no damage, by the question that it answers."""

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import NamedTuple

from headwise.report._data import CurveSet, curve_sets, value_range
from headwise.report._text import as_number, listing, number
from headwise.types import DAMAGE, Plan, Reading, Readings

PER_HEAD = {"query_head", "kv_head"}  # axes along which values have no order: dots, not a curve
FULL = {"spectrum.logit_rank": "qk_dim", "spectrum.output_rank": "v_dim"}  # what a value is at most
FLAT, SHARP = -0.75, -0.25  # slopes: below the one a head saturates, above the other it stays sharp
# Shown unfolded.
FIRST = ("conditioning.outputs", "saturation.slope", "spectrum.logit_rank", "spectrum.output_rank", "lags.contribution")


class Strip(NamedTuple):
    """One layer's heads."""

    layer: int
    values: tuple[float, ...]
    full: float | None
    words: str


class StripSet(NamedTuple):
    """One kind of reading, a value per head."""

    reading: Reading
    values: tuple[float, float]
    marks: tuple[float, ...]
    strips: tuple[Strip, ...]
    error: float | None  # typical standard error of a value

    @property
    def kind(self) -> str:
        """What was read."""
        return self.reading.kind


class Topic(NamedTuple):
    """A question, why it matters, the answer in a sentence, and its readings, those to show first in front."""

    question: str
    why: str
    answer: str
    sets: tuple[CurveSet | StripSet, ...]


def diagnostics(readings: Readings, plan: Plan | None) -> tuple[Topic, ...]:
    """All readings that are no damage, by topic; topics without readings are left out."""
    found: dict[str, CurveSet | StripSet] = {}
    for group in curve_sets(readings, plan):
        if not group.kind.startswith(DAMAGE):
            dots = group.reading.axis in PER_HEAD
            found[group.kind] = strip_set(group.reading, readings) if dots else _guided(group)
    topics = []
    for question, probe, why, answer in TOPICS:
        kinds = [kind for kind in found if kind.startswith(probe)]
        kinds.sort(key=lambda kind: not kind.startswith(FIRST))
        sets = tuple(found.pop(kind) for kind in kinds)
        if sets:
            topics.append(Topic(question, why, answer(readings), sets))
    return tuple(topics)


def strip_set(reading: Reading, readings: Readings) -> StripSet:
    """Dots of every layer on one axis, with the full size where the shape knows it."""
    strips = tuple(
        Strip(layer, values, full, _in_words(values, full))
        for layer, row in enumerate(reading.values)
        if (values := tuple(v for v in row if as_number(v) is not None))
        for full in (_full(reading.kind, readings, layer),)
    )
    marks = (-1.0, 0.0) if reading.kind == "saturation.slope" else ()
    shown = [v for strip in strips for v in (*strip.values, strip.full or 0.0)]
    errors = [e for row in reading.standard_error or () for e in row if as_number(e) is not None]
    ends = value_range([*shown, *marks], log=False)
    return StripSet(reading, ends, marks, strips, median(errors) if errors else None)


def _full(kind: str, readings: Readings, layer: int) -> float | None:
    """The dimension that an effective rank is to be seen against."""
    layers = readings.shape.layers if readings.shape else ()
    return float(getattr(layers[layer], FULL[kind])) if kind in FULL and layer < len(layers) else None


def _in_words(values: Sequence[float], full: float | None) -> str:
    low, high = (number(end, 2) for end in (min(values), max(values)))
    ends = low if len(values) == 1 or low == high else f"{low} to {high}"
    return f"{ends} of {number(full)}" if full else ends


def _guided(group: CurveSet) -> CurveSet:
    """Where it helps: the line that even attention would follow, and what lies beyond the lags shown."""
    if group.kind == "saturation.jacobian_norm":
        curves = tuple(c._replace(earlier=tuple((t, 1 / t) for t, _ in c.points if t > 0)) for c in group.curves)
        shown = [v for c in curves for _, v in (*c.points, *c.earlier)]
        return group._replace(curves=curves, values=value_range(shown, True), guide="1/L, as with even attention")
    if group.kind == "lags.contribution":
        notes = [f"beyond: {max(0.0, 1 - sum(group.reading.values[c.layer])):.0%}" for c in group.curves]
        return group._replace(curves=tuple(c._replace(note=n) for c, n in zip(group.curves, notes, strict=True)))
    return group


def _values(readings: Readings, kind: str) -> list[float]:
    reading = readings.curve(kind)
    return [] if reading is None else [v for row in reading.values for v in row if as_number(v) is not None]


def _saturation(readings: Readings) -> str:
    slopes = _values(readings, "saturation.slope")
    if not slopes:
        return ""
    flat, sharp = sum(s < FLAT for s in slopes), sum(s > SHARP for s in slopes)
    return (
        f"Of {len(slopes)} heads, {flat} saturate (slope below {FLAT}) and {sharp} stay sharp (above {SHARP}); "
        f"the median slope is {number(median(slopes), 2)}."
    )


def _spectrum(readings: Readings) -> str:
    parts = []
    for kind, what in (
        ("logit_rank", "query/key directions carry the logits"),
        ("output_rank", "value directions reach the output"),
    ):
        ranks = _values(readings, f"spectrum.{kind}")
        parts += [f"about {fmean(ranks):.0f} {what}"] if ranks else []
    return f"On average over heads, {listing(parts)}." if parts else ""


def _lags(readings: Readings) -> str:
    reading = readings.curve("lags.contribution")
    if reading is None or not reading.values:
        return ""
    near = [sum(row[:8]) for row in reading.values]
    far = [max(0.0, 1 - sum(row)) for row in reading.values]
    return (
        f"The token itself and the seven before it give {min(near):.0%} to {max(near):.0%} of a layer's attention "
        f"output, what lies further back than the lags shown {min(far):.0%} to {max(far):.0%}."
    )


def _conditioning(readings: Readings) -> str:
    reading = readings.curve("conditioning.outputs")
    if reading is None or not reading.values:
        return ""
    last = [row[-1] for row in reading.values if row]
    return (
        f"For {reading.ticks[0][-1]} tokens the condition number of a layer's head outputs is "
        f"{number(min(last), 2)} to {number(max(last), 2)}, in the median {number(median(last), 2)}."
    )


TOPICS: tuple[tuple[str, str, str, Callable[[Readings], str]], ...] = (
    (
        "Do heads stay sharp as the input gets longer?",
        "saturation",
        "A head whose attention flattens averages over all it sees, and an average needs few dimensions.",
        _saturation,
    ),
    (
        "How many directions do heads use?",
        "spectrum",
        "Directions that carry nothing can go for nothing: where few are in use, small sizes are cheap.",
        _spectrum,
    ),
    (
        "How well conditioned is attention?",
        "conditioning",
        "A large condition number says that some directions of a layer's heads are nearly lost beside the others.",
        _conditioning,
    ),
    (
        "How far back do layers look?",
        "lags",
        "A layer that reads its near neighbours alone does simpler work than one that looks far back.",
        _lags,
    ),
    ("Other readings", "", "Probes that this page does not know; each describes itself.", lambda readings: ""),
)
