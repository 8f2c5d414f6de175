"""The model card: the same facts as the page, as text that the Hugging Face Hub and a terminal can show."""

from __future__ import annotations

import json
import re

from headwise.report import _facts as facts
from headwise.report import _judged as judged
from headwise.report import _rivals as rivals
from headwise.report._checked import not_kept_in_words, recovery_in_words
from headwise.report._commands import how_to_make, run_command
from headwise.report._data import LABELS, UNIT_LABELS, damage_rows, healing_parts
from headwise.report._text import cell, fence, human, number, relative
from headwise.types import UNITS, Dossier


def card(dossier: Dossier) -> str:
    """Front matter, then the answer, then the tables."""
    parts = [
        _front_matter(dossier),
        f"# {cell(facts.model_name(dossier))}, reshaped by Headwise",
        f"**{cell(facts.headline(dossier))}**",
        cell(facts.way_out(dossier)),
        _measures(dossier),
        "## How to load it",
        "`folder` is this folder, or its name on the Hub.",
        fence(facts.loading(dossier), "python"),
    ]
    for heading, body in (
        ("Before and after", _layers(dossier)),
        ("Damage by layer", _damage(dossier)),
        ("Budgets", _budgets(dossier)),
        ("Beside other strategies", _baselines(dossier)),
        ("Healing", _healing(dossier)),
        ("Certificate", _certificate(dossier)),
        ("Generations", _samples(dossier)),
        ("Do it again", _reproduce(dossier)),
    ):
        parts += [f"## {heading}", body]
    return "\n\n".join(parts) + "\n"


def _front_matter(dossier: Dossier) -> str:
    """YAML that the Hub accepts; a base model that cannot be a name on the Hub, such as a path, is left to the text."""
    name, lines = facts.model_name(dossier), ["---", "library_name: transformers"]
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?", name):
        lines += [f"base_model: {json.dumps(name)}"]
    kind = "portable" if facts.is_portable(dossier) else "tailored"
    lines += [f"pipeline_tag: {facts.use(dossier)[1]}", "tags:", "- headwise", "- pruned", f"- {kind}", "---"]
    return "\n".join(lines)


def _table(heads: tuple[str, ...], rows: facts.Rows) -> str:
    lines = [" | ".join(heads), " | ".join("---" for _ in heads), *(" | ".join(cell(c) for c in row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


def _missing(words: str, command: str) -> str:
    return f"{words}. This makes it, with the run folder for DIR:\n\n{fence(command, 'sh')}"


def _measures(dossier: Dossier) -> str:
    rows = []
    for m in facts.measures(dossier):
        name = f"{m.label}{f', {m.unit}' if m.unit else ''}{' (planned)' if m.planned else ''}"
        rows.append((name, human(m.before), human(m.after), relative(m.before, m.after), m.interval or "–"))
    return _table(("", "before", "after", "change", "95% interval of after"), tuple(rows))


def _layers(dossier: Dossier) -> str:
    plan = dossier.plan
    if plan is None:
        return _missing("No plan has been made", how_to_make(dossier, "allocate"))
    rows = []
    for index, (old, new) in enumerate(zip(plan.source.layers, plan.target.layers, strict=True)):
        sizes = [(getattr(old, size), getattr(new, size)) for size in (*LABELS, "qk_width")]
        rows.append((f"{index} {old.role}".strip(), *(f"{a} → {b}" if a != b else str(a) for a, b in sizes)))
    return _table(("layer", *LABELS.values(), "query/key width"), tuple(rows))


def _damage(dossier: Dossier) -> str:
    if dossier.readings is None:
        return _missing("The model has not been probed", how_to_make(dossier, "probe"))
    if dossier.plan is None:
        return _missing("No plan has been made", how_to_make(dossier, "allocate"))
    rows = damage_rows(dossier.readings, dossier.plan)
    units = [unit for unit in UNITS if any(unit in row.parts for row in rows)]
    cells = tuple((str(r.layer), *(number(r.parts.get(unit)) for unit in units), number(r.total)) for r in rows)
    words = f"Predicted, in {facts.damage_unit(dossier)}. Together {number(sum(row.total for row in rows))}."
    return f"{words}\n\n" + _table(("layer", *(UNIT_LABELS[unit] for unit in units), "together"), cells)


def _budgets(dossier: Dossier) -> str:
    if dossier.plan is None:
        return _missing("No plan has been made", how_to_make(dossier, "allocate"))
    text = _table(("budget", "unit", "source", "limit", "spent", "share", "met"), facts.budget_rows(dossier))
    if dossier.plan.frontier:
        points = tuple((f"{p.share:.1%}", number(p.damage)) for p in dossier.plan.frontier)
        text += "\n\nLeast predicted damage for every share of the first budget:\n\n" + _table(
            ("share", "damage"), points
        )
    return text


def _baselines(dossier: Dossier) -> str:
    rows = rivals.comparisons(dossier)
    if len(rows) < 2:
        return _missing("No other strategy was tried", how_to_make(dossier, "allocate"))
    cells = tuple(
        (f"{r.strategy} (this run)" if r.chosen else r.strategy, number(r.predicted), number(r.measured), r.spent)
        for r in rows
    )
    return _table(("strategy", "predicted damage", "measured damage", "spent"), cells)


def _healing(dossier: Dossier) -> str:
    if dossier.healing is None:
        return _missing("The model was not healed", how_to_make(dossier, "heal"))
    words = f"Method: {cell(dossier.healing.get('method', 'unknown'))}."
    gained = recovery_in_words(dossier.healing)
    words += f" On text that nothing was fitted to: {gained}." if gained else ""
    words += f" {cell(not_kept_in_words(dossier.healing))}"
    rows = tuple(
        (str(row.layer), part, number(row.before), number(row.after), relative(row.before, row.after))
        for part, layers in healing_parts(dossier.healing).items()
        for row in layers
    )
    return f"{words}\n\n" + _table(("layer", "part", "error before", "error after", "change"), rows) if rows else words


def _certificate(dossier: Dossier) -> str:
    verdict = dossier.verdict
    if verdict is None:
        return _missing(
            f"{facts.why_no_verdict(dossier)} Nothing has been verified".strip(), how_to_make(dossier, "verify")
        )
    checks = tuple(("✓ pass" if c.passed else "✗ FAIL", c.name, c.observed, c.expected) for c in verdict.checks)
    text = f"{cell(judged.status(verdict))}. {cell(judged.headline(verdict))}\n\n"
    text += _table(("result", "check", "observed", "expected"), checks)
    text += f"\n\n{_table(judged.LENGTH_HEADS, judged.length_rows(verdict))}" if verdict.lengths else ""
    if verdict.retrieval:
        text += f"\n\n{judged.RETRIEVAL_WORDS}\n\n{_table(judged.RETRIEVAL_HEADS, judged.retrieval_rows(verdict))}"
    if left_out := judged.not_measured(verdict):
        text += "\n\nNot measured:\n\n" + "\n".join(f"- {cell(words)}" for words in left_out)
    text += "\n\n" + _table(
        ("quantity", "before", "after", "change", "95% interval of after"), facts.certificate_rows(dossier)
    )
    words = facts.damage_in_words(dossier)
    return text + (f"\n\n{cell(words)}" if words else "")


def _samples(dossier: Dossier) -> str:
    if dossier.verdict is None:
        return _missing("Nothing has been generated", how_to_make(dossier, "verify"))
    blocks = [
        f"Prompt:\n\n{fence(s.prompt)}\n\nSource:\n\n{fence(s.before)}\n\nReshaped:\n\n{fence(s.after)}"
        for s in dossier.verdict.samples
    ]
    return "\n\n".join(blocks) or "The verdict holds no generations."


def _reproduce(dossier: Dossier) -> str:
    return fence(run_command(dossier.settings), "sh") + "\n\n" + _table(("", "value"), facts.provenance(dossier))
