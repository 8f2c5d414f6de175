"""Reducing heads by hooks and fine-tuning against the source: what the experiments on smaller heads rely on."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # experiments/ lies beside the package

from experiments._bench import PARTS
from experiments._finetune import Narrow, Reference, by_activations, by_weights, finetune, narrowed
from experiments._training import minimise

from headwise.cuts import reshape_layer
from headwise.errors import HeadwiseError
from headwise.families.llama import FAMILY as llama
from headwise.probes import gram
from headwise.types import LayerKeep

WAYS = {
    "activations": lambda model, tokens: by_activations(llama, model, tokens),
    "weights": lambda model, tokens: by_weights(llama, model, tokens.shape[1]),
}


@pytest.fixture
def tokens():
    return torch.randint(3, 97, (12, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def source():
    """A tiny model whose heads attend to something: at the usual initialisation all logits are near zero."""
    model = llama.tailor(llama.tiny(num_hidden_layers=2))
    with torch.no_grad():
        for block in llama.blocks(model):
            for name in "qkvo":
                getattr(block.attention, f"{name}_proj").weight.mul_(8)
    return model


def quartered(source, tokens):
    """A copy of the model with a quarter of the value and query/key dimensions in its first layer."""
    shape = llama.shape_of(source.config).layers[0]
    moments = gram.collect(llama, source, tokens, mlp=False)[0]
    layer = reshape_layer(llama, source, 0, replace(shape, qk_dim=4, v_dim=4), LayerKeep(), moments)
    cut = llama.tailor(source)
    cut.model.layers[0] = layer
    return cut


def test_finetuning_lowers_the_kl_and_leaves_the_source_alone(source, tokens):
    before = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    cut, reference = quartered(source, tokens), Reference(llama, source, tokens)
    start = reference.damage(cut).kl
    found = finetune(llama, source, cut, tokens, steps=40, batch_tokens=96, rate=2e-3)
    assert reference.damage(cut).kl < start / 2
    assert found["curve"][0][1] > found["curve"][-1][1] and found["curve"][-1][0] == 40
    assert (found["steps"], found["tokens"], found["rate"]) == (40, 40 * 96, 2e-3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in source.state_dict().items())


def test_same_seed_same_result(source, tokens):
    def trained(seed):
        cut = quartered(source, tokens)
        finetune(llama, source, cut, tokens, steps=3, batch_tokens=96, seed=seed)
        return torch.cat([p.detach().flatten() for p in cut.parameters()])

    first = trained(0)
    assert torch.equal(first, trained(0))
    assert not torch.equal(first, trained(1))


def test_only_the_given_parameters_move(source, tokens):
    cut = quartered(source, tokens)
    before = {name: p.detach().clone() for name, p in cut.named_parameters()}
    asked = [p.requires_grad for p in cut.parameters()]
    chosen = cut.model.layers[0].self_attn.o_proj.weight
    finetune(llama, source, cut, tokens, steps=2, batch_tokens=96, parameters=[chosen])
    moved = [name for name, p in cut.named_parameters() if not torch.equal(p, before[name])]
    assert moved == ["model.layers.0.self_attn.o_proj.weight"]
    assert [p.requires_grad for p in cut.parameters()] == asked
    assert all(p.grad is None for p in cut.parameters())


def test_a_model_that_equals_the_source_stays_where_it_is(source, tokens):
    copy, reference = llama.tailor(source), Reference(llama, source, tokens)
    finetune(llama, source, copy, tokens, steps=5, batch_tokens=96)
    assert reference.damage(copy).kl < 1e-6, "rounding must not be taken for a gradient"


def test_divergence_is_an_error_that_says_what_to_do():
    weight = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(HeadwiseError, match="diverged.*lower the rate, for example to 0.1"):
        minimise(lambda rows: (weight * torch.nan).sum(), [weight], 4, 2, 2, rate=0.3)


@pytest.mark.parametrize("way", WAYS)
def test_full_rank_changes_nothing(source, tokens, way):
    directions = WAYS[way](source, tokens)
    narrows = {layer: Narrow(range(4), directions[layer], 16) for layer in range(2)}
    with torch.no_grad():
        before = llama.run(source, tokens)
        with narrowed(llama.blocks(source), narrows):
            reduced = llama.run(source, tokens)
        after = llama.run(source, tokens)
    torch.testing.assert_close(reduced, before, atol=2e-4, rtol=0)
    assert torch.equal(after, before), "hooks are gone afterwards"


@pytest.mark.parametrize("way", WAYS)
def test_a_head_reduced_by_hooks_is_an_explicit_small_head(source, tokens, way):
    """Its output equals softmax attention with r-dimensional queries, keys and values, read out by its share of W_o."""
    layer, head, dim = 1, 3, 5
    narrow = Narrow((head,), WAYS[way](source, tokens)[layer], dim)
    attention, seen = llama.blocks(source)[layer].attention, {}
    look = attention.attend.register_forward_pre_hook(lambda _m, args: seen.update(q=args[0], k=args[1], v=args[2]))
    with torch.no_grad(), narrowed(llama.blocks(source), {layer: narrow}):
        tell = attention.attend.register_forward_hook(lambda _m, _a, output: seen.update(z=output[0]))
        llama.run(source, tokens)
    look.remove()
    tell.remove()
    q, k, v = seen["q"][:, head], seen["k"][:, head // 2], seen["v"][:, head // 2]
    q_small, k_small, v_small = q @ narrow.q_down[0], k @ narrow.q_up[0].mT, v @ narrow.z_down[0]
    assert q_small.shape[-1] == k_small.shape[-1] == v_small.shape[-1] == dim
    logits = q_small @ k_small.mT * attention.attend.scaling
    later = torch.ones(24, 24, dtype=torch.bool).triu(1)
    small = logits.masked_fill(later, float("-inf")).softmax(-1) @ v_small
    torch.testing.assert_close(seen["z"][:, :, head], small @ narrow.z_up[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("part", PARTS)
def test_fewer_dimensions_cost_more_down_to_none(source, tokens, part):
    directions = by_activations(llama, source, tokens)
    reference = Reference(llama, source, tokens)
    costs = []
    for dim in (16, 4, 0):
        with narrowed(llama.blocks(source), {0: Narrow((1,), directions[0], dim, part)}):
            costs.append(reference.damage(source, 0).kl)
    assert costs[0] < 1e-6 < costs[1] < costs[2]


def test_damage_from_a_layer_on_equals_damage_from_the_start(source, tokens):
    reference = Reference(llama, source, tokens)
    narrow = Narrow((0, 2), by_activations(llama, source, tokens)[1], 3)
    with narrowed(llama.blocks(source), {1: narrow}):
        short, whole = reference.damage(source, 1), reference.damage(source)
    assert short.kl > 1e-4
    assert short == pytest.approx(whole, rel=1e-3, abs=1e-6)


def test_calibrated_directions_lose_less_than_the_weights_own(source, tokens):
    """On the very text they were taken from, at the layer's output: what truncation along moments promises."""
    reference, costs = Reference(llama, source, tokens), {}
    for way, directions in WAYS.items():
        narrow = Narrow(range(4), directions(source, tokens)[1], 4, "v")
        with narrowed(llama.blocks(source), {1: narrow}):
            costs[way] = reference.damage(source, 1).kl
    assert costs["activations"] < costs["weights"]
