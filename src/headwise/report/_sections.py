"""The sections below the first screen. A stage that has not run says what to type."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from headwise.report import _facts as facts
from headwise.report import _judged as judged
from headwise.report import _pictures as pictures
from headwise.report import _tables as tables
from headwise.report._chart import draw, draw_rows
from headwise.report._commands import FOLDER, how_to_make, run_command
from headwise.report._data import CurveSet, curve_sets, damage_rows, price_pairs
from headwise.report._diagnostics import FIRST, HEADINGS, StripSet, diagnostics
from headwise.report._explore import Heat
from headwise.report._healing import healing_in_words, healing_parts
from headwise.report._html import code, details, figure, legend, missing, paragraph, pickable, pre, table
from headwise.report._rivals import left_out
from headwise.report._samples import draw_samples
from headwise.report._text import escape, number
from headwise.runs.dossier import Dossier
from headwise.types import DAMAGE, UNIT_OF, UNITS, Plan, Readings, Verdict
from headwise.types.unit import LABELS

Maps = tuple[Heat, ...]
HOW = "A line per layer, early ones faint, late ones strong; choose a layer to see its error bars."
PICK = "up and down choose a layer"


def _baselines(dossier: Dossier, maps: Maps) -> str:
    budgets, strategies = tables.budgets(dossier), tables.strategies(dossier)
    body = table(budgets) if budgets.rows else paragraph("The plan has no budget.")
    if len(strategies.rows) < 2:
        return body + missing(("No other strategy was tried", how_to_make(dossier, "allocate")))
    words = f"The same budgets spent in other ways; predicted from the same readings, in {facts.damage_unit(dossier)}."
    return paragraph(words + left_out(dossier)) + table(strategies) + "<h3>Budgets</h3>" + body


def _damage(dossier: Dossier, maps: Maps) -> str:
    assert dossier.readings is not None
    body = _by_layer(dossier, dossier.readings, dossier.plan) if dossier.plan is not None else ""
    body += _predicted(dossier, dossier.readings)
    body += "<h3>Damage curves</h3>" + paragraph(
        "What every size of every layer would cost on its own: where a line is flat, cutting is cheap, and the solver "
        f"walks along all of them at once. {HOW} Diamonds: the sizes that were chosen."
    )
    sets = [group for group in curve_sets(dossier.readings, dossier.plan) if group.kind.startswith(DAMAGE)]
    for group in sets:
        unit = UNIT_OF.get(group.kind)
        name = f"{unit.title if unit else 'Damage'}: {group.kind} by {group.reading.axis}"
        name += "" if group.used else " (not used by this plan)"
        body += _reading(group, maps, name, group.used)
    return body


def _by_layer(dossier: Dossier, readings: Readings, plan: Plan) -> str:
    rows, units = damage_rows(readings, plan), tables.damage_by_unit(readings, plan)
    body = paragraph(
        f"Predicted loss increase of every layer at its chosen sizes, in {facts.damage_unit(dossier)}: where the plan "
        f"pays. Together {number(sum(row.total for row in rows))}; the plan says {number(plan.predicted_damage)}."
        + (ROUNDS if dossier.settings and dossier.settings.rounds > 1 else "")
    )
    if not units.rows:
        return body + paragraph("The plan cuts nothing that was priced.")
    keys = legend([(unit, LABELS[unit]) for unit in UNITS if any(unit in row.parts for row in rows)])
    picture = pickable(f"Damage by layer; {PICK}", draw_rows(pictures.damage(rows)))
    words = table(units) + details("By layer", table(tables.damage_by_layer(readings, plan)))
    return f'{body}{keys}<div class="pair">{picture}<div>{words}</div></div>'


ROUNDS = " The plan adds up its rounds; these are the first round's curves at the final sizes."


def _predicted(dossier: Dossier, readings: Readings) -> str:
    """Predicted against measured: the whole plan, and single cuts."""
    body, marks, pairs = "", facts.damages(dossier), price_pairs(readings)
    if len(marks) > 1:
        words = "Sum of prices: what the solver minimised, before healing."
        if "rehearsed" in marks:
            words += " Rehearsed: the finished model on calibration text that nothing was fitted to."
        words = f"{facts.damage_in_words(dossier)} {words} Measured: on the evaluation data, with its 95% interval."
        body += f"<div>{paragraph(words)}{draw_rows(pictures.marks(marks))}</div>"
    if pairs:
        picture = pickable(f"Predicted against measured prices; {PICK}", draw(pictures.prices(pairs)))
        body += f"<div>{paragraph('Prices of single cuts. ' + pictures.prices_in_words(pairs))}{picture}</div>"
    return f'<h3>Predicted against measured</h3><div class="pair">{body}</div>' if body else ""


def _layers(dossier: Dossier, maps: Maps) -> str:
    assert dossier.readings is not None
    topics = diagnostics(dossier.readings, dossier.plan)
    if not topics:
        return paragraph("These readings hold damages only; a new run also measures what the layers do.")
    body = paragraph(
        f"What the probes saw beside damage: why some cuts are cheap. Only the strategy bound decides by it. {HOW}"
    )
    for topic in topics:
        body += f"<h3>{escape(topic.question)}</h3>" + paragraph(f"{topic.why} {topic.answer}".strip())
        for group in topic.sets:
            name = HEADINGS.get(group.kind, f"{group.kind} by {group.reading.axis}")
            body += _reading(group, maps, name, group.kind.startswith(FIRST))
    return body


def _reading(group: CurveSet | StripSet, maps: Maps, name: str, is_open: bool) -> str:
    """One reading: what it means, a picture of lines or dots, the heat map, and the numbers."""
    if isinstance(group, StripSet):
        words, shape, picture = _strip_words(group), "a dot per head", draw_rows(pictures.strips(group))
    else:
        words, shape, picture = _line_words(group), "a line per layer", draw(pictures.curves(group))
    words += f" Probe {group.reading.probe}, {number(group.reading.tokens)} tokens."
    shown = pickable(f"{name}, {shape}; {PICK}", picture)
    found = next((one for one in maps if one.reading.kind == group.kind), None)
    pair = f'<div class="pair">{shown}{_heat(found, name) if found else ""}</div>'
    numbers = details("As a table", "", kind="table") if found else ""
    return f'<div class="reading">{details(name, f"<p class=note>{escape(words)}</p>{pair}{numbers}", is_open)}</div>'


def _heat(found: Heat, name: str) -> str:
    """The frame of a heat map; the script paints it."""
    last = len(found.rows) - 1
    layers = f'<div class="rows" aria-hidden="true"><span>0</span><span>{last}</span></div>' if last else ""
    low, high = (number(end, 3) for end in found.ends)
    sizes = [str(found.ticks[place]) for place in (0, -1)] if found.ticks else ["", ""]
    label = f"Heat map of {name}: layers down; arrow keys read the values"
    return (
        f'<div class="heat" id="{found.name}"><div class="plot">{layers}'
        f'<canvas tabindex="0" role="img" aria-label="{escape(label)}"></canvas><div class="ring"></div></div>'
        f'<div class="ticks"><span>{sizes[0]}</span><span>{escape(found.reading.axis.replace("_", " "))}</span>'
        f"<span>{sizes[1]}</span></div>"
        f'<div class="key"><span>{low}</span><i></i><span>{high} {escape(found.reading.unit)}'
        f"{', logarithmic' if found.log else ''}</span></div>"
        '<p class="read" role="status">Point at a cell for its value.</p></div>'
    )


def _line_words(group: CurveSet) -> str:
    words = group.reading.meaning + (" Logarithmic, with zero on the floor." if group.log else "")
    words += f" Dashed: {group.guide}." if group.guide else ""
    if group.earlier_probe:
        words += f" Dashed for a chosen layer: as the {group.earlier_probe} probe predicted it."
    return words


def _strip_words(group: StripSet) -> str:
    words = f"{group.reading.meaning} A dot per {group.reading.axis.replace('_', ' ')}, layers down."
    words += " Grey: the full dimension." if any(strip.full for strip in group.strips) else ""
    return words + (f" Typical standard error: {number(group.error, 2)}." if group.error is not None else "")


def _healing(dossier: Dossier, maps: Maps) -> str:
    record = dossier.healing or {}
    words, parts, found = healing_in_words(record), healing_parts(record), pictures.loss(record)
    dots = any(series.style == "dot" for series in found.series) if found else False
    curve = figure("Loss; dots: on held-out text" if dots else "Loss", draw(found)) if found else ""
    if not parts:
        return paragraph(f"{words} It recorded no errors per layer.") + curve
    words += (
        " How far every layer's output lies from the source's, relative to it: ring before, dot after the repair. "
        "Errors add up from layer to layer, so late layers have more to make up for."
    )
    figures = "".join(
        figure(part, pickable(f"Healing of {part}; {PICK}", draw_rows(pictures.healing(part, rows, parts))))
        for part, rows in parts.items()
    )
    body = f'<div class="grid" style="--min:300px">{figures}{curve}</div>'
    return paragraph(words) + body + details("As a table", table(tables.healing(record)))


def _certificate(dossier: Dossier, maps: Maps) -> str:
    verdict = dossier.verdict
    assert verdict is not None
    body = paragraph(f"{judged.status(verdict)}. {judged.headline(verdict)}")
    body += table(tables.checks(verdict)) if verdict.checks else ""
    if verdict.lengths:
        words = "Both models on the same text, in rows of growing length; intervals are over blocks of text."
        chart = pictures.by_length(verdict)
        picture = draw(chart) if chart else ""
        body += f"<h3>Quality by length</h3>{paragraph(words)}{picture}{table(tables.lengths(verdict))}"
    if verdict.retrieval:
        numbers = table(tables.retrieval(verdict))
        body += f"<h3>Retrieval by distance</h3>{paragraph(tables.RETRIEVAL_WORDS)}{numbers}"
    body += "<h3>What was measured</h3>" + table(tables.measured(verdict))
    body += paragraph("Sizes are counted on the saved model. Intervals of times are the range of their repeats.")
    return body + _not_measured(verdict)


def _not_measured(verdict: Verdict) -> str:
    found = judged.not_measured(verdict)
    items = "".join(f"<li>{escape(words)}</li>" for words in found)
    body = f"<ul>{items}</ul>" if found else paragraph("Nothing that a certificate has was left out.")
    return f"<h3>What was not measured</h3>{body}"


def _samples(dossier: Dossier, maps: Maps) -> str:
    if dossier.verdict is None or not dossier.verdict.samples:
        return paragraph("The verdict holds no generations; models that generate nothing are judged by their outputs.")
    return draw_samples(dossier.verdict.samples)


def _reproduce(dossier: Dossier, maps: Maps) -> str:
    words = paragraph("Load it:") + pre(facts.loading(dossier, FOLDER + "/model"))
    words += paragraph("The whole run, into a new folder DIR:") + pre(run_command(facts.asked(dossier)))
    again = "Think again with another budget, from the same readings and without a GPU: "
    budget = dossier.plan.budgets[0].name if dossier.plan and dossier.plan.budgets else "kv"
    words += f"<p>{again}{code(f'headwise allocate DIR --budget {budget}=60%')}</p>"
    return words + table(tables.provenance(dossier))


class Section(NamedTuple):
    """A part of the page: its anchor, its word in the bar, its heading, the stage that it needs, what makes it."""

    name: str
    word: str
    heading: str
    needs: tuple[str, ...]
    make: Callable[[Dossier, Maps], str]

    def body(self, dossier: Dossier, maps: Maps) -> str:
        """What stands under the heading, or what to type."""
        lacking = facts.absent(dossier, *self.needs)
        return missing(lacking) if lacking else self.make(dossier, maps)


SECTIONS = (
    Section("baselines", "Strategies", "Other strategies", ("plan",), _baselines),
    Section("damage", "Damage", "Damage by layer", ("readings",), _damage),
    Section("layers", "Layers", "What the layers do", ("readings",), _layers),
    Section("healing", "Healing", "Healing", ("healing",), _healing),
    Section("certificate", "Certificate", "Certificate", ("verdict",), _certificate),
    Section("samples", "Generations", "Generations", ("verdict",), _samples),
    Section("reproduce", "Use it", "Use it, do it again", (), _reproduce),
)
