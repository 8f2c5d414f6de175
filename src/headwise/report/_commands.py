"""What to type: to make the run again, or to make the stage that is missing. Flags come from `Settings`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from headwise.runs.dossier import Dossier
from headwise.runs.flags import words
from headwise.runs.settings import Settings
from headwise.types import Sweep

FOLDER = "DIR"  # the run folder, which the dossier does not know
UNKNOWN = {"model": "MODEL", "budgets": ("kv=75%",)}  # what a command needs, where the settings do not have it


def run_command(settings: Mapping[str, Any]) -> str:
    """The command line that makes this run again, quoted for a shell.

    >>> run_command({"model": "gpt2", "budgets": ["kv=75%"], "seed": 0})
    'headwise run gpt2 --budget kv=75% --seed 0 --out DIR'
    """
    return shlex.join(["headwise", "run", *_words("run", settings), "--out", FOLDER])


def how_to_make(dossier: Dossier, stage: str) -> str:
    """Commands, one per line, from the first stage that is missing to `stage`, and the report again at the end.

    Stages and not `headwise run`, which refuses a folder that holds a report.
    """
    settings: dict[str, Any] = dossier.settings.to_json() if dossier.settings else {}
    lines: list[str] = []
    if dossier.readings is None:
        probe = _words("probe", settings)
        lines.append(shlex.join(["headwise", "probe", *probe, "--out", FOLDER, "--overwrite"]))
    if dossier.plan is None and stage != "probe":
        lines.append(_on_folder("allocate", settings))
    if stage in ("heal", "verify"):
        if dossier.healing is None:
            left_out = {"heal": None} if stage == "heal" and settings.get("heal") == "none" else {}
            lines.append(_heal({**settings, **left_out}))
        lines.append(_on_folder("verify", settings))
    return "\n".join([*lines, f"headwise report {FOLDER}"])


def allocate_command(sweep: Sweep, settings: Mapping[str, Any]) -> tuple[str, str]:
    """What stands before and after the first budget in the commands that build a point of the frontier."""
    after = shlex.join(words(Settings, "allocate", {"budgets": sweep.others, "allow": sweep.allow}))
    stages = (_heal(settings), f"headwise verify {FOLDER}", f"headwise report {FOLDER}")
    return f"headwise allocate {FOLDER} --budget ", "\n".join((f" {after}", *stages))


def _heal(settings: Mapping[str, Any]) -> str:
    """Healing as in the run: another one would replace the model by one that was healed otherwise."""
    return _on_folder("reshape" if settings.get("heal") == "none" else "heal", settings)


def _on_folder(command: str, settings: Mapping[str, Any]) -> str:
    return shlex.join(["headwise", command, FOLDER, *_words(command, settings)])


def _words(command: str, settings: Mapping[str, Any]) -> list[str]:
    """What to type for settings as a file has them; placeholders stand for what a command needs and is not there."""
    known = {name: value for name, value in settings.items() if value not in (None, "", [], ())}
    return words(Settings, command, UNKNOWN | known)
