"""Measured numbers: a value with its interval and unit, of the source beside the cut model.

Files and `--json` hold them under flat keys such as `loss_after_low`; only this file knows these keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headwise.types._record import Record

UNITS_OF = {"loss": "nats", "kl": "nats", "kv_bytes_per_token": "bytes", "weight_bytes": "bytes"}
ENDS = ("after_low", "after_high", "before_low", "before_high", "before", "after", "low", "high")


@dataclass(frozen=True, slots=True)
class Measure(Record):
    """A value, and the ends of its interval where they are known."""

    value: float
    low: float | None = None
    high: float | None = None
    unit: str = ""


@dataclass(frozen=True, slots=True)
class BeforeAfter(Record):
    """One quantity of the source and of the cut model; no `before`: it compares the two, or belongs to neither."""

    after: Measure | None = None
    before: Measure | None = None


def unit_of(name: str) -> str:
    """The unit of a quantity, by its name; those with `ms` in it are times.

    >>> unit_of("decode_ms_per_token"), unit_of("parameters")
    ('ms', '')
    """
    return UNITS_OF.get(name, "ms" if "ms" in name.split("_") else "")


def grouped(flat: Mapping[str, float]) -> dict[str, BeforeAfter]:
    """Quantities from flat keys: `x_before`, `x_after`, `x_after_low`, ... are one; so are `x`, `x_low` and `x_high`.

    >>> grouped({"kl": 0.5, "kl_low": 0.25, "kl_high": 0.75})["kl"].after
    Measure(value=0.5, low=0.25, high=0.75, unit='nats')
    """
    ends: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        end = next((end for end in ENDS if key.endswith(f"_{end}")), "")
        ends.setdefault(key.removesuffix(f"_{end}") if end else key, {})[end] = value
    return {
        name: BeforeAfter(_measure(name, known, "" if "" in known else "after"), _measure(name, known, "before"))
        for name, known in ends.items()
    }


def _measure(name: str, known: dict[str, Any], which: str) -> Measure | None:
    if which not in known:
        return None
    low, high = (known.get(f"{which}_{end}" if which else end) for end in ("low", "high"))
    return Measure(known[which], low, high, unit_of(name))


def flattened(quantities: Mapping[str, BeforeAfter]) -> dict[str, float]:
    """Quantities under flat keys: the inverse of `grouped`."""
    found: dict[str, float] = {}
    for name, both in quantities.items():
        for end, measure in (("_before", both.before), ("_after" if both.before else "", both.after)):
            if measure is not None:
                known = {"": measure.value, "_low": measure.low, "_high": measure.high}
                found |= {f"{name}{end}{side}": value for side, value in known.items() if value is not None}
    return found
