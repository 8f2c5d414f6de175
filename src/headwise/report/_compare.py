"""Several runs on one page: a table with a link to every report, and what damage was measured at what size."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headwise.errors import HeadwiseError
from headwise.report import _facts as facts
from headwise.report import _judged as judged
from headwise.report._bits import WHOLE, average_bits, is_coded
from headwise.report._chart import WIDE, Axis, Chart, Series, draw
from headwise.report._data import value_range
from headwise.report._html import NO_DATA, bar, document, figure, paragraph, section, table, top
from headwise.report._sizes import full_size
from headwise.report._tables import Table
from headwise.report._text import MISSING, human, interval, listing, number
from headwise.report._words import MEASURED, PREDICTED, known_ends
from headwise.runs.dossier import Dossier
from headwise.types import Measure

SHARES = f"Shares of the cache are of the source's at {WHOLE} bits per number, with everything that is stored."


class ComparedRun(NamedTuple):
    """One run as a point: damage and its interval, and the share of the source's size by what is counted."""

    name: str
    dossier: Dossier
    damage: float
    ends: tuple[float, float] | None
    measured: bool  # else predicted
    shares: dict[str, float]
    letter: str  # by which the pictures name it
    link: str = ""  # to its report


def read_runs(
    dossiers: Sequence[tuple[str, Dossier]], links: Mapping[str, str] | None = None
) -> tuple[ComparedRun, ...]:
    """The runs as points; what cannot stand on one axis is refused."""
    units = {facts.damage_unit(dossier) for _, dossier in dossiers if dossier.readings is not None}
    if len(units) > 1:
        raise HeadwiseError(f"these runs count damage in {listing(sorted(units))}; compare runs of one task.")
    known = links or {}
    return tuple(_run(name, dossier, letter_of(i), known.get(name, "")) for i, (name, dossier) in enumerate(dossiers))


def letter_of(place: int) -> str:
    """A short name: A to Z, then A1 to Z1, and so on."""
    return chr(ord("A") + place % 26) + (str(place // 26) if place >= 26 else "")


def _run(name: str, dossier: Dossier, letter: str, link: str) -> ComparedRun:
    if dossier.plan is None:
        raise HeadwiseError(f"{name} holds no plan yet; type: headwise allocate {name} --budget kv=75%")
    found = facts.damages(dossier) or {PREDICTED: Measure(dossier.plan.predicted_damage)}
    kind, last = list(found.items())[-1]
    pairs = {fact.label: (fact.before, fact.after) for fact in facts.sizes(dossier)}
    shares = {label: after / before for label, (before, after) in pairs.items() if before and after is not None}
    for budget in dossier.plan.budgets:
        full, spent = full_size(budget, dossier.plan), dossier.plan.spent.get(budget.key)
        if budget.name not in facts.LABELS and full and spent is not None:
            shares[budget.name] = spent / full
    return ComparedRun(name, dossier, last.value, known_ends(last), kind == MEASURED, shares, letter, link)


def best(runs: Sequence[ComparedRun], size: str) -> tuple[ComparedRun, ...]:
    """The runs that no other beats in size and in measured damage, smallest first."""
    ranked = sorted((r for r in runs if size in r.shares and r.measured), key=lambda r: (r.shares[size], r.damage))
    kept: list[ComparedRun] = []
    for run in ranked:
        if not kept or run.damage < kept[-1].damage:
            kept.append(run)
    return tuple(kept)


def compare(dossiers: Sequence[tuple[str, Dossier]], links: Mapping[str, str] | None = None) -> str:
    """Several runs, by name, on one page; `links` lead to their reports."""
    runs = read_runs(dossiers, links)
    known = dict.fromkeys(size for run in runs for size in run.shares)
    sizes = [size for size in known if len({run.shares.get(size) for run in runs}) > 1]
    drawn = sizes or list(runs[0].shares)[:1]
    figures = "".join(figure(f"By {_small(name)}", draw(run_chart(runs, name))) for name in drawn)
    unit = facts.damage_unit(runs[0].dossier)
    sources = {facts.model_name(run.dossier) for run in runs}
    words = (
        f"Damage in {unit}, against the share of the source's size that is left; lower and further left is better. "
        "Dots: measured after healing, with 95% intervals. Rings: predicted before healing. Line: the runs that no "
        "other beats. Letters: the runs in the table."
    )
    words += f" {SHARES}" if any(is_coded(run.dossier.plan) for run in runs) else ""
    words += f" Sources differ: {listing(sorted(sources))}." if len(sources) > 1 else ""
    reached, made = run_tables(runs)
    how = f"<h3>How they were made</h3>{table(made)}"
    body = section("runs", "Run by run", table(reached) + how)
    pictures = f'<div class="grid" style="--min:340px">{figures}</div>'
    body += section("frontier", "On one frontier", paragraph(words) + pictures)
    title = f"{len(runs)} runs compared"
    header = top(title, (), _lead(runs, sizes[0] if sizes else ""))
    links_here = bar((("runs", "Run by run"), ("frontier", "On one frontier")))
    return document(f"{title} by Headwise", header, links_here, body, NO_DATA)


def _small(size: str) -> str:
    return size if size[1:2].isupper() else size[:1].lower() + size[1:]


def _lead(runs: Sequence[ComparedRun], size: str) -> str:
    """The answer in a sentence."""
    good = [run.name for run in best(runs, size)] if size else []
    failed = [r.name for r in runs if r.dossier.verdict and not r.dossier.verdict.passed]
    least = min(runs, key=lambda run: run.damage)
    sentence = f"{least.name} has the least damage"
    if good:
        sentence = f"No other run is both smaller in {_small(size)} and better than {listing(good)}"
    return f"{sentence}. {f'Do not use {listing(failed)}: checks or quality failed.' if failed else ''}".strip()


def run_chart(runs: Sequence[ComparedRun], size: str) -> Chart:
    """Damage by share of a size, a point per run with its interval and its letter."""
    known = [run for run in runs if size in run.shares]
    shown = [value for run in known for value in (run.damage, *(run.ends or ()))]
    log = min(shown) > 0 and max(shown) > 5 * min(shown)
    shares = [run.shares[size] for run in known]
    margin = (max(shares) - min(shares)) * 0.08 or 0.05
    points = [Series(tuple((run.shares[size], run.damage) for run in best(known, size)))]
    for run in known:
        words = f"{run.name}: {run.shares[size]:.1%}, damage {number(run.damage)}"
        style, ends = "dot" if run.measured else "ring", (run.ends,) if run.ends else ()
        points.append(Series(((run.shares[size], run.damage),), style, words, run.letter, ends))
    x = Axis(f"share of {_small(size)}", (min(shares) - margin, max(shares) + margin), percent=True)
    title = f"Damage of {len(known)} runs against {_small(size)}"
    return Chart(title, x, Axis("damage", value_range(shown, log), log), tuple(points), frame=WIDE)


def run_tables(runs: Sequence[ComparedRun]) -> tuple[Table, Table]:
    """What every run reached, and how it was made; least damage first."""
    sizes = list(dict.fromkeys(size for run in runs for size in run.shares))
    ranked = sorted(runs, key=lambda run: run.damage)
    label, links = facts.measures(runs[0].dossier)[0].label.lower(), tuple(run.link for run in ranked)
    heads = ("", "run", "verdict", label, "change", "95% interval", *map(_small, sizes), "ms per token")
    reached = Table(heads, tuple(_reached(run, sizes) for run in ranked), range(3, len(heads)), "runs", links=links)
    ways = ("", "run", "budget", "strategy", "healing", "cache bits per number", "damage", "95% interval", "model")
    made = [_made(run) for run in ranked]
    kept = [i for i, way in enumerate(ways) if way != "cache bits per number" or any(row[i] != MISSING for row in made)]
    rows = tuple(tuple(row[i] for i in kept) for row in made)
    numeric = range(5, len(kept) - 1)
    return reached, Table(tuple(ways[i] for i in kept), rows, numeric, "how runs were made", links=links)


def _reached(run: ComparedRun, sizes: Sequence[str]) -> tuple[str, ...]:
    verdict, (quality, *_, time) = run.dossier.verdict, facts.measures(run.dossier)
    worst = verdict.worst if verdict else None
    change = (MISSING, MISSING)
    if verdict and worst:
        change = judged.amount(verdict, worst.value).removesuffix(" perplexity"), judged.ends(verdict, worst)
    both = " → ".join(human(value) for value in (quality.before, quality.after) if value is not None) or MISSING
    return (
        *(run.letter, run.name, MISSING if verdict is None else judged.status(verdict), both, *change),
        *(f"{run.shares[size]:.1%}" if size in run.shares else MISSING for size in sizes),
        human(time.after),
    )


def _made(run: ComparedRun) -> tuple[str, ...]:
    plan = run.dossier.plan
    assert plan is not None
    return (
        *(run.letter, run.name, ", ".join(budget.text for budget in plan.budgets)),
        "portable" if plan.portable else plan.strategy,
        run.dossier.healing.method if run.dossier.healing else MISSING,
        f"{average_bits(plan):.1f}" if is_coded(plan) else MISSING,
        number(run.damage) if run.measured else f"{number(run.damage)} (predicted)",
        interval(*run.ends) if run.ends else MISSING,
        facts.model_name(run.dossier),
    )
