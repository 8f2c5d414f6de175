"""The contract of the family `timm`. Needs timm; `make test` says how it is found."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

try:
    import timm
except Exception as error:  # torchvision beside another torch raises more than ImportError
    pytest.skip(f"timm cannot be imported ({error})", allow_module_level=True)

from tiny_models import load_elsewhere, logits, masked, random_plan, save_all

import headwise
from headwise import families, tasks
from headwise.cost import parameters
from headwise.cuts import reshape, reshape_layer
from headwise.cuts._dims import cut_values
from headwise.errors import ModelError
from headwise.families.timm import FAMILY as family
from headwise.heal.refit import refit
from headwise.probes import gram, sensitivity
from headwise.types import GONE, LayerKeep, Plan

EVEN = {"mlp_ratio": 2.0}  # a width at which a fused product and its two halves take the same path to the last bit
EVA02 = {"architecture": "eva02_tiny_patch14_224", **EVEN}
VARIANTS = {
    "vit": {},
    "bare": {"head": "AutoModel"},
    "registers, pooled": {"reg_tokens": 2, "global_pool": "avg", "class_token": False},
    "attention pool": {"global_pool": "map"},
    "qk norm, layer scale": {"qk_norm": True, "init_values": 0.3},
    "no biases": {"qkv_bias": False, "proj_bias": False},
    "drop path": {"drop_path_rate": 0.2, "attn_drop_rate": 0.1, "proj_drop_rate": 0.1},
    "post-norm": {"architecture": "vit_base_patch16_rpn_224"},
    "deit distilled": {"architecture": "deit_tiny_distilled_patch16_224"},
    "deit3": {"architecture": "deit3_small_patch16_224"},
    "eva": {"architecture": "eva_large_patch14_196"},
    "eva02": EVA02,
    "eva02, norm of channels": {"architecture": "eva02_base_patch14_224", **EVEN},
    "dinov3": {"architecture": "vit_small_patch16_dinov3"},
}
ALL = pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
FEW = ("vit", "eva02", "post-norm", "deit3")
SOME = pytest.mark.parametrize("changes", [VARIANTS[name] for name in FEW], ids=FEW)


def tiny(changes):
    return family.tiny("timm_wrapper", **changes)  # computes plain attention, and so does what is made of it


def images(model):
    return family.example(model.config)


def said(model):
    return logits(model, images(model))


def cut(model, plan):
    tailored = family.tailor(model)
    return reshape(family, tailored, plan, gram.collect(family, tailored, images(model), mlp=False))


@ALL
def test_identity_plan_gives_identical_logits(changes):
    model = tiny(changes)
    shape = family.shape_of(model.config)
    plan = Plan("tiny", shape, shape, tuple(LayerKeep() for _ in shape.layers), "test", (), {}, 0.0, 0)
    made = cut(model, plan)
    assert torch.equal(said(model), said(made)), "bit for bit, in float32 eager"
    assert sum(p.numel() for p in made.parameters()) == sum(p.numel() for p in model.parameters())


@ALL
def test_cutting_equals_masking_and_formulas_equal_counts(changes):
    model = tiny(changes)
    tailored = family.tailor(model)
    moments = gram.collect(family, tailored, images(model), mlp=False)
    for seed in range(2):
        plan = random_plan(family, model, seed)
        made = reshape(family, tailored, plan, moments)
        want = said(masked(family, model, plan, moments))
        assert (said(made) - want).abs().max() <= 1e-4 * want.abs().max(), "a cut is a mask no longer computed"
        assert sum(p.numel() for p in made.parameters()) == parameters(plan.target)
        assert family.shape_of(made.config).layers == plan.target.layers, "the configuration says what was built"


def test_values_at_full_rank_change_nothing():
    model = family.tailor(tiny(EVA02))
    moments = gram.collect(family, model, images(model), mlp=False)
    tensors, shape = family.state_of(model), family.shape_of(model.config).layers
    layer = family.take_layer(tensors, 0, model.config)
    family.put_layer(tensors, 0, cut_values(layer, shape[0], moments[0]["gram_z"], shape[0].v_dim), model.config)
    assert (said(family.build(model, shape, tensors)) - said(model)).abs().max() <= 1e-4 * said(model).abs().max()


def test_queries_and_keys_fold_where_nothing_lies_between():
    folds = {name: family.shape_of(tiny(changes).config).grain.folds for name, changes in VARIANTS.items()}
    assert folds["vit"] and folds["eva"] and not folds["eva02"] and not folds["qk norm, layer scale"]


@SOME
def test_gradients_reach_every_parameter(changes):
    model = tiny(changes)
    made = cut(model, random_plan(family, model, 1)).train()
    made.gradient_checkpointing_enable()
    made(images(model), labels=torch.tensor([1, 2])).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())


@SOME
def test_the_source_is_untouched(changes):
    model = tiny(changes)
    before, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    cut(model, random_plan(family, model, 3))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.config.to_dict() == config


@SOME
def test_layer_by_layer_is_the_whole_and_refitting_helps(changes):
    model = family.tailor(tiny(changes))
    rows = images(model)
    healed, found = refit(family, model, cut(model, random_plan(family, model, 3)), rows)
    for layer in found.layers:
        assert layer["attention"].error_after <= layer["attention"].error_before + 1e-9
        assert layer["mlp"].error_after <= layer["mlp"].error_before + 1e-9
    assert torch.isfinite(said(healed)).all()
    stream = family.embed(model, rows)
    for index, (block, context) in enumerate(
        zip(family.blocks(model), family.layer_contexts(model, rows), strict=True)
    ):
        x = stream if block.attention_norm is None else block.attention_norm(stream)
        q, k, v = block.attention.heads(x, context.get("position_embeddings"))
        middle = block.middle(stream, block.attention.attend(q, k, v, None)[0].flatten(2))
        end = block.end(middle, block.channels(stream, middle))
        stream = family.run_layer(model, index, stream, context)
        assert torch.allclose(end, stream, atol=1e-5), f"layer {index} by its parts"
    assert torch.allclose(family.logits(model, stream), said(model), atol=1e-5)


@SOME
def test_a_single_cut_layer_equals_the_layer_of_a_cut_model(changes):
    model = family.tailor(tiny(changes))
    moments = gram.collect(family, model, images(model), mlp=False)
    plan = random_plan(family, model, 7)
    layers = (plan.source.layers[0], plan.target.layers[1], plan.source.layers[2])
    keep = (LayerKeep(), plan.keep[1], LayerKeep())
    want = said(reshape(family, model, replace(plan, target=plan.target.with_layers(layers), keep=keep), moments))
    with family.replaced(model, 1, reshape_layer(family, model, 1, layers[1], keep[1], moments[1])):
        assert torch.equal(said(model), want)


@SOME
def test_a_removed_layer_is_one_that_is_skipped(changes):
    model = family.tailor(tiny({**changes, "depth": 5}))  # as many layers as classes: no list is mistaken
    rows, layers = images(model), family.shape_of(model.config).layers
    shorter = family.build(model, (layers[0], GONE, *layers[2:]), family.state_of(model))
    stream = family.embed(model, rows)
    for index, context in enumerate(family.layer_contexts(model, rows)):
        if index != 1:
            stream = family.run_layer(model, index, stream, context)
    assert torch.allclose(said(shorter), family.logits(model, stream), atol=1e-5)
    assert sum(p.numel() for p in shorter.parameters()) == parameters(family.shape_of(shorter.config))
    assert shorter.config.num_labels == 5 and shorter.config.headwise["kept"] == [0, 2, 3, 4]
    healed, _ = refit(family, model, shorter, rows)
    assert (said(healed) - said(model)).square().mean() <= (said(shorter) - said(model)).square().mean()


def test_a_cut_model_compiles_without_a_break():
    model = tiny(EVA02)
    made = cut(model, random_plan(family, model, 5))
    made.config._attn_implementation = "sdpa"
    with torch.no_grad():
        got = torch.compile(made, backend="eager", fullgraph=True)(images(model)).logits
    assert torch.allclose(got, said(made), atol=1e-5)


def test_a_saved_model_loads_in_a_fresh_process(tmp_path):
    model = tiny(EVA02)
    save_all(tmp_path, {"eva02": (family, cut(model, random_plan(family, model, 5)))})
    load_elsewhere("without headwise", tmp_path)


SIZES = dict(embed_dim=32, depth=3, num_heads=4, img_size=16, patch_size=4)


@pytest.fixture
def folder(tmp_path):
    """A model as timm itself saves it."""
    torch.manual_seed(0)
    overlay = {"input_size": (3, 16, 16), "crop_pct": 1.0}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, pretrained_cfg_overlay=overlay, **SIZES)
    timm.models.save_for_hf(model, tmp_path / "source", model_args=SIZES, safe_serialization=True)
    return tmp_path / "source"


def test_what_timm_saved_goes_the_whole_way(folder, tmp_path):
    draw = np.random.default_rng(0)
    np.savez(tmp_path / "images.npz", x=draw.integers(0, 255, (60, 16, 16, 3), np.uint8), y=draw.integers(0, 5, 60))
    dossier = headwise.run(
        str(folder), budget="params=80%", data=str(tmp_path / "images.npz"), out=tmp_path / "run", swap_tokens=0
    )
    assert all(check.passed for check in dossier.verdict.checks), "reloading in a fresh process among them"
    assert {"kl", "class_agreement", "accuracy"} <= set(dossier.verdict.quality)
    assert (size := dossier.verdict.to_json()["size"])["parameters_after"] <= 0.8 * size["parameters_before"]


def test_images_of_another_size_are_refused(folder):
    settings = json.loads((folder / "config.json").read_text())
    settings["pretrained_cfg"]["input_size"] = [3, 32, 32]
    (folder / "config.json").write_text(json.dumps(settings))
    model, processor = families.load(str(folder))
    with pytest.raises(ModelError, match="images are prepared as 32x32, but vit_tiny_patch16_224 takes 16x16"):
        tasks.of(model, processor, str(folder))


def test_names_lead_to_the_hub():
    assert families.locate("timm:vit_tiny_patch16_224.augreg_in21k")[0] == "timm/vit_tiny_patch16_224.augreg_in21k"
    assert families.locate("timm:deit_tiny_patch16_224")[0] == "timm/deit_tiny_patch16_224.fb_in1k", "its own tag"
    with pytest.raises(ModelError, match="has no weights for 'deit_tiny_patch16'. Did you mean deit_tiny_patch16_224"):
        families.locate("timm:deit_tiny_patch16")


def test_every_unit_is_priced_in_what_the_model_is_for():
    model = family.tailor(tiny(EVA02))
    rows = family.example(model.config, 6)
    task = tasks.of(model, None, "")
    moments = gram.collect(family, model, rows, mlp=True)
    curves, _ = sensitivity.measure(family, model, rows, moments, True, 0, task=task)
    kinds = {curve.kind for curve in curves}
    assert kinds == {f"damage.{unit}" for unit in ("qk_projected", "v", "mlp", "heads", "kv_heads")}
    assert all(row[0] == 0 and max(row) > 0 for curve in curves if curve.kind != "damage.heads" for row in curve.values)


REFUSED = {
    "swin_tiny_patch4_window7_224": "it is a SwinTransformer, no plain Vision Transformer",
    "convnext_nano": "it is a ConvNeXt",
    "vit_base_patch16_rope_mixed_224": "its rotary positions were learned for every head",
    "eva02_base_patch16_clip_224": "a norm lies between its heads and their output projection",
    "vit_nonsense": "knows no model called 'vit_nonsense'",
}


@pytest.mark.parametrize(("architecture", "reason"), REFUSED.items(), ids=REFUSED)
def test_what_is_not_supported_is_refused_with_the_reason(architecture, reason):
    from transformers import TimmWrapperConfig

    with pytest.raises(ModelError, match=reason) as refusal:
        family.shape_of(TimmWrapperConfig(architecture=architecture))
    assert "vit_*, deit_*" in str(refusal.value) or "knows no model" in str(refusal.value), "what is supported is named"
