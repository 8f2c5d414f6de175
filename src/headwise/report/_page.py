"""The document: the answer first, then the model with its budget slider, what it writes, what was verified, how to use
it; everything else is folded under Advanced."""

from typing import Any

from headwise.report import _facts as facts
from headwise.report import _judged as judged
from headwise.report._answer import answer
from headwise.report._chart import draw
from headwise.report._commands import folder_of
from headwise.report._data import damage_rows
from headwise.report._explore import damage_words, explorer, heats, layer_facts, proof
from headwise.report._html import bar, blocks, details, document, folded, legend, pickable, section, table
from headwise.report._model import damage_scale, draw_model, model_keys, model_rows
from headwise.report._pictures import frontier
from headwise.report._sections import SECTIONS, missing
from headwise.report._sizes import Size, sizes_of
from headwise.report._tables import layer_sizes
from headwise.report._text import escape, human
from headwise.runs.dossier import Dossier
from headwise.types import Plan

ADVANCED = "For those who want to know why: how the plan was found, what every layer costs and does, what was recorded."


def render(dossier: Dossier) -> str:
    """The report: one HTML page that loads nothing. Stages that have not run say which command makes them."""
    maps, slider = heats(dossier), explorer(dossier)
    shown = [part for part in SECTIONS if part.shown(dossier)]
    plain, deep = ([part for part in shown if part.advanced is kind] for kind in (False, True))
    body = f'<section id="map">{_map(dossier, slider)}</section>\n'
    body += "".join(section(part.name, part.heading, blocks(part.blocks(dossier, maps))) for part in plain)
    parts = "".join(folded(part.name, part.heading, blocks(part.blocks(dossier, maps))) for part in deep)
    body += section("advanced", "Advanced", f'<p class="note">{ADVANCED}</p>{parts}')
    names = (("map", "Model and budget"), *((part.name, part.word) for part in plain), ("advanced", "Advanced"))
    layers = len(dossier.plan.keep) if dossier.plan else 0
    data = {
        "layers": layers,
        "explorer": slider,
        "heats": [found.for_script() for found in maps],
        "facts": layer_facts(dossier),
    }
    links = bar(names, _picker(layers) if layers else "")
    return document(f"{facts.title(dossier)}, by Headwise", answer(dossier), links, body, data)


def _picker(layers: int) -> str:
    """The chosen layer."""
    options = "".join(f'<option value="{index}">{index}</option>' for index in range(layers))
    return (
        '<div class="picker"><label for="layer">Layer</label>'
        '<button type="button" id="layer-before" aria-label="Layer before">‹</button>'
        f'<select id="layer" aria-label="Layer"><option value="">all</option>{options}</select>'
        '<button type="button" id="layer-after" aria-label="Layer after">›</button></div>'
    )


def _map(dossier: Dossier, slider: dict[str, Any] | None) -> str:
    if lacking := facts.absent(dossier, "plan"):
        return f"<h2>The model before and after</h2>{blocks(missing(*lacking))}"
    plan = dossier.plan
    assert plan is not None
    damages = [row.total for row in damage_rows(dossier.readings, plan)] if dossier.readings else None
    rows = model_rows(plan, damages, dossier.sweep)
    scale = slider["scale"] if slider else damage_scale(row.damage for row in rows)
    label = "Picture of the model, layers down, heads across; up and down choose a layer"
    picture = pickable(label, draw_model(rows, interactive=True, scale=scale)) + legend(model_keys(rows, scale))
    picture += '<div id="inspect" class="inspect" role="status" hidden></div>'
    banner = (
        '<p id="preview" class="banner" hidden><b>Preview, not built: <span id="preview-text"></span>.</b>'
        '<button type="button" id="own">Back to this run</button></p>'
    )
    return (
        f'<div class="head"><h2>The model before and after</h2>{banner}</div>'
        f'<div class="split"><div class="shown">{picture}'
        f"{_costs(plan, sizes_of(plan))}{details('Every size in numbers, of this run', table(layer_sizes(plan)))}</div>"
        f'<div class="explore" id="frontier">{_explore(dossier, plan, slider is not None)}</div></div>'
    )


def _explore(dossier: Dossier, plan: Plan, slider: bool) -> str:
    """The frontier with the slider under it, and what builds the point that the slider shows."""
    heading, found, sweep = "What would another budget do?", frontier(dossier), dossier.sweep
    if found is None:
        return f"<h3>{heading}</h3><p>The {plan.strategy} strategy draws no frontier; the exact strategy does.</p>"
    picture = draw(found)
    if sweep is None or not slider:
        return f"<h3>{heading}</h3>{picture}<p>There is no slider here: this run has no readings that tell.</p>"
    rough = sum(one.rough for one in sweep.answers)
    how = "each solved exactly" if not rough else f"{rough} of them to within 0.1%, the others exactly"
    some = "" if sweep.done else f" of {sweep.wanted} (headwise report {folder_of(dossier)} solves more)"
    tailored = " They are tailored; this run is portable." if plan.portable else ""
    note = (
        f"Line: the least damage that can be reached, predicted before healing, at {len(sweep.answers)} budgets{some}, "
        f"{how}.{tailored} Diamond: this run, predicted before healing; cross: this run, measured; ring: "
        "another strategy, predicted."
    )
    return (
        f'<h3><label for="budget">{heading}</label></h3>{picture}'
        f'<input type="range" id="budget" min="0" max="{len(sweep.answers) - 1}" step="1" disabled>'
        f'<p class="fact"><output id="budget-text" for="budget">{escape(plan.budgets[0].text)}</output> '
        '<span class="tag" id="budget-state">this run</span></p>'
        f"{_numbers(dossier, plan)}"
        '<pre class="copy"><code id="budget-command"></code></pre>'
        f'<p class="note">{escape(note)}</p>'
    )


def _numbers(dossier: Dossier, plan: Plan) -> str:
    """What is predicted at the slider's place and, for this run, what was measured: each with its name."""
    verdict = dossier.verdict
    worst = verdict.worst if verdict else None
    measured = ""
    if verdict and worst:
        said = escape(judged.amount(verdict, worst.value))
        measured = f'<p class="fact" id="own-measured">This run, {facts.measured_words(dossier)}: <b>{said}</b></p>'
    said = escape(damage_words(plan.predicted_damage, dossier))
    return (
        f'<p class="fact"><span id="budget-whose">This run</span>, predicted before healing: '
        f'<b id="budget-damage">{said}</b>, <span id="budget-proof">{escape(proof(plan))}</span></p>{measured}'
    )


def _costs(plan: Plan, found: tuple[Size, ...]) -> str:
    """What the model costs in every unit; the script rewrites it when the budget is moved."""
    body = ""
    for size in found:
        cells = "".join(f'<td class="num">{escape(c)}</td>' for c in (human(size.full), *size.words(plan.target)))
        body += f"<tr><td>{escape(size.full_label)}</td>{cells}</tr>"
    heads = "".join(f'<th scope="col" class="num">{name}</th>' for name in ("source", "after", "share"))
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Sizes of the model"><table id="costs"><thead><tr>'
        f'<th scope="col">size</th>{heads}</tr></thead><tbody>{body}</tbody></table></div>'
    )
