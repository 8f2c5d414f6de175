"""Everything that one run folder holds: the only argument of the report."""

from dataclasses import dataclass, field

from headwise.runs.settings import Settings
from headwise.types import Healing, Plan, Readings, Record, Sweep, Verdict


@dataclass(frozen=True, slots=True)
class Baseline(Record):
    """What another strategy would have done with the same budgets."""

    strategy: str
    predicted_damage: float
    spent: dict[str, float]  # by budget


@dataclass(frozen=True, slots=True)
class Dossier(Record):
    """A run as far as it came. A stage that has not run is None."""

    settings: Settings | None = None  # those that plan and model follow; None: no run, as with a plan shown alone
    readings: Readings | None = None
    plan: Plan | None = None
    healing: Healing | None = None
    verdict: Verdict | None = None
    baselines: tuple[Baseline, ...] = ()
    sweep: Sweep | None = None
    unverified: str | None = None  # why a verdict that is there does not count: the plan or the model changed
    versions: dict[str, str] = field(default_factory=dict)  # of packages
    folder: str = ""  # the run folder as it was named, for commands to type; empty: no run
