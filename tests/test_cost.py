"""Costs: small cases by hand, and that more is never cheaper. Real models are compared elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conftest import GRAIN, layer_shapes
from hypothesis import given
from hypothesis import strategies as some

from headwise import cost
from headwise.types import LayerShape, ModelShape

LAYER = LayerShape(query_heads=4, kv_heads=2, qk_dim=6, v_dim=5, mlp_width=7, qk_width=6)
MODEL = ModelShape("llama", 10, 100, True, (LAYER, LAYER), GRAIN, other_parameters=50, element_bytes=2)


def test_parameters_of_a_layer_by_hand() -> None:
    query, key, value, out = 10 * 4 * 6, 10 * 2 * 6, 10 * 2 * 5, 4 * 5 * 10
    assert cost.layer_parameters(MODEL, LAYER) == query + key + value + out + 3 * 10 * 7


def test_a_projection_adds_one_matrix_for_queries_and_one_for_keys_of_every_group() -> None:
    projected = replace(LAYER, qk_dim=4)
    more = cost.layer_parameters(MODEL, projected) - cost.layer_parameters(MODEL, LAYER)
    assert more == 2 * 2 * 6 * 4, "kv_heads * qk_width * qk_dim, twice"


def test_a_projection_is_applied_to_every_query_head_and_every_key_head() -> None:
    projected, attended = replace(LAYER, qk_dim=4), 9
    before = cost.layer_flops_per_token(MODEL, LAYER, attended)
    after = cost.layer_flops_per_token(MODEL, projected, attended)
    assert after - before == 2 * (4 + 2) * 6 * 4 - 2 * attended * 4 * (6 - 4)


def test_biases_are_parameters_but_no_products() -> None:
    biased = replace(MODEL, qkv_bias=True, o_bias=True, mlp_bias=True)
    more = cost.layer_parameters(biased, LAYER) - cost.layer_parameters(MODEL, LAYER)
    assert more == (4 * 6 + 2 * 6 + 2 * 5) + 10 + (7 + 7 + 10)
    assert cost.layer_flops_per_token(biased, LAYER, 3) == cost.layer_flops_per_token(MODEL, LAYER, 3)


def test_tied_embeddings_count_once() -> None:
    layers = 2 * cost.layer_parameters(MODEL, LAYER)
    assert cost.parameters(MODEL) == 100 * 10 + 50 + layers
    assert cost.parameters(replace(MODEL, tied_embeddings=False)) == 2 * 100 * 10 + 50 + layers


def test_flops_by_hand() -> None:
    per_token = 2 * cost.layer_parameters(MODEL, LAYER)
    head = 2 * 10 * 100
    # A prompt of three: its tokens attend to 1, 2 and 3 positions, and only the last needs logits.
    assert cost.prefill_flops(MODEL, 3) == head + 2 * sum(per_token + 2 * seen * 4 * (6 + 5) for seen in (1, 2, 3))


def test_attention_is_what_a_layer_does_without_its_mlp() -> None:
    whole = 3 * cost.layer_flops_per_token(MODEL, LAYER, 2)  # a prompt of three attends to two positions on average
    assert whole - cost.attention_flops(MODEL, LAYER, 3) == 3 * 2 * 3 * 10 * 7, "gate, up and down"


def test_an_encoders_tokens_attend_to_all_and_keep_nothing() -> None:
    encoder = replace(MODEL, cached=False)
    more = cost.prefill_flops(encoder, 3) - cost.prefill_flops(MODEL, 3)
    assert more == 2 * 3 * 2 * (3 - 2) * 4 * (6 + 5), "three positions each instead of two on average, in two layers"
    assert cost.kv_bytes_per_token(encoder) == 0


def test_cache_bytes_by_hand() -> None:
    assert cost.kv_bytes_per_token(MODEL) == 2 * 2 * (6 + 5) * 2
    assert cost.kv_bytes_per_token(replace(MODEL, element_bytes=4)) == cost.kv_bytes_per_token(MODEL), "at 16 bits"
    assert 2 * cost.kv_bytes_per_token(replace(MODEL, element_bytes=1)) == cost.kv_bytes_per_token(MODEL)


def test_a_projected_key_is_cached_at_its_small_size() -> None:
    assert cost.layer_kv_bytes_per_token(MODEL, replace(LAYER, qk_dim=4)) == 2 * (4 + 5) * 2


def test_a_layer_without_attention_or_mlp_costs_nothing() -> None:
    gone, biased = LayerShape(0, 0, 0, 0, 0, 0), replace(MODEL, qkv_bias=True, o_bias=True, mlp_bias=True)
    assert cost.layer_parameters(biased, gone) == 0
    assert cost.layer_flops_per_token(biased, gone, 100) == 0
    assert cost.layer_kv_bytes_per_token(biased, gone) == 0


@given(layer_shapes(), some.sampled_from(["v_dim", "mlp_width", "groups", "plain_qk"]), some.booleans())
def test_a_larger_layer_is_never_cheaper(layer: LayerShape, field: str, bias: bool) -> None:
    model = replace(MODEL, qkv_bias=bias, o_bias=bias, mlp_bias=bias)
    if field == "groups":
        larger = replace(layer, query_heads=layer.query_heads + layer.queries_per_group, kv_heads=layer.kv_heads + 1)
    elif field == "plain_qk":
        layer = replace(layer, qk_dim=layer.qk_width)
        larger = replace(layer, qk_dim=layer.qk_dim + 2, qk_width=layer.qk_width + 2)
    else:
        larger = replace(layer, **{field: getattr(layer, field) + 1})
    assert cost.layer_parameters(model, larger) > cost.layer_parameters(model, layer)
    assert cost.layer_flops_per_token(model, larger, 5) > cost.layer_flops_per_token(model, layer, 5)
    assert cost.layer_kv_bytes_per_token(model, larger) >= cost.layer_kv_bytes_per_token(model, layer)


@pytest.mark.parametrize("length", [1, 2, 64, 4096])
def test_a_longer_prompt_costs_more_than_its_share(length: int) -> None:
    head = 2.0 * MODEL.hidden_size * MODEL.vocab_size
    assert cost.prefill_flops(MODEL, 2 * length) - head > 2 * (cost.prefill_flops(MODEL, length) - head)
