"""The sections below the first screen. A stage that has not run says what to type."""

from __future__ import annotations

from collections.abc import Callable

from headwise.report import _facts as facts
from headwise.report import _judged as judged
from headwise.report import _rivals as rivals
from headwise.report._checked import (
    damage_marks,
    held_out_curve,
    loss_curve,
    not_kept_in_words,
    pairs_in_words,
    price_pairs,
    recovery_in_words,
)
from headwise.report._commands import FOLDER, how_to_make, run_command
from headwise.report._data import (
    UNIT_LABELS,
    CurveSet,
    curve_sets,
    damage_rows,
    healing_parts,
    healing_range,
)
from headwise.report._diagnostics import FIRST, HEADINGS, StripSet, diagnostics
from headwise.report._draw import (
    draw_by_length,
    draw_damage,
    draw_healing,
    draw_lines,
    draw_loss,
    draw_marks,
    draw_scatter,
    draw_strips,
)
from headwise.report._explore import Heat
from headwise.report._html import code, details, figure, legend, missing, paragraph, pickable, pre, table
from headwise.report._samples import draw_samples
from headwise.report._text import as_number, escape, number
from headwise.types import UNITS, Dossier, Verdict

Maps = tuple[Heat, ...]
COLOURS = {"qk": "qk", "v": "v", "mlp": "mlp", "heads": "heads", "kv_heads": "kv", "depth": "dmg"}
HOW = "A line per layer, early ones faint, late ones strong; choose a layer to see its error bars."
NAMES = {
    "damage.qk_projected": "Query/key dimensions",
    "damage.qk_pairs": "Rotary pairs",
    "damage.qk_pairs_shared": "Rotary pairs, one set for all layers",
    "damage.v": "Value dimensions",
    "damage.mlp": "MLP width",
    "damage.heads": "Query heads",
    "damage.kv_heads": "Key/value heads",
    "damage.depth": "Whole layers",
}
PICK = "up and down choose a layer"


def _baselines(dossier: Dossier, maps: Maps) -> str:
    if dossier.plan is None:
        return missing("No plan has been made", how_to_make(dossier, "allocate"))
    heads = ("budget", "unit", "source", "limit", "spent", "share", "kept?")
    budgets = facts.budget_rows(dossier)
    body = table(heads, budgets, range(2, 6), name="budgets") if budgets else paragraph("The plan has no budget.")
    rows = rivals.comparisons(dossier)
    if len(rows) < 2:
        return body + missing("No other strategy was tried", how_to_make(dossier, "allocate"))
    cells = tuple(
        (
            f"{row.strategy} (this run)" if row.chosen else row.strategy,
            number(row.predicted),
            number(row.measured),
            "–" if row.share is None else f"{row.share:.1%}",
            row.spent,
        )
        for row in rows
    )
    columns = ("strategy", "predicted damage", "measured damage", "share of first budget", "spent")
    words = f"The same budgets spent in other ways; predicted from the same readings, in {facts.damage_unit(dossier)}."
    if left_out := rivals.left_out(dossier):
        words += f" {left_out}"
    return paragraph(words) + table(columns, cells, (1, 2, 3), now=0, name="strategies") + "<h3>Budgets</h3>" + body


def _damage(dossier: Dossier, maps: Maps) -> str:
    if dossier.readings is None:
        return missing("The model has not been probed", how_to_make(dossier, "probe"))
    body = _by_layer(dossier) if dossier.plan is not None else ""
    body += _predicted(dossier)
    body += "<h3>Damage curves</h3>" + paragraph(
        "What every size of every layer would cost on its own: where a line is flat, cutting is cheap, and the solver "
        f"walks along all of them at once. {HOW} Diamonds: the sizes that were chosen."
    )
    sets = [group for group in curve_sets(dossier.readings, dossier.plan) if group.kind.startswith("damage.")]
    for group in sets:
        name = f"{NAMES.get(group.kind, 'Damage')}: {group.kind} by {group.axis}"
        name += "" if group.used else " (not used by this plan)"
        body += _reading(group, maps, name, group.used)
    return body


def _by_layer(dossier: Dossier) -> str:
    assert dossier.readings is not None and dossier.plan is not None
    rows = damage_rows(dossier.readings, dossier.plan)
    total = sum(row.total for row in rows)
    units = [unit for unit in UNITS if any(unit in row.parts for row in rows)]
    sums = [(unit, sum(row.parts.get(unit, 0.0) for row in rows)) for unit in units]
    body = paragraph(
        f"Predicted loss increase of every layer at its chosen sizes, in {facts.damage_unit(dossier)}: where the "
        f"plan pays. Together {number(total)}; the plan says {number(dossier.plan.predicted_damage)}.{_rounds(dossier)}"
    )
    shares = tuple((UNIT_LABELS[u], number(v), f"{v / total:.0%}" if total > 0 else "–") for u, v in sums)
    if not shares:
        return body + paragraph("The plan cuts nothing that was priced.")
    keys = legend([(COLOURS[unit], UNIT_LABELS[unit]) for unit, _ in sums])
    cells = tuple((str(r.layer), *(number(r.parts.get(unit)) for unit in units), number(r.total)) for r in rows)
    heads = ("layer", *(UNIT_LABELS[unit] for unit in units), "together")
    per_layer = table(heads, cells, range(1, len(heads)), name="damage by layer", layers=True)
    picture = pickable(f"Damage by layer; {PICK}", draw_damage(rows))
    words = table(("unit", "damage", "share"), shares, (1, 2), name="damage by unit") + details("By layer", per_layer)
    return f'{body}{keys}<div class="pair">{picture}<div>{words}</div></div>'


def _rounds(dossier: Dossier) -> str:
    rounds = as_number(dossier.settings.get("rounds")) or 1
    return " The plan adds up its rounds; these are the first round's curves at the final sizes." if rounds > 1 else ""


def _predicted(dossier: Dossier) -> str:
    """Predicted against measured: the whole plan, and single cuts."""
    assert dossier.readings is not None
    body, marks, pairs = "", damage_marks(dossier), price_pairs(dossier.readings)
    if len(marks) > 1:
        words = "Sum of prices: what the solver minimised, before healing."
        if any(mark.name == "rehearsed" for mark in marks):
            words += " Rehearsed: the finished model on calibration text that nothing was fitted to."
        words = f"{facts.damage_in_words(dossier)} {words} Measured: on the evaluation data, with its 95% interval."
        body += f"<div>{paragraph(words)}{draw_marks(marks)}</div>"
    if pairs:
        picture = pickable(f"Predicted against measured prices; {PICK}", draw_scatter(pairs))
        body += f"<div>{paragraph('Prices of single cuts. ' + pairs_in_words(pairs))}{picture}</div>"
    return f'<h3>Predicted against measured</h3><div class="pair">{body}</div>' if body else ""


def _layers(dossier: Dossier, maps: Maps) -> str:
    if dossier.readings is None:
        return missing("The model has not been probed", how_to_make(dossier, "probe"))
    topics = diagnostics(dossier.readings, dossier.plan)
    if not topics:
        return paragraph("These readings hold damages only; a new run also measures what the layers do.")
    body = paragraph(f"What the probes saw beside damage: why some cuts are cheap. {HOW}")
    for topic in topics:
        body += f"<h3>{escape(topic.question)}</h3>" + paragraph(f"{topic.why} {topic.answer}".strip())
        for group in topic.sets:
            name = HEADINGS.get(group.kind, f"{group.kind} by {group.axis}")
            body += _reading(group, maps, name, group.kind.startswith(FIRST))
    return body


def _reading(group: CurveSet | StripSet, maps: Maps, name: str, is_open: bool) -> str:
    """One reading: what it means, a picture of lines or dots, the heat map, and the numbers."""
    strips = isinstance(group, StripSet)
    words = _strip_words(group) if isinstance(group, StripSet) else _line_words(group)
    picture = draw_strips(group) if isinstance(group, StripSet) else draw_lines(group)
    shown = pickable(f"{name}, {'a dot per head' if strips else 'a line per layer'}; {PICK}", picture)
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
    words = group.meaning + (" Logarithmic, with zero on the floor." if group.log else "")
    words += f" Dashed: {group.guide}." if group.guide else ""
    words += (
        f" Dashed for a chosen layer: as the {group.earlier_probe} probe predicted it." if group.earlier_probe else ""
    )
    return f"{words} Probe {group.probe}, {number(group.tokens)} tokens."


def _strip_words(group: StripSet) -> str:
    words = f"{group.meaning} A dot per {group.axis.replace('_', ' ')}, layers down."
    words += " Grey: the full dimension." if any(strip.full for strip in group.strips) else ""
    words += f" Typical standard error: {number(group.error, 2)}." if group.error is not None else ""
    return f"{words} Probe {group.probe}, {number(group.tokens)} tokens."


def _healing(dossier: Dossier, maps: Maps) -> str:
    healing = dossier.healing
    if healing is None:
        return missing("The model was not healed", how_to_make(dossier, "heal"))
    tokens, seconds = as_number(healing.get("tokens")), as_number(healing.get("seconds"))
    words = f"Method: {healing.get('method', 'unknown')}."
    words += f" {number(tokens)} tokens." if tokens is not None else ""
    words += f" {number(seconds)} seconds." if seconds is not None else ""
    rate, speed = as_number(healing.get("rate")), as_number(healing.get("tokens_per_second"))
    words += f" Rate {number(rate)}." if rate is not None else ""
    words += f" {number(speed)} tokens per second." if speed is not None else ""
    gained = recovery_in_words(healing)
    words += f" On text that nothing was fitted to: {gained}." if gained else ""
    words += f" {not_kept_in_words(healing)}"
    losses, held = loss_curve(healing), held_out_curve(healing)
    name = "Loss; dots: on text kept from it" if held else "Loss"
    curve = figure(name, draw_loss(losses, "loss", held)) if len(losses) > 1 else ""
    parts = healing_parts(healing)
    if not parts:
        return paragraph(f"{words} It recorded no errors per layer.") + curve
    ends, log = healing_range(parts)
    words += (
        " How far every layer's output lies from the source's, relative to it: ring before, dot after the repair. "
        "Errors add up from layer to layer, so late layers have more to make up for."
    )
    figures = "".join(
        figure(part, pickable(f"Healing of {part}; {PICK}", draw_healing(part, rows, ends, log)))
        for part, rows in parts.items()
    )
    cells = tuple(
        (str(row.layer), part, number(row.before), number(row.after)) for part, rows in parts.items() for row in rows
    )
    numbers = table(("layer", "part", "error before", "error after"), cells, (2, 3), name="healing", layers=True)
    return (
        paragraph(words)
        + f'<div class="grid" style="--min:300px">{figures}{curve}</div>'
        + details("As a table", numbers)
    )


def _certificate(dossier: Dossier, maps: Maps) -> str:
    verdict = dossier.verdict
    if verdict is None:
        why = facts.why_no_verdict(dossier)
        return (paragraph(why) if why else "") + missing("Nothing has been verified", how_to_make(dossier, "verify"))
    checks = tuple(("✓ pass" if c.passed else "✗ FAIL", c.name, c.observed, c.expected) for c in verdict.checks)
    body = paragraph(f"{judged.status(verdict)}. {judged.headline(verdict)}")
    body += table(("result", "check", "observed", "expected"), checks, (), name="checks") if checks else ""
    heads = ("quantity", "before", "after", "change", "95% interval of after")
    body += _by_length(verdict) + _retrieval(verdict) + "<h3>What was measured</h3>"
    body += table(heads, facts.certificate_rows(dossier), range(1, 5), name="measured")
    body += paragraph("Sizes are counted on the saved model. Intervals of times are the range of their repeats.")
    return body + _not_measured(verdict)


def _by_length(verdict: Verdict) -> str:
    """Damage over length: the curve, and its numbers."""
    if not verdict.lengths:
        return ""
    words = "Both models on the same text, in rows of growing length; intervals are over blocks of text."
    data = judged.by_length(verdict)
    picture = draw_by_length(data) if data else ""
    numbers = table(judged.LENGTH_HEADS, judged.length_rows(verdict), range(6), name="quality by length")
    return f"<h3>Quality by length</h3>{paragraph(words)}{picture}{numbers}"


def _retrieval(verdict: Verdict) -> str:
    if not verdict.retrieval:
        return ""
    numbers = table(judged.RETRIEVAL_HEADS, judged.retrieval_rows(verdict), range(5), name="retrieval")
    return f"<h3>Retrieval by distance</h3>{paragraph(judged.RETRIEVAL_WORDS)}{numbers}"


def _not_measured(verdict: Verdict) -> str:
    found = judged.not_measured(verdict)
    items = "".join(f"<li>{escape(words)}</li>" for words in found)
    body = f"<ul>{items}</ul>" if found else paragraph("Nothing that a certificate has was left out.")
    return f"<h3>What was not measured</h3>{body}"


def _samples(dossier: Dossier, maps: Maps) -> str:
    if dossier.verdict is None:
        return missing("Nothing has been generated", how_to_make(dossier, "verify"))
    if not dossier.verdict.samples:
        return paragraph("The verdict holds no generations; models that generate nothing are judged by their outputs.")
    return draw_samples(dossier.verdict.samples)


def _reproduce(dossier: Dossier, maps: Maps) -> str:
    words = paragraph("Load it:") + pre(facts.loading(dossier, FOLDER + "/model"))
    words += paragraph("The whole run, into a new folder DIR:") + pre(run_command(dossier.settings))
    again = "Think again with another budget, from the same readings and without a GPU: "
    budget = dossier.plan.budgets[0].name if dossier.plan and dossier.plan.budgets else "kv"
    words += f"<p>{again}{code(f'headwise allocate DIR --budget {budget}=60%')}</p>"
    return words + table(("what", "value"), facts.provenance(dossier), (), name="provenance")


# Name, word in the bar, heading, what makes it.
SECTIONS: tuple[tuple[str, str, str, Callable[[Dossier, Maps], str]], ...] = (
    ("baselines", "Strategies", "Other strategies", _baselines),
    ("damage", "Damage", "Damage by layer", _damage),
    ("layers", "Layers", "What the layers do", _layers),
    ("healing", "Healing", "Healing", _healing),
    ("certificate", "Certificate", "Certificate", _certificate),
    ("samples", "Generations", "Generations", _samples),
    ("reproduce", "Use it", "Use it, do it again", _reproduce),
)
