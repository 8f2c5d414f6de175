"""The model card: the same facts and tables as the page, as text that the Hugging Face Hub and a terminal can show."""

from __future__ import annotations

import json
import re

from headwise.report import _facts as facts
from headwise.report import _tables as tables
from headwise.report._bits import GENERATE, is_coded
from headwise.report._html import Block, Code, Folded, Heading, Items, Words
from headwise.report._sections import SECTIONS
from headwise.report._tables import Table
from headwise.report._text import cell, fence
from headwise.runs.dossier import Dossier


def model_card(dossier: Dossier) -> str:
    """Front matter, then the answer, then the page's sections without their pictures."""
    start = [
        _front_matter(dossier),
        f"# {cell(facts.model_name(dossier))}, reshaped by Headwise",
        f"**{cell(facts.headline(dossier))}**",
        cell(facts.way_out(dossier)),
        _table(tables.main_numbers(dossier)),
        "## How to load it",
        "`folder` is this folder, or its name on the Hub.",
        fence(facts.loading(dossier), "python"),
    ]
    if is_coded(dossier.plan):
        start.append(cell(GENERATE))
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
