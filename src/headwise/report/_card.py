"""The model card: the same facts and tables as the page, as text that the Hugging Face Hub and a terminal can show."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from headwise.files.card import lines_of
from headwise.report import _facts as facts
from headwise.report import _tables as tables
from headwise.report._bits import GENERATE, is_coded
from headwise.report._commands import for_engine
from headwise.report._html import Block, Code, Folded, Heading, Items, Words
from headwise.report._sections import SECTIONS
from headwise.report._tables import Table
from headwise.report._text import cell, fence, for_script
from headwise.runs.dossier import Dossier


def model_card(dossier: Dossier, facts_of_source: Mapping[str, Any] | None = None) -> str:
    """Front matter, then the answer, then the page's sections without their pictures.

    `facts_of_source` are its licence and its name on the Hub, if it has one, as they were when the model was saved.
    """
    start = [
        _front_matter(dossier, facts_of_source),
        f"# {cell(facts.title(dossier))}, by Headwise",
        f"**{cell(facts.headline(dossier))}**",
        cell(facts.way_out(dossier)),
        _table(tables.main_numbers(dossier)),
        "## How to load it",
        "`folder` is this folder, or its name on the Hub.",
        fence(facts.loading(dossier), "python"),
    ]
    if is_coded(dossier.plan):
        start.append(cell(GENERATE))
    if served := for_engine(facts.elsewhere(dossier)):
        start += [cell(f"{served[0]}. This makes a model that vLLM serves:"), fence(served[1], "sh")]
    if dossier.plan is not None:
        start += ["## Before and after", _table(tables.layer_sizes(dossier.plan))]
    for part in (part for part in SECTIONS if part.shown(dossier)):
        start += [f"## {part.heading}", *map(_block, part.blocks(facts.elsewhere(dossier)))]
    return "\n\n".join(filter(None, start)) + "\n"


def _block(of: Block) -> str:
    match of:
        case Words():
            return cell(of.text)
        case Heading():
            return f"### {cell(of.text)}"
        case Items():
            return "\n".join(f"- {cell(text)}" for text in of.texts)
        case Code():
            return f"{of.name}:\n\n{fence(of.text, of.language)}" if of.name else fence(of.text, of.language)
        case Folded():
            return f"{cell(of.heading)}:\n\n{_table(of.table)}"
        case Table():
            return _table(of)
    return ""


def _front_matter(dossier: Dossier, known: Mapping[str, Any] | None) -> str:
    """YAML that the Hub accepts; a base model that cannot be a name on the Hub, such as a path, is left to the text."""
    name = facts.model_name(dossier)
    if known is None:
        named = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?", name) and name != "embedded"
        known = {"base_model": name} if named else {}
    use, kind = facts.use(dossier)[1], "portable" if facts.is_portable(dossier) else "tailored"
    lines = ["---", "library_name: transformers", *lines_of(known), f"pipeline_tag: {use}"]
    lines += ["tags:", "- headwise", "- pruned", f"- {kind}", *_model_index(dossier, use), "---"]
    return "\n".join(lines)


def _model_index(dossier: Dossier, use: str) -> list[str]:
    """What was measured, in the form that the Hub shows beside a model; nothing before it is verified."""
    if dossier.verdict is None:
        return []
    found = [fact for fact in facts.measures(dossier) if fact.after is not None and math.isfinite(fact.after)]
    slugs = [re.sub(r"[^a-z0-9]+", "_", fact.label.lower()).strip("_") for fact in found]
    metrics = [{"type": s, "name": fact.label, "value": fact.after} for s, fact in zip(slugs, found, strict=True)]
    text = {"name": dossier.verdict.evaluation or "held-out text", "type": "held-out"}
    results = [{"task": {"type": use}, "dataset": text, "metrics": metrics}]
    name = PurePath(facts.model_name(dossier)).name
    return ["model-index:", f"- name: {json.dumps(f'{name} by Headwise')}", f"  results: {for_script(results)}"]


def _table(of: Table) -> str:
    rows = [of.heads, tuple("---" for _ in of.heads), *(tuple(map(cell, row)) for row in of.rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
