"""What was proved about a reshaped model."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from headwise.errors import HeadwiseError
from headwise.types._record import Record
from headwise.types.measure import BeforeAfter, Measure, flattened, grouped

MAX_LOSS = "10%"  # the limit of quality unless one is given
LEAST_ROWS = 2  # of one length, for that length to count as measured
RETRIEVES = 0.2  # share of tokens that the source must retrieve for a distance to say anything
RETRIEVAL_LOSS = 0.1  # share of tokens that the cut model may retrieve less

WITHIN, UNCERTAIN, BEYOND, NOT_JUDGED = "within limit", "uncertain", "beyond limit", "not judged"
TABLES = ("quality", "size", "speed", "damage")  # of a verdict, by flat keys in its file
VERIFIED, PARTLY, FAILED = "verified", "partly verified", "not verified"


def damage_limit(text: str, divergence: str = "KL") -> float:
    """The damage that a limit such as `2%` or `0.02` allows.

    A plain number is damage as the task counts it. A percentage is an increase of perplexity, which is so many nats of
    loss or KL. Embeddings have no perplexity: there it is 1 - cosine itself.

    >>> round(damage_limit("10%"), 4), damage_limit("0.02"), damage_limit("2%", "1 - cosine")
    (0.0953, 0.02, 0.02)
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%?)\s*", text)
    if match is None or float(match[1]) <= 0:
        raise HeadwiseError(f"max_loss is '{text}'; give a percentage of perplexity such as 2%, or nats such as 0.02.")
    amount = float(match[1])
    if not match[2] and amount >= 1:  # a nat is 172% more perplexity
        raise HeadwiseError(f"max_loss is '{text}', which is {amount:g} nats; did you mean {amount:g}%?")
    if not match[2]:
        return amount
    return amount / 100 if divergence == "1 - cosine" else math.log1p(amount / 100)


@dataclass(frozen=True, slots=True)
class Check(Record):
    """One promise, what was seen and what was promised."""

    name: str
    passed: bool
    observed: str
    expected: str


@dataclass(frozen=True, slots=True)
class Sample(Record):
    """A prompt, continued by the source model and by the reshaped one."""

    prompt: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class LengthQuality(Record):
    """Damage on rows of one length; every length reads the same text. Intervals are 95%, over blocks of text."""

    length: int  # tokens of a row
    rows: int
    loss_before: float
    loss_after: float
    damage: float  # increase of the loss, nats per token
    low: float
    high: float
    kl: float
    kl_low: float
    kl_high: float


@dataclass(frozen=True, slots=True)
class Retrieval(Record):
    """How well a passage of random tokens is repeated `distance` tokens later. Intervals are 95%, of the difference."""

    distance: int
    passages: int
    accuracy_before: float  # share of the second copy's tokens that the source predicts
    accuracy_after: float
    accuracy_change_low: float
    accuracy_change_high: float
    loss_before: float
    loss_after: float
    loss_change_low: float
    loss_change_high: float

    @property
    def possible(self) -> bool:
        """Whether the source retrieves at this distance at all."""
        return self.accuracy_before >= RETRIEVES

    @property
    def lost(self) -> bool:
        """Whether the cut model retrieves clearly less."""
        return self.possible and self.accuracy_change_high < -RETRIEVAL_LOSS


@dataclass(frozen=True, slots=True)
class Verdict(Record):
    """The certificate: sizes as counted on the real object, quality with intervals at every length, speed, checks.

    Three facts are kept apart: whether the sizes hold (`sizes_verified`), up to which length quality was measured
    (`verified_up_to`), and whether it is within the limit (`quality_state`).
    """

    quality: dict[str, BeforeAfter]
    size: dict[str, BeforeAfter]
    speed: dict[str, BeforeAfter]
    damage: dict[str, Measure]  # measured; predicted: on calibration text; sum_of_prices: what the solver added up
    checks: tuple[Check, ...]
    samples: tuple[Sample, ...]
    evaluation: str
    tokens: int
    machine: str
    date: str
    lengths: tuple[LengthQuality, ...] = ()
    retrieval: tuple[Retrieval, ...] = ()
    length: int = 0  # tokens of the rows that `quality` was measured on; 0: rows have no one length
    context: int = 0  # tokens of context that will be served; 0: not known, or the model reads no growing text
    max_loss: str = MAX_LOSS  # the limit as it was given
    limit: float = damage_limit(MAX_LOSS)  # the same as damage
    not_measured: tuple[str, ...] = ()  # and why

    @classmethod
    def of(
        cls,
        quality: Mapping[str, float],
        size: Mapping[str, int],
        speed: Mapping[str, float],
        damage: Mapping[str, float],
        *more: Any,
        **named: Any,
    ) -> Self:
        """A verdict from flat keys, as checks return them."""
        found = {name: both.after for name, both in grouped(damage).items() if both.after}
        return cls(grouped(quality), grouped(size), grouped(speed), found, *more, **named)

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary with flat keys, such as `loss_after_low`."""
        tables = {name: flattened(getattr(self, name)) for name in TABLES[:3]}
        tables["size"] = {name: int(value) for name, value in tables["size"].items()}
        tables["damage"] = flattened({name: BeforeAfter(measure) for name, measure in self.damage.items()})
        return {**Record.to_json(self), **tables}

    @classmethod
    def from_file(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Flat keys, put in order; whatever holds none is left for the reader to refuse."""
        tables: dict[str, dict[str, Any]] = {}
        for table in (name for name in TABLES if isinstance(data.get(name), dict)):
            tables[table] = {name: both.to_json() for name, both in grouped(data[table]).items()}
        if "damage" in tables:
            tables["damage"] = {name: both["after"] for name, both in tables["damage"].items() if both["after"]}
        return {**data, **tables}

    @property
    def sizes_verified(self) -> bool:
        """Whether every check holds: counts, budgets, times, and the model as it reloads."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def measured(self) -> tuple[tuple[int, Measure], ...]:
        """Length and damage wherever its interval was measured; length 0 where rows have no one length."""
        at = [(q.length, Measure(q.damage, q.low, q.high)) for q in self.lengths if q.rows >= LEAST_ROWS]
        whole = self.damage.get("measured")
        known = whole is not None and whole.low is not None and whole.high is not None
        return (*([(self.length, whole)] if whole and known else []), *at)

    @property
    def worst(self) -> Measure | None:
        """The most damage that was measured; one that is not a number is worse than any."""
        found = [measure for _, measure in self.measured]
        return max(found, key=lambda m: math.inf if math.isnan(m.value) else m.value, default=None)

    @property
    def quality_state(self) -> str:
        """Whether the damage is within the limit at every measured length, its interval included."""
        if not self.measured:
            return NOT_JUDGED
        found = [measure for _, measure in self.measured]
        if any((m.low or 0.0) > self.limit or not math.isfinite(m.value) for m in found):
            return BEYOND
        return WITHIN if all(m.high is not None and m.high <= self.limit for m in found) else UNCERTAIN

    @property
    def verified_up_to(self) -> int:
        """The longest context at which quality was measured; 0 where the model reads no growing text."""
        return max((length for length, _ in self.measured), default=0)

    @property
    def reasons(self) -> tuple[str, ...]:
        """What keeps the verdict from being plain: failed checks, quality, lengths, retrieval."""
        found = [f"{check.name}: {check.observed}, {check.expected}" for check in self.checks if not check.passed]
        found += [] if self.checks else ["no checks were made"]
        if self.quality_state == NOT_JUDGED:
            found.append("quality was not judged against a limit: run headwise verify again")
        elif self.quality_state != WITHIN:
            found.append(f"quality: {self.quality_state} of {self.max_loss}")
        if self.verified_up_to < self.context:
            found.append(f"verified up to {self.verified_up_to:,} of {self.context:,} tokens")
        return (*found, *(_lost_in_words(found) for found in self.retrieval if found.lost))

    @property
    def state(self) -> str:
        """The whole in one word: verified, partly verified, or not verified."""
        if not self.passed or not self.checks:
            return FAILED
        return PARTLY if self.reasons else VERIFIED

    @property
    def passed(self) -> bool:
        """Whether no check failed and quality is not beyond the limit: what the exit code says."""
        return all(check.passed for check in self.checks) and self.quality_state != BEYOND


def _lost_in_words(found: Retrieval) -> str:
    lost = 100 * (found.accuracy_before - found.accuracy_after)
    return f"retrieves {lost:.0f} points less than the source at {found.distance:,} tokens"
