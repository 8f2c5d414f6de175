"""The split of rows into calibration, rehearsal, evaluation and more: no row serves two of them."""

from __future__ import annotations

import pytest
import torch

from headwise.data import DataRows
from headwise.data.split import Counts, Split, one_source, rehearsed, two_sources


def rows(count: int, first: int = 0) -> DataRows:
    """Rows that are told apart by their only token, which is also their right answer."""
    numbers = torch.arange(first, first + count)
    return DataRows(numbers[:, None], numbers)


def numbers(found: Split) -> list[list[int]]:
    parts = found.calibration.rows, found.evaluation.rows, found.more, found.held_out
    return [part.flatten().tolist() for part in parts]


def test_parts_of_one_source_follow_each_other() -> None:
    counts = Counts(calibration=4, evaluation=2, more=3, longer=2)
    found = one_source(rows(11), counts)
    assert numbers(found) == [[0, 1, 2, 3], [4, 5], [6, 7, 8], [4, 5, 9, 10]]
    assert found.evaluation.truth is not None and found.evaluation.truth.tolist() == [4, 5], "answers go with rows"
    assert numbers(one_source(rows(7), counts)) == [[0, 1, 2, 3], [4, 5], [6], [4, 5]], "what comes last is missing"


@pytest.mark.parametrize(("count", "calibration"), [(2, 1), (3, 2), (5, 3)])
def test_too_few_rows_are_shared_in_proportion(count: int, calibration: int) -> None:
    first, second, more, _ = numbers(one_source(rows(count), Counts(calibration=4, evaluation=2, more=3)))
    assert len(first) == calibration and first + second == list(range(count)) and more == []


def test_each_of_two_sources_fills_its_own_parts() -> None:
    counts = Counts(calibration=2, evaluation=1, more=1, longer=2)
    assert numbers(two_sources(rows(3), rows(3, first=100), counts)) == [[0, 1], [100], [2], [100, 101, 102]]


def test_every_eighth_row_rehearses_unless_there_are_fewer() -> None:
    fitted, kept = rehearsed(rows(16).rows)
    assert kept.flatten().tolist() == [7, 15] and len(fitted) == 14
    fitted, kept = rehearsed(rows(7).rows)
    assert len(fitted) == len(kept) == 7
