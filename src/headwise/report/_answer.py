"""The first screen: what was asked, what was got, whether it is safe to use, and what to type next."""

import math
import shlex
from typing import NamedTuple

from headwise.report import _commands as commands
from headwise.report import _facts as facts
from headwise.report import _judged as judged
from headwise.report._html import Card, Code, Meter, block, cards, top
from headwise.report._sizes import sizes_of
from headwise.report._text import escape, human, listing, number, relative, short
from headwise.runs.dossier import Dossier
from headwise.types import Answer, Budget
from headwise.types.verdict import BEYOND, MAX_LOSS, NOT_JUDGED, UNCERTAIN


class Next(NamedTuple):
    """What to do next: why, and what to type."""

    words: str
    code: str
    language: str = "sh"


def answer(dossier: Dossier) -> str:
    """The first screen as HTML."""
    sign, sentence = judged.advice(dossier.verdict, dossier.unverified)
    follows = next_step(dossier)
    code = block(Code(follows.code, follows.language))
    return (
        top(facts.title(dossier), judged.statuses(dossier.verdict), f"{sign} {sentence}")
        + f'<p class="asked"><b>Asked:</b> {escape(asked(dossier))}</p>'
        + f'<p class="asked"><b>Got:</b> {escape(facts.changes(dossier, short=True))}.</p>'
        + cards(got(dossier))
        + f'<div class="next"><p><b>Next:</b> {escape(follows.words)}</p>{code}</div>'
    )


def asked(dossier: Dossier) -> str:
    """The budgets and the limit of quality, in words."""
    plan, verdict = dossier.plan, dossier.verdict
    budgets = plan.budgets if plan else ()
    named = {size.budget.key: size for size in sizes_of(plan)} if plan else {}
    parts = []
    for budget in budgets:
        meaning = named[budget.key].meaning if budget.key in named else budget.name
        limit = _limit(budget)
        share = f"{limit} of the source's" if limit.endswith("%") else f"{limit} {budget.unit}"
        parts.append(f"{meaning} at most {share}")
    own = verdict.max_loss if verdict else (dossier.settings and dossier.settings.max_loss) or MAX_LOSS
    lost = f"with a damage of at most {own}"
    if facts.damage_unit(dossier) == facts.NATS and own.endswith("%"):
        lost = f"with at most {own} more perplexity"
    elif verdict:
        lost = f"with a damage of at most {number(verdict.limit, 3)} {facts.damage_unit(dossier)}"
    return f"{listing(parts) or 'no budget'}, {lost}."


def got(dossier: Dossier) -> tuple[Card, ...]:
    """Quality as measured, then every size; the asked limits are marked."""
    limits = {facts.LABELS.get(b.name): b for b in (dossier.plan.budgets if dossier.plan else ())}
    found = [_quality(dossier)]
    for fact in (*facts.sizes(dossier), facts.measures(dossier)[-1]):
        if fact.before is None or fact.after is None or not fact.before:
            continue
        lines, limit = [f"{human(fact.before)} → {human(fact.after)} {fact.unit}".strip()], limits.get(fact.label)
        if fact.label in (facts.CACHE, facts.SIZE):
            lines.append("planned, not counted yet" if fact.planned else "counted, exact")
        if fact.interval:
            lines.append(f"{fact.range} {fact.interval}")
        if fact.unit == "ms" and dossier.verdict:
            lines.append(f"on {short(dossier.verdict.machine, 60)}")
        share = limit.limit / fact.before if limit else None
        lines += [f"limit: {_limit(limit)}"] if limit else []
        grew = fact.after > 1.005 * fact.before
        meter = Meter(fact.after / fact.before, share if share and share < 2 else None) if limit or not grew else None
        found.append(Card(fact.label, relative(fact.before, fact.after), tuple(lines), meter, grew))
    return tuple(found)


def _limit(budget: Budget) -> str:
    """The limit as it was given, without the name of the budget."""
    return budget.text.partition("=")[2].partition("@")[0]


def _quality(dossier: Dossier) -> Card:
    verdict = dossier.verdict
    worst = verdict.worst if verdict else None
    if verdict is None or worst is None:
        return Card("Quality", "–", ("not measured",))
    if not math.isfinite(worst.value):
        return Card("Quality", "not a number", (facts.measured_words(dossier),))
    change = judged.percent(worst.value) if judged.has_perplexity(verdict) else f"{worst.value:.3g}"
    what = "perplexity" if judged.has_perplexity(verdict) else judged.amount(verdict, worst.value).partition(" ")[2]
    said = f"{what}, {facts.measured_words(dossier)}; limit: {verdict.max_loss}"
    lines = (said, f"95% interval {judged.ends(verdict, worst)}")
    shares = (None if v is None else v / verdict.limit for v in (worst.value, verdict.limit, worst.low, worst.high))
    meter = Meter(*shares)
    return Card("Quality", change, lines, meter)


def next_step(dossier: Dossier) -> Next:
    """What to type now."""
    verdict = dossier.verdict
    if lacking := facts.absent(dossier, "readings", "plan", "verdict"):
        return Next(f"{lacking[0]}. This does it:", lacking[1])
    assert verdict is not None
    folder = shlex.quote(commands.folder_of(dossier))
    if verdict.quality_state == NOT_JUDGED:
        return Next("measure its quality.", f"headwise verify {folder}\nheadwise report {folder}")
    if not verdict.sizes_verified:
        return Next(
            "see which check failed, then build it again.", f"headwise verify {folder}\nheadwise report {folder}"
        )
    if verdict.quality_state == BEYOND:
        return _better(dossier)
    if verdict.quality_state == UNCERTAIN and dossier.settings:
        more = {**facts.settings_of(dossier), "eval_tokens": 4 * dossier.settings.eval_tokens}
        words = "measure on four times as much text, which halves the interval."
        return Next(words, commands.run_command(more, commands.beside(dossier, "more")))
    return Next("load it.", facts.loading(dossier, f"{commands.folder_of(dossier)}/model", short=True), "python")


def _better(dossier: Dossier) -> Next:
    """Heal a model that was not, else the smallest budget that should keep the limit, as far as this run can tell."""
    if dossier.settings and dossier.settings.heal == "none":
        return Next("heal it, in a copy of this run.", commands.another_healing(dossier, "refit"))
    if (enough := _enough(dossier)) and dossier.sweep:
        words = f"a larger budget, in a copy of this run: {enough.text} should keep the limit, if damage grows as here."
        return Next(words, commands.another_budget(dossier, dossier.sweep, enough.text))
    words = "train what is left, in a copy of this run: it takes longer and recovers more."
    return Next(words, commands.another_healing(dossier, "distill"))


def _enough(dossier: Dossier) -> Answer | None:
    """The answer of the frontier that saves most and whose damage, scaled as this run's turned out, keeps the limit."""
    verdict, plan, sweep = dossier.verdict, dossier.plan, dossier.sweep
    worst = verdict.worst if verdict else None
    if verdict is None or worst is None or plan is None or sweep is None or plan.predicted_damage <= 0:
        return None
    scale = max(worst.value, worst.high or worst.value) / plan.predicted_damage
    good = [one for one in sweep.answers if one.damage * scale <= verdict.limit]
    return min(good, key=lambda one: one.share, default=None)
