"""Where the memory goes under a limit on weights, or on weights and cache together: parts before and after."""

from typing import NamedTuple

from headwise.budgets import of_cache, of_weights
from headwise.cost import layer_text_bytes, matrices, table_bytes, weight_bytes
from headwise.report._chart import Bar, Row, RowChart
from headwise.report._data import damage_rows
from headwise.report._tables import Table
from headwise.report._text import MISSING, number
from headwise.types import Budget, LayerShape, ModelShape, Plan, Readings
from headwise.types.weights import ENDS, MATRICES, matrix_bytes

UNIT = "megabytes"
ATTENTION, MLP = MATRICES[:4], MATRICES[4:]
SCALE = 1e6


class Part(NamedTuple):
    """One part of the memory, in bytes."""

    label: str
    colour: str  # by the unit of a cut that has it
    before: int
    after: int
    kinds: tuple[str, ...]  # the units of damage that it pays for


def limit(plan: Plan | None) -> Budget | None:
    """The budget that limits weights."""
    return next((budget for budget in (plan.budgets if plan else ()) if of_weights(budget)), None)


def is_limited(plan: Plan | None) -> bool:
    """Whether a plan has such a budget."""
    return limit(plan) is not None


def parts(plan: Plan) -> list[Part]:
    """Tables of words, attention, MLPs, all other weights, and the cache where it counts."""
    budget = limit(plan)
    assert budget is not None, "memory is limited"
    found = []
    sides = [_sizes(model, budget) for model in (plan.source, plan.target)]
    for label, colour, kinds in (
        ("word tables", "depth", ()),
        ("attention weights", "qk", ("qk", "v", "heads", "kv_heads")),
        ("MLP weights", "mlp", ("mlp",)),
        ("other weights", "heads", ()),
        ("cache", "bits", ("bits",)),
    ):
        before, after = (side.get(label, 0) for side in sides)
        if before or after:
            found.append(Part(label, colour, before, after, kinds))
    return found


def _sizes(model: ModelShape, budget: Budget) -> dict[str, int]:
    layers = [layer for layer in model.layers if not layer.gone]
    found = {"word tables": table_bytes(model)}
    for label, names in (("attention weights", ATTENTION), ("MLP weights", MLP)):
        found[label] = sum(_matrices(model, layer, names) for layer in layers)
    found["other weights"] = weight_bytes(model) - sum(found.values())
    if of_cache(budget):
        found["cache"] = budget.batch * sum(layer_text_bytes(model, layer, budget.length) for layer in layers)
    return found


def _matrices(model: ModelShape, layer: LayerShape, names: tuple[str, ...]) -> int:
    known = matrices(model, layer)
    return sum(matrix_bytes(*known[name], getattr(layer, f"w_{name}")) for name in names if name in known)


def picture(plan: Plan) -> RowChart:
    """Two stacked bars on one axis, in megabytes."""
    found, rows = parts(plan), []
    for label in ("before", "after"):
        bars, start = [], 0.0
        for part in found:
            size = getattr(part, label) / SCALE
            bars.append(Bar(start, start + size, f"u-{part.colour}", f"{part.label} {label}: {number(size)} MB"))
            start += size
        rows.append(Row(label, f"{number(start)} MB", f"{label}: {number(start)} MB", bars=tuple(bars)))
    most = max(bar.end for row in rows for bar in row.bars)
    budget = limit(plan)
    marks = (budget.limit / SCALE,) if budget is not None and budget.limit / SCALE <= most else ()
    return RowChart("Where the memory goes, before and after", (0.0, most or 1.0), tuple(rows), marks=marks)


def in_words(plan: Plan) -> str:
    """What the limit is of, and what it does to a model in memory."""
    budget = limit(plan)
    assert budget is not None, "memory is limited"
    cache = f" and the cache of {budget.batch} x {budget.length:,} tokens" if of_cache(budget) else ""
    return (
        f"{budget.text} limits the weights as they are stored{cache}; the source is counted at 16 bits per number. The "
        "dark line is the limit. Weights keep these bits in memory where headwise.load(folder, packed=True) or "
        "transformers with trust_remote_code=True loads the model: every product unpacks what it needs, which takes "
        "time. headwise.load(folder) alone unpacks all weights."
    )


def table(plan: Plan, readings: Readings | None) -> Table:
    """Every part before and after, and what it was predicted to cost."""
    rows, costs = [], _costs(plan, readings) if readings else {}
    for part in parts(plan):
        share = f"{part.after / part.before:.1%}" if part.before else MISSING
        sizes = (f"{size / SCALE:,.2f}" for size in (part.before, part.after))
        rows.append((part.label, *sizes, share, number(costs[part.label]) if part.label in costs else MISSING))
    heads = ("part", "before, MB", "after, MB", "left", "predicted damage")
    return Table(heads, tuple(rows), range(1, 5), "memory")


def _costs(plan: Plan, readings: Readings) -> dict[str, float]:
    """Predicted damage by part: of cuts and bits in its layers; bits of matrices are priced one by one."""
    found: dict[str, float] = {}
    by_unit: dict[str, float] = {}
    for row in damage_rows(readings, plan):
        for unit, value in row.parts.items():
            by_unit[unit] = by_unit.get(unit, 0.0) + value
    for part in parts(plan):
        found[part.label] = sum(by_unit.get(unit, 0.0) for unit in part.kinds)
    for label, names in (("attention weights", ATTENTION), ("MLP weights", MLP)):
        for name in names:
            reading = readings.curve(f"damage.w_{name}")
            for index, layer in enumerate(plan.target.layers):
                bits = getattr(layer, f"w_{name}")
                if reading is not None and not layer.gone and bits in reading.ticks[index]:
                    found[label] = found.get(label, 0.0) + reading.at(index, bits)
    for end in ENDS:
        reading = readings.curve(f"damage.{end}")
        if reading is not None:
            found["word tables"] = found.get("word tables", 0.0) + reading.at(0, getattr(plan.target, end))
    found.pop("other weights", None)
    return found


def bits_by_layer(plan: Plan) -> Table:
    """The width of every matrix of every layer, and of the tables of words."""
    rows = []
    for index, layer in enumerate(plan.target.layers):
        known = matrices(plan.source, layer) if not layer.gone else {}
        rows.append((str(index), *(str(getattr(layer, f"w_{n}")) if n in known else MISSING for n in MATRICES)))
    tables = [str(getattr(plan.target, end)) for end in ENDS[: 1 if plan.source.tied_embeddings else 2]]
    rows.append(("word tables", ", ".join(tables), *(MISSING for _ in MATRICES[1:])))
    return Table(("layer", *MATRICES), tuple(rows), range(1, 8), "weight bits")
