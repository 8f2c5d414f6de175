"""The contract of every family, on tiny random models: what a user of a reshaped model relies on."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwise import families
from headwise.checks.exactness import cache_bytes_per_token
from headwise.cost import kv_bytes_per_token, parameters
from headwise.cuts import reshape, save
from headwise.probes import gram
from headwise.types import LayerKeep, LayerShape, Plan

VARIANTS = [
    pytest.param(family, kind, changes, id=f"{kind}-{name}")
    for family in families.known()
    for kind in family.MODEL_TYPES
    for name, changes in {
        "gqa": {},
        "mha": {"num_key_value_heads": 4},
        "mqa": {"num_key_value_heads": 1},
        "tied": {"tie_word_embeddings": True},
    }.items()
]
VARIANTS += [
    pytest.param(families.known()[0], "llama", {"attention_bias": True, "mlp_bias": True}, id="llama-biases"),
    pytest.param(families.known()[0], "mistral", {"sliding_window": 6}, id="mistral-window"),
]
IDS = torch.arange(40).reshape(2, 20) % 90 + 3


def tiny(family, kind, changes):
    model = family.tiny(kind, **changes)
    model.config._attn_implementation = "eager"
    return model


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def random_plan(family, model, seed, portable=False):
    """A random legal plan of every unit kind, with random kept units."""
    draw = random.Random(seed)
    source = family.shape_of(model.config)
    grain, targets, keeps = source.grain, [], []
    for shape in source.layers:
        groups = draw.randint(1, shape.kv_heads)
        per_group = draw.randint(1, shape.queries_per_group)
        width = draw.choice(grain.qk_sizes(shape.qk_width))
        dim = draw.choice([size for size in grain.qk_sizes(shape.qk_width) if size <= width])
        target = LayerShape(
            query_heads=groups * per_group,
            kv_heads=groups,
            qk_width=width,
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
        keeps.append(
            LayerKeep(
                query_heads=tuple(heads),
                kv_heads=tuple(kept),
                rotary_pairs=tuple(tuple(sorted(draw.sample(range(shape.qk_width // 2), width // 2))) for _ in kept),
                mlp_channels=tuple(sorted(draw.sample(range(shape.mlp_width), target.mlp_width))),
            )
        )
        targets.append(target)
    return Plan("tiny", source, source.with_layers(tuple(targets)), tuple(keeps), "test", (), {}, 0.0, seed)


def cut(family, model, plan):
    tailored = family.tailor(model)
    return reshape(family, tailored, plan, gram.collect(family, tailored, IDS, mlp=False))


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
        columns = pair_columns(keep.rotary_pairs, old.qk_width)
        per_group = old.queries_per_group
        eye = torch.zeros(old.kv_heads, old.qk_width, old.qk_width)
        for g, index in zip(keep.kv_heads, columns, strict=True):
            inner = torch.eye(new.qk_width)
            if new.qk_dim < new.qk_width:
                grams = [_select(moment[name][[g]], index[None]) for name in ("gram_q", "gram_k")]
                p_q, p_k, _ = balanced(*grams)
                inner = (p_q[0, :, : new.qk_dim] @ p_k[0, :, : new.qk_dim].T).float()
            eye[g][index[:, None], index[None]] = inner

        def mask_queries(_module, args, eye=eye, per_group=per_group):
            q, k, v, *rest = args
            return (q @ eye.repeat_interleave(per_group, 0), k, v, *rest)

        seen = torch.zeros(old.query_heads, old.v_dim, old.v_dim)  # what is left of each head's output
        seen[list(keep.query_heads)] = value_projectors(block.attention.o_proj.weight, moment["gram_z"], old, new, keep)
        hooks.append(block.attention.attend.register_forward_pre_hook(mask_queries))
        hooks.append(
            block.attention.attend.register_forward_hook(
                lambda _m, _a, out, seen=seen: (torch.einsum("bthv,hvw->bthw", out[0], seen), out[1])
            )
        )
        channels = torch.zeros(old.mlp_width)
        channels[list(keep.mlp_channels)] = 1
        hooks.append(block.down.register_forward_pre_hook(lambda _m, args, channels=channels: (args[0] * channels,)))
    return other


@pytest.mark.parametrize(("family", "kind", "changes"), VARIANTS)
def test_cutting_equals_masking(family, kind, changes):
    model = tiny(family, kind, changes)
    tailored = family.tailor(model)
    moments = gram.collect(family, tailored, IDS, mlp=False)
    for seed in range(4):
        plan = random_plan(family, model, seed)
        want = logits(masked(family, model, plan, moments))
        got = logits(reshape(family, tailored, plan, moments))
        assert (got - want).abs().max() <= 1e-4 * want.abs().max(), "a cut is a mask that is no longer computed"


@pytest.mark.parametrize(("family", "kind", "changes"), VARIANTS[:4])
def test_values_at_full_rank_change_nothing(family, kind, changes):
    from headwise.cuts._dims import cut_values

    model = family.tailor(tiny(family, kind, changes))
    moments = gram.collect(family, model, IDS, mlp=False)
    tensors, shape = family.state_of(model), family.shape_of(model.config).layers[0]
    layer = family.take_layer(tensors, 0)
    family.put_layer(tensors, 0, cut_values(layer, shape, moments[0]["gram_z"], shape.v_dim))
    turned = family.build(model, family.shape_of(model.config).layers, tensors)
    assert (logits(turned) - logits(model)).abs().max() <= 1e-4 * logits(model).abs().max()


@pytest.mark.parametrize(("family", "kind", "changes"), VARIANTS)
def test_generation_with_any_cache_equals_no_cache(family, kind, changes):
    made = cut(family, tiny(family, kind, changes), random_plan(family, tiny(family, kind, changes), 1))
    made.config._attn_implementation = "sdpa"
    want = IDS[:, :12]
    for _ in range(6):
        want = torch.cat((want, logits(made, want)[:, -1:].argmax(-1)), 1)
    for cache in (None, "static"):
        got = made.generate(
            IDS[:, :12], attention_mask=torch.ones(2, 12), max_new_tokens=6, min_new_tokens=6, do_sample=False,
            cache_implementation=cache, eos_token_id=None, disable_compile=True,
        )  # fmt: skip
        assert torch.equal(got, want), f"cache {cache}"


def test_left_padding_changes_nothing():
    family = families.known()[0]
    made = cut(family, tiny(family, "llama", {}), random_plan(family, tiny(family, "llama", {}), 2))
    made.config._attn_implementation = "sdpa"
    mask = torch.tensor([[0] * 3 + [1] * 9])
    padded = torch.cat((torch.zeros(1, 3, dtype=torch.long), IDS[:1, :9]), 1)
    options = dict(max_new_tokens=5, min_new_tokens=5, do_sample=False, eos_token_id=None)
    long = made.generate(padded, attention_mask=mask, **options)[:, 12:]
    assert torch.equal(long, made.generate(IDS[:1, :9], attention_mask=torch.ones(1, 9), **options)[:, 9:])


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10_000))
def test_gradients_reach_every_parameter(seed):
    family = families.known()[0]
    model = tiny(family, "llama", {})
    made = cut(family, model, random_plan(family, model, seed)).train()
    made.gradient_checkpointing_enable()
    made(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())


def test_the_source_is_untouched():
    family = families.known()[0]
    model = tiny(family, "qwen2", {})
    before, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    cut(family, model, random_plan(family, model, 3))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.config.to_dict() == config
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()), "no hook stays behind"


class FakeTokenizer:
    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


AUTO = "from transformers import AutoModelForCausalLM as A"
LOADERS = {
    "with headwise": f"import headwise; {AUTO}; m = A.from_pretrained(sys.argv[1])",
    "headwise last": f"{AUTO}; import headwise; m = A.from_pretrained(sys.argv[1])",
    "without headwise": f"{AUTO}; m = A.from_pretrained(sys.argv[1], trust_remote_code=True)",
}


@pytest.mark.parametrize("kind", families.known()[0].MODEL_TYPES)
def test_a_saved_model_loads_in_a_fresh_process(kind, tmp_path, monkeypatch):
    family = families.known()[0]
    model = tiny(family, kind, {})
    made = save(
        family, cut(family, model, random_plan(family, model, 5)), FakeTokenizer(), tmp_path / "model", portable=False
    )
    torch.save({"ids": IDS, "logits": logits(made)}, tmp_path / "want.pt")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    for name, line in LOADERS.items():
        check = f"import sys, torch; {line}; w = torch.load(sys.argv[2]); m.config._attn_implementation = 'eager'; "
        check += "assert (m(w['ids']).logits - w['logits']).abs().max() < 1e-4"
        done = subprocess.run(
            [sys.executable, "-c", check, str(tmp_path / "model"), str(tmp_path / "want.pt")],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{kind} {name}: {done.stderr[-800:]}"


def test_unknown_models_are_refused_with_the_list():
    from transformers import OPTConfig

    from headwise.errors import ModelError

    with pytest.raises(ModelError, match="type 'opt' are not supported. Supported types: llama, mistral, qwen2"):
        families.family_of(OPTConfig())


@pytest.mark.parametrize("kind", families.known()[0].MODEL_TYPES)
def test_a_single_cut_layer_equals_the_layer_of_a_cut_model(kind):
    from headwise.cuts import reshape_layer

    family = families.known()[0]
    model = family.tailor(tiny(family, kind, {}))
    moments = gram.collect(family, model, IDS, mlp=False)
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


def test_a_cut_model_compiles_without_a_break():
    family = families.known()[0]
    model = tiny(family, "llama", {})
    made = cut(family, model, random_plan(family, model, 5))
    made.config._attn_implementation = "sdpa"
    with torch.no_grad():
        got = torch.compile(made, backend="eager", fullgraph=True)(IDS, use_cache=False).logits
    assert torch.allclose(got, logits(made), atol=1e-5)
