"""What to type to give a run another budget, plan or healing without probing again. No torch."""

import shlex
from dataclasses import fields
from pathlib import Path

from headwise.runs.flags import words
from headwise.runs.settings import Settings

LATER = {"budgets", "strategy", "allow", "portable", "heal", "heal_options", "max_loss"}  # settings of later stages


def commands(folder: Path, settings: Settings, before: Settings) -> str | None:
    """The commands that carry out new settings with the readings that a run has; None where it must probe again."""
    narrow = before.only_kv and not settings.only_kv  # nothing but the cache was priced
    if not set(settings.changed(before)) <= LATER or narrow or not set(settings.allow) <= set(before.allow):
        return None
    values = {f.name: value for f in fields(settings) if (value := getattr(settings, f.name)) != f.default}
    stages = ("allocate", "heal" if settings.heal != "none" else "reshape", "verify")
    typed = [["headwise", stage, str(folder), *words(Settings, stage, values)] for stage in stages]
    return " && ".join(shlex.join(parts) for parts in [*typed, ["headwise", "report", str(folder)]])
