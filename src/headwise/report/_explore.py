"""What the page's script knows: shapes, the exact answer to every budget, and the readings behind the heat maps.

Plain data on its way into JSON. Layer shapes are written once and named by their place; words are made here, so that
the script formats no number that the page says elsewhere.
"""

import math
from typing import Any, NamedTuple

from headwise.report import _data as data
from headwise.report import _facts as facts
from headwise.report._bits import WHOLE, in_bits, is_coded, mean_bits, row_sizes
from headwise.report._commands import another_budget, beside, run_command
from headwise.report._diagnostics import StripSet, diagnostics
from headwise.report._healing import healing_parts
from headwise.report._judged import percent
from headwise.report._model import GAP, MLP_SHARE, damage_scale, full_dim, full_mlp, model_rows
from headwise.report._sizes import Size, full_size, sizes_of
from headwise.report._tables import CODED_SIZES, SIZE_LABELS
from headwise.report._text import number
from headwise.report._words import axis_words, reading_words
from headwise.runs.dossier import Dossier
from headwise.types import Answer, LayerShape, Plan, Reading, Readings, Sweep
from headwise.types.shape import SIZES

MANY, FEW, DEEP = 48, 20, 32  # sizes of a reading that a heat map shows, and fewer for more layers than DEEP


def explorer(dossier: Dossier) -> dict[str, Any] | None:
    """The slider's data; None where no frontier was solved."""
    plan, sweep, readings = dossier.plan, dossier.sweep, dossier.readings
    if plan is None or sweep is None or readings is None or len(sweep.answers) < 2:
        return None
    rows, sizes = model_rows(plan, sweep=sweep), sizes_of(plan)
    answers = sorted(sweep.answers, key=lambda answer: answer.share)
    table = {shape: place for place, shape in enumerate(sweep.shapes)}
    own = [table.setdefault(shape, len(table)) for shape in plan.target.layers]
    source = [table.setdefault(shape, len(table)) for shape in plan.source.layers]
    lists = [*(answer.layers for answer in answers), own]
    damages = layer_damages(readings, plan, list(table), lists)
    return {
        "shapes": [[getattr(shape, size) for size in SIZES] for shape in table],
        "source": source,
        "own": own,
        "kept": [list(row.heads) for row in rows] if _heads_go(table, plan) else None,
        "orders": _orders(readings) if _heads_go(table, plan) else None,
        "damage": damages,
        "scale": damage_scale([value for layer in damages for value in layer.values()]),
        "bits": layer_bits(plan, list(table), [*lists, source]) if is_coded(plan, sweep) else None,
        "full": [full_dim(rows), full_mlp(rows), GAP, MLP_SHARE],
        "answers": [_answer(answer, plan, sweep, sizes, dossier) for answer in answers],
        "at": own_place(answers, plan),
        "predicted": plan.predicted_damage,
        "ownWords": damage_words(plan.predicted_damage, dossier),
        "ownProof": proof(plan),
        "ownCosts": [size.words(plan.target) for size in sizes],
        "ownCommand": run_command(facts.settings_of(dossier), beside(dossier, "again")),
    }


def proof(plan: Plan) -> str:
    """How far the plan is proven best."""
    return _proven(plan.gap) if plan.strategy == "exact" else f"by the {plan.strategy} strategy"


def _proven(gap: float) -> str:
    return "proven optimal" if gap < 5e-5 else f"within {gap:.2%} of the proven optimum"


def own_place(answers: list[Answer], plan: Plan) -> int:
    """The answer whose limit is nearest the plan's own."""
    full = full_size(plan.budgets[0], plan) or 1.0
    return min(range(len(answers)), key=lambda i: abs(answers[i].share - min(1.0, plan.budgets[0].limit / full)))


def _answer(answer: Answer, plan: Plan, sweep: Sweep, sizes: tuple[Size, ...], dossier: Dossier) -> dict[str, Any]:
    shape = sweep.model(answer, plan.source)
    return {
        "text": answer.text,
        "share": answer.share,
        "damage": answer.damage,
        "words": damage_words(answer.damage, dossier),
        "proof": _proven(answer.gap),
        "layers": list(answer.layers),
        "costs": [size.words(shape) for size in sizes],
        "command": another_budget(dossier, sweep, answer.text),
    }


def damage_words(damage: float, dossier: Dossier) -> str:
    """Damage as a change of perplexity where it is counted in nats per token, and in its unit."""
    unit = facts.damage_unit(dossier)
    plain = f"{number(damage, 3)} {unit}"
    return f"{percent(damage)} perplexity ({plain})" if unit == facts.NATS and 0 < damage < 7 else plain


def _heads_go(table: dict[LayerShape, int], plan: Plan) -> bool:
    """Whether any answer loses heads of a layer that stays, so that the script must know which."""
    most = max(layer.query_heads for layer in plan.source.layers)
    return any(0 < shape.query_heads < most for shape in table)


def _orders(readings: Readings) -> list[dict[str, Any]]:
    return [
        {name: [list(group) for group in order[name]] for name in ("heads", "kv_heads") if name in order}
        for order in readings.orders
    ]


def layer_damages(
    readings: Readings, plan: Plan, table: list[LayerShape], lists: list[Any]
) -> list[dict[int, float | None]]:
    """Per layer, what each of its shapes was predicted to damage, by the shape's place in the table."""
    found: list[dict[int, float | None]] = []
    for layer in range(len(plan.source.layers)):
        places = sorted({layers[layer] for layers in lists})
        known = {place: data.layer_damage(readings, plan, layer, table[place]) for place in places}
        found.append({place: _rounded(value) for place, value in known.items()})
    return found


def layer_bits(plan: Plan, table: list[LayerShape], lists: list[Any]) -> dict[str, Any]:
    """Numbers of every layer's cached rows, and bits of keys and values by the shape's place in the table."""
    found: list[dict[int, list[str]]] = []
    for layer, old in enumerate(plan.source.layers):
        places = sorted({layers[layer] for layers in lists})
        found.append({place: [f"{bits:.1f}" for bits in mean_bits(old, table[place])] for place in places})
    return {"rows": [row_sizes(old) for old in plan.source.layers], "layers": found, "whole": WHOLE}


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")


def layer_facts(dossier: Dossier) -> list[list[tuple[str, str]]]:
    """Per layer, what the page says of it in words when it is chosen."""
    plan = dossier.plan
    if plan is None:
        return []
    found: list[list[tuple[str, str]]] = [[] for _ in plan.keep]
    for index, (old, new) in enumerate(zip(plan.source.layers, plan.target.layers, strict=True)):
        sizes = [(name, getattr(old, size), getattr(new, size)) for size, name in SIZE_LABELS.items()]
        if new.coded and not new.gone:
            sizes = [(name, a, b) for name, a, b in sizes if name not in CODED_SIZES]
        cut = [in_bits(old, new)] * new.coded + [f"{name} {a} → {b}" for name, a, b in sizes if a != b]
        found[index].append(("In this run", "removed" if new.gone else ", ".join(cut) or "nothing is cut"))
    if dossier.readings is not None:
        rows = data.damage_rows(dossier.readings, plan)
        total = sum(row.total for row in rows)
        for row in rows:
            share = f" ({row.total / total:.0%} of all)" if total > 0 else ""
            found[row.layer].append(("Predicted damage before healing", f"{number(row.total, 3)}{share}"))
        for topic in diagnostics(dossier.readings, plan):
            for group in topic.sets:
                for strip in group.strips if isinstance(group, StripSet) else ():
                    if strip.layer < len(found):
                        found[strip.layer].append((reading_words(group.kind, group.reading.axis), strip.words))
    for part, gains in healing_parts(dossier.healing).items():
        for gain in gains:
            if gain.layer < len(found):
                words = f"{number(gain.before, 3)} → {number(gain.after, 3)}"
                found[gain.layer].append((f"Healed error, {part}", words))
    return found


class Heat(NamedTuple):
    """One reading as a table of values, layers down, thinned to what a page can show."""

    name: str  # of its place on the page
    reading: Reading
    ticks: tuple[int, ...]
    rows: tuple[tuple[float | None, ...], ...]
    errors: tuple[tuple[float | None, ...], ...] | None
    ends: tuple[float, float]
    log: bool
    chosen: tuple[int | None, ...]

    def for_script(self) -> dict[str, Any]:
        """As the script takes it."""
        r = self.reading
        names = ["model"] if r.kind == "damage.depth" else [f"layer {i}" for i in range(len(self.rows))]
        return {
            "name": self.name, "kind": reading_words(r.kind, r.axis), "axis": axis_words(r.axis), "unit": r.unit,
            "ticks": self.ticks, "rows": self.rows, "errors": self.errors, "ends": self.ends, "log": self.log,
            "chosen": self.chosen, "names": names,
        }  # fmt: skip


def heats(dossier: Dossier) -> tuple[Heat, ...]:
    """A heat map per kind of reading, of the reading that should be believed."""
    if dossier.readings is None:
        return ()
    kinds = dict.fromkeys(reading.kind for reading in dossier.readings.curves)
    believed = [reading for kind in kinds if (reading := dossier.readings.curve(kind)) is not None]
    found = [heat(reading, place, dossier.plan) for place, reading in enumerate(believed)]
    return tuple(one for one in found if any(value is not None for row in one.rows for value in row))


def heat(reading: Reading, place: int, plan: Plan | None) -> Heat:
    """The data of one heat map."""
    sizes = sorted({tick for row in reading.ticks for tick in row})
    most = MANY if len(reading.ticks) <= DEEP else FEW
    chosen = tuple(data.chosen_size(reading, plan, layer) for layer in range(len(reading.ticks)))
    kept = data.thin(sizes, most, None, reading.axis in data.LOG_AXES)
    ticks = tuple(tick for tick in sizes if tick in kept)
    if data.counts_bytes(reading):
        ticks = data.byte_steps(reading, most)
        chosen = tuple(_shown_at(size, own, ticks) for size, own in zip(chosen, reading.ticks, strict=True))
    rows = _table(reading, reading.values, ticks, 4)
    errors = _table(reading, reading.standard_error, ticks, 2) if reading.standard_error else None
    shown = [value for row in rows for value in row if value is not None]
    log = data.wants_log(reading.kind, shown)
    ends = data.value_range(shown, True) if log else (min(shown, default=0.0), max(shown, default=1.0))
    return Heat(f"r{place}", reading, ticks, rows, errors, ends, log, chosen)


def _shown_at(chosen: int | None, sizes: tuple[int, ...], ticks: tuple[int, ...]) -> int | None:
    """The step at which a chosen size is the one that fits; None where a larger one does."""
    tick = next((tick for tick in ticks if chosen is not None and tick >= chosen), None)
    return tick if tick is not None and data.fitting(sizes, tick) == chosen else None


def _table(reading: Reading, values: Any, ticks: tuple[int, ...], digits: int) -> tuple[tuple[float | None, ...], ...]:
    known = data.at_sizes(reading, values, ticks)
    return tuple(tuple(_rounded(row.get(tick), digits) for tick in ticks) for row in known)
