"""The front matter of model cards: the lines of YAML before a README.md's text. A card may be missing or damaged."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LONGEST = 1 << 16  # bytes of a card that are read: its front matter comes first
CARRIED = ("license", "license_name", "license_link", "language", "base_model")  # that stay true of a cut model

Facts = dict[str, str | list[str]]


def facts_of(path: Path) -> Facts:
    """What a card says of a model that stays true when it is cut; nothing where it cannot be read."""
    import yaml  # type: ignore[import-untyped]

    if not path.is_file():  # nor a pipe, from which reading would never end
        return {}
    try:
        with path.open("rb") as file:
            text = file.read(LONGEST).decode(errors="replace")
        found: Any = yaml.safe_load(text.split("---", 2)[1]) if text.startswith("---") else None
    except (OSError, ValueError, IndexError, RecursionError, yaml.YAMLError):
        return {}
    found = found if isinstance(found, dict) else {}
    return {name: found[name] for name in CARRIED if _is_plain(found.get(name))}


def _is_plain(value: Any) -> bool:
    many = value if isinstance(value, list) else [value]
    return 0 < len(many) <= 100 and all(isinstance(text, str) and 0 < len(text) <= 200 for text in many)


def lines_of(facts: Mapping[str, Any]) -> list[str]:
    """Facts as lines of YAML."""
    return [f"{name}: {json.dumps(facts[name], ensure_ascii=False)}" for name in CARRIED if name in facts]


def short_card(facts: Mapping[str, Any]) -> str:
    """The card of a model that has no report yet."""
    lines = ["---", "library_name: transformers", *lines_of(facts), "tags:", "- headwise", "---", ""]
    return "\n".join([*lines, "Reshaped by Headwise. `headwise report` writes what was done and what it cost.", ""])
