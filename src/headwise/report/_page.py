"""The page: one section after the other, the answer first. A stage that has not run says what to type."""

from __future__ import annotations

from headwise.report import _facts as facts
from headwise.report._commands import FOLDER, how_to_make, run_command
from headwise.report._data import (
    LABELS,
    UNIT_LABELS,
    CurveSet,
    curve_sets,
    damage_rows,
    frontier,
    healing_parts,
    healing_range,
    layer_map,
)
from headwise.report._diagnostics import FIRST, HEADINGS, StripSet, diagnostics
from headwise.report._draw import (
    draw_curve,
    draw_damage,
    draw_frontier,
    draw_healing,
    draw_map,
    draw_measure,
    draw_strips,
)
from headwise.report._html import code, details, figure, legend, missing, paragraph, pre, section, table
from headwise.report._style import CSS
from headwise.report._text import as_number, escape, human, number, relative
from headwise.types import UNITS, Dossier

# Nothing may be fetched, whatever the dossier holds.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
OPEN_LAYERS = 32  # deeper models start with their curves folded


def page(dossier: Dossier) -> str:
    """The whole document."""
    title = f"{facts.model_name(dossier)}, reshaped by Headwise"
    parts = (
        ("map", "Before and after", _map),
        ("damage", "Damage by layer", _damage),
        ("layers", "What the layers do", _layers),
        ("frontier", "What other budgets would cost", _frontier),
        ("baselines", "Beside other strategies", _baselines),
        ("healing", "Healing", _healing),
        ("certificate", "Certificate", _certificate),
        ("samples", "Generations", _samples),
        ("reproduce", "Do it again", _reproduce),
    )
    links = "".join(f'<a href="#{name}">{escape(heading)}</a> ' for name, heading, _ in parts)
    sections = "".join(section(name, heading, make(dossier)) for name, heading, make in parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n"
        f'<body><header>{_answer(dossier)}<nav aria-label="Sections">{links}</nav></header>\n<main>{sections}'
        "<footer>Written by headwise. This page is one file and loads nothing.</footer></main></body></html>\n"
    )


def _answer(dossier: Dossier) -> str:
    passed = dossier.verdict.passed and dossier.verdict.checks if dossier.verdict else None
    status = "… not verified yet" if passed is None else "✓ verified" if passed else "✗ not verified"
    cards = "".join(_card(measure) for measure in facts.measures(dossier))
    bad = " bad" if passed is not None and not passed else ""
    return (
        f'<h1>{escape(facts.model_name(dossier))}, reshaped</h1><p class="status{bad}">{status}</p>'
        f'<p class="lead">{escape(facts.headline(dossier))}</p><div class="grid">{cards}</div>'
        f"{paragraph(facts.way_out(dossier))}{pre(facts.loading(dossier, FOLDER + '/model'))}"
        f'<p class="note">{FOLDER} is the run folder.</p>'
    )


def _card(measure: facts.Measure) -> str:
    unit = f" <small>{measure.unit}</small>" if measure.unit and measure.after is not None else ""
    lines = [] if measure.after is not None else ["not measured"]
    if measure.after is not None and measure.before is not None:
        lines.append(f"{relative(measure.before, measure.after)} from {human(measure.before)}")
    lines += [f"95% interval {measure.interval}"] if measure.interval else []
    lines += ["planned, not counted yet"] if measure.planned else []
    return (
        f'<div class="card"><h3>{measure.label}</h3><div class="big">{human(measure.after)}{unit}</div>'
        f"<p>{'<br>'.join(escape(words) for words in lines)}</p>{draw_measure(measure)}</div>"
    )


def _map(dossier: Dossier) -> str:
    if dossier.plan is None:
        return missing("No plan has been made", how_to_make(dossier, "allocate"))
    panels = layer_map(dossier.plan)
    figures = "".join(
        figure(LABELS[p.size], draw_map(p, LABELS[p.size]), f"{p.share:.0%} kept" if p.share < 1 else "unchanged")
        for p in panels
    )
    keys = [("k", "kept"), ("g", "removed")]
    if any(bar.through > bar.after for panel in panels for bar in panel.bars):
        keys.append(("h", "computed, then projected away before the cache"))
    words = "Layers run down, from 0. Dimensions are per head; query heads that share a key/value head stand together."
    return (
        paragraph(words)
        + legend(keys)
        + f'<div class="grid maps">{figures}</div>'
        + details("The same in numbers", _layer_table(dossier))
    )


def _layer_table(dossier: Dossier) -> str:
    plan = dossier.plan
    assert plan is not None
    rows = []
    for index, (old, new) in enumerate(zip(plan.source.layers, plan.target.layers, strict=True)):
        sizes = [(getattr(old, size), getattr(new, size)) for size in (*LABELS, "qk_width")]
        rows.append((f"{index} {old.role}".strip(), *(f"{a} → {b}" if a != b else str(a) for a, b in sizes)))
    return table(("layer", *LABELS.values(), "query/key width"), tuple(rows), range(7))


def _damage(dossier: Dossier) -> str:
    if dossier.readings is None:
        return missing("The model has not been probed", how_to_make(dossier, "probe"))
    body = ""
    if dossier.plan is not None:
        rows = damage_rows(dossier.readings, dossier.plan)
        total = sum(row.total for row in rows)
        sums = [
            (unit, sum(row.parts.get(unit, 0.0) for row in rows))
            for unit in UNITS
            if any(unit in row.parts for row in rows)
        ]
        body = paragraph(
            f"Predicted loss increase of every layer at its chosen sizes, in {facts.damage_unit(dossier)}. "
            f"Together {number(total)}; "
            f"the plan says {number(dossier.plan.predicted_damage)}.{_rounds(dossier)}"
        )
        shares = tuple((UNIT_LABELS[u], number(v), f"{v / total:.0%}" if total > 0 else "–") for u, v in sums)
        keys = legend([(f"u-{unit}", UNIT_LABELS[unit]) for unit, _ in sums])
        words = (
            table(("unit", "damage", "share"), shares, (1, 2))
            if shares
            else paragraph("The plan cuts nothing that was priced.")
        )
        body += f'{keys}<div class="grid" style="--min:300px"><div>{draw_damage(rows)}</div><div>{words}</div></div>'
    sets = [group for group in curve_sets(dossier.readings, dossier.plan) if group.kind.startswith("damage.")]
    return body + "<h3>Curves that the probes found</h3>" + "".join(_curves(group) for group in sets)


def _rounds(dossier: Dossier) -> str:
    rounds = as_number(dossier.settings.get("rounds")) or 1
    return " The plan adds up its rounds; these are the first round's curves at the final sizes." if rounds > 1 else ""


def _curves(group: CurveSet) -> str:
    heading = f"{group.kind} by {group.axis}" + ("" if group.used else " (not used by this plan)")
    return details(heading, _minis(group), group.used and len(group.curves) <= OPEN_LAYERS)


def _minis(group: CurveSet) -> str:
    """What a set of curves shows, in words, and a small picture per layer."""
    ends = f"{number(group.values[0])} to {number(group.values[1])} {group.unit}".strip()
    scale = "logarithmic with zero on the floor, " if group.log else ""
    words = f"{group.meaning} Across: {group.axis}{', logarithmic' if group.log_across else ''}. "
    words += f"Up: {ends}, {scale}same for all layers."
    words += " Diamond: the size that was chosen." if any(c.chosen for c in group.curves) else ""
    words += " Whiskers: standard errors." if any(c.errors for c in group.curves) else ""
    words += f" Dashed: as the {group.earlier_probe} probe had it." if group.earlier_probe else ""
    words += f" Dashed: {group.guide}." if group.guide else ""
    words += f" Probe {group.probe}, {number(group.tokens)} tokens."
    minis = "".join(draw_curve(group, curve) for curve in group.curves)
    return f'<p class="note">{escape(words)}</p><div class="grid minis">{minis}</div>'


def _layers(dossier: Dossier) -> str:
    if dossier.readings is None:
        return missing("The model has not been probed", how_to_make(dossier, "probe"))
    topics = diagnostics(dossier.readings, dossier.plan)
    if not topics:
        return paragraph("These readings hold damages only; a new run also measures what the layers do.")
    body = paragraph(
        "What the probes saw beside damage: why some cuts are cheap. Only the strategy bound decides by it."
    )
    for topic in topics:
        body += f"<h3>{escape(topic.question)}</h3>" + (paragraph(topic.answer) if topic.answer else "")
        for group in topic.sets:
            inner = _strips(group) if isinstance(group, StripSet) else _minis(group)
            heading = HEADINGS.get(group.kind, f"{group.kind} by {group.axis}")
            many = not isinstance(group, StripSet) and len(group.curves) > OPEN_LAYERS
            body += details(heading, inner, group.kind in FIRST and not many)
    return body


def _strips(group: StripSet) -> str:
    words = f"{group.meaning} A dot per {group.axis.replace('_', ' ')}, layers down."
    words += " Grey: the full dimension." if any(strip.full for strip in group.strips) else ""
    words += f" Typical standard error: {number(group.error, 2)}." if group.error is not None else ""
    words += f" Probe {group.probe}, {number(group.tokens)} tokens."
    return f'<p class="note">{escape(words)}</p>{draw_strips(group)}'


def _frontier(dossier: Dossier) -> str:
    if dossier.plan is None:
        return missing("No plan has been made", how_to_make(dossier, "allocate"))
    heads = ("budget", "unit", "source", "limit", "spent", "share", "")
    body = (
        table(heads, facts.budget_rows(dossier), range(2, 6))
        if dossier.plan.budgets
        else paragraph("The plan has no budget.")
    )
    data = frontier(dossier)
    if data is None:
        return body + paragraph(f"The {dossier.plan.strategy} strategy draws no frontier; the exact strategy does.")
    words = "Least predicted damage by share of the first budget. Diamond: this plan. Ring: another. Cross: measured."
    return body + paragraph(words) + draw_frontier(data)


def _baselines(dossier: Dossier) -> str:
    rows = facts.comparisons(dossier)
    if len(rows) < 2:
        return missing("No other strategy was tried", how_to_make(dossier, "allocate"))
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
    heads = ("strategy", "predicted damage", "measured damage", "share of first budget", "spent")
    words = f"The same budgets, spent in other ways. Damage in {facts.damage_unit(dossier)}; less is better."
    return paragraph(words) + table(heads, cells, (1, 2, 3), now=0)


def _healing(dossier: Dossier) -> str:
    healing = dossier.healing
    if healing is None:
        return missing("The model was not healed", how_to_make(dossier, "heal"))
    tokens, seconds = as_number(healing.get("tokens")), as_number(healing.get("seconds"))
    words = f"Method: {healing.get('method', 'unknown')}." + (
        f" {number(tokens)} tokens." if tokens is not None else ""
    )
    words += f" {number(seconds)} seconds." if seconds is not None else ""
    parts = healing_parts(healing)
    if not parts:
        return paragraph(f"{words} It recorded no errors per layer.")
    ends, log = healing_range(parts)
    words += " Error relative to the source's output, per layer; ring: before, dot: after."
    figures = "".join(figure(part, draw_healing(part, rows, ends, log)) for part, rows in parts.items())
    return paragraph(words) + f'<div class="grid" style="--min:300px">{figures}</div>'


def _certificate(dossier: Dossier) -> str:
    verdict = dossier.verdict
    if verdict is None:
        return missing("Nothing has been verified", how_to_make(dossier, "verify"))
    checks = tuple(("✓ pass" if c.passed else "✗ FAIL", c.name, c.observed, c.expected) for c in verdict.checks)
    body = paragraph(facts.checks_in_words(dossier)[:1].upper() + facts.checks_in_words(dossier)[1:] + ".")
    body += table(("result", "check", "observed", "expected"), checks, ()) if checks else ""
    heads = ("quantity", "before", "after", "change", "95% interval of after")
    body += "<h3>What was measured</h3>" + table(heads, facts.certificate_rows(dossier), range(1, 5))
    words = facts.damage_in_words(dossier)
    return body + (f"<h3>Predicted against measured</h3>{paragraph(words)}" if words else "")


def _samples(dossier: Dossier) -> str:
    if dossier.verdict is None:
        return missing("Nothing has been generated", how_to_make(dossier, "verify"))
    if not dossier.verdict.samples:
        return paragraph("The verdict holds no generations.")
    body = paragraph("The same prompts, continued by the source and by the reshaped model.")
    for sample in dossier.verdict.samples:
        sides = "".join(
            f'<div><div class="note">{name}</div><p dir="auto">{escape(text)}</p></div>'
            for name, text in (("source", sample.before), ("reshaped", sample.after))
        )
        prompt = f'<div class="note">prompt</div><p dir="auto"><strong>{escape(sample.prompt)}</strong></p>'
        body += f'<div class="sample">{prompt}<div class="grid" style="--min:280px">{sides}</div></div>'
    return body


def _reproduce(dossier: Dossier) -> str:
    words = paragraph("The whole run, into a new folder DIR:") + pre(run_command(dossier.settings))
    again = "Think again with another budget, from the same readings and without a GPU: "
    budget = dossier.plan.budgets[0].name if dossier.plan and dossier.plan.budgets else "kv"
    words += f"<p>{again}{code(f'headwise allocate DIR --budget {budget}=60%')}</p>"
    return words + table(("", "value"), facts.provenance(dossier), ())
