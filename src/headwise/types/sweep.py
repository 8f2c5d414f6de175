"""The exact plan for many limits of one budget, stored so that each layer's shape is written once."""

from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

from headwise.errors import PlanError
from headwise.types._record import Record
from headwise.types.shape import LayerShape, ModelShape


@dataclass(frozen=True, slots=True)
class Answer(Record):
    """What the exact strategy answers to one limit."""

    text: str  # the budget as `--budget` takes it
    share: float  # the limit, of the source's price
    damage: float
    gap: float  # to the proven bound, relative
    layers: tuple[int, ...]  # of every layer the place of its shape in the sweep's table
    rough: bool = False  # solved to a small gap only, as time was short
    ends: dict[str, int] = field(default_factory=dict)  # bits of the tables of words, where they were chosen

    def __post_init__(self) -> None:
        if not all(map(isfinite, (self.share, self.damage, self.gap))):
            raise PlanError("an answer of the frontier holds a number that is not finite; delete frontier.json.")


@dataclass(frozen=True, slots=True)
class Sweep(Record):
    """Answers by falling limit of the first budget; the other budgets stay as they were."""

    key: str  # fingerprint of everything that the answers depend on
    budget: str
    others: tuple[str, ...]  # the other budgets, as `--budget` takes them
    allow: tuple[str, ...]
    shapes: tuple[LayerShape, ...]
    answers: tuple[Answer, ...]
    wanted: int  # limits that were to be solved; fewer answers: time ran out, or no plan meets them
    done: bool  # whether nothing is left to solve

    def __post_init__(self) -> None:
        if len(set(self.shapes)) < len(self.shapes):
            raise PlanError("the frontier's table names a shape twice; delete frontier.json.")
        if len({len(answer.layers) for answer in self.answers}) > 1:
            raise PlanError("answers of the frontier have different numbers of layers; delete frontier.json.")
        if any(not 0 <= place < len(self.shapes) for answer in self.answers for place in answer.layers):
            raise PlanError("a layer of the frontier names a shape that its table does not hold; delete frontier.json.")

    def target(self, answer: Answer) -> tuple[LayerShape, ...]:
        """The layers of an answer."""
        return tuple(self.shapes[place] for place in answer.layers)

    def model(self, answer: Answer, source: ModelShape) -> ModelShape:
        """The model of an answer."""
        ends: dict[str, Any] = dict(answer.ends)
        return replace(source.with_layers(self.target(answer)), **ends)
