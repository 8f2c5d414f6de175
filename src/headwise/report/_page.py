"""The document: the answer first, then the model with its budget slider, then everything else, section by section."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headwise.report import _facts as facts
from headwise.report import _judged as judged
from headwise.report._chart import draw
from headwise.report._commands import FOLDER
from headwise.report._data import damage_rows
from headwise.report._explore import Heat, Price, damage_words, explorer, heats, layer_facts, price_list, proof
from headwise.report._html import blocks, details, document, legend, paragraph, pickable, section, table, top
from headwise.report._model import draw_model, model_keys, model_rows
from headwise.report._pictures import draw_fact, frontier
from headwise.report._sections import SECTIONS, missing
from headwise.report._tables import layer_sizes
from headwise.report._text import escape, human, relative
from headwise.runs.dossier import Dossier
from headwise.types import Plan

LONG = ("flops", "attention")  # prices that depend on the length of the input


def render(dossier: Dossier) -> str:
    """The report: one HTML page that loads nothing. Stages that have not run say which command makes them."""
    maps, slider = heats(dossier), explorer(dossier)
    shown = [part for part in SECTIONS if part.shown(dossier)]
    names = (("map", "Model and budget"), *((part.name, part.word) for part in shown))
    body = f'<section id="map">{_map(dossier, slider is not None)}</section>\n'
    body += "".join(section(part.name, part.heading, blocks(part.blocks(dossier, maps))) for part in shown)
    layers = len(dossier.plan.keep) if dossier.plan else 0
    return document(
        f"{facts.model_name(dossier)}, reshaped by Headwise",
        _answer(dossier),
        _bar(names, layers),
        body,
        _data(dossier, maps, slider),
    )


def _data(dossier: Dossier, maps: tuple[Heat, ...], slider: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "layers": len(dossier.plan.keep) if dossier.plan else 0,
        "explorer": slider,
        "heats": [found.for_script() for found in maps],
        "facts": layer_facts(dossier),
    }


def _answer(dossier: Dossier) -> str:
    verdict = dossier.verdict
    words, kind = (judged.status(verdict), judged.CLASSES[verdict.state]) if verdict else ("… not verified yet", " bad")
    status = f'<p class="status{kind}">{escape(words)}</p>'
    quality, *sizes, time = facts.measures(dossier)
    return (
        top(f"{facts.model_name(dossier)}, reshaped", status, facts.headline(dossier))
        + cards((*reversed(sizes), time, quality))
        + f'<p class="note">{escape(facts.way_out(dossier))}</p>'
    )


def cards(known: Iterable[facts.Fact]) -> str:
    """The numbers of the first screen."""
    return f'<div class="grid cards">{"".join(map(_card, known))}</div>'


def _card(fact: facts.Fact) -> str:
    """One number with its error bar."""
    unit = f" <small>{fact.unit}</small>" if fact.unit and fact.after is not None else ""
    lines = [] if fact.after is not None else ["not measured"]
    if fact.after is not None and fact.before is not None:
        lines.append(f"{relative(fact.before, fact.after)} from {human(fact.before)}")
    if fact.interval:
        lines.append(f"{fact.range} {fact.interval}")
    elif fact.after is not None:
        exact = fact.label in (facts.CACHE, facts.SIZE)
        lines += ["planned, not counted yet"] if fact.planned else ["counted, exact"] if exact else []
    return (
        f'<div class="card"><h2>{fact.label}</h2><div class="big">{human(fact.after)}{unit}</div>'
        f"<p>{'<br>'.join(escape(words) for words in lines)}</p>{draw_fact(fact)}</div>"
    )


def _bar(names: tuple[tuple[str, str], ...], layers: int) -> str:
    """Links that stay on the screen, and the chosen layer."""
    links = "".join(f'<a href="#{name}">{escape(words)}</a>' for name, words in names)
    options = "".join(f'<option value="{index}">{index}</option>' for index in range(layers))
    picker = (
        '<div class="picker"><label for="layer">Layer</label>'
        '<button type="button" id="layer-before" aria-label="Layer before">‹</button>'
        f'<select id="layer"><option value="">all</option>{options}</select>'
        '<button type="button" id="layer-after" aria-label="Layer after">›</button></div>'
    )
    return (
        f'<nav class="bar" aria-label="Sections and layers"><div class="bar-inner"><div class="links">{links}</div>'
        f"{picker if layers else ''}</div></nav>"
    )


def _map(dossier: Dossier, slider: bool) -> str:
    if lacking := facts.absent(dossier, "plan"):
        return f"<h2>The model before and after</h2>{blocks(missing(*lacking))}"
    plan = dossier.plan
    assert plan is not None
    damages = [row.total for row in damage_rows(dossier.readings, plan)] if dossier.readings else None
    rows = model_rows(plan, damages, dossier.sweep)
    label = "Picture of the model, layers down, heads across; up and down choose a layer"
    picture = legend(model_keys(rows)) + pickable(label, draw_model(rows, interactive=True))
    picture += '<div id="inspect" class="inspect" role="status" hidden></div>'
    costs = _costs(plan, price_list(plan))
    return (
        '<h2 class="sr">The model before and after</h2>'
        f'<div class="split"><div>{picture}{costs}{details("Every size in numbers", table(layer_sizes(plan)))}</div>'
        f'<div class="explore" id="frontier">{_explore(dossier, plan, slider)}</div></div>'
    )


def _explore(dossier: Dossier, plan: Plan, slider: bool) -> str:
    """The frontier with the slider under it, and what builds the point that the slider shows."""
    found = frontier(dossier)
    if found is None:
        return paragraph(f"The {plan.strategy} strategy draws no frontier; the exact strategy does.")
    picture = draw(found)
    if dossier.sweep is None or not slider:
        reason = "this run has no readings that price its budget"
        return f"<h3>What would another budget do?</h3>{picture}{paragraph(f'There is no slider here: {reason}.')}"
    sweep = dossier.sweep
    rough = sum(answer.rough for answer in sweep.answers)
    how = "each solved exactly" if not rough else f"{rough} of them to within 0.1%, the others exactly,"
    some = "" if sweep.done else f" of {sweep.wanted} (headwise report {FOLDER} solves more)"
    tailored = " They are tailored; this run is portable." if plan.portable else ""
    note = (
        f"The line is the least predicted damage at each budget: {len(sweep.answers)} budgets{some}, {how} "
        "from this run's readings, before healing, so no strategy can lie below it. Diamond: this plan; ring: "
        f"another strategy; cross: measured, after healing. {FOLDER} is the run folder.{tailored}"
    )
    return (
        f'<h3><label for="budget">What would another budget do?</label></h3>{picture}'
        f'<input type="range" id="budget" min="0" max="{len(sweep.answers) - 1}" step="1" disabled>'
        f'<p class="fact"><output id="budget-text" for="budget">{escape(plan.budgets[0].text)}</output> '
        '<span class="note" id="budget-state">this run</span> '
        '<button type="button" id="own" hidden>Back to this run</button></p>'
        f'<p class="fact">Predicted damage <b id="budget-damage">{escape(damage_words(plan.predicted_damage, dossier))}'
        f'</b>, <span id="budget-proof">{escape(proof(plan))}</span></p>'
        '<pre><code id="budget-command"></code></pre><button type="button" id="copy">Copy the commands</button>'
        f'<p class="note">{escape(note)}</p>'
    )


def _costs(plan: Plan, priced: tuple[Price, ...]) -> str:
    """What the model costs in every unit; the script rewrites it when the budget is moved."""
    body = ""
    for price in priced:
        at = f" at {price.budget.length:,}" if price.budget.name in LONG else ""
        cells = "".join(f'<td class="num">{escape(c)}</td>' for c in (human(price.full), *price.words(plan.target)))
        body += f'<tr title="{escape(price.budget.unit)}"><td>{escape(price.meaning + at)}</td>{cells}</tr>'
    heads = "".join(f'<th scope="col" class="num">{name}</th>' for name in ("source", "after", "share"))
    return f'<table id="costs"><thead><tr><th scope="col">cost</th>{heads}</tr></thead><tbody>{body}</tbody></table>'
