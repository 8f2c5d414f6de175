"""What a healing did: the record that heal.json holds and that the report draws. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from headwise.errors import PlanError
from headwise.types._record import Record

NULLABLE = ("rate", "tokens_per_second")  # of a method that trains: written even where there is none
FINITE = ("rehearsed", "rehearsed_before", "tokens", "seconds", *NULLABLE)


@dataclass(frozen=True, slots=True)
class Gain(Record):
    """What one part of a layer gained: its squared error relative to what the source's part puts out."""

    USUAL = ("curve",)
    error_before: float
    error_after: float
    curve: tuple[float, ...] | None = None  # the error at every check, of a layer that trains


@dataclass(frozen=True, slots=True)
class LossPoint(Record):
    """One point of a loss curve."""

    USUAL = ("held_out",)
    step: int  # steps done
    loss: float  # mean training loss since the point before; blockwise: share of the layers' errors that is left
    held_out: float | None = None  # divergence on held-out rows, where it was measured at this step


@dataclass(frozen=True, slots=True)
class HealingStage(Record):
    """One of the methods that a healing consists of, in order: distillation starts from a refit, for example."""

    USUAL = ("kept",)
    method: str
    tokens: int  # that it read
    seconds: float
    kept: bool | None = None  # False: it did harm on held-out text, or was left out


@dataclass(frozen=True, slots=True)
class Healing(Record):
    """What one healing did, with all its stages. A field is None where the method has no such thing.

    Fields that only one method knows, and that are not named here, are kept in `details` and stand beside the others
    in JSON, so that a new method needs no change of this type.
    """

    method: str  # name of the last stage; "none": the model was not healed
    tokens: int | None = None  # read by all stages; text that distillation reads twice counts twice
    strength: float | None = None  # refit: of the ridge that holds weights near those that the cut left
    steps: int | None = None  # distillation: optimizer steps done, without trials of learning rates
    rate: float | None = None  # distillation: highest learning rate, as a share of a tensor's size; None: none helped
    trials: tuple[dict[str, float], ...] | None = None  # distillation: rate, divergence and loss of each trial
    batch_tokens: int | None = None  # distillation: tokens of one step
    divergence_before: float | None = None  # distillation: from the source, on held-out calibration rows
    divergence_after: float | None = None  # the same measure for the model that came out
    tokens_per_second: float | None = None  # distillation: while training
    processes: int | None = None  # distillation: that shared the work
    shared_weights: bool | None = None  # distillation: whether each process held a part of the weights only (FSDP)
    layers: tuple[dict[str, Gain], ...] | None = None  # for every layer, gains by part: attention, mlp, stream, ...
    curve: tuple[LossPoint, ...] | None = None  # of the last stage, if it trains
    seconds: float | None = None  # of all stages
    kept: bool | None = None  # whether every stage was kept
    reason: str | None = None  # why a stage was not kept, as a sentence
    stages: tuple[HealingStage, ...] | None = None  # in order
    rehearsed_before: float | None = None  # damage before healing, on text that nothing was fitted to
    rehearsed: float | None = None  # damage after healing on the same text: the damage to expect
    rounds: tuple[Healing, ...] | None = None  # healings of the rounds before the last one
    details: dict[str, Any] = field(default_factory=dict)  # what the method records beside these

    def __post_init__(self) -> None:
        for name in FINITE:
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise PlanError(f"{name} is {value}, not a finite number.")

    def to_json(self) -> dict[str, Any]:
        """The dictionary that heal.json holds."""
        kept = NULLABLE if self.steps is not None else ()
        found = {name: value for name, value in Record.to_json(self).items() if value is not None or name in kept}
        details: dict[str, Any] = found.pop("details")
        return found | details

    @classmethod
    def from_file(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Fields that are not named above go to `details`."""
        named = {f.name for f in fields(cls)} - {"details"}
        found: dict[str, Any] = {name: value for name, value in data.items() if name in named}
        return {**found, "details": {name: value for name, value in data.items() if name not in named}}
