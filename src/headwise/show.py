"""Plans, readings and verdicts in the terminal. Only the command line calls this."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwise.errors import HeadwiseError, PlanError
from headwise.types import Plan, Readings, Verdict

KINDS: dict[str, type[Plan] | type[Readings] | type[Verdict]] = {"Plan": Plan, "Readings": Readings, "Verdict": Verdict}


def show_file(path: Path) -> None:
    """Draw whatever headwise wrote into a file."""
    try:
        kind = json.loads(path.read_text()).get("headwise")
    except (OSError, ValueError, AttributeError) as error:
        raise PlanError(f"{path} cannot be read ({error}); give plan.json, readings.json or verdict.json.") from None
    if kind not in KINDS:
        raise PlanError(f"{path} holds no {', '.join(KINDS)}; give plan.json, readings.json or verdict.json.")
    show_record(KINDS[kind].read(path))


def show_record(record: Plan | Readings | Verdict) -> None:
    """Draw one record."""
    draw: dict[type, Any] = {Plan: _plan, Readings: _readings, Verdict: _verdict}
    draw[type(record)](record, Console())


def _bar(after: int, before: int, width: int = 12) -> str:
    full = round(width * after / before) if before else 0
    return "█" * full + "░" * (width - full) + f" {after}/{before}"


def _plan(plan: Plan, console: Console) -> None:
    fields = ("query_heads", "kv_heads", "qk_width", "qk_dim", "v_dim", "mlp_width")
    table = Table("layer", *fields, title=f"{plan.model}: {plan.strategy}", title_justify="left")
    for index, (old, new) in enumerate(zip(plan.source.layers, plan.target.layers, strict=True)):
        table.add_row(f"{index} {old.role}".strip(), *(_bar(getattr(new, name), getattr(old, name)) for name in fields))
    console.print(table)
    for budget in plan.budgets:
        console.print(f"{budget.text}: {plan.spent[budget.name]:,.0f} of {budget.limit:,.0f} {budget.unit}")
    console.print(f"predicted damage {plan.predicted_damage:.4f}, gap to the proven bound {plan.gap:.1e}")


COLUMNS = 8  # of a table of readings: what fits a terminal; longer rows are thinned


def _columns(ticks: tuple[int, ...], axis: str) -> tuple[int, ...]:
    """Which sizes to print: all, or some with both ends; of lags mostly the near ones."""
    if len(ticks) <= COLUMNS:
        return ticks
    last, parts = len(ticks) - 1, [i / (COLUMNS - 1) for i in range(COLUMNS)]
    places = [round((last + 1) ** part) - 1 if axis == "lag" else round(last * part) for part in parts]
    return tuple(ticks[i] for i in dict.fromkeys(places))


def _readings(readings: Readings, console: Console) -> None:
    for reading in sorted(readings.curves, key=lambda r: not r.kind.startswith("damage.")):
        shown = _columns(max(reading.ticks, key=len), reading.axis)
        console.print(Text(f"{reading.kind} by {reading.axis} (probe {reading.probe}): {reading.meaning}"))
        table = Table("layer", *map(str, shown), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        every = [value for row in reading.values for value in row]
        form = ".3f" if min(every, default=0.0) < 0 or max(every, default=0.0) >= 10 else ".4f"  # seven places at most
        for layer, (ticks, values) in enumerate(zip(reading.ticks, reading.values, strict=True)):
            cells = dict(zip(ticks, values, strict=True))
            table.add_row(str(layer), *(format(cells[t], form) if t in cells else "" for t in shown))
        console.print(table)


def _verdict(verdict: Verdict, console: Console) -> None:
    for title, numbers in (
        ("quality", verdict.quality),
        ("size", verdict.size),
        ("speed", verdict.speed),
        ("damage", verdict.damage),
    ):
        table = Table(title, "")
        for name, value in numbers.items():
            table.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value:.5g}")
        console.print(table)
    for check in verdict.checks:
        console.print(
            f"{'pass' if check.passed else 'FAIL'}  {check.name}: {check.observed} (expected {check.expected})"
        )


TESTED = "transformers 5.17 and 5.22"  # with which the contract tests of every family were run


def family_rows() -> list[dict[str, Any]]:
    """What can be done with every family."""
    try:
        from headwise import families
    except ImportError as error:
        raise HeadwiseError(f"torch and transformers are needed ({error}); install headwise again.") from None
    return [
        {
            "family": family.name,
            "models": family.summary,
            "model_types": list(family.model_types),
            "units": [*family.units, "depth"],
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
    cuts = {kind: family.units if grain.portable is None else grain.portable for kind, grain in grains.items()}
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
    cells = [
        [", ".join(value) or "none" if isinstance(value, list) else value for value in row.values()] for row in rows
    ]
    if markdown:
        lines = [heads, ("---",) * len(heads), *cells]
        print("\n".join(f"| {' | '.join(line)} |" for line in lines))
        return
    table = Table(*heads)
    for line in cells:
        table.add_row(*line)
    Console().print(table)
