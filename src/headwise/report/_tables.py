"""Every table of the report as plain data: page, model card, notebook and terminal write the same ones."""

from collections.abc import Collection
from typing import NamedTuple

from headwise.report import _facts as facts
from headwise.report import _judged as judged
from headwise.report._bits import PARTS, WHOLE, bit_rows, is_coded, mean_bits, row_sizes
from headwise.report._data import damage_rows
from headwise.report._healing import healing_parts
from headwise.report._rivals import rivals
from headwise.report._sizes import full_size, size_of
from headwise.report._text import MISSING, as_number, human, interval, number, relative, words
from headwise.report._words import known_ends
from headwise.runs.dossier import Dossier
from headwise.types import CUTS, UNITS, Healing, Plan, Readings, Verdict
from headwise.types.codes import CACHE_BYTES
from headwise.types.shape import SIZES
from headwise.types.unit import LABELS
from headwise.types.verdict import LEAST_ROWS, RETRIEVAL_LOSS

SIZE_LABELS = {size: unit.label for size in SIZES for unit in CUTS if unit.size == size}  # of a layer, for a reader
CODED_SIZES = (SIZE_LABELS["qk_dim"], SIZE_LABELS["v_dim"])  # which say little of a layer whose cache is coded
RETRIEVAL_WORDS = (
    "A passage of 32 random tokens is repeated at a distance. The table shows the share of its tokens, without the "
    "first, that each model predicts the second time. This needs no data."
)


class Table(NamedTuple):
    """Heads and rows of text."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: Collection[int] = ()  # columns that are flush right
    name: str = ""  # with one, a page lets it be sorted and downloaded
    now: int = -1  # the row that is set bold
    layers: bool = False  # whether the first column names layers, which can be chosen
    links: tuple[str, ...] = ()  # of the rows, under the second cell


def layer_sizes(plan: Plan) -> Table:
    """Every size of every layer before and after."""
    names, rows = {**SIZE_LABELS, "qk_width": "query/key width"}, []
    for index, (old, new) in enumerate(zip(plan.source.layers, plan.target.layers, strict=True)):
        sizes = {size: (getattr(old, size), getattr(new, size)) for size in names}
        cells = {size: f"{a} → {b}" if a != b else str(a) for size, (a, b) in sizes.items()}
        if new.coded:
            codes = {"qk_dim": sum(new.k_code), "v_dim": sum(new.v_code)}
            pairs = zip(codes.items(), row_sizes(old), mean_bits(old, new), strict=True)
            cells |= {size: f"{coded} of {full}, {bits:.1f} bits" for (size, coded), full, bits in pairs}
        rows.append((f"{index} {old.role}".strip(), *cells.values()))
    if is_coded(plan):
        names |= {"qk_dim": "keys cached", "v_dim": "values cached"}
    return Table(("layer", *names.values()), tuple(rows), range(7), "layers before and after", layers=True)


def layer_bits(plan: Plan) -> Table:
    """What the cached rows of every layer take: bits per number, numbers that have any, bytes."""
    rows = []
    for keys, values in zip(*(bit_rows(plan, part) for part in PARTS), strict=True):
        new = plan.target.layers[keys.layer]
        taken, full = new.row_bytes(), CACHE_BYTES * (keys.full + values.full)
        kept = (f"{part.kept:,} of {part.full:,}" for part in (keys, values))
        bits = (f"{part.mean:.1f}" for part in (keys, values))
        share = f"{taken / full:.1%}"
        rows.append((str(keys.layer), *bits, *kept, str(new.kv_heads), f"{taken:,}", f"{full:,}", share))
    heads = (
        *("layer", "keys, bits", "values, bits", "keys kept", "values kept"),
        *("rows of a token", "bytes of a row", f"at {WHOLE} bits", "share"),
    )
    return Table(heads, tuple(rows), range(len(heads)), "bits by layer", layers=True)


def damage_by_layer(readings: Readings, plan: Plan) -> Table:
    """Predicted damage of every layer at its chosen sizes, by unit."""
    found = damage_rows(readings, plan)
    units = [unit for unit in UNITS if any(unit in row.parts for row in found)]
    rows = tuple((str(r.layer), *(number(r.parts.get(unit)) for unit in units), number(r.total)) for r in found)
    heads = ("layer", *(LABELS[unit] for unit in units), "together")
    return Table(heads, rows, range(1, len(heads)), "damage by layer", layers=True)


def damage_by_unit(readings: Readings, plan: Plan) -> Table:
    """What each unit adds to the damage."""
    found = damage_rows(readings, plan)
    total = sum(row.total for row in found)
    sums = {unit: sum(row.parts.get(unit, 0.0) for row in found) for unit in UNITS}
    cut = [unit for unit in UNITS if any(unit in row.parts for row in found)]
    rows = tuple((LABELS[u], number(sums[u]), f"{sums[u] / total:.0%}" if total > 0 else MISSING) for u in cut)
    return Table(("unit", "damage", "share"), rows, (1, 2), "damage by unit")


def budgets(dossier: Dossier) -> Table:
    """Source, limit and what is spent of every budget: as planned, or as checked if it was."""
    rows, plan = [], dossier.plan
    checks = {check.name: check.passed for check in (dossier.verdict.checks if dossier.verdict else ())}
    for budget in plan.budgets if plan else ():
        assert plan is not None
        full, spent = full_size(budget, plan), size_of(budget, plan.target)
        spent = as_number(plan.spent.get(budget.key)) if spent is None else spent
        share = f"{spent / full:.1%}" if full and spent is not None else MISSING
        within = None if spent is None else spent <= budget.limit * (1 + 1e-9)
        within = checks.get(f"budget {budget.text}", within)
        met = MISSING if within is None else "✓ met" if within else "✗ NOT MET"
        rows.append((budget.text, budget.unit, human(full), human(budget.limit), human(spent), share, met))
    heads = ("budget", "unit", "source", "limit", "spent", "share", "met")
    return Table(heads, tuple(rows), range(2, 6), "budgets")


def strategies(dossier: Dossier) -> Table:
    """This plan, and what other strategies would have done with the same budgets."""
    rows = tuple(
        (
            f"{row.strategy} (this run)" if row.chosen else row.strategy,
            number(row.predicted),
            number(row.measured),
            MISSING if row.share is None else f"{row.share:.1%}",
            row.spent,
        )
        for row in rivals(dossier)
    )
    heads = ("strategy", "predicted before healing", "measured after healing", "share of first budget", "spent")
    return Table(heads, rows, (1, 2, 3), "strategies", now=0)


def frontier(plan: Plan) -> Table:
    """The least predicted damage at every share of the first budget, as far as a larger one gains anything."""
    points = sorted(plan.frontier, key=lambda point: point.share)
    useful = [p for before, p in zip([None, *points], points, strict=False) if not before or p.damage < before.damage]
    return Table(
        ("share", "predicted before healing"), tuple((f"{p.share:.1%}", number(p.damage)) for p in useful), (0, 1)
    )


def healing(found: Healing) -> Table:
    """Errors of every layer's parts before and after healing."""
    rows = tuple(
        (str(row.layer), part, number(row.before), number(row.after), relative(row.before, row.after))
        for part, layers in healing_parts(found).items()
        for row in layers
    )
    return Table(("layer", "part", "error before", "error after", "change"), rows, (2, 3, 4), "healing", layers=True)


def checks(verdict: Verdict) -> Table:
    """Every promise, what was seen and what was promised."""
    rows = tuple(("✓ pass" if c.passed else "✗ FAIL", c.name, c.observed, c.expected) for c in verdict.checks)
    return Table(("result", "check", "observed", "expected"), rows, (), "checks")


def measured(verdict: Verdict) -> Table:
    """Every measured quantity, known here by name or not."""
    rows = []
    for table in (verdict.quality, verdict.size, verdict.speed):
        for name, both in table.items():
            before, after = (as_number(m.value) if m else None for m in (both.before, both.after))
            ends = interval(*known) if (known := known_ends(both.after)) else MISSING
            rows.append((words(name), number(before), number(after), relative(before, after), ends))
    heads = ("quantity", "before", "after", "change", "95% interval of after (times: range)")
    return Table(heads, tuple(rows), range(1, 5), "measured")


def main_numbers(dossier: Dossier) -> Table:
    """The numbers that answer most questions, before and after."""
    rows = []
    for fact in facts.measures(dossier):
        name = f"{fact.label}{f', {fact.unit}' if fact.unit else ''}{' (planned)' if fact.planned else ''}"
        change = relative(fact.before, fact.after)
        rows.append((name, human(fact.before), human(fact.after), change, fact.interval or MISSING))
    return Table(("", "before", "after", "change", "95% interval of after (times: range)"), tuple(rows), range(1, 5))


def lengths(verdict: Verdict) -> Table:
    """Quality at every length, against the limit."""
    rows = []
    for q in verdict.lengths:
        change, nats = (MISSING, MISSING), f"{number(q.damage, 3)} ({interval(q.low, q.high, 3)})"
        if judged.has_perplexity(verdict):
            change = judged.percent(q.damage), judged.span(q.low, q.high)
            nats = number(q.damage, 3)
        counted = f"{q.rows}" if q.rows >= LEAST_ROWS else f"{q.rows}, too few to certify"
        rows.append((f"{q.length:,}", *change, nats, number(q.kl, 3), counted, _against(verdict, q.low, q.high)))
    heads = ("tokens", "perplexity", "95% interval", "nats per token", "KL", "rows", "limit")
    return Table(heads, tuple(rows), range(6), "quality by length")


def _against(verdict: Verdict, low: float, high: float) -> str:
    return "✓ within" if high <= verdict.limit else "✗ BEYOND" if low > verdict.limit else "! uncertain"


def retrieval(verdict: Verdict) -> Table:
    """Accuracy of both models at every distance, the change with its interval, and what that means."""
    rows = []
    for r in verdict.retrieval:
        change = 100 * (r.accuracy_after - r.accuracy_before)
        ends = f"{100 * r.accuracy_change_low:+.1f} to {100 * r.accuracy_change_high:+.1f}"
        meaning = "! clearly less" if r.lost else f"✓ within {100 * RETRIEVAL_LOSS:.0f} points"
        meaning = meaning if r.possible else "the source does not retrieve at this distance"
        losses = f"{number(r.loss_before, 3)} → {number(r.loss_after, 3)}"
        both = f"{r.accuracy_before:.1%}", f"{r.accuracy_after:.1%}"
        rows.append((f"{r.distance:,}", *both, f"{change:+.1f} points ({ends})", losses, meaning))
    heads = ("distance", "source", "cut model", "change (95% interval)", "loss", "in words")
    return Table(heads, tuple(rows), range(5), "retrieval")


def provenance(dossier: Dossier) -> Table:
    """Everything that a reader needs to judge or repeat the run."""
    rows: list[tuple[str, str]] = []
    images = facts.reads_images(dossier)
    if v := dossier.verdict:
        rows += [
            ("Evaluation images" if images else "Evaluation data", v.evaluation),
            ("Evaluation tokens", number(v.tokens) + (" (patches)" if images else "")),
            ("Machine", v.machine),
            ("Date", v.date),
        ]
    if dossier.readings:
        rows.append(("Calibration tokens", number(dossier.readings.tokens)))
        rows += [("Probing", f"{number(dossier.readings.seconds)} s")] if dossier.readings.seconds else []
    if dossier.plan:
        rows += [("Strategy", dossier.plan.strategy), ("Gap to the proven bound", f"{dossier.plan.gap:.2%}")]
    for key, value in facts.settings_of(dossier).items():
        rows.append((f"Setting: {key}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    rows += [(f"Versions: {package}", version) for package, version in dossier.versions.items()]
    return Table(("what", "value"), tuple(rows), (), "provenance")
