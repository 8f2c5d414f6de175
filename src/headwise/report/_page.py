"""The document: the answer first, then the model with its budget slider, then everything else, section by section."""

from __future__ import annotations

from typing import Any

from headwise.report import _facts as facts
from headwise.report import _judged as judged
from headwise.report._assets import css, policy, script
from headwise.report._commands import FOLDER, how_to_make
from headwise.report._data import LABELS, damage_rows, frontier
from headwise.report._draw import draw_frontier, draw_measure
from headwise.report._explore import Heat, Price, damage_words, explorer, heats, layer_facts, price_list, proof
from headwise.report._html import details, legend, missing, paragraph, pickable, section, table
from headwise.report._model import draw_model, model_keys, model_rows
from headwise.report._sections import SECTIONS
from headwise.report._text import escape, for_script, human, relative
from headwise.types import Dossier, Plan

NOSCRIPT = "Without JavaScript there is no slider and there are no heat maps; everything else is here."


def page(dossier: Dossier) -> str:
    """The whole document."""
    maps, slider = heats(dossier), explorer(dossier)
    names = (("map", "Model and budget"), *((name, word) for name, word, *_ in SECTIONS))
    body = f'<section id="map">{_map(dossier, slider is not None)}</section>\n'
    body += "".join(section(name, words, make(dossier, maps)) for name, _, words, make in SECTIONS)
    layers = len(dossier.plan.keep) if dossier.plan else 0
    return document(
        f"{facts.model_name(dossier)}, reshaped by Headwise",
        _answer(dossier),
        _bar(names, layers),
        body,
        _data(dossier, maps, slider),
    )


def document(title: str, header: str, bar: str, body: str, data: dict[str, Any]) -> str:
    """A page that loads nothing: style, script and data are in it."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy()}">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{css()}</style></head>\n"
        f"<body><header>{header}<noscript><p class=note>{NOSCRIPT}</p></noscript></header>{bar}\n<main>{body}"
        "<footer>Written by headwise. This page is one file and loads nothing.</footer></main>"
        '<div id="toast" class="toast" role="status"></div>\n'
        f'<script type="application/json" id="data">{for_script(data)}</script>\n'
        f"<script>{script()}</script></body></html>\n"
    )


def _data(dossier: Dossier, maps: tuple[Heat, ...], slider: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "layers": len(dossier.plan.keep) if dossier.plan else 0,
        "explorer": slider,
        "heats": [found.for_script() for found in maps],
        "facts": layer_facts(dossier),
    }


def heading(title: str, status: str) -> str:
    """The first line: the name, the status, and the switch between light and dark."""
    return (
        f'<div class="top"><h1>{escape(title)}</h1>{status}'
        '<button type="button" id="theme" class="right" hidden>Dark</button></div>'
    )


def _answer(dossier: Dossier) -> str:
    verdict = dossier.verdict
    words, kind = (judged.status(verdict), judged.CLASSES[verdict.state]) if verdict else ("… not verified yet", " bad")
    status = f'<p class="status{kind}">{escape(words)}</p>'
    quality, *sizes, time = facts.measures(dossier)
    cards = "".join(measure_card(measure) for measure in (*reversed(sizes), time, quality))
    return (
        heading(f"{facts.model_name(dossier)}, reshaped", status)
        + f'<p class="lead">{escape(facts.headline(dossier))}</p><div class="grid cards">{cards}</div>'
        + f'<p class="note">{escape(facts.way_out(dossier))}</p>'
    )


def measure_card(measure: facts.Measure) -> str:
    """One of the numbers of the first screen, with its error bar."""
    unit = f" <small>{measure.unit}</small>" if measure.unit and measure.after is not None else ""
    lines = [] if measure.after is not None else ["not measured"]
    if measure.after is not None and measure.before is not None:
        lines.append(f"{relative(measure.before, measure.after)} from {human(measure.before)}")
    if measure.interval:
        lines.append(f"{measure.range} {measure.interval}")
    elif measure.after is not None:
        exact = measure.label in (facts.CACHE, facts.SIZE)
        lines += ["planned, not counted yet"] if measure.planned else ["counted, exact"] if exact else []
    return (
        f'<div class="card"><h2>{measure.label}</h2><div class="big">{human(measure.after)}{unit}</div>'
        f"<p>{'<br>'.join(escape(words) for words in lines)}</p>{draw_measure(measure)}</div>"
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
    plan = dossier.plan
    if plan is None:
        words = missing("No plan has been made", how_to_make(dossier, "allocate"))
        return f"<h2>The model before and after</h2>{words}"
    damages = [row.total for row in damage_rows(dossier.readings, plan)] if dossier.readings else None
    rows = model_rows(plan, damages)
    label = "Picture of the model, layers down, heads across; up and down choose a layer"
    picture = legend(model_keys(rows)) + pickable(label, draw_model(rows, interactive=True))
    picture += '<div id="inspect" class="inspect" role="status" hidden></div>'
    costs = _costs(plan, price_list(plan))
    return (
        '<h2 class="sr">The model before and after</h2>'
        f'<div class="split"><div>{picture}{costs}{details("Every size in numbers", layer_table(plan))}</div>'
        f'<div class="explore" id="frontier">{_explore(dossier, plan, slider)}</div></div>'
    )


def layer_table(plan: Plan) -> str:
    """Every size of every layer."""
    rows = []
    for index, (old, new) in enumerate(zip(plan.source.layers, plan.target.layers, strict=True)):
        sizes = [(getattr(old, size), getattr(new, size)) for size in (*LABELS, "qk_width")]
        rows.append((f"{index} {old.role}".strip(), *(f"{a} → {b}" if a != b else str(a) for a, b in sizes)))
    heads = ("layer", *LABELS.values(), "query/key width")
    return table(heads, tuple(rows), range(7), name="layers before and after", layers=True)


def _explore(dossier: Dossier, plan: Plan, slider: bool) -> str:
    """The frontier with the slider under it, and what builds the point that the slider shows."""
    found = frontier(dossier)
    if found is None:
        return paragraph(f"The {plan.strategy} strategy draws no frontier; the exact strategy does.")
    picture = draw_frontier(found)
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
    rows = []
    for price in priced:
        amount, share = price.words(plan.target)
        at = f" at {price.budget.length:,}" if "token" not in price.budget.unit and price.budget.name in LONG else ""
        rows.append((f"{price.meaning}{at}", human(price.full), amount, share))
    body = "".join(
        f'<tr title="{escape(price.budget.unit)}"><td>{escape(name)}</td>'
        + "".join(f'<td class="num">{escape(cell)}</td>' for cell in cells)
        + "</tr>"
        for price, (name, *cells) in zip(priced, rows, strict=True)
    )
    heads = "".join(f'<th scope="col" class="num">{name}</th>' for name in ("source", "after", "share"))
    return f'<table id="costs"><thead><tr><th scope="col">cost</th>{heads}</tr></thead><tbody>{body}</tbody></table>'


LONG = ("flops", "attention")  # prices that depend on the length of the input
