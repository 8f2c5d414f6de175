"""What other strategies would have done with the same budgets."""

from collections.abc import Mapping
from typing import NamedTuple

from headwise.report._bits import WHOLE, is_coded
from headwise.report._sizes import full_size
from headwise.report._text import MISSING, human
from headwise.runs.dossier import Dossier
from headwise.types import Readings


class Rival(NamedTuple):
    """One strategy's plan for the run's budgets; the run's own is `chosen`."""

    strategy: str
    share: float | None  # of the source's size, in the first budget's unit
    predicted: float
    measured: float | None  # of the run's own
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
        _rival(dossier, b.strategy, b.spent, b.predicted_damage)
        for b in dossier.baselines
        if b.strategy != plan.strategy or b.predicted_damage != plan.predicted_damage
    ]
    return (own, *sorted(others, key=lambda row: row.predicted))


def _rival(
    dossier: Dossier,
    strategy: str,
    spent: Mapping[str, float],
    predicted: float,
    measured: float | None = None,
    chosen: bool = False,
) -> Rival:
    share = None
    if dossier.plan and dossier.plan.budgets:
        first = dossier.plan.budgets[0]
        full, amount = full_size(first, dossier.plan), spent.get(first.key)
        share = amount / full if full and amount is not None else None
    text = ", ".join(f"{name} {human(amount)}" for name, amount in spent.items()) or MISSING
    return Rival(strategy, share, predicted, measured, text, chosen)


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
    return (
        f" The published recipe is left out: the damage of its cuts was predicted by the {probes[1]} probe alone, "
        f"that of the others by the {probes[0]} probe."
    )


def _without_bits(readings: Readings) -> str:
    """What other plans do where this one codes the cache, and by which probe damages were predicted."""
    ways = [readings.curve(kind) for kind in ("damage.k_bits", "damage.qk_projected")]
    probes = [reading.probe for reading in ways if reading is not None]
    words = f" The others code nothing: they keep fewer dimensions of {WHOLE} bits each."
    if len(set(probes)) < 2:
        return words
    return f"{words} Their damage was predicted by the {probes[1]} probe alone, that of bits by the {probes[0]} probe."
