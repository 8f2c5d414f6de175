"""The record of what a healing did, heal.json. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headwise.errors import PlanError
from headwise.files.json import is_number, read_object, shortened

HEALING: dict[str, type | tuple[type, ...]] = {"method": str, "layers": list, "rounds": list, "curve": list}
HEALING_NUMBERS = ("rehearsed", "rehearsed_before", "tokens", "seconds", "rate", "tokens_per_second")


def read_healing(path: Path, *needed: str) -> dict[str, Any]:
    """What a healing did, from heal.json. `needed` fields must be there; known ones must be of their kind."""
    found = read_object(path, advice="run headwise heal again")
    for name, kind in HEALING.items():
        if name in found and not isinstance(found[name], kind):
            raise PlanError(f"{path}: {name} is {shortened(found[name])}; run headwise heal again.")
    for name in HEALING_NUMBERS:
        if found.get(name) is not None and not is_number(found[name]):
            raise PlanError(
                f"{path}: {name} is {shortened(found[name])}, not a finite number; run headwise heal again."
            )
    if lost := [name for name in ("method", *needed) if found.get(name) is None]:
        raise PlanError(f"{path} does not say {lost[0]}; run headwise heal again.")
    return found
