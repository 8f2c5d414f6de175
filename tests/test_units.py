"""Shapes and units: which sizes are legal, what a cut changes, and measures under flat keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conftest import GRAIN, layer_shapes
from hypothesis import given

from headwise.errors import PlanError, ShapeError
from headwise.types import CUTS, DEFAULT_UNITS, UNIT_OF, UNITS, LayerShape, Measure, ModelShape, Unit, code_bytes
from headwise.types.measure import flattened, grouped
from headwise.types.unit import LABELS

LAYER = LayerShape(query_heads=4, kv_heads=2, qk_dim=8, v_dim=8, mlp_width=16, qk_width=8)
NOT_SIZED = ("depth", "w_embed", "w_head")  # of a whole model
SIZED = [unit for unit in CUTS if unit.curve not in NOT_SIZED and unit.allow != "bits"]  # codes are not


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((-1, 1, 2, 2, 2, 2), "query_heads is -1; sizes cannot be negative."),
        ((4, 4, 2, 2, -8, 2), "mlp_width is -8; sizes cannot be negative."),
        (
            (14, 4, 2, 2, 2, 2),
            "14 query heads cannot share 4 key/value heads evenly; the nearest counts that can are 12 and 16.",
        ),
        (
            (2, 4, 2, 2, 2, 2),
            "2 query heads cannot share 4 key/value heads evenly; the nearest counts that can are 4.",
        ),
        ((4, 0, 2, 2, 2, 2), "4 query heads have no key/value heads to share; set both to 0 to remove attention."),
        (
            (4, 4, 0, 2, 2, 2),
            "qk_dim and v_dim must be at least 1 where there are heads; set query_heads to 0 instead.",
        ),
        ((4, 4, 6, 2, 2, 4), "qk_dim 6 is larger than qk_width 4; a projection only shrinks."),
    ],
)
def test_a_layer_that_cannot_be_is_refused(sizes: tuple[int, ...], text: str) -> None:
    with pytest.raises(ShapeError) as caught:
        LayerShape(*sizes)
    assert str(caught.value) == text


def test_a_model_needs_a_layer() -> None:
    with pytest.raises(ShapeError, match="a model needs at least one layer."):
        ModelShape("llama", 32, 100, True, (), GRAIN)


def test_layers_without_attention_or_mlp_are_legal() -> None:
    assert LayerShape(0, 0, 0, 0, 8, 0).queries_per_group == 0
    assert not LayerShape(2, 1, 4, 4, 0, 4).projected and LayerShape(2, 1, 4, 4, 0, 6).projected


@pytest.mark.parametrize(
    ("full", "step", "floor", "sizes"),
    [(64, 16, 20, (64, 48, 32)), (20, 8, 8, (20, 16, 8)), (8, 8, 8, (8,)), (6, 8, 8, (6,)), (0, 8, 8, (0,))],
)
def test_legal_sizes_are_steps_below_the_full_one(full: int, step: int, floor: int, sizes: tuple[int, ...]) -> None:
    grain = replace(GRAIN, qk_step=step, v_step=step, mlp_step=step, qk_floor=floor, v_floor=floor, mlp_floor=floor)
    assert grain.qk_sizes(full) == grain.v_sizes(full) == grain.mlp_sizes(full) == sizes


def test_units_are_named_once_and_have_labels() -> None:
    assert UNITS == ("qk", "v", "mlp", "bits", "heads", "kv_heads", "rank", "weights", "depth") and set(
        DEFAULT_UNITS
    ) <= set(UNITS)
    assert len(UNIT_OF) == len(CUTS) and set(LABELS) == set(UNITS)


@pytest.mark.parametrize("unit", SIZED, ids=lambda unit: unit.curve)
@given(shape=layer_shapes())
def test_a_cut_to_a_size_has_that_size_and_the_full_one_changes_nothing(unit: Unit, shape: LayerShape) -> None:
    sizes = unit.sizes(shape, GRAIN)
    assert list(sizes) == sorted(sizes, reverse=True) and (not sizes or sizes[0] == unit.full(shape))
    for size in sizes:
        cut = unit.shape(shape, size, folds=False, order={})
        assert unit.full(cut) == size
        assert shape.projected or size < sizes[0] or cut == shape


def test_a_projection_that_folds_leaves_nothing_wider() -> None:
    unit = UNIT_OF["damage.qk_projected"]
    assert unit.shape(LAYER, 4, True, {}).qk_width == 4 and unit.shape(LAYER, 4, False, {}).qk_width == 8


@pytest.mark.parametrize(("curve", "dim"), [("k_bits", "qk_dim"), ("v_bits", "v_dim")])
def test_a_code_is_chosen_by_its_bytes(curve: str, dim: str) -> None:
    unit, codes = (
        UNIT_OF[f"damage.{curve}"],
        ((0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 2, 0)),
    )
    fine, coarse = (unit.shape(LAYER, code_bytes(code, 8), False, {curve: codes}) for code in codes)
    assert unit.full(LAYER) == 16 > unit.full(fine) == 10 > unit.full(coarse) == 4, "bytes: of codes, a scale, a share"
    assert getattr(fine, dim) == getattr(coarse, dim) == 8 and fine.coded, "near tokens are read with all numbers"
    with pytest.raises(PlanError, match=rf"price 11 bytes in {curve}, .* probe again"):
        unit.shape(LAYER, 11, False, {curve: codes})


def test_measures_are_read_from_flat_keys_and_written_back() -> None:
    flat = {"loss_before": 2.0, "loss_after": 2.5, "loss_after_low": 2.25, "loss_after_high": 2.75, "kl": 0.5,
            "kl_low": 0.25, "kl_high": 0.75, "prompt_tokens": 256.0, "decode_ms_per_token_before": 3.0,
            "decode_ms_per_token_after": 2.0}  # fmt: skip
    found = grouped(flat)
    assert found["loss"].after == Measure(2.5, 2.25, 2.75, "nats") and found["loss"].before == Measure(2.0, unit="nats")
    assert found["kl"].before is None and found["decode_ms_per_token"].after == Measure(2.0, unit="ms")
    assert flattened(found) == flat and grouped(flattened(found)) == found
