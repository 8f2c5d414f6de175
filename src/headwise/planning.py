"""The allocate stage on a run folder, without torch: think again as often as you like."""

from __future__ import annotations

from pathlib import Path

from headwise import strategies
from headwise.budgets import parse
from headwise.errors import BudgetError, PlanError
from headwise.runfolder import RunFolder
from headwise.types import ModelShape, Plan, Readings


def allocate_in(
    out: Path | str, budgets: tuple[str, ...], strategy: str, allow: tuple[str, ...], portable: bool, seed: int
) -> Plan:
    """Read readings.json, decide, write plan.json (an older plan is kept beside it)."""
    folder = RunFolder(out)
    folder.require()
    if not budgets:
        raise BudgetError("no budget was given; add one, such as --budget kv=75%.")
    if not folder.readings_file.exists():
        raise PlanError(
            f"{folder.path} has no readings yet; begin with: headwise probe MODEL --out {folder.path} --overwrite"
        )
    readings = Readings.read(folder.readings_file)
    shape = ModelShape.from_json(readings.shape, "readings.shape")
    plan = strategies.allocate(readings, tuple(parse(t, shape) for t in budgets), strategy, allow, portable, seed)
    folder.write_plan(plan)
    return plan
