"""One record as a piece of HTML for a notebook: the page's own drawing and style, inside one element, no script."""

from __future__ import annotations

from functools import cache

from headwise.report import _facts as facts
from headwise.report import _judged as judged
from headwise.report._assets import css
from headwise.report._data import curve_sets, damage_rows
from headwise.report._diagnostics import PER_HEAD, strip_set
from headwise.report._draw import draw_lines, draw_strips
from headwise.report._explore import heat
from headwise.report._html import details, legend, paragraph, table
from headwise.report._model import draw_model, model_keys, model_rows
from headwise.report._page import measure_card
from headwise.report._text import escape, number
from headwise.types import Dossier, Plan, Reading, Readings, Verdict


def fragment(record: Plan | Reading | Readings | Verdict | Dossier) -> str:
    """The record as HTML that may stand in any page."""
    if isinstance(record, Plan):
        body = _plan(record)
    elif isinstance(record, Reading):
        body = _reading(record)
    elif isinstance(record, Readings):
        body = _readings(record)
    else:
        body = _verdict(record) if isinstance(record, Verdict) else _dossier(record)
    return f'<div class="headwise"><style>{_style()}</style>{body}</div>'


@cache
def _style() -> str:
    """The page's style, inside the element alone; notebooks have themes of their own, so it brings its ground."""
    inside = css().replace(":root {", "& {", 1).replace("color-scheme: light dark;", "color-scheme: light;", 1)
    own = "background: var(--bg); color: var(--ink); padding: 12px 16px; max-width: 1000px; line-height: 1.45;"
    return f".headwise {{ {own}\n{inside} }}"


def _plan(plan: Plan, damages: list[float] | None = None) -> str:
    rows = facts.budget_rows(Dossier({}, None, plan, None, None))
    heads = ("budget", "unit", "source", "limit", "spent", "share", "kept?")
    words = f"{plan.strategy}: predicted damage {number(plan.predicted_damage)}, gap to the proven bound {plan.gap:.1e}"
    budgets = table(heads, rows, range(2, 6)) if rows else ""
    layers = model_rows(plan, damages)
    return f"<h3>{escape(plan.model)}</h3>{paragraph(words)}{legend(model_keys(layers))}{draw_model(layers)}{budgets}"


def _reading(reading: Reading) -> str:
    alone = Readings("", {}, (reading,), ({},) * len(reading.ticks), reading.tokens, reading.seed)
    if reading.axis in PER_HEAD:
        picture = draw_strips(strip_set(reading, alone))
    else:
        picture = "".join(draw_lines(group) for group in curve_sets(alone, None))
    found = heat(reading, 0, None)
    cells = tuple((str(layer), *(number(value) for value in row)) for layer, row in enumerate(found.rows))
    heads = ("layer", *map(str, found.ticks))
    words = f"{reading.meaning} In {reading.unit or 'no unit'}; probe {reading.probe}, {number(reading.tokens)} tokens."
    title = f"<h3>{escape(reading.kind)} by {escape(reading.axis)}</h3>{paragraph(words)}"
    return title + picture + details("In numbers", table(heads, cells, range(1, len(heads))))


def _readings(readings: Readings) -> str:
    rows = tuple((r.kind, r.axis, r.probe, r.unit, number(r.tokens), r.meaning) for r in readings.curves)
    heads = ("kind", "axis", "probe", "unit", "tokens", "meaning")
    words = f"{len(rows)} readings; each shows itself: readings.curve(kind)"
    return f"<h3>{escape(readings.model)}</h3>{paragraph(words)}{table(heads, rows, (4,))}"


def _verdict(verdict: Verdict) -> str:
    dossier = Dossier({}, None, None, None, verdict)
    checks = tuple(("✓ pass" if c.passed else "✗ FAIL", c.name, c.observed, c.expected) for c in verdict.checks)
    heads = ("quantity", "before", "after", "change", "95% interval of after")
    return (
        f"<h3>{escape(judged.headline(verdict))}</h3>{_cards(dossier)}"
        + table(("result", "check", "observed", "expected"), checks, ())
        + details("Everything that was measured", table(heads, facts.certificate_rows(dossier), range(1, 5)))
    )


def _cards(dossier: Dossier) -> str:
    known = [measure for measure in facts.measures(dossier) if measure.after is not None]
    return f'<div class="grid cards">{"".join(measure_card(measure) for measure in known)}</div>'


def _dossier(dossier: Dossier) -> str:
    body = f'<p class="lead">{escape(facts.headline(dossier))}</p>{_cards(dossier)}'
    if dossier.plan is None:
        return body
    damages = [row.total for row in damage_rows(dossier.readings, dossier.plan)] if dossier.readings else None
    return body + _plan(dossier.plan, damages)
