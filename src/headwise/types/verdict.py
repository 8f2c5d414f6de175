"""What was proved about a reshaped model, and everything else that one run folder holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headwise.types._record import Record
from headwise.types.plan import Plan
from headwise.types.reading import Readings
from headwise.types.sweep import Sweep


@dataclass(frozen=True, slots=True)
class Check(Record):
    """One promise, what was seen and what was promised."""

    name: str
    passed: bool
    observed: str
    expected: str


@dataclass(frozen=True, slots=True)
class Sample(Record):
    """The same prompt continued by the source model and by the reshaped one."""

    prompt: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Verdict(Record):
    """The certificate: quality with error bars, size as counted on the real object, speed as measured, checks."""

    quality: dict[str, float]
    size: dict[str, int]
    speed: dict[str, float]
    damage: dict[str, float]
    checks: tuple[Check, ...]
    samples: tuple[Sample, ...]
    evaluation: str
    tokens: int
    machine: str
    date: str

    @property
    def passed(self) -> bool:
        """Whether every check holds."""
        return all(check.passed for check in self.checks)


@dataclass(frozen=True, slots=True)
class Dossier(Record):
    """Everything in one run folder: the only argument of the report. A stage that has not run is None."""

    settings: dict[str, Any]
    readings: Readings | None
    plan: Plan | None
    healing: dict[str, Any] | None
    verdict: Verdict | None
    baselines: tuple[dict[str, Any], ...] = ()
    sweep: Sweep | None = None
    unverified: str | None = None  # why a verdict that is there does not count: the plan or the model changed
