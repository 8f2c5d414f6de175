"""The allocate stage on a run folder, without torch: from one probing to any number of plans."""

from dataclasses import replace
from pathlib import Path

from headwise import strategies
from headwise.budgets import parse_all
from headwise.errors import BudgetError, PlanError
from headwise.progress import note
from headwise.runs.folder import RunFolder
from headwise.runs.settings import Settings
from headwise.types import CUTS, Budget, Plan, Readings, Unit


def allocate_in(
    out: Path | str,
    budgets: tuple[str, ...],
    strategy: str,
    allow: tuple[str, ...],
    portable: bool,
    seed: int,
    serve: str | None = None,
    multiple: int = 1,
    same_dims: bool = False,
) -> Plan:
    """Read readings.json, decide, write plan.json (an older plan is kept beside it)."""
    folder = RunFolder(out)
    if not budgets:
        raise BudgetError("no budget was given; add one, such as --budget kv=75%.")
    with folder.held("allocate"):
        settings = folder.require()
        wanted = replace(settings, budgets=budgets, strategy=strategy, allow=allow, portable=portable, seed=seed)
        wanted = replace(wanted, serve=serve, multiple=multiple, same_dims=same_dims)
        plan = _allocated(folder, wanted)
        folder.write_plan(plan, wanted)
    return plan


def _allocated(folder: RunFolder, wanted: Settings) -> Plan:
    if not folder.readings_file.exists():
        raise PlanError(
            f"{folder.path} has no readings yet; begin with: headwise probe MODEL --out {folder.path} --overwrite"
        )
    readings = Readings.read(folder.readings_file)
    if any(layer.pooled > 1 for layer in readings.source.layers):
        wanted.refuse_to_pool()
    limits = parse_all(wanted.budgets, readings.source, folder.tables())
    return plan_for(wanted, readings, limits)


def plan_for(settings: Settings, readings: Readings, limits: tuple[Budget, ...]) -> Plan:
    """Decide every size for some limits, as the settings say."""
    if "rank" in settings.units and not settings.only_kv and readings.curve("damage.q_rank") is None:
        note("this probing priced no ranks, so none is cut; ranks are priced for limits on params and flops.")
    how = settings.strategy, settings.units, settings.portable, settings.seed
    if not settings.limits_sizes:
        return strategies.allocate(readings, limits, *how)
    if strategies.bits_alone(readings):
        raise PlanError(
            "this probing priced bits of the cache alone, and --serve, --multiple and --same-dims need prices of "
            "dimensions; probe again with the same flag."
        )
    plan = strategies.allocate(replace(readings, shape=settings.legal(readings.source)), limits, *how)
    return replace(plan, free_damage=strategies.allocate(readings, limits, *how).predicted_damage)


def units_to_measure(settings: Settings, folds: bool, coded: bool, packed: bool = False) -> dict[str, Unit]:
    """Which units to check by measurement, by the kind of their curve.

    `coded`: cached rows are coded; `packed`: bits of weights are chosen.
    """
    units = [unit for unit in CUTS if unit.swapped and unit.allow in settings.allow and not settings.portable]
    if folds:  # then a projection is as good as dropping pairs
        units = [unit for unit in units if unit.curve != "qk_pairs"]
    units = [unit for unit in units if unit.allow != "bits" or coded]
    units = [unit for unit in units if unit.allow != ("rank" if packed else "weights")]
    if coded and (settings.only_kv or packed):  # codes do all that dropping directions can
        units = [unit for unit in units if unit.allow not in ("qk", "v")]
    return {unit.kind: unit for unit in units if unit.cached or not settings.only_kv}
