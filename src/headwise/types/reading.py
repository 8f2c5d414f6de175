"""What a probe found, with enough words that a report can draw it without knowing the probe."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.errors import PlanError
from headwise.types._record import Record

Row = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Reading(Record):
    """A table of numbers, one row per layer: `values[layer][i]` belongs to `ticks[layer][i]` on the axis `axis`."""

    probe: str  # who measured it
    kind: str  # what it is, such as "damage.qk_projected"
    axis: str  # what the columns are, such as "qk_dim"
    ticks: tuple[tuple[int, ...], ...]
    values: tuple[Row, ...]
    standard_error: tuple[Row, ...] | None
    unit: str
    meaning: str  # one sentence for a person
    tokens: int
    seed: int

    def __post_init__(self) -> None:
        for name in ("values", "standard_error"):
            table = getattr(self, name)
            if table is not None and [len(row) for row in table] != [len(row) for row in self.ticks]:
                raise PlanError(f"reading {self.kind}: {name} and ticks have different lengths; probe again.")

    def at(self, layer: int, tick: int) -> float:
        """The value of a layer at a size."""
        try:
            return self.values[layer][self.ticks[layer].index(tick)]
        except ValueError:
            known = ", ".join(map(str, self.ticks[layer]))
            raise PlanError(f"layer {layer} has no price for {self.axis} {tick}; priced sizes: {known}.") from None


@dataclass(frozen=True, slots=True)
class Readings(Record):
    """Everything that one probing of one model found, and the order in which its units would go."""

    model: str
    shape: dict[str, object]  # ModelShape as JSON: what was probed
    curves: tuple[Reading, ...]
    orders: tuple[dict[str, tuple[tuple[int, ...], ...]], ...]  # per layer and unit, per group: most needed first
    tokens: int
    seed: int
    seconds: float = 0.0
    context: int = 0  # tokens of context that it is for; 0: not known
    depth: tuple[int, ...] = ()  # layers in the order in which whole layers would go, as far as that was measured

    def curve(self, kind: str) -> Reading | None:
        """The reading of that kind that should be believed: the last one, as later probes correct earlier ones."""
        return next((r for r in reversed(self.curves) if r.kind == kind), None)
