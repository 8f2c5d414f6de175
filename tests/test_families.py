"""The contract of every family, on tiny random models: what a user of a reshaped model relies on."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwise import families, tasks
from headwise.checks.exactness import cache_bytes_per_token
from headwise.cost import kv_bytes_per_token, parameters
from headwise.cuts import reshape, save
from headwise.probes import gram
from headwise.types import LayerKeep, Plan

SHARING = {"gqa": {}, "mha": {"num_key_value_heads": 4}, "mqa": {"num_key_value_heads": 1}}
FACTORS = [1.0, 1.1, 1.3, 1.7, 2.0, 2.5, 3.0, 4.0]
LONGROPE = {"rope_type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS[::-1], "rope_theta": 1e4}
MORE: dict[str, dict[str, dict]] = {  # model_type -> name -> changes to its tiny model
    "llama": {**SHARING, "tied": {"tie_word_embeddings": True}, "biases": {"attention_bias": True, "mlp_bias": True}},
    "mistral": {**SHARING, "tied": {"tie_word_embeddings": True}, "window": {"sliding_window": 6}},
    "qwen2": {**SHARING, "tied": {"tie_word_embeddings": True}},
    "qwen3": {
        **SHARING,
        "tied": {"tie_word_embeddings": True},
        "biases": {"attention_bias": True},
        "no windows": {"use_sliding_window": False},
    },
    "phi3": {
        **SHARING,
        "tied": {"tie_word_embeddings": True},
        "window": {"sliding_window": 6},
        "partial rotary": {"partial_rotary_factor": 0.5},
        "longrope": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 8},
    },
    "smollm3": {
        **SHARING,
        "tied": {"tie_word_embeddings": True},
        "biases": {"attention_bias": True, "mlp_bias": True},
        "no windows": {"use_sliding_window": False},
        "all rotary": {"no_rope_layers": [1, 1, 1]},
    },
    "olmo2": {**SHARING, "tied": {"tie_word_embeddings": True}, "biases": {"attention_bias": True}},
    "gemma": {**SHARING, "untied": {"tie_word_embeddings": False}},
    "gemma2": {
        **SHARING,
        "untied": {"tie_word_embeddings": False},
        "no windows": {"layer_types": ["full_attention"] * 3},
        "hard caps": {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.5},
        "no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    },
    "gemma3_text": {
        **SHARING,
        "untied": {"tie_word_embeddings": False},
        "no windows": {"layer_types": ["full_attention"] * 3},
        "capped": {"final_logit_softcapping": 0.5},
    },
    "gpt2": {
        "plain": {},
        "scale by layer": {"scale_attn_by_inverse_layer_idx": True},
        "n_inner": {"n_inner": 96},
        "untied": {"tie_word_embeddings": False},
    },
    "opt": {
        "plain": {},
        "post-norm": {"do_layer_norm_before": False},
        "projected embeddings": {"word_embed_proj_dim": 48},
        "no biases": {"enable_bias": False, "layer_norm_elementwise_affine": False},
        "untied": {"word_embed_proj_dim": 48, "tie_word_embeddings": False},
        "odd scale": {"num_attention_heads": 2, "hidden_size": 48, "_remove_final_layer_norm": True},
    },
    "gpt_neox": {
        "plain": {},
        "full rotary": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
        "sequential": {"use_parallel_residual": False},
        "no biases": {"attention_bias": False},
        "tied": {"tie_word_embeddings": True},
    },
    **{
        kind: {
            "plain": {},
            "bare": {"head": "AutoModel"},
            "classifier": {"head": "AutoModelForSequenceClassification", "num_labels": 3},
            "untied": {"tie_word_embeddings": False},
        }
        for kind in ("bert", "roberta", "distilbert")
    },
    "modernbert": {
        "plain": {},
        "bare": {"head": "AutoModel"},
        "classifier": {"head": "AutoModelForSequenceClassification", "num_labels": 3},
        "mean": {"head": "AutoModelForSequenceClassification", "classifier_pooling": "mean", "classifier_bias": True},
        "biases": {"attention_bias": True, "mlp_bias": True, "norm_bias": True},
        "untied": {"tie_word_embeddings": False, "decoder_bias": False},
        "all local": {"layer_types": ["sliding_attention"] * 3},
    },
    "vit": {
        "plain": {},
        "bare": {"head": "AutoModel"},
        "pooled narrower": {"head": "AutoModel", "pooler_output_size": 24},
        "no biases": {"qkv_bias": False},
        "not square": {"image_size": (16, 24), "patch_size": (4, 8), "num_channels": 1},
    },
    "deit": {"plain": {}, "bare": {"head": "AutoModel"}, "no biases": {"qkv_bias": False}},
    "deit_with_teacher": {"plain": {}},
    "dinov2": {"plain": {}, "bare": {"head": "AutoModel"}, "mask token": {"use_mask_token": True}},
    "dinov2_swiglu": {"plain": {}, "bare": {"head": "AutoModel"}},
    "clip": {"plain": {}, "other labels": {"num_labels": 5}},
    "t5": {
        "v1.0": {},
        "v1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "own_head": True},
        "deep decoder": {"num_decoder_layers": 3, "d_kv": 12},
    },
    "bart": {
        "plain": {},
        "uneven": {"decoder_layers": 3, "decoder_attention_heads": 2, "decoder_ffn_dim": 96},
        "scaled": {"scale_embedding": True, "tie_word_embeddings": False, "activation_function": "relu"},
    },
    "whisper": {
        "plain": {},
        "uneven": {"decoder_layers": 3, "decoder_attention_heads": 2, "decoder_ffn_dim": 96},
        "untied": {"tie_word_embeddings": False, "activation_function": "relu"},
    },
}
HERE = [family for family in families.known() if not family.package]  # others have tests of their own
VARIANTS = [
    pytest.param(family, kind, changes, id=f"{kind}-{name}")
    for family in HERE
    for kind in family.model_types
    for name, changes in MORE.get(kind, {"plain": {}}).items()
]
KINDS = [pytest.param(family, kind, id=kind) for family in HERE for kind in family.model_types]
IDS = torch.arange(40).reshape(2, 20) % 90 + 3


def rows(model):
    """What a model reads: two rows of tokens, or two images."""
    return families.family_of(model.config).example(model.config)


def tiny(family, kind, changes):
    model = family.tiny(kind, **changes)
    return attending(model, "eager")


def attending(model, how):
    """The model on another kernel; stacks may hold configurations of their own."""
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = how
    return model


def logits(model, ids=None):
    """What a model says; encoders may be bare."""
    with torch.no_grad():
        return families.family_of(model.config).run(model, rows(model) if ids is None else ids)


def needs_a_cache(family, model):
    if not family.shape_of(model.config).cached:
        pytest.skip(f"{family.name} models read a whole text at once")


def random_plan(family, model, seed, least=0.0):
    """A random legal plan of every unit kind that the family can cut, with random kept units.

    Heads keep at least a share `least` of their dimensions.
    """
    draw = random.Random(seed)
    source = family.shape_of(model.config)
    grain, targets, keeps = source.grain, [], []
    first = source.layers[0]
    grain = replace(
        grain,
        qk_floor=max(grain.qk_floor, int(least * first.qk_width)),
        v_floor=max(grain.v_floor, int(least * first.v_dim)),
    )
    for shape in source.layers:
        groups = draw.randint(1, shape.kv_heads) if "kv_heads" in family.units else shape.kv_heads
        per_group = draw.randint(1, shape.queries_per_group) if "heads" in family.units else shape.queries_per_group
        width = draw.choice(grain.qk_sizes(shape.qk_width)) if grain.rotary else shape.qk_width
        dim = draw.choice([size for size in grain.qk_sizes(shape.qk_width) if size <= width])
        target = replace(
            shape,
            query_heads=groups * per_group,
            kv_heads=groups,
            qk_width=dim if grain.folds else width,
            qk_dim=dim,
            v_dim=draw.choice(grain.v_sizes(shape.v_dim)),
            mlp_width=draw.choice(grain.mlp_sizes(shape.mlp_width)),
        )
        kept = sorted(draw.sample(range(shape.kv_heads), groups))
        heads = [
            g * shape.queries_per_group + h
            for g in kept
            for h in sorted(draw.sample(range(shape.queries_per_group), per_group))
        ]
        pairs = tuple(tuple(sorted(draw.sample(range(shape.qk_width // 2), width // 2))) for _ in kept)
        keeps.append(
            LayerKeep(
                query_heads=tuple(heads),
                kv_heads=tuple(kept),
                rotary_pairs=pairs if grain.rotary else None,
                mlp_channels=tuple(sorted(draw.sample(range(shape.mlp_width), target.mlp_width))),
            )
        )
        targets.append(target)
    return Plan("tiny", source, source.with_layers(tuple(targets)), tuple(keeps), "test", (), {}, 0.0, seed)


def cut(family, model, plan):
    tailored = family.tailor(model)
    return reshape(family, tailored, plan, gram.collect(family, tailored, rows(model), mlp=False))


@pytest.mark.parametrize(("family", "kind", "changes"), VARIANTS)
def test_identity_plan_gives_identical_logits(family, kind, changes):
    model = tiny(family, kind, changes)
    shape = family.shape_of(model.config)
    plan = Plan("tiny", shape, shape, tuple(LayerKeep() for _ in shape.layers), "test", (), {}, 0.0, 0)
    assert torch.equal(logits(model), logits(cut(family, model, plan))), "bit for bit, in float32 eager"


@pytest.mark.parametrize(("family", "kind", "changes"), VARIANTS)
def test_formulas_equal_what_is_counted(family, kind, changes):
    model = tiny(family, kind, changes)
    for seed in range(3):
        plan = random_plan(family, model, seed)
        made = cut(family, model, plan)
        assert sum(p.numel() for p in made.parameters()) == parameters(plan.target)
        assert cache_bytes_per_token(made, plan.target.element_bytes) == kv_bytes_per_token(plan.target)
        assert family.shape_of(made.config).layers == plan.target.layers, "the configuration says what was built"


def value_projectors(o_weight, gram_z, old, new, keep):
    """Per kept head: projection onto the kept value directions, as the refitted output projection sees them."""
    from headwise.linalg import value_basis

    heads = list(keep.query_heads)
    o_kept = o_weight.detach().view(len(o_weight), old.query_heads, old.v_dim)[:, heads].flatten(1)
    gram = gram_z[heads]
    p = value_basis(gram, o_kept, new.kv_heads)[0][..., : new.v_dim].repeat_interleave(new.queries_per_group, 0)
    return (p @ torch.linalg.solve(p.mT @ gram @ p, p.mT @ gram)).float()


def masked(family, model, plan, moments):
    """The source with the same units masked: heads, rotary pairs, directions and channels."""
    from headwise.cuts import _select
    from headwise.cuts._dims import pair_columns
    from headwise.linalg import balanced

    other = family.tailor(model)
    hooks = []
    for block, old, new, keep, moment in zip(
        family.blocks(other), plan.source.layers, plan.target.layers, plan.keep, moments, strict=True
    ):
        whole = (tuple(range(old.qk_width // 2)),) * new.kv_heads
        columns = pair_columns(keep.rotary_pairs or whole, old.qk_width)
        per_group = old.queries_per_group
        eye = torch.zeros(old.kv_heads, old.qk_width, old.qk_width)
        for g, index in zip(keep.kv_heads, columns, strict=True):
            inner = torch.eye(len(index))
            if new.qk_dim < len(index):
                grams = [_select(moment[name][[g]], index[None]) for name in ("gram_q", "gram_k")]
                p_q, p_k, _ = balanced(*grams)
                inner = (p_q[0, :, : new.qk_dim] @ p_k[0, :, : new.qk_dim].T).float()
            eye[g][index[:, None], index[None]] = inner

        def mask_queries(_module, args, eye=eye, per_group=per_group):
            q, k, v, *rest = args
            return (q @ eye.repeat_interleave(per_group, 0), k, v, *rest)

        seen = torch.zeros(old.query_heads, old.v_dim, old.v_dim)  # what is left of each head's output
        seen[list(keep.query_heads)] = value_projectors(block.output.weight, moment["gram_z"], old, new, keep)
        hooks.append(block.attention.attend.register_forward_pre_hook(mask_queries))
        hooks.append(
            block.attention.attend.register_forward_hook(
                lambda _m, _a, out, seen=seen: (torch.einsum("bthv,hvw->bthw", out[0], seen), out[1])
            )
        )
        if block.down is None:
            continue
        channels = torch.zeros(old.mlp_width)
        channels[list(keep.mlp_channels)] = 1
        hooks.append(block.down.register_forward_pre_hook(lambda _m, args, channels=channels: (args[0] * channels,)))
    return other


@pytest.mark.parametrize(("family", "kind", "changes"), VARIANTS)
def test_cutting_equals_masking(family, kind, changes):
    model = tiny(family, kind, changes)
    tailored = family.tailor(model)
    moments = gram.collect(family, tailored, rows(model), mlp=False)
    for seed in range(4):
        plan = random_plan(family, model, seed)
        want = logits(masked(family, model, plan, moments))
        got = logits(reshape(family, tailored, plan, moments))
        assert (got - want).abs().max() <= 1e-4 * want.abs().max(), "a cut is a mask that is no longer computed"


@pytest.mark.parametrize(("family", "kind", "changes"), VARIANTS)
def test_values_at_full_rank_change_nothing(family, kind, changes):
    from headwise.cuts._dims import cut_values

    model = family.tailor(tiny(family, kind, changes))
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


def written(family, ids):
    """The tokens of rows that the model writes, as `generate` returns them."""
    return list(family.arguments(ids).values())[-1]


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
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10_000))
def test_gradients_reach_every_parameter(family, kind, seed):
    model = tiny(family, kind, {})
    made = cut(family, model, random_plan(family, model, seed)).train()
    made.gradient_checkpointing_enable()
    for each in (model, made):
        family.run(each, rows(model)).square().mean().backward()
    idle = {name for name, p in model.named_parameters() if p.grad is None}  # a head may leave something out
    grads = {name: p.grad for name, p in made.named_parameters() if name not in idle}
    assert len(idle) <= 2 and all(grad is not None and grad.isfinite().all() for grad in grads.values())


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_the_source_is_untouched(family, kind):
    model = tiny(family, kind, {})
    before, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    cut(family, model, random_plan(family, model, 3))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.config.to_dict() == config
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()), "no hook stays behind"


class FakeTokenizer:
    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


LOAD = """
import json, sys, torch
{first}
import transformers
{second}
bad = dict()
for kind, auto in json.load(open(sys.argv[1] + "/kinds.json")).items():
    try:
        model = getattr(transformers, auto).from_pretrained(f"{{sys.argv[1]}}/{{kind}}"{remote})
        model.set_attn_implementation("eager")
        want = torch.load(f"{{sys.argv[1]}}/{{kind}}.pt")
        found = model(**want["inputs"])
        found = next(found[name] for name in ("logits", "image_embeds", "pooler_output") if name in found)
        assert found.shape == want["want"].shape and (found - want["want"]).abs().max() < 1e-4, "says something else"
    except Exception as error:
        bad[kind] = repr(error)[-400:]
assert not bad, bad
"""
LOADERS = {  # a new process that loads every kind of model in a folder
    "with headwise": LOAD.format(first="import headwise", second="", remote=""),
    "headwise last": LOAD.format(first="", second="import headwise", remote=""),
    "without headwise": LOAD.format(first="", second="", remote=", trust_remote_code=True"),
}


def load_elsewhere(name, folder, made):
    """Save models, each with what it says, and let a fresh process load them all and compare."""
    for kind, (family, model) in made.items():
        model = save(family, model, FakeTokenizer(), folder / kind, portable=False)
        torch.save({"inputs": family.arguments(rows(model)), "want": logits(model)}, folder / f"{kind}.pt")
    autos = {kind: families.auto_class_of(model) for kind, (_, model) in made.items()}
    (folder / "kinds.json").write_text(json.dumps(autos))
    environment = {**os.environ, "HF_MODULES_CACHE": str(folder / "modules")}
    done = subprocess.run(
        [sys.executable, "-c", LOADERS[name], str(folder)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, f"{name}: {done.stderr[-2000:]}"


@pytest.mark.parametrize("name", LOADERS)
def test_saved_models_load_in_a_fresh_process(name, tmp_path):
    made = {}
    for family in HERE[:1] if name == "headwise last" else HERE:  # the order of imports is the same story for all
        for kind in family.model_types:
            model = tiny(family, kind, {})
            made[kind] = family, cut(family, model, random_plan(family, model, 5))
    load_elsewhere(name, tmp_path, made)


def test_unknown_models_are_refused_with_the_list():
    from transformers import MambaConfig

    from headwise.errors import ModelError

    with pytest.raises(ModelError, match="type 'mamba' are not supported. Supported types: .*llama, mistral, qwen2"):
        families.family_of(MambaConfig())


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_a_single_cut_layer_equals_the_layer_of_a_cut_model(family, kind):
    from headwise.cuts import reshape_layer

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
def test_a_cut_model_compiles_without_a_break(family, kind):
    model = tiny(family, kind, {})
    made = cut(family, model, random_plan(family, model, 5))
    attending(made, "sdpa")
    torch._dynamo.reset()  # what other families compiled counts against a limit
    with torch.no_grad():
        got = family.run(torch.compile(made, backend="eager", fullgraph=True), rows(made))
    assert torch.allclose(got, logits(made), atol=1e-5)


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_refitting_lowers_the_error_of_every_layer(family, kind):
    from headwise.heal.refit import refit

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
    from headwise.probes import sensitivity

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
