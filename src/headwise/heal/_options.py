"""What can be told to a healing method. No torch: settings are checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from headwise.errors import HeadwiseError


@dataclass(frozen=True, slots=True)
class Options:
    """Limits of a healing; None leaves it to the method."""

    tokens: int | None = None  # of the calibration text that are learned from, of a method that learns; None: all
    steps: int | None = None  # at most, of a block or of the whole model
    rate: float | None = None  # learning rate; None: found by trial

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise HeadwiseError(f"the healing option {field.name} is {value:g}; it must be above 0.")

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Options:
        """Read options such as `steps=200` and `rate=1e-4`.

        >>> Options.parse(["steps=200", "rate=1e-4"])
        Options(tokens=None, steps=200, rate=0.0001)
        """
        kinds = {field.name: int if "int" in str(field.type) else float for field in fields(cls)}
        found: dict[str, float] = {}
        for text in texts:
            name, _, value = (part.strip() for part in text.partition("="))
            if name not in kinds:
                raise HeadwiseError(f"no healing option is called '{name}'. Known: {', '.join(kinds)}.")
            try:
                found[name] = kinds[name](float(value))
            except (ValueError, OverflowError):
                raise HeadwiseError(f"'{value}' is no number; write it as {name}=100.") from None
        return cls(**found)
