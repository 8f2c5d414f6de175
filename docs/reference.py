"""Writes the reference pages from the code: commands, settings, the plan's fields, and a family as an example.

python docs/reference.py          # write docs/reference/*.md and the marked part of docs/contributing.md
python docs/reference.py --check  # exit 1 if they are not what the code says
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from headwise.cli.commands import app
from headwise.registry import texts
from headwise.runs.flags import described
from headwise.runs.heal_options import Options
from headwise.runs.settings import Settings
from headwise.types import Budget, LayerKeep, LayerShape, ModelShape, Plan
from headwise.types.shape import Grain

ROOT = Path(__file__).parents[1]
LAYER = LayerShape(  # an example
    query_heads=8, kv_heads=1, qk_dim=256, v_dim=256, mlp_width=704, qk_width=256, pooled=4, v_width=256,
    k_code=(0, 0, 0, 0, 2, 0, 5, 0, 40, 0, 88, 0), v_code=(0, 0, 0, 0, 0, 0, 0, 12, 0, 61, 0, 70),
)  # fmt: skip
WORDS = {  # of fields whose names say it all in the code
    "model": "the source, as it was named", "source": "sizes before", "target": "sizes after",
    "keep": "which units of every layer stay", "strategy": "who made the plan", "budgets": "the limits that it meets",
    "spent": "what it costs, by budget", "seed": "random seed", "portable": "one size for all layers",
    "frontier": "damage that other limits would have cost", "family": "model family", "hidden_size": "width",
    "vocab_size": "tokens of the vocabulary", "tied_embeddings": "input and output share one table",
    "layers": "one shape for each layer", "grain": "which sizes are legal",
    "qkv_bias": "queries, keys, values have biases",
    "o_bias": "so has the output projection", "mlp_bias": "so has the MLP", "query_heads": "query heads",
    "kv_heads": "key/value heads, or rows that heads share", "mlp_width": "channels of the MLP",
    "mlp_channels": "channels of the MLP", "name": "kv, params, ...", "unit": "what the limit is counted in",
    "limit": "at most so much", "length": "tokens of context that it is counted at", "text": "as it was typed",
    "workload": "what is timed", "qk_step": "query/key dimensions are multiples of this",
    "v_step": "so are value dimensions",
    "mlp_step": "and MLP widths", "qk_floor": "fewest query/key dimensions", "v_floor": "fewest value dimensions",
    "mlp_floor": "smallest MLP width",
}  # fmt: skip
FAMILY = ROOT / "src" / "headwise" / "families" / "smollm3.py"
NOTE = "<!-- printed by docs/reference.py: change the code, not this page -->"
INTRO = """Every command of `headwise`, printed from the code. `headwise COMMAND --help` says the same in the terminal.

Exit codes: 0 fine, 2 bad input (one line says what to type), 3 not verified (a check failed, or quality is beyond
`--max-loss`), 130 and 143 interrupted (the same command resumes)."""
SETTINGS = """What a run is asked to do. On the command line each setting is a flag; in Python it is a keyword argument
of `headwise.run` and `headwise.probe`; in a run folder it is a key of `run.json`. An interrupted run resumes only under
the same settings."""


def words(text: Any) -> str:
    """A text for the cell of a table: one line, bars escaped."""
    return re.sub(r"\s+", " ", str(text or "")).strip().replace("|", "\\|")


def table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """A table in Markdown."""
    head = [f"| {' | '.join(titles)} |", "|" + " --- |" * len(titles)]
    return [*head, *(f"| {' | '.join(row)} |" for row in rows), ""]


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    if value is None or value is False or value in ((), [], "") or callable(value):
        return ""
    return f"`{','.join(map(str, value)) if isinstance(value, (list, tuple)) else value}`"


def _typed(parameter: Any) -> str:
    """How an option is typed: its flags and what stands for the value."""
    if parameter.param_type_name == "argument":
        return f"`{(parameter.metavar or parameter.name).upper()}`"
    flags = ", ".join(f"`{flag}`" for flag in (*parameter.opts, *parameter.secondary_opts))
    return flags if parameter.is_flag else f"{flags} `{words(parameter.metavar or parameter.name.upper())}`"


def commands(group: Any, path: tuple[str, ...] = ("headwise",)) -> Iterator[str]:
    """A section for every command, those of sub-commands behind their own."""
    for name, command in group.commands.items():
        here = (*path, name)
        yield from (f"## {' '.join(here)}", "", command.help.replace("\n", " ").replace("  ", "\n\n"), "")
        if hasattr(command, "commands"):
            yield from commands(command, here)
            continue
        shown = [p for p in command.params if p.name != "help" and not getattr(p, "hidden", False)]
        yield from table(
            ("argument or option", "meaning", "default"), [(_typed(p), words(p.help), _default(p)) for p in shown]
        )


def values() -> Iterator[str]:
    """The plug-ins that flags can name."""
    for setting in described(Settings):
        if package := setting.flag.plug_ins:
            yield from (f"### Values of {setting.written}", "")
            examples = texts(package, "EXAMPLE")
            rows = [
                (f"`{name}`", words(meaning), words(examples.get(name))) for name, meaning in texts(package).items()
            ]
            if examples:
                yield from table(("value", "meaning", "example"), [(n, m, f"`{e}`" if e else "") for n, m, e in rows])
            else:
                yield from table(("value", "meaning"), [row[:2] for row in rows])


def commands_page() -> str:
    """The page of commands."""
    lines = ["# Commands", "", NOTE, "", INTRO, "", *commands(typer.main.get_command(app))]
    return "\n".join([*lines, "## Values that flags can name", "", *values()]).rstrip() + "\n"


def settings_page() -> str:
    """The page of settings."""
    rows = []
    for setting in described(Settings):
        hidden = any(setting.default is none for none in (None, dataclasses.MISSING, False)) or setting.default == ()
        default = "" if hidden else f"`{_shown(setting.default)}`"
        flag = "" if setting.flag.argument else f"`{setting.written}`"
        rows.append((f"`{setting.name}`", flag, words(setting.flag.help), default, setting.flag.commands))
    lines = ["# Settings", "", NOTE, "", SETTINGS, ""]
    lines += table(("setting", "flag", "meaning", "default", "commands"), rows)
    lines += [
        "## Options of healing",
        "",
        "`--heal-option NAME=VALUE`, repeatable; in Python `heal_options=(...)`.",
        "",
    ]
    lines += table(("option", "meaning"), comments(Options))
    return "\n".join(lines).rstrip() + "\n"


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def comments(kind: type) -> list[tuple[str, str]]:
    """Fields of a dataclass and what the comments beside them, in its source, say."""
    found = []
    source = inspect.getsource(kind)
    for field in dataclasses.fields(kind):
        match = re.search(rf"^    {field.name}: (.*?)(?:  # (.*))?$", source, re.MULTILINE)
        name, kept = f"`{field.name}`", match[2] if match and match[2] else ""
        found.append((name, words(kept)))
    return found


def fields_of(kind: type) -> str:
    """A section on a dataclass: its docstring, and its fields."""
    rows = []
    for (name, meaning), field in zip(comments(kind), dataclasses.fields(kind), strict=True):
        if field.name != "table":  # a file of its own
            kind_of = words(str(field.type).replace("|", "or"))
            rows.append((name, f"`{kind_of}`", meaning or WORDS.get(field.name, "")))
    about = inspect.getdoc(kind) or ""
    return "\n".join([f"### {kind.__name__}", "", about, "", *table(("field", "type", "meaning"), rows)])


def marked(page: str, name: str, text: str) -> str:
    """A page with the part between its marks replaced."""
    start, end = f"<!-- {name}: printed by docs/reference.py -->", f"<!-- end of {name} -->"
    before, rest = page.split(start)
    return f"{before}{start}\n\n{text.strip()}\n\n{end}{rest.split(end)[1]}"


def pages() -> dict[Path, str]:
    """Every page that this file writes."""
    reference, contributing = ROOT / "docs" / "reference", ROOT / "docs" / "contributing.md"
    planned, layer = (reference / "plan.md").read_text(), json.dumps(LAYER.to_json(), indent=1)
    plan = "\n".join(fields_of(kind) for kind in (Plan, ModelShape, LayerShape, LayerKeep, Budget, Grain))
    return {
        reference / "commands.md": commands_page(),
        reference / "settings.md": settings_page(),
        reference / "plan.md": marked(marked(planned, "fields", plan), "layer", f"```json\n{layer}\n```"),
        contributing: marked(contributing.read_text(), "family", f"```py\n{FAMILY.read_text()}```"),
    }


def main() -> None:
    """Write or check."""
    new = pages()
    stale = [path for path, content in new.items() if not path.exists() or path.read_text() != content]
    if "--check" in sys.argv:
        sys.exit(f"stale: {', '.join(path.name for path in stale)}; run docs/reference.py" if stale else 0)
    for path in stale:
        path.write_text(new[path])


if __name__ == "__main__":
    main()
