"""The record of a healing: today's heal.json both ways, and one line where it is damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwise.errors import PlanError
from headwise.types import Gain, Healing

GAINS = {"attention": {"error_before": 0.2, "error_after": 0.1}, "mlp": {"error_before": 0.4, "error_after": 0.4}}
STREAM = {"error_before": 0.3, "error_after": 0.2, "curve": [0.3, 0.25, 0.2]}
STAGES = [
    {"method": "refit", "tokens": 64, "seconds": 1.5, "kept": True},
    {"method": "blockwise", "tokens": 64, "seconds": 2.0, "kept": False},
]
REFIT = {"method": "refit", "tokens": 64, "strength": 1.0, "layers": [GAINS, {}], "seconds": 1.5, "kept": True}
REFIT |= {"stages": STAGES[:1], "rehearsed_before": 0.3, "rehearsed": 0.2}
BLOCKWISE = {"method": "blockwise", "tokens": 128, "layers": [{**GAINS, "stream": STREAM}], "seconds": 3.5}
BLOCKWISE |= {"curve": [{"step": 0, "loss": 1.0}, {"step": 24, "loss": 0.7}], "kept": False}
BLOCKWISE |= {"reason": "healing by blockwise raised the damage.", "stages": STAGES, "rounds": [REFIT]}
DISTILL = {"method": "distill", "tokens": 9, "steps": 0, "rate": None, "batch_tokens": 3, "tokens_per_second": None}
DISTILL |= {"trials": [{"rate": 0.0, "divergence": 0.1, "loss": 0.1}], "divergence_before": 0.1, "processes": 2}
DISTILL |= {"divergence_after": 0.1, "shared_weights": False, "layers": [], "curve": [], "seconds": 1.0, "kept": True}
DISTILL |= {"curve": [{"step": 1, "loss": 0.5, "held_out": 0.4}], "stages": STAGES, "rounds": []}
STREAMED = {"method": "refit", "tokens": 64, "seconds": 1.5, "strength": 1e-2, "layers": [GAINS]}
STREAMED |= {"stages": [{"method": "refit", "tokens": 64, "seconds": 1.5}]}
OWN = {"method": "shift", "tokens": 1, "offsets": [1, 2], "rounds": [{"method": "shift", "tokens": 1, "offsets": [3]}]}


@pytest.mark.parametrize("data", [{"method": "none"}, REFIT, BLOCKWISE, DISTILL, STREAMED, OWN], ids=str)
def test_heal_json_is_read_and_written_unchanged(data):
    found = Healing.from_json(json.loads(json.dumps(data)), "heal.json")
    assert found.to_json() == data and Healing.from_json(found.to_json()) == found


def test_the_fields_of_a_refit_are_written_in_their_old_order():
    assert json.dumps(Healing.from_json(REFIT).to_json()) == json.dumps(REFIT)


def test_what_the_report_draws_has_types():
    found = Healing.from_json(BLOCKWISE)
    assert found.layers[0]["stream"] == Gain(0.3, 0.2, (0.3, 0.25, 0.2)) and found.curve[-1].step == 24
    assert [stage.kept for stage in found.stages] == [True, False] and found.rounds[0].method == "refit"
    assert Healing.from_json(OWN).details == {"offsets": [1, 2]}, "a method may record what no other does"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": None}, "heal.json.method must be str, not None"),
        ({"rehearsed": "low"}, "heal.json.rehearsed must be float, not 'low'"),
        ({"rehearsed": float("nan")}, "heal.json: rehearsed is nan, not a finite number"),
        ({"layers": {"0": 1}}, "heal.json.layers must be a list"),
        ({"layers": [{"mlp": 4}]}, r"heal.json.layers\[0\].mlp must be an object, not 4"),
        ({"curve": [3.0]}, r"heal.json.curve\[0\] must be an object"),
        ({"rounds": [{"tokens": 1}]}, r"heal.json.rounds\[0\].method is missing"),
    ],
    ids=str,
)
def test_a_damaged_record_is_named(change, message):
    with pytest.raises(PlanError, match=message):
        Healing.from_json({**REFIT, **change}, Path("run/heal.json").name)
