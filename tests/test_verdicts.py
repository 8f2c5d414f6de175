"""The rule by which each claim is judged: made-up results on either side of every border, and what noise gives."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:  # experiments live beside the package
    sys.path.insert(0, str(ROOT))

from experiments import _judge, _lab, b4_redesigns, q6_scratch  # noqa: E402
from seeds import EDGE, INNER, near, wide  # noqa: E402

YES, PARTLY, NO, OPEN, FITS = _judge.VERDICTS
ANSWERED, UNANSWERED = _judge.ANSWERS
Found = dict[str, Any]
HEADS = (4, 8, 16, 32, 64, 128)


def verdict(name: str, found: Found, results: Found | None = None) -> str:
    """What the rule makes of a result."""
    return _lab.judged(name, found, results).verdict


def test_every_experiment_has_a_claim_and_every_claim_a_test() -> None:
    assert set(_lab.CLAIMS) == set(_lab.experiments())
    for name, claim in _lab.CLAIMS.items():
        assert any(source in claim.source for source in _judge.SOURCES), f"{name}: which source?"
        assert claim.says.endswith((".", "?")) and claim.rule.endswith("."), name
        assert any(test.startswith(f"test_{name.partition('_')[0]}_") for test in globals()), f"{name} has no test"


@pytest.mark.parametrize(
    ("fails", "with_enough", "lost", "error", "word"),
    [
        (0, 0, 0.5, 0.01, YES),
        (7, 0, 0.5, 0.01, PARTLY),
        (7, 1, 0.5, 0.01, NO),
        (0, 0, 0.9, 0.01, NO),
        (0, 0, 0.6, 0.5, OPEN),
    ],
)
def test_a1_holds_everywhere_or_with_enough_heads(
    fails: int, with_enough: int, lost: float, error: float, word: str
) -> None:
    dimension = [{"mean": lost, "standard_error": error, "term": 0.6, "d_m": 1, "d": 2}]
    found = {"fails": fails, "cells": 9, "fails_with_enough_heads": with_enough, "dimension": dimension}
    assert verdict("a1_bound", found) == word


@pytest.mark.parametrize(("different", "error", "word"), [(0, 0.5, FITS), (0, 0.9, NO), (1, 0.5, OPEN)])
def test_a2_is_arithmetic(different: int, error: float, word: str) -> None:
    large = [{"error": error, "ends": {"most_heads": 0.8, "one_head": 0.7}}]
    assert verdict("a2_solver", {"different": different, "cases": 9, "large": large}) == word


@pytest.mark.parametrize(
    ("best", "error", "word"),
    [(8, [3, 2, 1, 2], FITS), (4, [3, 1, 2, 3], FITS), (8, [1, 2, 3, 4], NO), (3, [3, 1, 2, 3], NO)],
)
def test_a3_is_arithmetic(best: int, error: list[float], word: str) -> None:
    forms = [{"best_heads": 8, "error": [3, 2, 1, 2]}, {"best_heads": best, "error": error}]
    assert verdict("a3_curve", {"forms": forms, "control": []}) == word


def rows(*errors: float, rates: Found | None = None) -> list[Found]:
    """A sweep over heads; neighbours do not vary together."""
    spreads = (0.98, 1.0, 1.02, 1.01, 0.99), (1.02, 0.99, 0.98, 1.0, 1.01)
    return [
        {"heads": heads, "dim": 256 // heads, "positions": "linear", "error": [error * by for by in spreads[place % 2]]}
        | (INNER if rates is None else rates)
        for place, (heads, error) in enumerate(zip(HEADS, errors, strict=True))
    ]


SWEEPS = [
    (rows(9, 4, 2, 1, 3, 5), YES),
    (rows(9, 4, 1.02, 1, 3, 5), PARTLY),  # a plateau whose ends are worse
    (rows(9, 4, 2, 1, 1, 1), NO),  # flat to the end: no best
    (rows(9, 4, 2, 1.5, 1, 5), NO),  # another is clearly better
    (rows(1, 2, 3, 4, 5, 6), NO),
    (rows(9, 4, 2, 1, 3, 5, rates=EDGE), OPEN),
]


@pytest.mark.parametrize(("sweep", "word"), SWEEPS)
def test_a4_is_best_where_theory_says(sweep: list[Found], word: str) -> None:
    assert verdict("a4_ngram", {"rows": sweep, "theory": {"heads": 32}}) == word


@pytest.mark.parametrize(
    ("first", "second", "word"), [(0, 0, YES), (3, 4, NO), (1, 1, PARTLY), (0, 4, PARTLY), (0, 5, OPEN)]
)
def test_a5_needs_both_tasks(first: int, second: int, word: str) -> None:
    tasks = {
        name: {"rows": SWEEPS[place][0], "theory": {"nearest": 32}}
        for name, place in (("previous token", first), ("nonlinear", second))
    }
    assert verdict("a5_induction", {"tasks": tasks}) == word


@pytest.mark.parametrize(
    ("trained", "random", "error", "word"),
    [(-0.95, -0.95, 0.01, YES), (-0.2, -0.95, 0.01, PARTLY), (-0.2, -0.2, 0.01, NO), (-0.7, -0.8, 0.5, OPEN)],
)
def test_a6_trained_models_and_random_weights_are_judged_apart(
    trained: float, random: float, error: float, word: str
) -> None:
    models, control = (
        {"m": {"slope": slope, "slope_error": error, "sequences": 64, "heads": 8}} for slope in (trained, random)
    )
    found = _lab.judged("a6_saturation", {"models": models, "random": control})
    assert found.verdict == word and set(found.parts) == {"under its assumption, random weights", "on trained models"}


@pytest.mark.parametrize(
    ("kept", "uncut", "together", "word"),
    [
        (near(0.02), 0.01, 0.005, YES),
        (near(0.02), 0.01, 0.5, PARTLY),  # single heads yes, all at once no
        (near(0.9), 0.01, 0.005, NO),
        (near(0.9), 0.9, 0.005, OPEN),  # training alone does as much damage
        ([0.0, 0.0, 0.0, 0.5], 0.01, 0.005, OPEN),
    ],
)
def test_a7_a_small_head_must_keep_its_heads_worth(kept: list[float], uncut: float, together: float, word: str) -> None:
    one = {"way": "activations", "part": "both", "tuned": True}
    tables = {4: kept, 0: [1.0] * 4, 64: [uncut]}
    single = [one | {"dim": dim, "kl": [kl], "mean_kl": sum(kl) / len(kl)} for dim, kl in tables.items()]
    whole = [{"way": "activations", "dim": 4, "after": {"kl": together}}]
    model = {"effort": {"dims": [8, 4]}, "single": single, "together": whole}
    assert verdict("a7_heads", {"models": {"embedded": model}}) == word


def cutting(taper: float, uniform: float, spent: float) -> Found:
    def row(strategy: str, damage: float, share: float) -> Found:
        ends = {"measured": damage, "measured_low": damage - 0.001, "measured_high": damage + 0.001}
        return {"budget": "attention=80%@8", "strategy": strategy, "spent": share, "damage": {"refit": ends}}

    return {"models": {"embedded": {"rows": [row("taper", taper, spent), row("uniform", uniform, 0.8)]}}}


@pytest.mark.parametrize(
    ("taper", "spent", "word"), [(0.01, 0.8, YES), (0.2, 0.8, NO), (0.2, 0.9, NO), (0.2, 0.7, OPEN), (0.01, 0.7, OPEN)]
)
def test_a8_cutting_is_judged_where_no_less_is_spent(taper: float, spent: float, word: str) -> None:
    found = _lab.judged("a8_taper", cutting(taper, 0.1, spent))
    assert found.parts["cutting a trained model"] == word
    assert found.verdict == OPEN, "the paper proposes training from scratch, which was not done"


def scratch(loss: list[float]) -> Found:
    models = {name: {"loss": loss, "parameters": 5, **INNER} for name in q6_scratch.CLAIMED}
    return {"tokens": 10, "models": {"uniform": {"loss": near(3.0), "parameters": 5, **INNER}} | models}


@pytest.mark.parametrize(("loss", "word"), [(near(2.5), YES), (near(3.5), NO), (wide(2.5), OPEN)])
def test_a8_follows_training_from_scratch(loss: list[float], word: str) -> None:
    assert verdict("a8_taper", cutting(0.2, 0.1, 0.8), {"q6_scratch": scratch(loss)}) == word


@pytest.mark.parametrize(
    ("few", "many", "means", "error", "word"),
    [
        (0.01, 0.01, (3, 2), 1e-6, YES),
        (0.05, 0.01, (3, 2), 1e-6, PARTLY),
        (0.05, 0.05, (3, 2), 1e-6, PARTLY),
        (0.01, 0.01, (2, 3), 1e-6, NO),
        (0.01, 0.01, (3, 2), 9.0, OPEN),
    ],
)
def test_b1_the_formula_holds_where_it_should(
    few: float, many: float, means: tuple[int, int], error: float, word: str
) -> None:
    shapes = [
        {"tokens": t, "heads": 8, "ratio": 20, "off": off, "mean": mean, "formula": 1.0, "standard_error": error}
        for t, off in ((16, few), (64, many))
        for mean in means
    ]
    assert verdict("b1_gaussian", {"rows": shapes}) == word


@pytest.mark.parametrize(
    ("start", "after", "rates", "word"),
    [(-1, -1, INNER, YES), (-1, 1, INNER, PARTLY), (-1, -1, EDGE, PARTLY), (1, 1, INNER, NO), (1, -1, EDGE, NO)],
)
def test_b2_the_number_falls_with_heads(start: int, after: int, rates: Found, word: str) -> None:
    def numbers(power: int, heads: int) -> list[list[float]]:
        return [[by * float(heads) ** power] for by in (1.0, 1.01, 1.02)]

    split = [{"heads": h, "start": numbers(start, h), "after": numbers(after, h), **rates} for h in (1, 2, 4)]
    assert verdict("b2_conditioning", {"split": split}) == word
    rounding = [{**row, "start": [[1e9]] * 3} for row in split]
    assert _lab.judged("b2_conditioning", {"split": rounding}).parts["before training"] == OPEN


def grid(split: float, grown: float | None, mlp: float, rates: Found = INNER) -> Found:
    """8 layers of 12 heads that gain so much over 12 layers, split and grown; what a doubled MLP gains."""

    def cell(depth: int, heads: int, width: int, accuracy: float, way: str = "split") -> Found:
        return {"depth": depth, "heads": heads, "mlp": width, "way": way, "accuracy": near(accuracy), **rates}

    cells = {"original": cell(12, 3, 768, 0.6)}
    for heads, above in ((3, 0.0), (12, split)):
        for width, more in ((384, -mlp), (768, 0.0)):
            cells[f"8, {heads}, {width}"] = cell(8, heads, width, 0.6 + above + more)
    if grown is not None:
        cells["8, grown"] = cell(8, 12, 768, 0.6 + grown, "grown")
    return {"original": "original", "images": 9, "cells": cells}


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (grid(0.1, 0.1, 0.0), YES),
        (grid(0.1, -0.1, 0.0), PARTLY),  # split heads win, grown heads lose
        (grid(0.1, 0.1, 0.05), PARTLY),  # the MLP helps as much
        (grid(-0.1, -0.1, 0.05), NO),
        (grid(0.1, None, 0.0), OPEN),  # one reading was not trained
        (grid(0.1, 0.1, 0.0, EDGE), OPEN),
    ],
)
def test_b3_both_readings_of_more_heads_and_the_mlp(found: Found, word: str) -> None:
    assert verdict("b3_grid", found) == word


@pytest.mark.parametrize(("before", "after", "word"), [(100.0, 60.0, FITS), (100.0, 90.0, NO), (99.0, 60.0, OPEN)])
def test_b4_counts_agree_with_the_paper_by_some_reading(before: float, after: float, word: str) -> None:
    row = {"title": "it", "millions": {"before": before, "after": after}, "paper": {"before": 100.0, "after": 60.0}}
    found = _lab.judged("b4_redesigns", {"rows": [row, {"paper": {"after": None}}]})
    assert found.verdict == word and found.parts["at the same accuracy"] == "not tested"


def test_b4_the_two_other_readings_resolve_the_papers_counts() -> None:
    counted = {"XCiT-M": 46.4245, "TNT-B": 44.0136}  # millions as timm builds them, to about a hundredth
    found = {title: b4_redesigns.readings({"title": title, "millions": {"after": n}}) for title, n in counted.items()}
    assert [round(next(iter(each.values())), 1) for each in found.values()] == [59.0, 30.9]


@pytest.mark.parametrize(
    ("scores", "loss", "rates", "word"),
    [
        (near(0.8), 2.0, INNER, YES),
        (wide(0.8), 2.0, INNER, OPEN),
        (near(0.6), 2.0, INNER, NO),
        (near(0.8), 6.6, INNER, OPEN),  # pretraining had hardly begun
        (near(0.8), 2.0, EDGE, OPEN),
        (near(0.5), 2.0, INNER, OPEN),  # always the same answer
    ],
)
def test_b5_the_lean_encoder_keeps_its_average(scores: list[float], loss: float, rates: Found, word: str) -> None:
    base = near(0.8) if scores[0] != 0.5 else near(0.5)
    models = {
        name: {"glue": {"RTE": {"accuracy": s}}, "masked_loss": [loss], **rates}
        for name, s in (("deep", base), ("lean", scores))
    }
    assert verdict("b5_encoders", {"models": models}) == word


@pytest.mark.parametrize(
    ("lean", "tokens", "rates", "word"),
    [
        (near(2.5), 100, INNER, YES),
        (near(2.998), 100, INNER, PARTLY),  # better, by less than the margin
        (near(3.5), 100, INNER, NO),
        (wide(2.5), 100, INNER, OPEN),
        (near(2.5), 1, INNER, OPEN),  # fewer tokens than parameters
        (near(2.5), 100, EDGE, OPEN),
    ],
)
def test_b6_the_lean_decoders_loss_is_lower(lean: list[float], tokens: int, rates: Found, word: str) -> None:
    models = {name: {"loss": x, "parameters": 10, **rates} for name, x in (("deep", near(3.0)), ("lean", lean))}
    assert verdict("b6_decoders", {"tokens": tokens, "models": models}) == word


@pytest.mark.parametrize(
    ("four", "eight", "rates", "word"),
    [
        (near(0.6), near(0.6), INNER, YES),
        (near(0.6), near(0.45), INNER, PARTLY),  # eight heads help in one layer, but lose to two layers
        (near(0.3), near(0.3), INNER, NO),
        (wide(0.6), wide(0.6), INNER, OPEN),
        (near(0.6), near(0.6), EDGE, OPEN),
    ],
)
def test_b7_one_layer_beats_two_and_heads_help(four: list[float], eight: list[float], rates: Found, word: str) -> None:
    cells = {"1 x 2": near(0.4), "1 x 4": four, "1 x 8": eight, "2 x 2": near(0.5)}
    models = {name: {"accuracy": accuracy, **rates} for name, accuracy in cells.items()}
    assert verdict("b7_listops", {"chance": 0.1, "models": models}) == word


def test_b7_is_open_while_two_layers_were_not_trained() -> None:
    models = {f"1 x {heads}": {"accuracy": near(0.1 * heads), **INNER} for heads in (2, 4, 8)}
    assert verdict("b7_listops", {"chance": 0.1, "models": models}) == OPEN


@pytest.mark.parametrize(("low", "word"), [(0.4, ANSWERED), (-0.5, UNANSWERED)])
def test_q1_is_answered_once_damages_differ(low: float, word: str) -> None:
    plans = {"8": {"measured": 0.5, "measured_low": low, "measured_high": 1.0 - low}}
    plans["16"] = {"measured": 0.1, "measured_low": 0.09, "measured_high": 0.11}
    assert verdict("q1_length", {"lengths": [8, 16], "plans": plans}) == word


@pytest.mark.parametrize(("half", "word"), [(0.01, ANSWERED), (1.0, UNANSWERED)])
def test_q2_is_answered_once_the_extra_is_known(half: float, word: str) -> None:
    row = {"text": "unfamiliar", "budget": "kv=50%", "extra": 0.1, "extra_low": 0.1 - half, "extra_high": 0.1 + half}
    assert verdict("q2_robustness", {"models": {"m": {"label": "m", "rows": [row]}}}) == word


@pytest.mark.parametrize(("damages", "word"), [((3.0, 1.0), ANSWERED), ((1.0, 1.0), ANSWERED)])
def test_q3_is_answered_either_way(damages: tuple[float, float], word: str) -> None:
    kinds = dict(zip(("with norms", "without norms"), damages, strict=True))
    runs = [{"kind": kind, "blocks": near(damage)} for kind, damage in kinds.items() for _ in range(2)]
    assert verdict("q3_qknorm", {"rows": runs}) == word
    runs = [{"kind": kind, "blocks": [0.1, 5.0]} for kind in kinds for _ in range(2)]
    assert verdict("q3_qknorm", {"rows": runs}) == UNANSWERED


@pytest.mark.parametrize(("loss", "word"), [(near(3.0), ANSWERED), (near(3.5), ANSWERED), (wide(3.0), UNANSWERED)])
def test_q4_is_answered_once_designs_are_within_or_beyond_the_margin(loss: list[float], word: str) -> None:
    models = {"baseline": {"loss": near(3.0), "parameters": 10}, "leaner": {"loss": loss, "parameters": 7}}
    assert verdict("q4_design", {"models": models}) == word


@pytest.mark.parametrize(("loss", "word"), [(near(3.5), ANSWERED), (near(2.5), ANSWERED), (wide(3.0), UNANSWERED)])
def test_q5_is_answered_once_every_dimension_is_decided(loss: list[float], word: str) -> None:
    models = {
        f"{dim}": {"head_dim": dim, "normed": False, "loss": x, "parameters": 5, **INNER}
        for dim, x in ((64, near(3.0)), (8, loss))
    }
    assert verdict("q5_headdim", {"tokens": 10, "models": models}) == word


@pytest.mark.parametrize(("loss", "word"), [(near(3.5), ANSWERED), (near(2.5), ANSWERED), (wide(3.0), UNANSWERED)])
def test_q6_is_answered_either_way(loss: list[float], word: str) -> None:
    assert verdict("q6_scratch", scratch(loss)) == word
