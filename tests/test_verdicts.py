"""The rule by which each experiment decides: made-up results on either side of every border."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:  # experiments live beside the package
    sys.path.insert(0, str(ROOT))

from experiments import _lab, _points, _rules, _sweep  # noqa: E402

YES, PARTLY, NO = _lab.VERDICTS
Found = dict[str, Any]
HEADS = (4, 8, 16, 32, 64, 128)


def verdict(name: str, found: Found) -> str:
    """What the experiment makes of a result."""
    return str(_lab.load(name).verdict(found))


def near(value: float) -> list[float]:
    """Three seeds that hardly differ."""
    return [value - 0.0001, value, value + 0.0001]


def wide(value: float) -> list[float]:
    """Three seeds that differ so much that the mean's interval holds nearly everything."""
    return [value - 10.0, value, value + 10.0]


def test_every_claim_is_here() -> None:
    claims = {name for name in _lab.experiments() if not name.startswith("q")}
    tested = {name for name in claims if any(name.partition("_")[0] in test for test in globals())}
    assert tested == claims, "a verdict rule without a test"


@pytest.mark.parametrize(("values", "word"), [(near(-1.0), "better"), (near(1.0), "worse"), (wide(1.0), "level")])
def test_a_design_rule_follows_the_interval(values: list[float], word: str) -> None:
    assert _rules.word(_points.mean(values), "better", "worse", "level") == word


@pytest.mark.parametrize("name", [name for name in _lab.experiments() if name.startswith("q")])
def test_open_questions_are_answered_whatever_was_found(name: str) -> None:
    assert verdict(name, {}) == _lab.ANSWERED


@pytest.mark.parametrize(
    ("fails", "with_enough", "lost", "word"),
    [(0, 0, 0.5, YES), (7, 0, 0.5, PARTLY), (7, 1, 0.5, NO), (0, 0, 0.9, NO)],
)
def test_a1_holds_everywhere_or_with_enough_heads(fails: int, with_enough: int, lost: float, word: str) -> None:
    dimension = [{"mean": lost, "standard_error": 0.01, "term": 0.6}]
    assert verdict("a1_bound", {"fails": fails, "fails_with_enough_heads": with_enough, "dimension": dimension}) == word


@pytest.mark.parametrize(
    ("different", "error", "seconds", "word"),
    [(0, 0.5, 1.0, YES), (0, 0.9, 1.0, PARTLY), (0, 0.5, 9.0, PARTLY), (1, 0.5, 1.0, NO)],
)
def test_a2_equals_the_enumeration_beats_the_ends_and_is_fast(
    different: int, error: float, seconds: float, word: str
) -> None:
    large = [{"error": error, "seconds": seconds, "ends": {"most_heads": 0.8, "one_head": 0.7}}]
    assert verdict("a2_solver", {"different": different, "large": large}) == word


@pytest.mark.parametrize(
    ("best", "error", "word"),
    [(8, [3, 2, 1, 2], YES), (8, [1, 2, 3, 4], PARTLY), (4, [3, 1, 2, 3], PARTLY), (3, [3, 1, 2, 3], NO)],
)
def test_a3_is_lowest_at_eight(best: int, error: list[float], word: str) -> None:
    forms = [{"best_heads": 8, "error": [3, 2, 1, 2]}, {"best_heads": best, "error": error}]
    assert verdict("a3_curve", {"forms": forms}) == word


def swept(*errors: float) -> Found:
    """A sweep over heads; neighbours do not vary together."""
    spreads = (0.98, 1.0, 1.02, 1.01, 0.99), (1.02, 0.99, 0.98, 1.0, 1.01)
    rows = [
        {"heads": heads, "dim": 256 // heads, "error": [error * by for by in spreads[place % 2]]}
        for place, (heads, error) in enumerate(zip(HEADS, errors, strict=True))
    ]
    return _sweep.compare(rows)


SWEEPS = [
    ((9, 4, 2, 1, 3, 5), YES),
    ((9, 4, 2, 1.0001, 1, 5), YES),  # not told apart from the best
    ((9, 4, 2, 1, 1, 1), PARTLY),  # flat to the right
    ((9, 4, 2, 1.5, 1, 5), PARTLY),  # the neighbour is better
    ((9, 4, 3, 2.5, 2, 1), NO),
    ((1, 2, 3, 4, 5, 6), NO),
]


@pytest.mark.parametrize(("errors", "word"), SWEEPS)
def test_a4_is_best_where_theory_says(errors: tuple[float, ...], word: str) -> None:
    assert verdict("a4_ngram", {"trained": swept(*errors), "theory": {"heads": 32}}) == word


@pytest.mark.parametrize(
    ("first", "second", "word"), [(0, 0, YES), (4, 5, NO), (2, 3, PARTLY), (0, 5, PARTLY), (5, 0, PARTLY)]
)
def test_a5_needs_both_tasks(first: int, second: int, word: str) -> None:
    tasks = {
        name: {"trained": swept(*SWEEPS[place][0]), "theory": {"nearest": 32}}
        for name, place in (("previous token", first), ("nonlinear", second))
    }
    assert verdict("a5_induction", {"tasks": tasks}) == word


@pytest.mark.parametrize(
    ("trained", "late", "random", "word"),
    [(0.6, 0.0, 0.0, YES), (0.3, 0.0, 0.95, PARTLY), (0.1, 0.3, 0.95, PARTLY), (0.1, 0.1, 0.95, NO), (0.3, 0, 0.5, NO)],
)
def test_a6_counts_the_heads_that_follow_the_law(trained: float, late: float, random: float, word: str) -> None:
    model = {"share_following": trained, "late_share_following": late}
    control = {"share_following": random, "late_share_following": random}
    assert verdict("a6_saturation", {"models": {"m": model}, "random": {"m": control}}) == word


@pytest.mark.parametrize(
    ("below", "kept", "together", "word"),
    [(0.6, 0.1, 0.005, YES), (0.6, 0.1, 0.02, PARTLY), (0.6, 0.9, 0.005, PARTLY), (0.4, 0.1, 0.005, NO)],
)
def test_a7_needs_most_heads_and_all_together(below: float, kept: float, together: float, word: str) -> None:
    one = {"way": "activations", "part": "both", "tuned": True}
    single = [one | {"dim": 4, "below": below, "mean_kl": kept}, one | {"dim": 0, "below": 0.0, "mean_kl": 1.0}]
    whole = [{"way": "activations", "dim": 4, "after": {"kl": together}}]
    model = {"effort": {"dims": [8, 4]}, "single": single, "together": whole}
    assert verdict("a7_heads", {"models": {"embedded": model}}) == word


@pytest.mark.parametrize(
    ("taper", "uniform", "reverse", "word"),
    [
        ((0.001, 0.002), (0.003, 0.003), (0.004, 0.004), YES),
        ((0.1, 0.1), (0.2, 0.2), (0.3, 0.3), PARTLY),  # better, but not as accurate as the source
        ((0.001, 0.001), (0.002, 0.002), (0.0, 0.0), PARTLY),  # the other way round is better still
        ((0.001, 0.3), (0.002, 0.2), (0.3, 0.3), PARTLY),  # better in one row of two
        ((0.3, 0.3), (0.2, 0.2), (0.4, 0.4), NO),
    ],
)
def test_a8_is_no_worse_than_equal_sizes(
    taper: tuple[float, ...], uniform: tuple[float, ...], reverse: tuple[float, ...], word: str
) -> None:
    kinds = {"taper": taper, "uniform": uniform, "reversed taper": reverse}
    rows = [
        {"budget": f"attention={90 - place}%@8", "strategy": name, "damage": {"refit": {"measured": value}}}
        for name, values in kinds.items()
        for place, value in enumerate(values)
    ]
    assert verdict("a8_taper", {"models": {"embedded": {"rows": rows}}}) == word


@pytest.mark.parametrize(
    ("few", "many", "means", "word"),
    [(0.01, 0.01, (3, 2), YES), (0.05, 0.01, (3, 2), PARTLY), (0.05, 0.05, (3, 2), NO), (0.01, 0.01, (2, 3), NO)],
)
def test_b1_the_formula_holds_where_it_should(few: float, many: float, means: tuple[int, int], word: str) -> None:
    rows = [
        {"tokens": tokens, "ratio": 20, "off": off, "mean": mean}
        for tokens, off in ((16, few), (64, many))
        for mean in means
    ]
    assert verdict("b1_gaussian", {"rows": rows}) == word


@pytest.mark.parametrize(
    ("start", "after", "grown", "word"),
    [(-1, -1, 1, YES), (-1, 1, 1, PARTLY), (1, -1, 1, PARTLY), (1, 1, -1, PARTLY), (1, 1, 1, NO)],
)
def test_b2_the_number_falls_with_heads(start: int, after: int, grown: int, word: str) -> None:
    def rows(before: int, trained: int) -> list[Found]:
        return [{"heads": h, "start": [[float(h**before)]], "after": [[float(h**trained)]]} for h in (1, 2, 4)]

    assert verdict("b2_conditioning", {"split": rows(start, after), "grown": rows(1, grown)}) == word


@pytest.mark.parametrize(
    ("lean", "more_heads", "wider", "word"),
    [
        (near(0.7), 0.05, 0.0, YES),
        (near(0.7), 0.0, 0.05, PARTLY),  # better, but a wider MLP gains more than heads
        (near(0.597), 0.05, 0.0, PARTLY),  # not worse by the margin
        (near(0.5), 0.05, 0.0, NO),
    ],
)
def test_b3_the_rival_beats_the_original(lean: list[float], more_heads: float, wider: float, word: str) -> None:
    def cell(depth: int, heads: int, mlp: int, accuracy: list[float], held: float) -> Found:
        sizes = {"depth": depth, "heads": heads, "mlp": mlp, "parameters": 100 * depth + mlp}
        return {**sizes, "accuracy": accuracy, "rate": 0.1, "rates": {"0.1": held}}

    cells = {
        "original": cell(12, 3, 8, near(0.6), 1.0),
        "rival": cell(8, 6, 8, lean, 0.5),
        "fewer heads": cell(8, 3, 8, [a - more_heads for a in lean], 0.6),
        "narrower": cell(8, 6, 4, [a - wider for a in lean], 0.6),
    }
    assert verdict("b3_grid", {"original": "original", "cells": cells}) == word
    assert verdict("b3_grid", {"original": "original", "cells": {"original": cells["original"]}}) == NO, "no rival"


@pytest.mark.parametrize(
    ("before", "after", "agrees", "word"),
    [(100.0, 60.0, True, YES), (100.0, 60.0, False, PARTLY), (100.0, 90.0, False, NO), (99.0, 60.0, True, NO)],
)
def test_b4_counts_agree_with_the_paper(before: float, after: float, agrees: bool, word: str) -> None:
    row = {"agrees": agrees, "millions": {"before": before, "after": after}, "paper": {"before": 100.0, "after": 60.0}}
    unknown = {"agrees": None, "millions": {"before": 1.0, "after": 1.0}, "paper": {"before": None, "after": None}}
    assert verdict("b4_redesigns", {"rows": [row, unknown]}) == word


@pytest.mark.parametrize(("scores", "word"), [(near(0.8), YES), (wide(0.8), PARTLY), (near(0.6), NO)])
def test_b5_the_lean_encoder_keeps_its_average(scores: list[float], word: str) -> None:
    models = {name: {"glue": {"RTE": {"accuracy": s}}} for name, s in (("deep", near(0.8)), ("lean", scores))}
    assert verdict("b5_encoders", {"models": models}) == word


@pytest.mark.parametrize(
    ("lean", "flops", "settled", "word"),
    [
        (near(2.5), near(2.5), True, YES),
        (near(3.5), near(2.5), True, PARTLY),
        (wide(2.5), wide(2.5), True, NO),  # lower, but not significantly
        (near(3.5), near(3.5), True, NO),
        (near(2.5), near(2.5), False, NO),  # the deep model might still find a better rate
    ],
)
def test_b6_the_lean_decoders_loss_is_lower(lean: list[float], flops: list[float], settled: bool, word: str) -> None:
    losses = {"deep": near(3.0), "lean": lean, "lean, equal FLOPs": flops}
    models = {name: {"loss": loss, "settled": settled} for name, loss in losses.items()}
    assert verdict("b6_decoders", {"models": models}) == word


@pytest.mark.parametrize(
    ("one_of_two", "one_of_eight", "two_of_two", "word"),
    [
        (near(0.4), near(0.6), near(0.5), YES),
        (near(0.7), near(0.6), near(0.5), PARTLY),  # one layer beats two, but more heads do not help
        (near(0.3), near(0.4), near(0.5), PARTLY),  # more heads help, but one layer does not beat two
        (near(0.6), wide(0.4), near(0.5), PARTLY),  # not significantly worse than two layers
        (near(0.4), near(0.4), near(0.5), NO),
    ],
)
def test_b7_one_layer_beats_two_and_heads_help(
    one_of_two: list[float], one_of_eight: list[float], two_of_two: list[float], word: str
) -> None:
    cells = {"1 x 2": (2, one_of_two), "1 x 8": (8, one_of_eight), "2 x 2": (2, two_of_two)}
    models = {name: {"heads": heads, "accuracy": accuracy} for name, (heads, accuracy) in cells.items()}
    assert verdict("b7_listops", {"models": models}) == word


@pytest.mark.parametrize(
    ("loss", "parameters", "pace", "word"),
    [
        (near(3.0), 70, 0.95, YES),
        (wide(3.0), 70, 0.95, PARTLY),
        (near(3.0), 70, 0.5, PARTLY),
        (near(3.0), 70, None, PARTLY),
        (near(3.1), 70, 0.95, NO),
        (near(3.0), 80, 0.95, NO),  # too many parameters
    ],
)
def test_b8_a_smaller_design_reaches_the_loss(
    loss: list[float], parameters: int, pace: float | None, word: str
) -> None:
    models = {"baseline": {"loss": near(3.0), "parameters": 100}, "design": {"loss": loss, "parameters": parameters}}
    speed = None if pace is None else {"ratios": [pace]}
    assert verdict("b8_design", {"models": models, "speed": speed}) == word
