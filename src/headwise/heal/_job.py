"""What a healing method is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from headwise.families import Family
from headwise.progress import Track, silently
from headwise.runs.heal_options import Options
from headwise.tasks import Prepared, Task


@dataclass(frozen=True, slots=True)
class Job:
    """Two models and the rows to heal one on; neither is changed.

    Whatever a method chooses by looking at held-out rows it looks up on some of the calibration rows; the rehearsal is
    for its curve alone, as the expected damage is measured there.
    """

    family: Family
    task: Task
    source: nn.Module
    cut: nn.Module
    calibration: Prepared
    rehearsal: Prepared
    seed: int = 0
    track: Track = silently
    folder: Path | None = None  # where work is kept that a kill would lose; None: nowhere
    options: Options = Options()
    more: Prepared | None = None  # further rows to learn from, for methods that read much


def origins(source: nn.Module, cut: nn.Module) -> list[int]:
    """Which of the source's layers each layer of the cut model was."""
    numbers = [
        model.config.headwise.get("kept") or range(len(model.config.headwise["layers"])) for model in (source, cut)
    ]
    return [list(numbers[0]).index(number) for number in numbers[1]]


def rows_of(prepared: Prepared, rows: torch.Tensor) -> Prepared:
    """Some rows."""
    return prepared._replace(inputs=prepared.inputs[rows], labels=prepared.labels[rows], truth=None)


def together(first: Prepared, second: Prepared) -> Prepared:
    """The rows of both."""
    inputs, labels = torch.cat((first.inputs, second.inputs)), torch.cat((first.labels, second.labels))
    return first._replace(inputs=inputs, labels=labels, truth=None)
