"""Which rows calibrate, which rehearse, which evaluate, and which are left for more: no row serves two of these."""

from typing import NamedTuple

import torch

from headwise.data import DataRows

REHEARSAL = 8  # every eighth calibration row is kept from every fit


class Counts(NamedTuple):
    """How many rows each part should have."""

    calibration: int
    evaluation: int
    more: int = 0  # for a healing that reads more than the calibration
    longer: int = 0  # beyond the evaluation, so that rows of the whole context can be cut from held-out text

    @property
    def held_out(self) -> int:
        """DataRows that nothing is fitted to, those of the evaluation first."""
        return self.evaluation + self.longer


class Split(NamedTuple):
    """The parts, each with as many rows as there are."""

    calibration: DataRows
    evaluation: DataRows
    more: torch.Tensor
    held_out: torch.Tensor  # the evaluation and what follows it


def two_sources(found: DataRows, evaluation: DataRows, counts: Counts) -> Split:
    """DataRows to fit to and rows to evaluate on, each from its own source."""
    first = slice(counts.calibration)
    return Split(
        found.part(first),
        evaluation.part(slice(counts.evaluation)),
        found.rows[counts.calibration :],
        evaluation.rows,
    )


def one_source(found: DataRows, counts: Counts) -> Split:
    """DataRows of one source, in order: calibration, evaluation, more to heal on, longer text.

    Where there are too few for the first two, they share what there is in proportion. At least two rows are needed.
    """
    whole = counts.calibration + counts.evaluation
    both, rest = found.part(slice(whole)), found.rows[whole:]
    middle = max(1, len(both.rows) * counts.calibration // whole)
    evaluation = both.part(slice(middle, None))
    held_out = torch.cat((evaluation.rows, rest[counts.more :]))
    return Split(both.part(slice(middle)), evaluation, rest[: counts.more], held_out)


def rehearsed(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """DataRows to calibrate on, and rows of the same source on which the damage is predicted; both are all of a few."""
    kept = torch.arange(len(rows)) % REHEARSAL != REHEARSAL - 1
    return rows[kept], rows[~kept] if len(rows) >= REHEARSAL else rows
