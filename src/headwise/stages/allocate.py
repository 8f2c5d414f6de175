"""The allocate stage, without torch: a run folder can be allocated again as often as you like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from headwise import strategies
from headwise.budgets import parse_all
from headwise.errors import BudgetError, PlanError
from headwise.runs.folder import RunFolder
from headwise.runs.settings import Settings
from headwise.types import Budget, LayerShape, ModelShape, Plan, Readings


def allocate_in(
    out: Path | str, budgets: tuple[str, ...], strategy: str, allow: tuple[str, ...], portable: bool, seed: int
) -> Plan:
    """Read readings.json, decide, write plan.json (an older plan is kept beside it)."""
    folder = RunFolder(out)
    if not budgets:
        raise BudgetError("no budget was given; add one, such as --budget kv=75%.")
    with folder.held("allocate"):
        settings = folder.require()
        asked = replace(settings, budgets=budgets, strategy=strategy, allow=allow, portable=portable, seed=seed)
        plan = _allocated(folder, asked)
        folder.write_plan(plan, asked)
    return plan


def _allocated(folder: RunFolder, asked: Settings) -> Plan:
    if not folder.readings_file.exists():
        raise PlanError(
            f"{folder.path} has no readings yet; begin with: headwise probe MODEL --out {folder.path} --overwrite"
        )
    readings = Readings.read(folder.readings_file)
    shape = ModelShape.from_json(readings.shape, "readings.shape")
    if any(layer.pooled > 1 for layer in shape.layers):
        asked.refuse_to_pool()
    limits = parse_all(asked.budgets, shape, folder.tables())
    return plan_for(asked, readings, limits)


def plan_for(settings: Settings, readings: Readings, limits: tuple[Budget, ...]) -> Plan:
    """Decide every size for some limits, as the settings say."""
    return strategies.allocate(readings, limits, settings.strategy, settings.allow, settings.portable, settings.seed)


def sizes_to_measure(settings: Settings, folds: bool) -> dict[str, Callable[[LayerShape, int], LayerShape]]:
    """Which curves to check by measurement, and the layer that a size on their axis stands for."""
    found: dict[str, Callable[[LayerShape, int], LayerShape]] = {}
    if settings.portable:
        return found
    if "qk" in settings.allow:
        found["damage.qk_projected"] = lambda shape, size: replace(
            shape, qk_dim=size, qk_width=size if folds else shape.qk_width
        )
    if "v" in settings.allow:
        found["damage.v"] = lambda shape, size: replace(shape, v_dim=size)
    if not settings.only_kv and "mlp" in settings.allow:
        found["damage.mlp"] = lambda shape, size: replace(shape, mlp_width=size)
    if not settings.only_kv and "qk" in settings.allow and not folds:
        found["damage.qk_pairs"] = lambda shape, size: replace(shape, qk_width=size, qk_dim=size)
    if "heads" in settings.allow:
        found["damage.heads"] = lambda shape, size: replace(shape, query_heads=size * shape.kv_heads)
    if "kv_heads" in settings.allow:
        found["damage.kv_heads"] = lambda shape, size: replace(
            shape, kv_heads=size, query_heads=size * shape.queries_per_group
        )
    return found
