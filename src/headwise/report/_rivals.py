"""What other strategies would have done with the same budgets."""

from __future__ import annotations

from typing import Any, NamedTuple

from headwise import budgets as prices
from headwise.errors import HeadwiseError
from headwise.report._bits import WHOLE, is_coded
from headwise.report._text import MISSING, as_number, human
from headwise.runs.dossier import Dossier
from headwise.types import Budget, ModelShape, Readings


class Rival(NamedTuple):
    """One strategy's plan for the run's budgets; the run's own is `chosen`."""

    strategy: str
    share: float | None  # of the source's price, under the first budget
    predicted: float | None
    measured: float | None
    spent: str
    chosen: bool


def rivals(dossier: Dossier) -> tuple[Rival, ...]:
    """The chosen plan first, then the baselines, least predicted damage first."""
    plan, verdict = dossier.plan, dossier.verdict
    if plan is None:
        return ()
    measured = verdict.damage.get("measured") if verdict else None
    own = _rival(dossier, plan.strategy, plan.spent, plan.predicted_damage, measured.value if measured else None, True)
    others = [
        _rival(dossier, b.get("strategy", "?"), b.get("spent"), b.get("predicted_damage"), b.get("measured_damage"))
        for b in dossier.baselines
        if b.get("strategy") != plan.strategy or b.get("predicted_damage") != plan.predicted_damage
    ]
    return (own, *sorted(others, key=lambda row: float("inf") if row.predicted is None else row.predicted))


def _rival(
    dossier: Dossier, strategy: object, spent: Any, predicted: Any, measured: Any, chosen: bool = False
) -> Rival:
    amounts = {str(k): as_number(v) for k, v in spent.items()} if isinstance(spent, dict) else {}
    share = None
    if dossier.plan and dossier.plan.budgets:
        first = dossier.plan.budgets[0]
        full, amount = priced(first, dossier.plan.source), amounts.get(first.key)
        share = amount / full if full and amount is not None else None
    text = ", ".join(f"{name} {human(amount)}" for name, amount in amounts.items()) or MISSING
    return Rival(str(strategy), share, as_number(predicted), as_number(measured), text, chosen)


def left_out(dossier: Dossier) -> str:
    """What to know of the others: why the published recipe may be missing, or that they code nothing."""
    if dossier.readings is None or any(row.strategy == "published" for row in rivals(dossier)):
        return ""
    if is_coded(dossier.plan):
        return _without_bits(dossier.readings)
    ways = [dossier.readings.curve(kind) for kind in ("damage.qk_projected", "damage.qk_pairs")]
    probes = [reading.probe for reading in ways if reading is not None]
    if len(probes) < 2 or probes[0] == probes[1]:
        return ""
    return f" The published recipe is left out: its cuts were priced by {probes[1]} alone, the others by {probes[0]}."


def _without_bits(readings: Readings) -> str:
    """What other plans do where this one codes the cache, and who priced it."""
    ways = [readings.curve(kind) for kind in ("damage.k_bits", "damage.qk_projected")]
    probes = [reading.probe for reading in ways if reading is not None]
    words = f" The others code nothing: they keep fewer dimensions of {WHOLE} bits each."
    return words + (f" Those were priced by {probes[1]} alone, bits by {probes[0]}." if len(set(probes)) > 1 else "")


def priced(budget: Budget, shape: ModelShape) -> float | None:
    """What a shape costs under a budget; None for a price that this version does not know."""
    try:
        return prices.price(budget, shape)
    except HeadwiseError:
        return None
