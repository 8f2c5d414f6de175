"""Reads the record of a healing, heal.json. No torch."""

from pathlib import Path

from headwise.errors import PlanError
from headwise.files.json import read_object
from headwise.types import Healing

ADVICE = "run headwise heal again"


def read_healing(path: Path) -> Healing:
    """The healing that heal.json describes."""
    data = read_object(path, advice=ADVICE)
    try:
        return Healing.from_json(data, str(path))
    except PlanError as error:
        raise PlanError(f"{str(error).rstrip('.')}; {ADVICE}.") from None


def rehearsed_damage(path: Path) -> float:
    """The damage to expect, which heal.json of a finished model holds."""
    found = read_healing(path).rehearsed
    if found is None:
        raise PlanError(f"{path} does not say rehearsed; {ADVICE}.")
    return found
