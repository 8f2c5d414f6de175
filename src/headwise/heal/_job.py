"""What a healing method is given."""

from collections.abc import Iterator
from contextlib import contextmanager
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
    """Two models and the rows to heal one of them on; neither is changed.

    What a method chooses by held-out rows, it chooses by some of the calibration rows. The rehearsal is for its curve
    only, because the expected damage is measured there.
    """

    family: Family
    task: Task
    source: nn.Module
    cut: nn.Module
    calibration: Prepared
    rehearsal: Prepared
    seed: int = 0
    track: Track = silently
    folder: Path | None = None  # for work that a kill would lose; None: nothing is kept
    options: Options = Options()
    more: Prepared | None = None  # further rows to train on, beyond the calibration

    @property
    def device(self) -> torch.device:
        """Where both models are."""
        return next(self.cut.parameters()).device


def origins(source: nn.Module, cut: nn.Module) -> list[int]:
    """For each layer of the cut model, its number in the source."""
    known = (model.config.headwise for model in (source, cut))
    theirs, ours = (list(said.get("kept") or range(len(said["layers"]))) for said in known)
    return [theirs.index(number) for number in ours]


def with_removed(kept: list[int], count: int) -> list[range]:
    """For each layer that was kept, its number in the source and those of the layers behind it that were removed.

    >>> with_removed([1, 3], 5)
    [range(1, 3), range(3, 5)]
    """
    return [range(first, last) for first, last in zip(kept, [*kept[1:], count], strict=True)]


@contextmanager
def gradients(module: nn.Module, needed: bool) -> Iterator[list[torch.Tensor]]:
    """A module whose floating-point parameters all need gradients, or none; afterwards they are as before."""
    weights = [p for p in module.parameters() if p.is_floating_point()]
    before = [weight.requires_grad for weight in weights]
    try:
        yield [weight.requires_grad_(needed) for weight in weights]
    finally:
        for weight, was_needed in zip(weights, before, strict=True):
            weight.requires_grad_(was_needed).grad = None


def rows_of(prepared: Prepared, rows: torch.Tensor) -> Prepared:
    """The rows with these numbers."""
    return prepared._replace(inputs=prepared.inputs[rows], labels=prepared.labels[rows], truth=None)


def together(first: Prepared, second: Prepared) -> Prepared:
    """The rows of both."""
    inputs, labels = torch.cat((first.inputs, second.inputs)), torch.cat((first.labels, second.labels))
    return first._replace(inputs=inputs, labels=labels, truth=None)
