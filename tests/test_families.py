"""The contract of every family, on tiny random models: what a user of a reshaped model relies on."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from tiny_models import KINDS, VARIANTS, attending, cut, logits, masked, random_plan, rows, tiny, written
from transformers import MambaConfig

from headwise import families, tasks
from headwise.checks.exactness import cache_bytes_per_token
from headwise.cost import kv_bytes_per_token, parameters
from headwise.cuts import reshape, reshape_layer
from headwise.cuts._dims import cut_values
from headwise.errors import ModelError
from headwise.heal.refit import refit
from headwise.probes import gram, sensitivity
from headwise.types import LayerKeep, Plan


def needs_a_cache(family, model):
    if not family.shape_of(model.config).cached:
        pytest.skip(f"{family.name} models read a whole text at once")


@pytest.mark.parametrize(("family", "kind", "changes"), VARIANTS)
def test_a_cut_changes_nothing_but_what_is_cut_and_costs_what_is_counted(family, kind, changes):
    model = tiny(family, kind, changes)
    shape, tailored = family.shape_of(model.config), family.tailor(model)
    moments = gram.collect(family, tailored, rows(model), mlp=False)
    whole = Plan("tiny", shape, shape, tuple(LayerKeep() for _ in shape.layers), "test", (), {}, 0.0, 0)
    same = reshape(family, tailored, whole, moments)
    assert torch.equal(logits(model), logits(same)), "identity: bit for bit, in float32 eager"
    for seed in range(2):
        plan = random_plan(family, model, seed)
        made = reshape(family, tailored, plan, moments)
        assert sum(p.numel() for p in made.parameters()) == parameters(plan.target)
        assert cache_bytes_per_token(made, plan.target.cache_bytes) == kv_bytes_per_token(plan.target)
        assert family.shape_of(made.config).layers == plan.target.layers, "the configuration says what was built"
        want, got = logits(masked(family, model, plan, moments)), logits(made)
        assert (got - want).abs().max() <= 1e-4 * want.abs().max(), "a cut is a mask that is no longer computed"


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_values_at_full_rank_change_nothing(family, kind):
    model = family.tailor(tiny(family, kind, {}))
    moments = gram.collect(family, model, rows(model), mlp=False)
    tensors, shape = family.state_of(model), family.shape_of(model.config).layers[0]
    layer = family.take_layer(tensors, 0, model.config)
    cut = cut_values(layer, shape, moments[0]["gram_z"], shape.v_dim)
    family.put_layer(tensors, 0, cut, model.config)
    turned = family.build(model, family.shape_of(model.config).layers, tensors)
    assert (logits(turned) - logits(model)).abs().max() <= 1e-4 * logits(model).abs().max()


@pytest.mark.parametrize(("family", "kind", "changes"), VARIANTS)
def test_generation_with_any_cache_equals_no_cache(family, kind, changes):
    needs_a_cache(family, tiny(family, kind, changes))
    made = cut(family, tiny(family, kind, changes), random_plan(family, tiny(family, kind, changes), 1))
    attending(made, "sdpa")
    begun = want = family.example(made.config, 2, 12)
    for _ in range(6):
        want = family.longer(want, logits(made, want)[:, -1:].argmax(-1))
    for cache in (None, "static"):
        got = made.generate(
            **family.arguments(begun), attention_mask=torch.ones(2, 12), max_new_tokens=6, min_new_tokens=6,
            do_sample=False, cache_implementation=cache, eos_token_id=None, disable_compile=True,
        )  # fmt: skip
        assert torch.equal(got[:, -6:], written(family, want)[:, -6:]), f"cache {cache}"


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_padding_changes_nothing(family, kind):
    model = tiny(family, kind, {})
    needs_a_cache(family, model)
    made = cut(family, model, random_plan(family, model, 2))
    attending(made, "sdpa")
    if family.audio:
        pytest.skip("recordings are all of one length")
    ids, pad = family.arguments(family.example(model.config, 1, 9))["input_ids"], torch.zeros(1, 3, dtype=torch.long)
    parts = (ids, pad) if model.config.is_encoder_decoder else (pad, ids)  # encoders are padded behind a text
    padded = torch.cat(parts, 1)
    options = dict(max_new_tokens=5, min_new_tokens=5, do_sample=False, eos_token_id=None)
    long = made.generate(padded, attention_mask=(padded > 0).long(), **options)[:, -5:]
    assert torch.equal(long, made.generate(ids, attention_mask=torch.ones(1, 9), **options)[:, -5:])


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_the_source_is_untouched(family, kind):
    model = tiny(family, kind, {})
    before, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    cut(family, model, random_plan(family, model, 3))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.config.to_dict() == config
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()), "no hook stays behind"


def test_unknown_models_are_refused_with_the_list():
    with pytest.raises(ModelError, match="type 'mamba' are not supported. Supported types: .*llama, mistral, qwen2"):
        families.family_of(MambaConfig())


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_a_single_cut_layer_equals_the_layer_of_a_cut_model(family, kind):
    model = family.tailor(tiny(family, kind, {}))
    moments = gram.collect(family, model, rows(model), mlp=False)
    plan = random_plan(family, model, 7)
    layers = list(plan.source.layers)
    layers[1] = plan.target.layers[1]
    keep = tuple(plan.keep[1] if index == 1 else LayerKeep() for index in range(len(layers)))
    want = logits(
        reshape(family, model, replace(plan, target=plan.target.with_layers(tuple(layers)), keep=keep), moments)
    )
    before = logits(model)
    with family.replaced(model, 1, reshape_layer(family, model, 1, layers[1], keep[1], moments[1])):
        assert torch.equal(logits(model), want)
    assert torch.equal(logits(model), before), "the model's own layer is back"


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_refitting_lowers_the_error_of_every_layer(family, kind):
    model = family.tailor(tiny(family, kind, {}))
    made = cut(family, model, random_plan(family, model, 3))
    healed, found = refit(family, model, made, rows(model))
    for block, whole, layer in zip(family.blocks(made), family.blocks(model), found.layers, strict=True):
        parts = {"attention"} if block.down is None else {"attention", "mlp"}
        if block.inner and block.inner[0].weight.shape == whole.inner[0].weight.shape:
            parts |= {"channels"}
        assert set(layer) == parts, "every part of a layer has its gain"
        for gain in layer.values():
            assert gain.error_after <= gain.error_before + 1e-9
    stream = family.embed(model, rows(model))
    for index, context in enumerate(family.layer_contexts(model, rows(model))):
        stream = family.run_layer(model, index, stream, context)
    answers = family.logits(model, family.answering(stream, rows(model)))
    assert torch.allclose(answers, logits(model), atol=1e-5), "layer by layer is the whole"
    assert torch.isfinite(logits(healed)).all()


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_blocks_say_what_layers_do(family, kind):
    model = family.tailor(tiny(family, kind, {}))
    stream, contexts = family.embed(model, rows(model)), family.layer_contexts(model, rows(model))
    for index, (block, context) in enumerate(zip(family.blocks(model), contexts, strict=True)):
        end = block(stream, context)
        stream = family.run_layer(model, index, stream, context)
        assert torch.allclose(end, stream, atol=1e-5), f"layer {index} by its parts"


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_a_tailored_model_gives_its_attention_weights(family, kind):
    model = tiny(family, kind, {})
    with torch.no_grad():
        options = dict(**family.arguments(rows(model)), output_attentions=True, **family.quiet)
        want, got = (found(**options) for found in (model, family.tailor(model)))
    kinds = [name for name in want if name.endswith("attentions")]
    assert kinds == [name for name in got if name.endswith("attentions")] != []
    assert sum(len(want[name]) for name in kinds) == len(family.shape_of(model.config).layers)
    for name in kinds:
        assert all(torch.equal(a, b) for a, b in zip(want[name], got[name], strict=True)), name


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_every_unit_is_priced(family, kind):
    model = family.tailor(tiny(family, kind, {}))
    if not family.shape_of(model.config).cached:
        pytest.skip("encoders are priced by their tasks")
    ids = rows(model)
    moments = gram.collect(family, model, ids, mlp=True)
    curves, orders = sensitivity.measure(family, model, ids, moments, True, 0, task=tasks.of(model, None))
    kinds = {curve.kind for curve in curves}
    assert {"damage.qk_projected", "damage.v", "damage.mlp", "damage.heads", "damage.kv_heads"} <= kinds
    assert ("damage.qk_pairs" in kinds) == family.shape_of(model.config).grain.rotary, "pairs where pairs can go"
    for curve in curves:
        for row in curve.values:
            assert row[0] == 0 and all(value >= 0 for value in row), f"{curve.kind}: nothing lost costs nothing"
    for order, shape in zip(orders, family.shape_of(model.config).layers, strict=True):
        assert sorted(order.get("mlp", [()])[0]) == list(range(shape.mlp_width))
