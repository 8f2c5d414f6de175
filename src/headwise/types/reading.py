"""What a probe found, described so that the report can draw it without knowing the probe."""

import math
from dataclasses import dataclass

from headwise.errors import PlanError
from headwise.types._record import Record
from headwise.types.codes import BITS
from headwise.types.shape import LayerShape, ModelShape
from headwise.types.unit import DAMAGE, END_KINDS, UNIT_OF

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
        if self.kind.startswith(DAMAGE) and not all(math.isfinite(value) for row in self.values for value in row):
            raise PlanError(f"reading {self.kind} holds a damage that is not a finite number; probe again.")
        if any(min(row, default=0) < 0 or len(set(row)) < len(row) for row in self.ticks):
            raise PlanError(f"reading {self.kind}: sizes are negative or named twice; probe again.")

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
    shape: ModelShape | None  # what was probed; None: readings of no model, to be drawn alone
    curves: tuple[Reading, ...]
    orders: tuple[dict[str, tuple[tuple[int, ...], ...]], ...]  # per layer and unit, per group: most needed first
    tokens: int
    seed: int
    seconds: float = 0.0
    context: int = 0  # tokens of context that it is for; 0: not known
    depth: tuple[int, ...] = ()  # layers in the order in which whole layers would go, as far as that was measured

    def __post_init__(self) -> None:
        if self.shape is None:
            return
        layers = self.shape.layers
        for reading in self.curves:
            rows = 1 if reading.kind in ("damage.depth", *END_KINDS) else len(layers)
            if len(reading.ticks) != rows:
                raise PlanError(f"reading {reading.kind} has {len(reading.ticks)} rows for {rows} layers; probe again.")
            _check_sizes(reading, layers)
        if len(self.orders) != len(layers):
            raise PlanError(f"orders has {len(self.orders)} layers and the model {len(layers)}; probe again.")
        for index, (order, layer) in enumerate(zip(self.orders, layers, strict=True)):
            _check_orders(f"orders of layer {index}", order, layer)
        if len(set(self.depth)) < len(self.depth) or not all(0 <= index < len(layers) for index in self.depth):
            raise PlanError(f"depth must name different layers below {len(layers)}; probe again.")

    @property
    def source(self) -> ModelShape:
        """What was probed; readings of no model are refused."""
        if self.shape is None:
            raise PlanError(f"the readings of {self.model or 'no model'} do not say what was probed; probe again.")
        return self.shape

    def curve(self, kind: str) -> Reading | None:
        """The reading of that kind that should be believed: the last one, as later probes correct earlier ones."""
        return next((r for r in reversed(self.curves) if r.kind == kind), None)


def _check_sizes(reading: Reading, layers: tuple[LayerShape, ...]) -> None:
    """A curve of damage names sizes from 1 up to the one that a layer has."""
    unit = UNIT_OF.get(reading.kind)
    for index, (layer, ticks) in enumerate(zip(layers, reading.ticks, strict=False)):
        full = unit.full(layer) if unit else 0
        if full and ticks and not 1 <= min(ticks) <= max(ticks) <= full:
            raise PlanError(
                f"reading {reading.kind}: sizes of layer {index} go from {min(ticks)} to {max(ticks)}; it has {full}. "
                "Probe again."
            )


def _check_orders(where: str, order: dict[str, tuple[tuple[int, ...], ...]], layer: LayerShape) -> None:
    """Every row of an order names each unit once; how many pairs there are depends on what was cut before."""
    known = {
        "kv_heads": (1, layer.kv_heads),
        "heads": (layer.kv_heads, layer.queries_per_group),
        "mlp": (1, layer.mlp_width),
    }
    for name, rows in order.items():
        if name in ("k_bits", "v_bits"):
            if any(len(code) != len(BITS) or min(code) < 0 or not sum(code) > 0 for code in rows):
                raise PlanError(
                    f"{where}: {name} must hold codes, a count for each of {len(BITS)} widths; probe again."
                )
            continue
        groups, units = known.get(name.removesuffix("_weight"), (len(rows), len(rows[0]) if rows else 0))
        if rows and units and (len(rows) != groups or any(sorted(row) != list(range(units)) for row in rows)):
            raise PlanError(f"{where}: {name} must order {units} units in each of {groups} groups; probe again.")
