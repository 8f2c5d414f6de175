"""Several runs on one page: what they cost against what damage was measured, with error bars, and a table beneath."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headwise.errors import HeadwiseError
from headwise.report import _facts as facts
from headwise.report import _judged as judged
from headwise.report._bits import WHOLE, average_bits, is_coded
from headwise.report._chart import WIDE, Axis, Chart, Series, draw
from headwise.report._data import value_range
from headwise.report._html import NO_DATA, document, figure, paragraph, section, table, top
from headwise.report._sizes import size_of
from headwise.report._tables import Table
from headwise.report._text import MISSING, as_number, human, interval, listing, number, relative
from headwise.runs.dossier import Dossier

SHARES = f"Shares of the cache are of the source's at {WHOLE} bits a number, everything that is stored counted."


class ComparedRun(NamedTuple):
    """One run as a point: damage and its interval, and the share of the source's price by what is priced."""

    name: str
    dossier: Dossier
    damage: float
    ends: tuple[float, float] | None
    measured: bool  # else predicted
    shares: dict[str, float]


def read_runs(dossiers: Sequence[tuple[str, Dossier]]) -> tuple[ComparedRun, ...]:
    """The runs as points; what cannot stand on one axis is refused."""
    units = {facts.damage_unit(dossier) for _, dossier in dossiers if dossier.readings is not None}
    if len(units) > 1:
        raise HeadwiseError(f"these runs count damage in {listing(sorted(units))}; compare runs of one task.")
    return tuple(_run(name, dossier) for name, dossier in dossiers)


def _run(name: str, dossier: Dossier) -> ComparedRun:
    if dossier.plan is None:
        raise HeadwiseError(f"{name} holds no plan yet; type: headwise allocate {name} --budget kv=75%")
    kind, last = list(facts.damages(dossier).items())[-1]
    low, high = as_number(last.low), as_number(last.high)
    ends = None if low is None or high is None else (low, high)
    pairs = {m.label: (m.before, m.after) for m in facts.measures(dossier) if m.label in (facts.CACHE, facts.SIZE)}
    shares = {label: after / before for label, (before, after) in pairs.items() if before and after is not None}
    for budget in dossier.plan.budgets:
        full, spent = size_of(budget, dossier.plan.source), dossier.plan.spent.get(budget.key)
        if budget.name not in ("kv", "params") and full and spent is not None:
            shares[budget.name] = spent / full
    return ComparedRun(name, dossier, last.value, ends, kind == "measured", shares)


def best(runs: Sequence[ComparedRun], price: str) -> tuple[ComparedRun, ...]:
    """The runs that no other beats in price and in measured damage, cheapest first."""
    ranked = sorted((r for r in runs if price in r.shares and r.measured), key=lambda r: (r.shares[price], r.damage))
    kept: list[ComparedRun] = []
    for run in ranked:
        if not kept or run.damage < kept[-1].damage:
            kept.append(run)
    return tuple(kept)


def compare(dossiers: Sequence[tuple[str, Dossier]]) -> str:
    """Several runs, by name, on one page."""
    runs = read_runs(dossiers)
    prices = [name for name in dict.fromkeys(p for run in runs for p in run.shares) if _differs(runs, name)]
    figures = "".join(figure(f"By {name}", draw(run_chart(runs, name))) for name in prices or list(runs[0].shares)[:1])
    unit = facts.damage_unit(runs[0].dossier)
    sources = {facts.model_name(run.dossier) for run in runs}
    words = (
        f"Damage in {unit}, against the share of the source's price that is left; lower and further left is better. "
    )
    words += "Dots: measured, with 95% intervals. Rings: predicted only. Line: the runs that no other beats."
    words += f" {SHARES}" if any(is_coded(run.dossier.plan) for run in runs) else ""
    words += f" Sources differ: {listing(sorted(sources))}." if len(sources) > 1 else ""
    body = section(
        "frontier", "On one frontier", paragraph(words) + f'<div class="grid" style="--min:340px">{figures}</div>'
    )
    body += section("runs", "Run by run", table(run_table(runs)))
    title = f"{len(runs)} runs compared"
    header = top(title, "", _lead(runs, prices[0] if prices else ""))
    return document(f"{title} by Headwise", header, "", body, NO_DATA)


def _differs(runs: Sequence[ComparedRun], price: str) -> bool:
    return len({run.shares.get(price) for run in runs}) > 1


def _lead(runs: Sequence[ComparedRun], price: str) -> str:
    """The answer in a sentence."""
    good = [run.name for run in best(runs, price)] if price else []
    failed = [r.name for r in runs if r.dossier.verdict and not r.dossier.verdict.sizes_verified]
    sentence = f"No other run is both smaller in {price} and better than {listing(good)}" if good else ""
    least = min(runs, key=lambda run: run.damage)
    sentence = sentence or f"{least.name} has the least damage"
    return f"{sentence}. {f'Checks failed in {listing(failed)}.' if failed else ''}".strip()


def run_chart(runs: Sequence[ComparedRun], price: str) -> Chart:
    """Damage by share of a price, a point per run with its interval and its name."""
    known = [run for run in runs if price in run.shares]
    shown = [value for run in known for value in (run.damage, *(run.ends or ()))]
    log = min(shown) > 0 and max(shown) > 5 * min(shown)
    shares = [run.shares[price] for run in known]
    margin = (max(shares) - min(shares)) * 0.08 or 0.05
    points = [Series(tuple((run.shares[price], run.damage) for run in best(known, price)))]
    for run in known:
        words = f"{run.name}: {run.shares[price]:.1%}, damage {number(run.damage)}"
        style, ends = "dot" if run.measured else "ring", (run.ends,) if run.ends else ()
        points.append(Series(((run.shares[price], run.damage),), style, words, run.name, ends))
    x = Axis(f"share of {price}", (min(shares) - margin, max(shares) + margin), percent=True)
    title = f"Damage of {len(known)} runs against {price}"
    return Chart(title, x, Axis("damage", value_range(shown, log), log), tuple(points), frame=WIDE)


def run_table(runs: Sequence[ComparedRun]) -> Table:
    """Everything about every run, least damage first."""
    prices = list(dict.fromkeys(price for run in runs for price in run.shares))
    rows, coded = [], any(is_coded(run.dossier.plan) for run in runs)
    for run in sorted(runs, key=lambda run: run.damage):
        dossier, plan = run.dossier, run.dossier.plan
        assert plan is not None
        quality, *_, time = facts.measures(dossier)
        rows.append((
            run.name, facts.model_name(dossier), ", ".join(b.text for b in plan.budgets),
            "portable" if plan.portable else plan.strategy, str((dossier.healing or {}).get("method", MISSING)),
            *([f"{average_bits(plan):.1f}"] if coded else []),
            *(f"{run.shares[price]:.1%}" if price in run.shares else MISSING for price in prices),
            number(run.damage) if run.measured else f"{number(run.damage)} (predicted)",
            interval(*run.ends) if run.ends else MISSING,
            human(quality.after), relative(quality.before, quality.after), human(time.after),
            MISSING if dossier.verdict is None else judged.status(dossier.verdict),
        ))  # fmt: skip
    words = ("run", "model", "budget", "strategy", "healing")
    label = facts.measures(runs[0].dossier)[0].label.lower()
    numbers = (
        *(["cache bits a number"] if coded else []),
        *prices,
        "damage",
        "95% interval",
        label,
        "change",
        "ms per token",
    )
    numeric = range(len(words), len(words) + len(numbers))
    return Table((*words, *numbers, "verdict"), tuple(rows), numeric, "runs")
