"""The model card: the same facts and tables as the page, as text that the Hugging Face Hub and a terminal can show."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable

from headwise.report import _facts as facts
from headwise.report import _judged as judged
from headwise.report import _tables as tables
from headwise.report._commands import how_to_make, run_command
from headwise.report._data import damage_rows
from headwise.report._healing import healing_in_words
from headwise.report._tables import Table
from headwise.report._text import cell, fence, number
from headwise.runs.dossier import Dossier

Blocks = Iterable[str | Table]  # text is Markdown already


def model_card(dossier: Dossier) -> str:
    """Front matter, then the answer, then the tables."""
    blocks: list[str | Table] = [
        _front_matter(dossier),
        f"# {cell(facts.model_name(dossier))}, reshaped by Headwise",
        f"**{cell(facts.headline(dossier))}**",
        cell(facts.way_out(dossier)),
        tables.main_numbers(dossier),
        "## How to load it",
        "`folder` is this folder, or its name on the Hub.",
        fence(facts.loading(dossier), "python"),
    ]
    for heading, needs, make in SECTIONS:
        lacking = facts.absent(dossier, *needs)
        blocks += [f"## {heading}", *(_missing(*lacking) if lacking else make(dossier))]
    return "\n\n".join(_table(block) if isinstance(block, Table) else block for block in blocks) + "\n"


def _front_matter(dossier: Dossier) -> str:
    """YAML that the Hub accepts; a base model that cannot be a name on the Hub, such as a path, is left to the text."""
    name, lines = facts.model_name(dossier), ["---", "library_name: transformers"]
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?", name):
        lines += [f"base_model: {json.dumps(name)}"]
    kind = "portable" if facts.is_portable(dossier) else "tailored"
    lines += [f"pipeline_tag: {facts.use(dossier)[1]}", "tags:", "- headwise", "- pruned", f"- {kind}", "---"]
    return "\n".join(lines)


def _table(of: Table) -> str:
    rows = [of.heads, tuple("---" for _ in of.heads), *(tuple(map(cell, row)) for row in of.rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _missing(words: str, command: str) -> Blocks:
    return cell(words) + ". This makes it, with the run folder for DIR:", fence(command, "sh")


def _layers(dossier: Dossier) -> Blocks:
    assert dossier.plan is not None
    return (tables.layer_sizes(dossier.plan),)


def _damage(dossier: Dossier) -> Blocks:
    assert dossier.readings is not None and dossier.plan is not None
    total = sum(row.total for row in damage_rows(dossier.readings, dossier.plan))
    words = f"Predicted, in {facts.damage_unit(dossier)}. Together {number(total)}."
    return cell(words), tables.damage_by_layer(dossier.readings, dossier.plan)


def _budgets(dossier: Dossier) -> Blocks:
    assert dossier.plan is not None
    words = "Least predicted damage for every share of the first budget:"
    return tables.budgets(dossier), *((words, tables.frontier(dossier.plan)) if dossier.plan.frontier else ())


def _baselines(dossier: Dossier) -> Blocks:
    found = tables.strategies(dossier)
    if len(found.rows) < 2:
        return _missing("No other strategy was tried", how_to_make(dossier, "allocate"))
    return (found,)


def _healing(dossier: Dossier) -> Blocks:
    found = tables.healing(dossier.healing or {})
    return cell(healing_in_words(dossier.healing or {})), *((found,) if found.rows else ())


def _certificate(dossier: Dossier) -> Blocks:
    verdict = dossier.verdict
    assert verdict is not None
    yield f"{cell(judged.status(verdict))}. {cell(judged.headline(verdict))}"
    yield tables.checks(verdict)
    if verdict.lengths:
        yield tables.lengths(verdict)
    if verdict.retrieval:
        yield tables.RETRIEVAL_WORDS
        yield tables.retrieval(verdict)
    if left_out := judged.not_measured(verdict):
        yield "Not measured:\n\n" + "\n".join(f"- {cell(words)}" for words in left_out)
    yield tables.measured(verdict)
    if words := facts.damage_in_words(dossier):
        yield cell(words)


def _samples(dossier: Dossier) -> Blocks:
    samples = dossier.verdict.samples if dossier.verdict else ()
    for sample in samples:
        for name, words in (("Prompt", sample.prompt), ("Source", sample.before), ("Reshaped", sample.after)):
            yield f"{name}:\n\n{fence(words)}"
    if not samples:
        yield "The verdict holds no generations."


def _reproduce(dossier: Dossier) -> Blocks:
    return fence(run_command(facts.asked(dossier)), "sh"), tables.provenance(dossier)


# Heading, stages that it needs, what makes it.
SECTIONS: tuple[tuple[str, tuple[str, ...], Callable[[Dossier], Blocks]], ...] = (
    ("Before and after", ("plan",), _layers),
    ("Damage by layer", ("readings", "plan"), _damage),
    ("Budgets", ("plan",), _budgets),
    ("Beside other strategies", ("plan",), _baselines),
    ("Healing", ("healing",), _healing),
    ("Certificate", ("verdict",), _certificate),
    ("Generations", ("verdict",), _samples),
    ("Do it again", (), _reproduce),
)
