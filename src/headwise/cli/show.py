"""Draws plans, readings, verdicts and the table of families in the terminal."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwise.errors import HeadwiseError, PlanError
from headwise.files.json import read_object
from headwise.runs.dossier import Dossier
from headwise.strategies import POOLING
from headwise.types import BeforeAfter, LayerKeep, LayerShape, Plan, Reading, Readings, Verdict
from headwise.types.verdict import FAILED, PARTLY, VERIFIED

Size = tuple[float, float, str]  # after, before, colour
KINDS: dict[str, type[Plan] | type[Readings] | type[Verdict]] = {"Plan": Plan, "Readings": Readings, "Verdict": Verdict}


def show_file(path: Path) -> None:
    """Draw whatever headwise wrote into a file; of a run folder, its plan."""
    path = path / "plan.json" if path.is_dir() else path
    kind = read_object(path, advice="give plan.json, readings.json or verdict.json").get("headwise")
    if not isinstance(kind, str) or kind not in KINDS:
        raise PlanError(f"{path} holds no {', '.join(KINDS)}; give plan.json, readings.json or verdict.json.")
    show_record(KINDS[kind].read(path))


def show_record(record: Plan | Readings | Verdict) -> None:
    """Draw one record."""
    draw: dict[type, Any] = {Plan: _plan, Readings: _readings, Verdict: _verdict}
    draw[type(record)](record, Console(highlight=False))


LEVELS = "▁▂▃▄▅▆▇█"
QK, V, MLP, BAD, FAINT = "blue", "yellow", "green", "red", "bright_black"


def _level(part: float) -> str:
    """A block as high as the part, of one; none for what is not a number."""
    return " " if not math.isfinite(part) else LEVELS[max(0, min(len(LEVELS) - 1, round(part * len(LEVELS)) - 1))]


def _table(*heads: str, **more: Any) -> Table:
    return Table(*heads, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), **more)


def _filled(table: Table, rows: Iterable[Iterable[str]]) -> Table:
    for row in rows:
        table.add_row(*row)
    return table


def _bar(after: float, before: float, colour: str, form: str = "", width: int = 6) -> Text:
    """A bar of what is left, and the numbers; what did not change is faint."""
    full = round(width * after / before) if before else 0
    bar = Text("█" * full, style=colour) + Text("░" * (width - full if before else 0), style=FAINT)
    number = Text(f" {after:{form}}", style="bold" if after != before else FAINT)
    return bar + number + Text(f"/{before:g}" if form else f"/{before}", style=FAINT)


def _sizes(old: LayerShape, new: LayerShape, coded: bool) -> tuple[Size, Size]:
    """What is left of keys and of values, and what there was: dimensions or, in a coded plan, bits per number."""
    if not coded:
        return (new.qk_dim, old.qk_dim, QK), (new.v_dim, old.v_dim, V)
    from headwise.report import mean_bits

    after, before = mean_bits(old, new), mean_bits(old, old)
    return (after[0], before[0], QK), (after[1], before[1], V)


def _heads(old: LayerShape, new: LayerShape, keep: LayerKeep, sizes: Sequence[Size]) -> Text:
    """Query heads in groups that share a key/value head, then their number. A head has a column for each of the sizes,
    as high as what is left of it: keys and values, keys alone, or none; a dot marks a head that is gone.
    """
    kept = set(range(new.query_heads) if keep.query_heads is None else keep.query_heads)
    out = Text()
    for head in range(old.query_heads if sizes else 0):
        for after, before, colour in sizes:
            out += Text(_level(after / before), style=colour) if head in kept else Text("·", style=FAINT)
        out += Text(" " if (head + 1) % max(1, old.queries_per_group) == 0 else "")
    on = f" on {new.kv_heads}" if new.kv_heads != old.kv_heads else ""
    return out + Text(
        f"{new.query_heads}/{old.query_heads}{on}", style=FAINT if new.query_heads == old.query_heads else "bold"
    )


def _layers(plan: Plan, columns: int) -> Table:
    """Layers down: heads across, then each size as a bar; a removed layer has the word instead."""
    asked = ", ".join(budget.text for budget in plan.budgets)
    table = _table(title=Text(f"{plan.model} at {asked}" if asked else plan.model, style="bold"), title_justify="left")
    table.add_column("layer", justify="right", min_width=5)
    coded = any(layer.coded for layer in plan.target.layers)
    names, form = (("k bits", "v bits"), ".1f") if coded else (("qk", "v"), "")
    for name in (f"heads ({'k' if coded else 'qk'}, v)" if columns == 2 else "heads", *names, "MLP"):
        table.add_column(name, no_wrap=True)
    for index, (old, new, keep) in enumerate(zip(plan.source.layers, plan.target.layers, plan.keep, strict=True)):
        name = f"{index} {old.role}".strip()
        if new.gone and not old.gone:
            table.add_row(name, Text("removed", style=BAD))
            continue
        sizes = _sizes(old, new, coded)
        bars = [*(_bar(*size, form) for size in sizes), _bar(new.mlp_width, old.mlp_width, MLP)]
        table.add_row(name, _heads(old, new, keep, sizes[:columns]), *bars)
    return table


def _plan(plan: Plan, console: Console) -> None:
    """The layers, heads drawn as widely as fits the terminal, and what the plan spends."""
    tables = [_layers(plan, columns) for columns in (2, 1, 0)]
    wide = console.options.update(width=10_000)
    console.print(next((t for t in tables if console.measure(t, options=wide).maximum <= console.width), tables[-1]))
    _plan_words(plan, console)


def _plan_words(plan: Plan, console: Console) -> None:
    """Budgets, damage, and the frontier as a line of blocks."""
    from headwise.report import proof

    for budget in plan.budgets:
        spent, form = plan.spent[budget.key], ",.0f" if budget.limit >= 1000 else ".4g"
        met = "✓" if spent <= budget.limit * (1 + 1e-9) else "✗ NOT MET"
        console.print(Text(f"{met} {budget.text}: {spent:{form}} of {budget.limit:{form}} {budget.unit}"))
    if any(layer.coded for layer in plan.target.layers):
        console.print(Text(_in_bits(plan)))
    console.print(Text(f"predicted damage before healing {plan.predicted_damage:.4f}, {proof(plan)}"))
    if plan.free_damage is not None:
        console.print(Text(_in_few_sizes(plan)))
    if len(plan.frontier) > 1:
        points = sorted(plan.frontier, key=lambda point: point.share)
        ends = f"{points[0].damage:.4f} at {points[0].share:.0%}", f"{points[-1].damage:.4f} at {points[-1].share:.0%}"
        line = _spark([point.damage for point in points], True)
        console.print(Text(f"predicted damage by budget: {ends[0]} {line} {ends[1]}"))


def _in_few_sizes(plan: Plan) -> str:
    """What it costs to use only some sizes."""
    asked = f"predicted damage {plan.predicted_damage:.4f} with the sizes that were asked for"
    return f"{asked}, {plan.free_damage:.4f} with all sizes"


def _in_bits(plan: Plan) -> str:
    from headwise.report import longest_text, plan_in_bits

    return f"cached {plan_in_bits(plan)}; scales, first and newest tokens are counted.{longest_text(plan)}"


def _spark(values: Sequence[float], log: bool) -> str:
    """A line of blocks; logarithmic over at most five decades."""
    if not values:
        return ""
    if log and max(values) > 0:
        floor = max(max(values) * 1e-5, min((v for v in values if v > 0), default=1e-12))
        values = [math.log10(max(value, floor)) for value in values]
    low, high = min(values), max(values)
    return "".join(_level((value - low) / (high - low) if high > low else 0.5) for value in values)


COLUMNS = 8  # of a table of readings: what fits a terminal; longer rows are thinned


def _shown(reading: Reading) -> tuple[tuple[int, ...], list[dict[int, float]]]:
    """The sizes to print, and every layer's values by size; bytes of codes differ by layer: the code that fits."""
    from headwise.report import at_sizes, byte_steps, counts_bytes, thin

    if counts_bytes(reading):
        sizes = byte_steps(reading, COLUMNS)
    else:  # all, or some with both ends; of lags mostly the near ones
        longest = max(reading.ticks, key=len)
        kept = thin(list(longest), COLUMNS, None, reading.axis == "lag")
        sizes = tuple(size for size in longest if size in kept)
    return sizes, at_sizes(reading, reading.values, sizes)


def _readings(readings: Readings, console: Console) -> None:
    for reading in sorted(readings.curves, key=lambda r: not r.kind.startswith("damage.")):
        shown, rows = _shown(reading)
        damage = reading.kind.startswith("damage.")
        words = f" by {reading.axis} (probe {reading.probe}): {reading.meaning}"
        console.print(Text(reading.kind, style="bold") + Text(words))
        fits = 10 * len(shown) + 10 <= console.width  # every number, and a block each
        table = _table("layer", *map(str, shown), *[""] * fits)
        every = [value for row in reading.values for value in row]
        form = ".3f" if min(every, default=0.0) < 0 or max(every, default=0.0) >= 10 else ".4f"  # seven places at most
        for layer, cells in enumerate(rows):
            line = _spark([cells[t] for t in shown if t in cells], damage)
            numbers = (format(cells[t], form) if t in cells else "" for t in shown)
            table.add_row(str(layer), *numbers, *[Text(line, style=QK)] * fits)
        console.print(table)


def _verdict(verdict: Verdict, console: Console) -> None:
    """What was measured, before beside after; then the checks, loud where one failed."""
    from headwise.report import WHEN, damage_numbers, headline, measured, not_measured, status

    colour = {VERIFIED: MLP, PARTLY: V, FAILED: BAD}[verdict.state]
    console.print(Text(status(verdict), style=f"bold {colour}") + Text(f"  {headline(verdict)}"))
    table = _table()
    for name in ("quantity", "before", "after", "change", "interval of after"):
        table.add_column(name, justify="left" if name == "quantity" else "right")
    console.print(_filled(table, measured(verdict).rows))
    _lengths(verdict, console)
    for name, damage in damage_numbers(verdict).items():
        console.print(Text(f"damage, {name} {WHEN[name]}: {damage.value:.5g}"))
    for check in verdict.checks:
        words = Text("✓ pass  ", style=MLP) if check.passed else Text("✗ FAIL  ", style=f"bold {BAD}")
        console.print(words + Text(f"{check.name}: {check.observed} (expected {check.expected})"))
    for left_out in not_measured(verdict):
        console.print(Text(f"not measured: {left_out}", style=FAINT))
    console.print(
        Text(f"{verdict.evaluation}, {verdict.tokens:,} tokens, {verdict.machine}, {verdict.date}", style=FAINT)
    )


def _lengths(verdict: Verdict, console: Console) -> None:
    """Quality by length and retrieval by distance, where they were measured."""
    from headwise.report import lengths, retrieval

    for found in (lengths(verdict), retrieval(verdict)):
        if found.rows:
            console.print(_filled(_table(*found.heads), found.rows))


TESTED = "transformers 5.17 and 5.22"  # with which the contract tests of every family were run


def family_rows() -> list[dict[str, Any]]:
    """What can be done with every family."""
    try:
        from headwise import families
        from headwise.families._decoder import Decoder  # which have a cache that can be coded
    except ImportError as error:
        raise HeadwiseError(f"torch and transformers are needed ({error}); install headwise again.") from None
    return [
        {
            "family": family.name,
            "models": family.summary,
            "model_types": list(family.model_types),
            "units": [*family.units, *(["bits"] if isinstance(family, Decoder) else []), "depth"],
            "portable": _portable(family),
            "tested": TESTED,
        }
        for family in families.known()
    ]


def _portable(family: Any) -> list[str]:
    """What a portable plan may cut, by model type where they differ; asked of tiny models, as it depends on sizes."""
    if not family.portable:
        return []
    grains = {kind: family.shape_of(family.tiny(kind).config).grain for kind in family.model_types}
    every = tuple(unit for unit in family.units if unit != "rank")  # stock code has no place for two factors
    cuts = {kind: every if grain.portable is None else grain.portable for kind, grain in grains.items()}
    if len(set(cuts.values())) == 1:
        return list(next(iter(cuts.values())))
    return [f"{kind}: {' '.join(units)}" for kind, units in cuts.items()]


def show_families(as_json: bool, markdown: bool = False) -> None:
    """The table of families: types, units that can be cut, what is portable, tested versions."""
    rows = family_rows()
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    heads = ("family", "models", "model types", "can be cut", "portable cuts", "tested with")
    words = [[", ".join(v) or "none" if isinstance(v, list) else v for v in row.values()] for row in rows]
    if markdown:
        lines = [heads, ("---",) * len(heads), *words]
        print("\n".join(f"| {' | '.join(line)} |" for line in lines))
        return
    Console().print(_filled(Table(*heads), words))


def in_short(verdict: Verdict) -> str:
    """What is left of the sizes, quality at the calibrated length, and the verdict: a line each."""
    from headwise.report import headline, status

    names = {"kv_bytes_per_token": "cache", "weight_bytes": "bytes of weights", "parameters": "parameters"}
    both = {words: verdict.size[name] for name, words in names.items() if name in verdict.size}
    kept = [f"{words} {b.after.value / b.before.value:.1%}" for words, b in both.items() if b.after and b.before]
    at = f", rows of {verdict.length:,} tokens" if verdict.length else ""
    data = verdict.evaluation.replace("held out from", "data held out from")
    lines = [f"{', '.join(kept)} of the source", f"{_quality_of(verdict.quality)} on {data}{at}"]
    return "\n".join([*lines, f"{status(verdict)}: {headline(verdict)}"])


def finished(dossier: Dossier, out: Path) -> str:
    """What a run found, in a few lines, and where its report lies."""
    from headwise.report import for_engine, recovery_in_words

    lines = [in_short(dossier.verdict)] if dossier.verdict else []
    if gained := recovery_in_words(dossier.healing):
        lines.append(f"{gained}, on text that nothing was fitted to")
    if dossier.plan is not None and any(layer.coded for layer in dossier.plan.target.layers):
        lines.append(_in_bits(dossier.plan))
    if dossier.plan is not None and dossier.plan.free_damage is not None:
        lines.append(_in_few_sizes(dossier.plan))
    if served := for_engine(dossier):
        lines.append(f"{served[0]}; a model that vLLM serves: {served[1]}")
    if _could_pool(dossier):
        lines.append("at the same cache bytes --pool all usually loses much less, for some more parameters")
    return "\n".join([*lines, f"report: {out / 'report.html'}"])


def _could_pool(dossier: Dossier) -> bool:
    """Whether only the cache was limited, of a decoder with several key/value heads that keep rows of their own."""
    plan = dossier.plan
    if plan is None or plan.strategy not in POOLING:
        return False
    apart = all(layer.kv_heads > 1 and layer.pooled == 1 and not layer.role for layer in plan.source.layers)
    only_kv = bool(plan.budgets) and all(budget.name == "kv" for budget in plan.budgets)
    return apart and only_kv and plan.source.cached and not (dossier.settings and dossier.settings.portable)


def _quality_of(quality: dict[str, BeforeAfter]) -> str:
    """Perplexity, or what else the task has: the loss, the cosine of embeddings, the KL."""
    for name in ("perplexity", "loss"):
        both = quality.get(name, BeforeAfter())
        if both.before and both.after and both.after.low is not None:
            before, after, ends = _numbers(both, ".3f")
            change = (both.after.value / both.before.value - 1) * 100
            return f"{name} {before} -> {after} ({change:+.2f}%; {ends})"
    name, label, form = "kl", "KL to the source", ".3g"
    if "cosine" in quality:
        name, label, form = "cosine", "mean cosine to the source's embeddings", ".4f"
    _, value, ends = _numbers(quality[name], form)
    said = f"{label} {value} ({ends})"
    if "accuracy" not in quality:
        return said
    before, after, ends = _numbers(quality["accuracy"], ".2%")
    return f"accuracy {before} -> {after} ({ends}), {said}"


def _numbers(both: BeforeAfter, form: str) -> tuple[str, str, str]:
    """What was before, what is after, and the interval of that, in words."""
    assert both.after is not None
    before = f"{both.before.value:{form}}" if both.before else ""
    return before, f"{both.after.value:{form}}", f"95% interval {both.after.low:{form}} to {both.after.high:{form}}"
