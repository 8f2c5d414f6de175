"""Tiny random models of every family for tests, with random plans, what a cut must equal, and ways to load them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from headwise import families
from headwise.cuts import _select, reshape, save
from headwise.cuts._dims import pair_columns
from headwise.linalg import balanced, value_basis
from headwise.probes import gram
from headwise.types import LayerKeep, Plan

SHARING = {"gqa": {}, "mha": {"num_key_value_heads": 4}, "mqa": {"num_key_value_heads": 1}}
FACTORS = [1.0, 1.1, 1.3, 1.7, 2.0, 2.5, 3.0, 4.0]
LONGROPE = {"rope_type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS[::-1], "rope_theta": 1e4}
# model_type -> name -> changes to its tiny model. Only what can differ: all rotary decoders share the code for head
# sharing and tied words, so Llama stands for them, with Phi-3 (fused heads) and OLMo 2 (a norm over all heads).
MORE: dict[str, dict[str, dict]] = {
    "llama": {**SHARING, "tied": {"tie_word_embeddings": True}, "biases": {"attention_bias": True, "mlp_bias": True}},
    "mistral": {"gqa": {}, "window": {"sliding_window": 6}},
    "qwen2": {"gqa": {}},
    "qwen3": {"gqa": {}, "biases": {"attention_bias": True}, "no windows": {"use_sliding_window": False}},
    "phi3": {
        **SHARING,
        "window": {"sliding_window": 6},
        "partial rotary": {"partial_rotary_factor": 0.5},
        "longrope": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 8},
    },
    "smollm3": {"gqa": {}, "no windows": {"use_sliding_window": False}, "all rotary": {"no_rope_layers": [1, 1, 1]}},
    "olmo2": {**SHARING, "biases": {"attention_bias": True}},
    "gemma": {"gqa": {}, "untied": {"tie_word_embeddings": False}},
    "gemma2": {
        "gqa": {},
        "no windows": {"layer_types": ["full_attention"] * 3},
        "hard caps": {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.5},
        "no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    },
    "gemma3_text": {
        "gqa": {},
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


def written(family, ids):
    """The tokens of rows that the model writes, as `generate` returns them."""
    return list(family.arguments(ids).values())[-1]


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


def value_projectors(o_weight, gram_z, old, new, keep):
    """Per kept head: projection onto the kept value directions, as the refitted output projection sees them."""
    heads = list(keep.query_heads)
    o_kept = o_weight.detach().view(len(o_weight), old.query_heads, old.v_dim)[:, heads].flatten(1)
    gram = gram_z[heads]
    p = value_basis(gram, o_kept, new.kv_heads)[0][..., : new.v_dim].repeat_interleave(new.queries_per_group, 0)
    return (p @ torch.linalg.solve(p.mT @ gram @ p, p.mT @ gram)).float()


def masked(family, model, plan, moments):
    """The source with the same units masked: heads, rotary pairs, directions and channels."""
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


def save_all(folder, made):
    """Save models (name -> family and model), each with what it says to its example rows."""
    for kind, (family, model) in made.items():
        model = save(family, model, FakeTokenizer(), folder / kind, portable=False)
        torch.save({"inputs": family.arguments(rows(model)), "want": logits(model)}, folder / f"{kind}.pt")
    autos = {kind: families.auto_class_of(model) for kind, (_, model) in made.items()}
    (folder / "kinds.json").write_text(json.dumps(autos))


def load_elsewhere(name, folder):
    """Let a fresh process load all models of a folder and compare what they say."""
    environment = {**os.environ, "HF_MODULES_CACHE": str(folder / "modules")}
    done = subprocess.run(
        [sys.executable, "-c", LOADERS[name], str(folder)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, f"{name}: {done.stderr[-2000:]}"
