"""Several runs on one page: what they cost against what damage was measured, with error bars, and a table beneath."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from headwise.errors import HeadwiseError
from headwise.report import _facts as facts
from headwise.report import _judged as judged
from headwise.report import _rivals as rivals
from headwise.report._checked import damage_marks
from headwise.report._data import value_range
from headwise.report._html import figure, paragraph, section, table
from headwise.report._page import document, heading
from headwise.report._svg import Scale, circle, line, path, polyline, short_tick, spread, svg, text, titled, xy
from headwise.report._text import escape, human, listing, number, relative, short
from headwise.types import Dossier


class Run(NamedTuple):
    """One run as a point: damage and its interval, and the share of the source's price by what is priced."""

    name: str
    dossier: Dossier
    damage: float
    low: float | None
    high: float | None
    measured: bool  # else predicted
    shares: dict[str, float]


def read_runs(dossiers: Sequence[tuple[str, Dossier]]) -> tuple[Run, ...]:
    """The runs as points; what cannot stand on one axis is refused."""
    units = {facts.damage_unit(dossier) for _, dossier in dossiers if dossier.readings is not None}
    if len(units) > 1:
        raise HeadwiseError(f"these runs count damage in {listing(sorted(units))}; compare runs of one task.")
    return tuple(_run(name, dossier) for name, dossier in dossiers)


def _run(name: str, dossier: Dossier) -> Run:
    if dossier.plan is None:
        raise HeadwiseError(f"{name} holds no plan yet; type: headwise allocate {name} --budget kv=75%")
    last = damage_marks(dossier)[-1]
    pairs = {m.label: (m.before, m.after) for m in facts.measures(dossier) if m.label in (facts.CACHE, facts.SIZE)}
    shares = {label: after / before for label, (before, after) in pairs.items() if before and after is not None}
    for budget in dossier.plan.budgets:
        full, spent = rivals.priced(budget, dossier.plan.source), dossier.plan.spent.get(budget.key)
        if budget.name not in ("kv", "params") and full and spent is not None:
            shares[budget.name] = spent / full
    return Run(name, dossier, last.value, last.low, last.high, last.name == "measured", shares)


def best(runs: Sequence[Run], price: str) -> tuple[Run, ...]:
    """The runs that no other beats in price and in measured damage, cheapest first."""
    ranked = sorted((r for r in runs if price in r.shares and r.measured), key=lambda r: (r.shares[price], r.damage))
    kept: list[Run] = []
    for run in ranked:
        if not kept or run.damage < kept[-1].damage:
            kept.append(run)
    return tuple(kept)


def compare_page(dossiers: Sequence[tuple[str, Dossier]]) -> str:
    """The whole document."""
    runs = read_runs(dossiers)
    prices = [name for name in dict.fromkeys(p for run in runs for p in run.shares) if _differs(runs, name)]
    figures = "".join(figure(f"By {name}", draw_runs(runs, name)) for name in prices or list(runs[0].shares)[:1])
    unit = facts.damage_unit(runs[0].dossier)
    sources = {facts.model_name(run.dossier) for run in runs}
    words = (
        f"Damage in {unit}, against the share of the source's price that is left; lower and further left is better. "
    )
    words += "Dots: measured, with 95% intervals. Rings: predicted only. Line: the runs that no other beats."
    words += f" Sources differ: {listing(sorted(sources))}." if len(sources) > 1 else ""
    body = section(
        "frontier", "On one frontier", paragraph(words) + f'<div class="grid" style="--min:340px">{figures}</div>'
    )
    body += section("runs", "Run by run", _table(runs))
    title = f"{len(runs)} runs compared"
    header = heading(title, "") + f'<p class="lead">{escape(_lead(runs, prices[0] if prices else ""))}</p>'
    data: dict[str, Any] = {"layers": 0, "explorer": None, "heats": [], "facts": []}
    return document(f"{title} by Headwise", header, "", body, data)


def _differs(runs: Sequence[Run], price: str) -> bool:
    return len({run.shares.get(price) for run in runs}) > 1


def _lead(runs: Sequence[Run], price: str) -> str:
    """The answer in a sentence."""
    good = [run.name for run in best(runs, price)] if price else []
    failed = [r.name for r in runs if r.dossier.verdict and not r.dossier.verdict.sizes_verified]
    sentence = f"No other run is both smaller in {price} and better than {listing(good)}" if good else ""
    least = min(runs, key=lambda run: run.damage)
    sentence = sentence or f"{least.name} has the least damage"
    return f"{sentence}. {f'Checks failed in {listing(failed)}.' if failed else ''}".strip()


def draw_runs(runs: Sequence[Run], price: str) -> str:
    """Damage by share of a price, a point per run with its interval and its name."""
    known = [run for run in runs if price in run.shares]
    shown = [v for run in known for v in (run.damage, run.low, run.high) if v is not None]
    log = min(shown) > 0 and max(shown) > 5 * min(shown)
    shares = [run.shares[price] for run in known]
    margin = (max(shares) - min(shares)) * 0.08 or 0.05
    across, up = (
        Scale(min(shares) - margin, max(shares) + margin, 50, 366),
        Scale(*value_range(shown, log), 196, 20, log),
    )
    body = text(50, 9, "damage", "m")
    for tick in up.ticks(4):
        words = short_tick(tick) if log else number(tick, 3)
        body += line(50, up(tick), 366, up(tick), "l") + text(45, up(tick) + 4, words, "m", "end")
    body += "".join(text(across(t), 210, f"{t:.0%}", "m", "middle") for t in across.ticks(6))
    body += polyline([(across(run.shares[price]), up(run.damage)) for run in best(known, price)], "c")
    places = spread([up(run.damage) for run in known], 12, 20, 194)
    for run, y in zip(known, places, strict=True):
        x, middle = across(run.shares[price]), up(run.damage)
        shape = circle(x, middle, 4, "k" if run.measured else "o")
        if run.low is not None and run.high is not None:
            shape = path(f"M{xy(x)} {xy(up(run.low))}V{xy(up(run.high))}", "w") + shape
        name = short(run.name, 26)
        side, anchor = (1, "") if x + 12 + 6 * len(name) < 380 else (-1, "end")
        shape += text(x + 9 * side, y + 3.5, name, "t", anchor)
        body += titled(f"{run.name}: {run.shares[price]:.1%}, damage {number(run.damage)}", shape)
    return svg(380, 216, f"Damage of {len(known)} runs against {price}", body, "chart")


def _table(runs: Sequence[Run]) -> str:
    prices = list(dict.fromkeys(price for run in runs for price in run.shares))
    rows = []
    for run in sorted(runs, key=lambda run: run.damage):
        dossier, plan = run.dossier, run.dossier.plan
        assert plan is not None
        quality, *_, time = facts.measures(dossier)
        interval = f"{number(run.low)} to {number(run.high)}" if run.low is not None else "–"
        passed = "–" if dossier.verdict is None else judged.status(dossier.verdict)
        healing = str((dossier.healing or {}).get("method", "–"))
        rows.append(
            (
                run.name, facts.model_name(dossier), ", ".join(b.text for b in plan.budgets),
                "portable" if plan.portable else plan.strategy, healing,
                *(f"{run.shares[price]:.1%}" if price in run.shares else "–" for price in prices),
                number(run.damage) if run.measured else f"{number(run.damage)} (predicted)", interval,
                human(quality.after), relative(quality.before, quality.after), human(time.after), passed,
            )
        )  # fmt: skip
    label = facts.measures(runs[0].dossier)[0].label.lower()
    heads = (
        "run", "model", "budget", "strategy", "healing", *prices, "damage", "95% interval", label, "change",
        "ms per token", "verdict",
    )  # fmt: skip
    numeric = [
        i for i, head in enumerate(heads) if head not in ("run", "model", "budget", "strategy", "healing", "verdict")
    ]
    return table(heads, tuple(rows), numeric, name="runs")
