"""A budget to meet and a plan that meets it: plain JSON that a person can read, edit and run again."""

import math
from dataclasses import dataclass, field

from headwise.errors import PlanError
from headwise.types._record import Record
from headwise.types.latency import LatencyTable, Workload
from headwise.types.shape import SIZES, LayerShape, ModelShape


@dataclass(frozen=True, slots=True)
class Budget(Record):
    """A limit on one size of a model. `text` is what the user wrote; `length` is the context that it is counted at.

    A limit on time names its workload and holds the table of measured times. The table is a file of its own in the run
    folder: a plan that is read alone knows what it spends, and can time nothing else.
    """

    USUAL = ("workload", "device", "batch")
    name: str
    unit: str
    limit: float
    length: int
    text: str
    workload: Workload | None = None
    device: str = ""  # on which it was measured
    table: LatencyTable | None = field(default=None, compare=False, repr=False)
    batch: int = 1  # texts that are held in memory at the same time

    def __post_init__(self) -> None:
        if not math.isfinite(self.limit) or self.limit < 0 or self.length < 1 or self.batch < 1:
            raise PlanError(f"budget {self.text}: its limit {self.limit} or length {self.length} is no real size.")

    @property
    def key(self) -> str:
        """The name under which a plan records what it spends; several limits on time may stand beside each other."""
        return self.name if self.workload is None else f"{self.name}@{self.workload}"


@dataclass(frozen=True, slots=True)
class LayerKeep(Record):
    """Which units of a source layer stay, by index; None keeps all. Reshaping decides which directions stay."""

    query_heads: tuple[int, ...] | None = None
    kv_heads: tuple[int, ...] | None = None
    rotary_pairs: tuple[tuple[int, ...], ...] | None = None  # per kept key/value head
    mlp_channels: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class FrontierPoint(Record):
    """One point of the frontier: what the budget's price would be and what damage the solver would have to accept."""

    share: float  # of the source's price
    damage: float


@dataclass(frozen=True, slots=True)
class Plan(Record):
    """What each layer becomes, and why that is the best that the budgets allow."""

    model: str
    source: ModelShape
    target: ModelShape
    keep: tuple[LayerKeep, ...]
    strategy: str
    budgets: tuple[Budget, ...]
    spent: dict[str, float]
    predicted_damage: float  # nats per token
    seed: int
    gap: float = 0.0  # between the plan and the solver's proven bound, relative
    portable: bool = False
    frontier: tuple[FrontierPoint, ...] = ()
    context: int = 0  # tokens of context that it was made for; 0: not known
    free_damage: float | None = None  # of the plan without limits on sizes, where an engine or a setting limits them

    def __post_init__(self) -> None:
        if not len(self.source.layers) == len(self.target.layers) == len(self.keep):
            raise PlanError(
                f"source, target and keep have {len(self.source.layers)}, {len(self.target.layers)} and "
                f"{len(self.keep)} layers; they must have the same number."
            )
        numbers = {"predicted_damage": self.predicted_damage, "gap": self.gap, **self.spent}
        numbers |= {f"frontier {i}": value for i, p in enumerate(self.frontier) for value in (p.share, p.damage)}
        if lost := [name for name, value in numbers.items() if not math.isfinite(value)]:
            raise PlanError(f"{lost[0]} is not a finite number; allocate again.")
        if unpriced := [budget.key for budget in self.budgets if budget.key not in self.spent]:
            raise PlanError(f"spent does not say what the plan costs in {unpriced[0]}; allocate again.")
        for index, (old, new, keep) in enumerate(zip(self.source.layers, self.target.layers, self.keep, strict=True)):
            _check_layer(f"layer {index}", old, new, keep, self.source.grain.folds)

    @property
    def kept_layers(self) -> tuple[int, ...]:
        """The source's layers that stay."""
        return tuple(index for index, layer in enumerate(self.target.layers) if not layer.gone)


def _check_layer(where: str, old: LayerShape, new: LayerShape, keep: LayerKeep, folds: bool) -> None:
    if new.gone:
        return  # nothing of it is kept
    for name in SIZES:
        if getattr(new, name) > getattr(old, name):
            raise PlanError(
                f"{where}: {name} grows from {getattr(old, name)} to {getattr(new, name)}; plans only shrink."
            )
    if bool(new.k_code) != bool(new.v_code):
        raise PlanError(f"{where}: keys and values are coded together; give both k_code and v_code, or neither.")
    _check_indices(where, "query_heads", keep.query_heads, old.query_heads, new.query_heads)
    _check_indices(where, "kv_heads", keep.kv_heads, old.kv_heads, new.kv_heads)
    _check_indices(where, "mlp_channels", keep.mlp_channels, old.mlp_width, new.mlp_width)
    if keep.rotary_pairs is not None:
        if len(keep.rotary_pairs) != new.kv_heads:
            raise PlanError(
                f"{where}: keep.rotary_pairs has {len(keep.rotary_pairs)} lists for {new.kv_heads} kv_heads."
            )
        for pairs in keep.rotary_pairs:
            _check_indices(where, "rotary_pairs", pairs, old.qk_width // 2, new.qk_width // 2)
    elif new.qk_width != old.qk_width and not folds:
        raise PlanError(f"{where}: qk_width falls to {new.qk_width} but keep.rotary_pairs is missing; allocate again.")


def _check_indices(where: str, name: str, kept: tuple[int, ...] | None, before: int, after: int) -> None:
    if kept is None:
        if before != after:
            raise PlanError(
                f"{where}: {name} falls from {before} to {after} but keep.{name} is missing; allocate again."
            )
        return
    if len(kept) != after or len(set(kept)) != after or not all(0 <= index < before for index in kept):
        raise PlanError(f"{where}: keep.{name} must name {after} different indices below {before}.")
