"""Contests between two arms of an experiment: what counts as shown, as too small, and as noise."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from seeds import EDGE, INNER, near, wide

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:  # experiments live beside the package
    sys.path.insert(0, str(ROOT))

from experiments import _judge, _provenance  # noqa: E402

YES, PARTLY, NO, OPEN, _ = _judge.VERDICTS


class TestContests:
    """Two one-sided tests, Holm's correction, and checks that void."""

    @pytest.mark.parametrize(
        ("gains", "equal", "word"),
        [
            (near(0.5), False, _judge.SHOWN),
            (near(0.05), False, _judge.SMALL),
            (near(-0.5), False, _judge.AGAINST),
            (near(0.0), False, _judge.AGAINST),  # no gain as large as the margin
            (wide(0.5), False, _judge.UNDECIDED),
            ([0.5], False, _judge.UNDECIDED),  # one seed shows nothing
            (near(-0.05), True, _judge.SHOWN),  # a loss below the margin is equal
            (near(-0.5), True, _judge.AGAINST),
            (wide(0.0), True, _judge.UNDECIDED),
        ],
    )
    def test_outcomes(self, gains: list[float], equal: bool, word: str) -> None:
        assert _judge.outcomes([_judge.sampled("it", gains, 0.1, equal)]) == [word]

    def test_a_result_that_alone_is_significant_falls_among_many(self) -> None:
        lucky = _judge.Contest("lucky", 2.2, 1.0, math.inf, 0.1)  # p = 0.014
        others = [_judge.Contest("noise", 0.1, 1.0, math.inf, 0.1)] * 2
        assert _judge.outcomes([lucky]) == [_judge.SHOWN]
        assert _judge.outcomes([lucky, *others])[0] == _judge.UNDECIDED

    def test_a_failed_check_voids_whatever_was_seen(self) -> None:
        contest = _judge.sampled("it", near(0.5), 0.1, failed=["a rate at the edge"])
        assert _judge.outcomes([contest]) == [_judge.VOID] and _judge.decide([contest]) == OPEN
        assert "a rate at the edge" in _judge.reasons([contest])

    @pytest.mark.parametrize(
        ("gains", "word"),
        [
            ((near(0.5), near(0.5)), YES),
            ((near(0.5), near(-0.5)), PARTLY),
            ((near(0.5), wide(0.5)), OPEN),  # noise does not become a condition
            ((near(-0.5), wide(0.5)), NO),
            ((wide(0.5), wide(0.5)), OPEN),
        ],
    )
    def test_decisions(self, gains: tuple[list[float], ...], word: str) -> None:
        assert _judge.decide([_judge.sampled("it", each, 0.1) for each in gains]) == word

    def test_so_many_seeds_decide_what_is_open(self) -> None:
        """If means and spreads stay: with so many it is decided, with one less it is not."""
        few = _judge.sampled("it", [0.03, -0.01, 0.02], 0.01)
        seeds, spread = _judge.seeds_needed([few]), few.error * math.sqrt(3)
        for count, words in ((seeds, [_judge.SHOWN]), (seeds - 1, [_judge.UNDECIDED])):
            more = few._replace(error=spread / math.sqrt(count), freedom=count - 1)
            assert _judge.outcomes([more]) == words
        assert _judge.seeds_needed([few, few]) > seeds, "more comparisons, a stricter level"
        assert _judge.seeds_needed([_judge.sampled("it", near(0.5), 0.1)]) == 0, "decided already"

    def test_what_would_settle_it_in_words(self) -> None:
        few = _judge.sampled("it", [0.03, -0.01, 0.02], 0.01, failed=["a: best learning rate 1 at the edge of 1 to 3"])
        gone = _judge.Contest("another", 0.0, math.inf, 1, 0.1, failed=("not trained",))
        words = _judge.settled_by([few, gone], "measure in float64")
        assert words.startswith("train what is missing (another), try more learning rates until")
        assert "measure in float64, take about" in words and words.endswith("seeds instead of 3")
        models = {"a": {"step_seconds": 0.5, "steps": 3600}}
        assert _judge.hours(models, ("a", "b"), 4, 2.0) == "about 4 H200 hours at the pace of this run"

    def test_the_sanity_checks(self) -> None:
        assert _judge.at_edge(EDGE) and not _judge.at_edge(INNER)
        assert _judge.at_edge({"rate": 0.1, "rates": {"0.1": 1.0, "0.2": 2.0}}), "two rates have no inside"
        assert _judge.hardly_learned([6.6], 8.3) and not _judge.hardly_learned([3.0], 8.3)
        assert _judge.at_majority([0.51], 0.5, "RTE") and not _judge.at_majority([0.6], 0.5, "RTE")
        assert _judge.short_of_tokens(1e6, 2e6) and not _judge.short_of_tokens(2e6, 1e6)


def test_a_digest_covers_where_names_come_from_and_not_what_else_a_room_has():
    """A result is not called old because of code that it never ran."""
    assert _provenance._home("headwise.types", "LayerShape") == "headwise.types.shape"
    whole = _provenance._closure({"headwise.training.loop"})
    assert "headwise.files.disk" in whole and not {"headwise.types", "headwise.types.plan"} & whole
    runtime = _provenance._closure({"headwise.runtime.modeling_headwise"})
    assert "headwise.runtime.coder_headwise" in runtime, "imports of the runtime are relative"
