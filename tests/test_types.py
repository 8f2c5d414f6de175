"""Types: nonsense is refused at birth, files come back as they were, and errors name the field."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import GRAIN, invent, layer_shapes
from hypothesis import given
from hypothesis import strategies as some

from headwise.errors import HeadwiseError, PlanError, ShapeError
from headwise.runs.dossier import Baseline, Dossier
from headwise.runs.settings import Settings
from headwise.types import (
    VERSION,
    Budget,
    Check,
    FrontierPoint,
    Healing,
    LayerKeep,
    LayerShape,
    ModelShape,
    Plan,
    Reading,
    Readings,
    Sample,
    Verdict,
    write_atomically,
)

LAYER = LayerShape(query_heads=4, kv_heads=2, qk_dim=8, v_dim=8, mlp_width=16, qk_width=8)
SMALLER = LayerShape(query_heads=2, kv_heads=1, qk_dim=4, v_dim=6, mlp_width=8, qk_width=4)
KEEP = LayerKeep(query_heads=(2, 3), kv_heads=(1,), rotary_pairs=((0, 3),), mlp_channels=(0, 1, 2, 3, 4, 5, 6, 9))
MODEL = ModelShape("llama", 32, 100, True, (LAYER, LAYER), GRAIN)
PLAN = Plan(
    model="invented",
    source=MODEL,
    target=MODEL.with_layers((SMALLER, LAYER)),
    keep=(KEEP, LayerKeep()),
    strategy="exact",
    budgets=(Budget("kv", "bytes per token", 100.0, 2048, "kv=50%"),),
    spent={"kv": 96.0},
    predicted_damage=0.25,
    seed=3,
    frontier=(FrontierPoint(0.5, 0.25), FrontierPoint(1.0, 0.0)),
)
VERDICT = Verdict.of(
    quality={"perplexity": 9.5},
    size={"parameters": 12},
    speed={},
    damage={"predicted": 0.1},
    checks=(Check("identity", True, "0", "0"), Check("budget", False, "2", "1")),
    samples=(Sample("once", "upon", "a time"),),
    evaluation="invented",
    tokens=7,
    machine="none",
    date="2000-01-01",
)


@some.composite
def model_shapes(draw: some.DrawFn) -> ModelShape:
    """Any legal model."""
    return ModelShape(
        family=draw(some.text(max_size=8)),
        hidden_size=draw(some.integers(1, 10**5)),
        vocab_size=draw(some.integers(1, 10**6)),
        tied_embeddings=draw(some.booleans()),
        layers=tuple(draw(some.lists(layer_shapes(), min_size=1, max_size=4))),
        grain=GRAIN,
        qkv_bias=draw(some.booleans()),
        other_parameters=draw(some.integers(0, 10**12)),
        element_bytes=draw(some.sampled_from([1, 2, 4])),
    )


@some.composite
def plans(draw: some.DrawFn) -> Plan:
    """Any plan that cuts MLPs: which channels stay is drawn."""
    source = draw(model_shapes())
    targets, keeps = [], []
    for layer in source.layers:
        kept = tuple(sorted(draw(some.sets(some.integers(0, layer.mlp_width - 1), max_size=9))))
        targets.append(replace(layer, mlp_width=len(kept)))
        keeps.append(LayerKeep(mlp_channels=kept))
    number = some.floats(allow_nan=False, allow_infinity=False)
    return replace(
        PLAN,
        source=source,
        target=source.with_layers(tuple(targets)),
        keep=tuple(keeps),
        predicted_damage=draw(number),
        spent={**PLAN.spent, **draw(some.dictionaries(some.text(max_size=5), number, max_size=3))},
        frontier=tuple(FrontierPoint(*pair) for pair in draw(some.lists(some.tuples(number, number), max_size=3))),
        portable=draw(some.booleans()),
    )


def through_json(value: Any) -> Any:
    """The value after it has been text."""
    return type(value).from_json(json.loads(json.dumps(value.to_json())))


@given(some.one_of(layer_shapes(), model_shapes(), plans()))
def test_json_gives_back_an_equal_value(value: LayerShape | ModelShape | Plan) -> None:
    assert through_json(value) == value


HEALING = Healing("new", 3, rounds=(Healing("refit", details={"b": None}),), details={"own": 1.5})
DOSSIER = Dossier(Settings("m"), invent(2), PLAN, HEALING, VERDICT, (Baseline("uniform", 0.1, {"kv": 2.0}),))


@pytest.mark.parametrize(
    "value",
    [GRAIN, PLAN, VERDICT, invent(1), DOSSIER],
    ids=lambda value: type(value).__name__,
)
def test_files_give_back_an_equal_value(value: Any, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "value.json"
    value.save(path)
    assert type(value).read(path) == value
    first = path.read_bytes()
    value.save(path)
    assert path.read_bytes() == first, "same value, same bytes"
    head = json.loads(first)
    assert (head["headwise"], head["version"]) == (type(value).__name__, VERSION), "a file says what it holds"


def test_missing_stages_of_a_dossier_stay_missing() -> None:
    assert through_json(Dossier()) == Dossier()


def test_values_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        LAYER.v_dim = 1  # type: ignore[misc]


def written(tmp_path: Path, **changes: Any) -> Path:
    """A plan file with some of its top fields replaced; None takes one away."""
    data = {"headwise": "Plan", "version": VERSION, **PLAN.to_json(), **changes}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(PlanError) as caught:
        Plan.read(path)
    return str(caught.value)


@pytest.mark.parametrize("version", [VERSION + 1, "1", None])
def test_a_newer_or_unclear_version_is_refused(version: Any, tmp_path: Path) -> None:
    path = written(tmp_path, version=version)
    text = f"{path} has format version {version}, this headwise reads up to {VERSION}; upgrade headwise."
    assert refusal(path) == text


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    VERDICT.save(path)
    assert refusal(path) == f"{path} does not hold a Plan; give the file that headwise wrote."
    path.write_text("[1, 2]")
    assert refusal(path) == f"{path} does not hold a Plan; give the file that headwise wrote."


def test_a_missing_or_broken_file_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert refusal(path) == f"{path} does not exist; run the stage that writes it first."
    path.write_text('{"headwise": "Plan", ')
    assert refusal(path).startswith(f"{path} is not valid JSON (")
    assert refusal(path).endswith("); restore it or run its stage again.")
    path.write_bytes(b"\xff\xfe\x00")
    assert "is not valid JSON" in refusal(path)


LAYERS = [layer.to_json() for layer in PLAN.target.layers]
KEEPS = [keep.to_json() for keep in PLAN.keep]


def target(**changes: Any) -> dict[str, Any]:
    """The plan's target with its first layer edited."""
    return {**PLAN.target.to_json(), "layers": [{**LAYERS[0], **changes}, LAYERS[1]]}


def keep(**changes: Any) -> list[dict[str, Any]]:
    """The plan's lists of what stays, the first layer's edited."""
    return [{**KEEPS[0], **changes}, KEEPS[1]]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"seed": None}, "plan.json.seed is missing."),
        ({"seed": "3"}, "plan.json.seed must be int, not '3'."),
        ({"seed": True}, "plan.json.seed must be int, not True."),
        ({"seed": 3.0}, "plan.json.seed must be int, not 3.0."),
        ({"strategy": 4}, "plan.json.strategy must be str, not 4."),
        ({"portable": 1}, "plan.json.portable must be bool, not 1."),
        ({"predicted_damage": "low"}, "plan.json.predicted_damage must be float, not 'low'."),
        ({"spent": [1]}, "plan.json.spent must be an object, not [1]."),
        ({"spent": {"kv": "all"}}, "plan.json.spent.kv must be float, not 'all'."),
        ({"budgets": {}}, "plan.json.budgets must be a list, not {}."),
        ({"budgets": [7]}, "plan.json.budgets[0] must be an object, not 7."),
        ({"target": target(v_dim="6")}, "plan.json.target.layers[0].v_dim must be int, not '6'."),
        (
            {"target": target(head_dim=6)},
            "plan.json.target.layers[0] has an unknown field 'head_dim'; "
            "known: query_heads, kv_heads, qk_dim, v_dim, mlp_width, qk_width, role, pooled, v_width, k_code, v_code, "
            "q_rank, w_q, w_k, w_v, w_o, w_gate, w_up, w_down.",
        ),
        ({"keep": keep(kv_heads=["1"])}, "plan.json.keep[0].kv_heads[0] must be int, not '1'."),
        ({"keep": keep(rotary_pairs=[0, 3])}, "plan.json.keep[0].rotary_pairs[0] must be a list, not 0."),
    ],
)
def test_a_wrong_field_is_named_with_its_path(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    assert refusal(written(tmp_path, **changes)) == text


def test_an_unknown_field_is_named(tmp_path: Path) -> None:
    text = refusal(written(tmp_path, colour="red"))
    assert text.startswith("plan.json has an unknown field 'colour'; known: model, source, target, keep,")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"target": target(v_dim=9)}, "plan.json: layer 0: v_dim grows from 8 to 9; plans only shrink."),
        (
            {"target": target(mlp_width=7)},
            "plan.json: layer 0: keep.mlp_channels must name 7 different indices below 16.",
        ),
        (
            {"keep": keep(mlp_channels=None)},
            "plan.json: layer 0: mlp_channels falls from 16 to 8 but keep.mlp_channels is missing; allocate again.",
        ),
        (
            {"keep": keep(mlp_channels=[0, 0, 1, 2, 3, 4, 5, 6])},
            "plan.json: layer 0: keep.mlp_channels must name 8 different indices below 16.",
        ),
        ({"keep": keep(kv_heads=[2])}, "plan.json: layer 0: keep.kv_heads must name 1 different indices below 2."),
        ({"keep": keep(kv_heads=[-1])}, "plan.json: layer 0: keep.kv_heads must name 1 different indices below 2."),
        (
            {"keep": keep(rotary_pairs=[[0, 3], [0, 3]])},
            "plan.json: layer 0: keep.rotary_pairs has 2 lists for 1 kv_heads.",
        ),
        (
            {"keep": keep(rotary_pairs=[[0, 4]])},
            "plan.json: layer 0: keep.rotary_pairs must name 2 different indices below 4.",
        ),
        (
            {"keep": keep(rotary_pairs=None)},
            "plan.json: layer 0: qk_width falls to 4 but keep.rotary_pairs is missing; allocate again.",
        ),
        (
            {"keep": KEEPS[:1]},
            "plan.json: source, target and keep have 2, 2 and 1 layers; they must have the same number.",
        ),
    ],
)
def test_an_edited_plan_that_makes_no_sense_is_refused(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    assert refusal(written(tmp_path, **changes)) == text


def test_a_shape_error_in_a_file_names_the_layer(tmp_path: Path) -> None:
    with pytest.raises(ShapeError) as caught:
        Plan.read(written(tmp_path, target=target(query_heads=3, kv_heads=2)))
    assert str(caught.value) == (
        "plan.json.target.layers[0]: 3 query heads cannot share 2 key/value heads evenly; "
        "the nearest counts that can are 2 and 4."
    )


def test_a_verdict_passes_when_every_check_does() -> None:
    assert not VERDICT.passed
    assert replace(VERDICT, checks=VERDICT.checks[:1]).passed


def test_readings_believe_the_later_probe_and_know_their_sizes() -> None:
    readings = invent(1)
    first = readings.curve("damage.v")
    assert first is not None and first.at(1, first.ticks[1][2]) == first.values[1][2]
    corrected = replace(first, values=tuple(tuple(2 * x for x in row) for row in first.values))
    assert replace(readings, curves=(*readings.curves, corrected)).curve("damage.v") == corrected
    assert readings.curve("damage.colour") is None
    with pytest.raises(PlanError) as caught:
        first.at(0, 7)
    assert str(caught.value) == "layer 0 has no price for v 7; priced sizes: 8, 6, 4."


@pytest.mark.parametrize("field", ["values", "standard_error"])
def test_a_reading_with_ragged_tables_is_refused(field: str) -> None:
    reading = Reading("p", "damage.v", "v", ((8, 6),), ((0.0, 1.0),), None, "nats", "x", 1, 0)
    with pytest.raises(PlanError, match=f"reading damage.v: {field} and ticks have different lengths; probe again."):
        replace(reading, **{field: ((0.0,),)})


def test_readings_are_found_beside_their_run(tmp_path: Path) -> None:
    invent(1).save(tmp_path / "readings.json")
    assert Readings.read(tmp_path / "readings.json") == invent(1)


class FullDisk:
    """Fails as a full disk does."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("step", ["fsync", "replace", "chmod"])
def test_a_full_disk_leaves_the_old_file_whole(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, step, FullDisk())
        with pytest.raises(OSError, match="No space left"):
            replace(PLAN, seed=9).save(path)
    assert path.read_bytes() == before and Plan.read(path) == PLAN
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"], "and no rubbish beside it"


def test_a_written_file_is_readable_by_others(tmp_path: Path) -> None:
    write_atomically(tmp_path / "new" / "a.txt", "text\n")
    assert (tmp_path / "new" / "a.txt").read_text() == "text\n"
    assert (tmp_path / "new" / "a.txt").stat().st_mode & 0o777 == 0o644


def test_every_error_a_user_can_act_on_has_one_base() -> None:
    assert issubclass(PlanError, HeadwiseError) and issubclass(ShapeError, HeadwiseError)
