"""The sections below the first screen, as blocks that the page and the model card write each in their way."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from headwise.report import _bits as bits
from headwise.report import _facts as facts
from headwise.report import _judged as judged
from headwise.report import _memory as memory
from headwise.report import _pictures as pictures
from headwise.report import _tables as tables
from headwise.report._chart import draw, draw_rows
from headwise.report._commands import FOLDER, another_budget, beside, folder_of, for_engine, how_to_make, run_command
from headwise.report._data import CurveSet, counts_bytes, curve_sets, cut_pairs, damage_rows
from headwise.report._diagnostics import StripSet, diagnostics
from headwise.report._explore import Heat
from headwise.report._healing import healing_in_words, healing_parts
from headwise.report._html import (
    Block,
    Code,
    Folded,
    Heading,
    Html,
    Items,
    Words,
    details,
    figure,
    legend,
    pickable,
    prose,
)
from headwise.report._rivals import left_out
from headwise.report._samples import draw_sample
from headwise.report._svg import short_tick
from headwise.report._text import escape, number
from headwise.report._words import GLOSSARY, axis_words, reading_words
from headwise.runs.dossier import Dossier
from headwise.types import DAMAGE, UNITS, Plan, Readings
from headwise.types.unit import LABELS

Maps = tuple[Heat, ...]
Blocks = Iterator[Block]
HOW = "A line per layer, early ones faint, late ones strong; choose a layer to see its error bars."
SHOWN = 2  # generations that are not folded
PICK = "up and down choose a layer"
BITS_WORDS = (
    "A line is a layer; across it, the coefficients of a cached row, most important first. Right: bits per number."
)
ROUNDS = " The plan adds up its rounds; these are the first round's curves at the final sizes."
SAMPLES = (
    "The same prompts, continued by the source and by the cut model. Dotted: only the source wrote it; "
    "underlined: only the cut model did. One changed word can change all that follows, so judge the meaning."
)


def missing(words: str, commands: str) -> Blocks:
    """What is not there, and what makes it."""
    yield Words(f"{words}. This makes it:", note=True)
    yield Code(commands, "sh")


def _baselines(dossier: Dossier, maps: Maps) -> Blocks:
    budgets, strategies = tables.budgets(dossier), tables.strategies(dossier)
    if len(strategies.rows) > 1:
        unit = facts.damage_unit(dossier)
        words = (
            f"The same budgets spent in other ways. Damage predicted before healing, from the same readings, in {unit}."
        )
        yield Words(words + left_out(dossier))
        yield strategies
    elif dossier.readings is None:
        yield from missing("No other strategy was tried", how_to_make(dossier, "allocate"))
    else:
        yield Words("No other strategy can be compared: these readings tell the damage of this kind of cut alone.")
    yield Heading("Budgets")
    yield budgets if budgets.rows else Words("The plan has no budget.")
    if dossier.plan and dossier.plan.frontier:
        yield Folded(
            "Least damage, predicted before healing, at every share of the first budget", tables.frontier(dossier.plan)
        )


def _bits(dossier: Dossier, maps: Maps) -> Blocks:
    """The cache of a coded plan: a heat map of bits, and what every layer takes."""
    plan = dossier.plan
    assert plan is not None
    yield Words(f"{bits.HOW} {bits.share_in_words(plan)}")
    rows = {part: bits.bit_rows(plan, part) for part in bits.PARTS}
    widths = sorted({width for found in rows.values() for row in found for width, _ in row.spans}, reverse=True)
    yield Html(legend([(f"bit-{width}", bits.bit_words(width)) for width in widths]))
    yield Html('<div class="pair">')
    for part, found in rows.items():
        picture = pickable(f"Bits of {part} by layer; {PICK}", draw_rows(pictures.bits(found)))
        yield Html(figure(f"Bits of {part} by layer", picture, BITS_WORDS))
    yield Html("</div>")
    yield tables.layer_bits(plan)


def _memory(dossier: Dossier, maps: Maps) -> Blocks:
    """Bytes of all parts before and after, what each costs, and the bits of every matrix."""
    plan = dossier.plan
    assert plan is not None
    yield Words(memory.in_words(plan))
    yield Html(legend([(part.colour, part.label) for part in memory.parts(plan)]))
    words = f"Where the memory goes, before and after, in {memory.UNIT}"
    yield Html(figure(words, draw_rows(memory.picture(plan)), words + "."))
    yield memory.table(plan, dossier.readings)
    if plan.target.packed:
        yield Folded("Bits of a weight, matrix by matrix", memory.bits_by_layer(plan))


def _damage(dossier: Dossier, maps: Maps) -> Blocks:
    assert dossier.readings is not None
    if dossier.plan is not None:
        yield from _by_layer(dossier, dossier.readings, dossier.plan)
    yield from _predicted(dossier, dossier.readings)
    yield Html("<h3>Damage curves</h3>")
    yield Html(
        "<p>What every size of every layer would cost on its own: where a line is flat, cutting is cheap, and the "
        f"solver walks along all of them at once. {HOW} Diamonds: the sizes that were chosen.</p>"
    )
    sets = [group for group in curve_sets(dossier.readings, dossier.plan) if group.kind.startswith(DAMAGE)]
    for group in sets:
        name = reading_words(group.kind, group.reading.axis) + ("" if group.used else " (not used by this plan)")
        yield _reading(group, maps, name)


def _by_layer(dossier: Dossier, readings: Readings, plan: Plan) -> Blocks:
    rows, units = damage_rows(readings, plan), tables.damage_by_unit(readings, plan)
    yield Words(
        f"Damage of every layer at its chosen sizes, predicted before healing, in {facts.damage_unit(dossier)}: where "
        f"quality is lost. Together {number(sum(row.total for row in rows))}; the plan says "
        f"{number(plan.predicted_damage)}." + (ROUNDS if dossier.settings and dossier.settings.rounds > 1 else "")
    )
    if not units.rows:
        yield Words("The plan cuts nothing whose damage was predicted.")
        return
    yield Html(legend([(unit, LABELS[unit]) for unit in UNITS if any(unit in row.parts for row in rows)]))
    picture = pickable(f"Damage by layer; {PICK}", draw_rows(pictures.damage(rows)))
    yield Html(f'<div class="pair">{picture}<div>')
    yield units
    yield Folded("By layer", tables.damage_by_layer(readings, plan))
    yield Html("</div></div>")


def _predicted(dossier: Dossier, readings: Readings) -> Blocks:
    """Predicted against measured: the whole plan, and single cuts."""
    marks, pairs = facts.damages(dossier), cut_pairs(readings)
    if len(marks) < 2 and not pairs:
        return
    yield Heading("Predicted against measured")
    yield Html('<div class="pair">')
    if len(marks) > 1:
        yield Html("<div>")
        yield Words(f"The whole plan. {facts.damage_in_words(dossier)}")
        yield Html(f"{draw_rows(pictures.marks(marks))}</div>")
    if pairs:
        yield Html("<div>")
        yield Words(f"Single cuts, before healing. {pictures.cuts_in_words(pairs)}")
        picture = draw(pictures.cuts(pairs))
        yield Html(f"{pickable(f'Single cuts, measured against predicted; {PICK}', picture)}</div>")
    yield Html("</div>")


def _layers(dossier: Dossier, maps: Maps) -> Blocks:
    assert dossier.readings is not None
    topics = diagnostics(dossier.readings, dossier.plan)
    if not topics:
        yield Words("These readings hold damages only; a new run also measures what the layers do.")
        return
    yield Html(f"<p>What the probes saw beside damage: why some cuts are cheap. {HOW}</p>")
    for topic in topics:
        yield Heading(topic.question)
        yield Words(f"{topic.why} {topic.answer}".strip())
        for group in topic.sets:
            yield _reading(group, maps, reading_words(group.kind, group.reading.axis))


def _reading(group: CurveSet | StripSet, maps: Maps, name: str) -> Html:
    """One reading: what it means, a picture of lines or dots, the heat map, and the numbers."""
    if isinstance(group, StripSet):
        words, shape, picture = _strip_words(group), "a dot per head", draw_rows(pictures.strips(group))
    else:
        words, shape, picture = _line_words(group), "a line per layer", draw(pictures.curves(group))
    words += f" Probe {group.reading.probe}, {number(group.reading.tokens)} tokens; `{group.kind}` in readings.json."
    shown = pickable(f"{name}, {shape}; {PICK}", picture)
    found = next((one for one in maps if one.reading.kind == group.kind), None)
    pair = f'<div class="pair">{shown}{_heat(found, name) if found else ""}</div>'
    numbers = details("As a table", "", kind="table") if found else ""
    inner = f"<p class=note>{prose(words)}</p>{pair}{numbers}"
    return Html(f'<div class="reading">{details(name, inner)}</div>')


def _heat(found: Heat, name: str) -> str:
    """The frame of a heat map; the script paints it."""
    last = len(found.rows) - 1
    layers = f'<div class="rows" aria-hidden="true"><span>0</span><span>{last}</span></div>' if last else ""
    low, high = map(short_tick, found.ends)
    sizes = [str(found.ticks[place]) for place in (0, -1)] if found.ticks else ["", ""]
    label = f"Heat map of {name}: layers down; arrow keys read the values"
    return (
        f'<div class="heat" id="{found.name}"><div class="plot">{layers}'
        f'<canvas tabindex="0" role="img" aria-label="{escape(label)}"></canvas><div class="ring"></div></div>'
        f'<div class="ticks"><span>{sizes[0]}</span><span>{escape(axis_words(found.reading.axis))}</span>'
        f"<span>{sizes[1]}</span></div>"
        f'<div class="key"><span>{low}</span><i></i><span>{high} {escape(found.reading.unit)}'
        f"{', logarithmic' if found.log else ''}</span></div>"
        '<p class="read" role="status">Point at a cell for its value.</p></div>'
    )


def _line_words(group: CurveSet) -> str:
    words = group.reading.meaning + (" Logarithmic, with zero on the floor." if group.log else "")
    words += f" Dashed: {group.guide}." if group.guide else ""
    words += " In the heat map: of the code that fits into so many bytes." if counts_bytes(group.reading) else ""
    if group.earlier_probe:
        words += f" Dashed for a chosen layer: as the {group.earlier_probe} probe predicted it."
    return words


def _strip_words(group: StripSet) -> str:
    words = f"{group.reading.meaning} A dot per {axis_words(group.reading.axis)}, layers down."
    words += " Grey: the full dimension." if any(strip.full for strip in group.strips) else ""
    return words + (f" Typical standard error: {number(group.error, 2)}." if group.error is not None else "")


def _healing(dossier: Dossier, maps: Maps) -> Blocks:
    healing = dossier.healing
    assert healing is not None
    parts, chart = healing_parts(healing), pictures.loss(healing)
    yield Words(healing_in_words(healing) + ("" if parts else " It recorded no errors per layer."))
    yield Html('<div class="grid" style="--min:300px">')
    for part, rows in parts.items():
        picture = draw_rows(pictures.healing(part, rows, parts))
        yield Html(figure(part, pickable(f"Healing of {part}; {PICK}", picture)))
    if chart:
        dots = any(series.style == "dot" for series in chart.series)
        yield Html(figure("Loss; dots: on held-out text" if dots else "Loss", draw(chart)))
    yield Html("</div>")
    if parts:
        yield Words(
            "How far every layer's output lies from the source's, relative to it: ring before, dot after the repair. "
            "Errors add up from layer to layer, so late layers have more to make up for."
        )
        yield Folded("As a table", tables.healing(healing))


def _certificate(dossier: Dossier, maps: Maps) -> Blocks:
    verdict = dossier.verdict
    assert verdict is not None
    reasons = f": {'; '.join(verdict.reasons)}" if verdict.reasons else ""
    yield Words(f"Verdict: {judged.status(verdict)}{reasons}.")
    sizes, quality = (words[:1] for words in judged.statuses(verdict))
    yield Heading("Sizes")
    yield Words(f"{sizes} {judged.sizes(verdict)} Sizes are counted on the saved model, loaded again from its files.")
    passed = verdict.sizes_verified
    yield Folded("Every check", tables.checks(verdict)) if passed else tables.checks(verdict)
    yield Heading("Quality")
    yield Words(f"{quality} {judged.quality(verdict)}")
    if verdict.lengths:
        yield Words("Both models on the same text, in rows of growing length; intervals are over blocks of text.", True)
        chart = pictures.by_length(verdict)
        yield Html(f'<div class="pair lengths">{draw(chart)}<div>' if chart else "<div><div>")
        yield tables.lengths(verdict)
        yield Html("</div></div>")
    if verdict.retrieval:
        yield Heading("Retrieval by distance")
        yield Words(tables.RETRIEVAL_WORDS, note=True)
        yield tables.retrieval(verdict)
    yield Heading("What was not measured")
    left = judged.not_measured(verdict)
    yield Items(left) if left else Words("Nothing: all usual checks were made.")
    yield Folded("Everything that was measured, before and after", tables.measured(verdict))


def _samples(dossier: Dossier, maps: Maps) -> Blocks:
    samples = dossier.verdict.samples if dossier.verdict else ()
    if not samples:
        yield Words("No text was generated: streamed runs, and models that generate nothing, are judged without it.")
        return
    yield Html(f"<p class=note>{SAMPLES}</p>")
    yield Html("".join(map(draw_sample, samples[:SHOWN])))
    if len(samples) > SHOWN:
        yield Html(details(f"{len(samples) - SHOWN} more", "".join(map(draw_sample, samples[SHOWN:]))))
    for sample in samples:
        for name, text in (("Prompt", sample.prompt), ("Source", sample.before), ("Cut model", sample.after)):
            yield Code(text, name=name, page=False)


def _reproduce(dossier: Dossier, maps: Maps) -> Blocks:
    folder, settings = folder_of(dossier), facts.settings_of(dossier)
    if not dossier.folder:
        yield Words(f"{FOLDER} is the run folder.", note=True)
    yield Code(facts.loading(dossier, folder + "/model"), "python", "Load it")
    yield Words(facts.way_out(dossier))
    if bits.is_coded(dossier.plan):
        yield Items((bits.GENERATE, *bits.LIMITS))
    if served := for_engine(dossier):
        yield Code(served[1], "sh", f"{served[0]}. A model that vLLM serves")
    yield Code(run_command(settings, beside(dossier, "again")), "sh", "The whole run again, into a new folder")
    if dossier.plan and dossier.plan.budgets and dossier.sweep:
        again = "Another budget, into a new folder, from the same readings"
        at = "".join(dossier.plan.budgets[0].text.partition("@")[1:])
        other = f"{dossier.sweep.budget}={'20%' if bits.is_coded(dossier.plan) else '60%'}{at}"
        yield Code(another_budget(dossier, dossier.sweep, other), "sh", again)


def _record(dossier: Dossier, maps: Maps) -> Blocks:
    yield Words("What a reader needs to judge or repeat the run.")
    yield tables.provenance(dossier)
    yield Heading("Words")
    yield tables.Table(("word", "meaning"), tuple(GLOSSARY.items()))


class Section(NamedTuple):
    """A part of the report: its anchor, its word in the bar, its heading, the stages that it needs, what makes it."""

    name: str
    word: str
    heading: str
    needs: tuple[str, ...]
    make: Callable[[Dossier, Maps], Blocks]
    advanced: bool = False  # whether it is folded away at the end
    only: Callable[[Plan | None], bool] = lambda plan: True  # for which plans it is

    def shown(self, dossier: Dossier) -> bool:
        """Whether it belongs into the report."""
        return self.only(dossier.plan)

    def blocks(self, dossier: Dossier, maps: Maps = ()) -> Blocks:
        """What stands under the heading, or what to type."""
        lacking = facts.absent(dossier, *self.needs)
        return missing(*lacking) if lacking else self.make(dossier, maps)


SECTIONS = (
    Section("samples", "Generations", "What both models write", ("verdict",), _samples),
    Section("certificate", "Verified", "What was verified", ("verdict",), _certificate),
    Section("reproduce", "Use it", "Use it, or make another", (), _reproduce),
    Section("baselines", "Strategies", "Budgets, and other ways to spend them", ("plan",), _baselines, True),
    Section("memory", "Memory", "Where the memory goes", ("plan",), _memory, only=memory.is_limited),
    Section("bits", "Bits", "The cache in bits", ("plan",), _bits, True, only=bits.is_coded),
    Section("damage", "Damage", "Damage by layer", ("readings",), _damage, True),
    Section("layers", "Layers", "What the layers do", ("readings",), _layers, True),
    Section("healing", "Healing", "Healing", ("healing",), _healing, True),
    Section("record", "Record", "Settings, versions and words", (), _record, True),
)
