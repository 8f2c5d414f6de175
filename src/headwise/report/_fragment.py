"""One record as a piece of HTML for a notebook: the page's own drawing and style, inside one element, no script."""

from collections.abc import Callable
from functools import cache
from typing import Any

from headwise.report import _facts as facts
from headwise.report import _judged as judged
from headwise.report import _pictures as pictures
from headwise.report import _tables as tables
from headwise.report._answer import got
from headwise.report._chart import draw, draw_rows
from headwise.report._data import curve_sets, damage_rows
from headwise.report._diagnostics import PER_HEAD, strip_set
from headwise.report._explore import heat, proof
from headwise.report._html import asset, cards, details, legend, paragraph, table
from headwise.report._model import draw_model, model_keys, model_rows
from headwise.report._tables import Table
from headwise.report._text import escape, number
from headwise.report._words import reading_words
from headwise.runs.dossier import Dossier
from headwise.types import Plan, Reading, Readings, Verdict


def fragment(record: Plan | Reading | Readings | Verdict | Dossier) -> str:
    """The record as HTML that may stand in any page."""
    draw_it: dict[type, Callable[[Any], str]] = {
        Plan: _plan, Reading: _reading, Readings: _readings, Verdict: _verdict, Dossier: _dossier
    }  # fmt: skip
    return f'<div class="headwise"><style>{_style()}</style>{draw_it[type(record)](record)}</div>'


@cache
def _style() -> str:
    """The page's style, inside the element alone; notebooks have themes of their own, so it brings its ground."""
    inside = asset("page.css").replace(":root {", "& {", 1)
    inside = inside.replace("color-scheme: light dark;", "color-scheme: light;", 1)
    own = "background: var(--bg); color: var(--ink); padding: 12px 16px; max-width: 1000px; line-height: 1.45;"
    return f".headwise {{ {own}\n{inside} }}"


def _plan(plan: Plan, damages: list[float] | None = None, heading: str = "") -> str:
    heading = heading or facts.title(Dossier(plan=plan))
    found, layers = tables.budgets(Dossier(plan=plan)), model_rows(plan, damages)
    words = f"Predicted damage before healing: {number(plan.predicted_damage, 3)}, {proof(plan)}."
    budgets = table(found) if found.rows else ""
    return f"<h3>{escape(heading)}</h3>{paragraph(words)}{legend(model_keys(layers))}{draw_model(layers)}{budgets}"


def _reading(reading: Reading) -> str:
    alone = Readings("", None, (reading,), ({},) * len(reading.ticks), reading.tokens, reading.seed)
    if reading.axis in PER_HEAD:
        picture = draw_rows(pictures.strips(strip_set(reading, alone)))
    else:
        picture = "".join(draw(pictures.curves(group)) for group in curve_sets(alone, None))
    found = heat(reading, 0, None)
    cells = tuple((str(layer), *(number(value) for value in row)) for layer, row in enumerate(found.rows))
    numbers = Table(("layer", *map(str, found.ticks)), cells, range(1, len(found.ticks) + 1))
    words = f"{reading.meaning} In {reading.unit or 'no unit'}; probe {reading.probe}, {number(reading.tokens)} tokens."
    title = f"<h3>{escape(reading_words(reading.kind, reading.axis))}</h3>{paragraph(words)}"
    return title + picture + details("In numbers", table(numbers))


def _readings(readings: Readings) -> str:
    rows = tuple((r.kind, r.axis, r.probe, r.unit, number(r.tokens), r.meaning) for r in readings.curves)
    found = Table(("kind", "axis", "probe", "unit", "tokens", "meaning"), rows, (4,))
    words = f"{len(rows)} readings; each shows itself: readings.curve(kind)"
    return f"<h3>{escape(readings.model)}</h3>{paragraph(words)}{table(found)}"


def _verdict(verdict: Verdict) -> str:
    found = {"What was checked": tables.checks(verdict), "Everything that was measured": tables.measured(verdict)}
    folded = "".join(details(name, table(of), name == "What was checked") for name, of in found.items())
    return f"<h3>{escape(judged.headline(verdict))}</h3>{_known(Dossier(verdict=verdict))}{folded}"


def _known(dossier: Dossier) -> str:
    return cards(card for card in got(dossier) if card.big != "–")


def _dossier(dossier: Dossier) -> str:
    sign, advice = judged.advice(dossier.verdict, dossier.unverified)
    body = f"<h3>{escape(facts.title(dossier))}</h3>{paragraph(f'{sign} {advice}')}"
    if dossier.plan is None:
        return body + paragraph(facts.headline(dossier)) + _known(dossier)
    body += paragraph(f"Got: {facts.changes(dossier, short=True)}.") + _known(dossier)
    damages = [row.total for row in damage_rows(dossier.readings, dossier.plan)] if dossier.readings else None
    return body + _plan(dossier.plan, damages, "What every layer keeps")
