"""What an export is asked for: the model, and the options that formats share."""

from dataclasses import dataclass
from typing import Any

from headwise.progress import Track


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Options of an export; a format refuses those that it does not know."""

    type: str = "auto"  # number format of weights
    tokenizer: str = "text"  # or "ids": the file takes token numbers only
    check: bool = True  # run the result where its engine is installed


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """A loaded model with its tokenizer, and how it is to be written."""

    name: str  # its folder, or the name that it was asked by
    model: Any
    reader: Any
    options: ExportOptions
    track: Track
