"""Whole layers that go: skipped in fact, counted right, healed by those before them, and never half there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import KINDS, logits, random_plan, rows, tiny

from headwise.cost import parameters
from headwise.cuts import reshape
from headwise.families.llama import FAMILY as family
from headwise.heal.refit import refit
from headwise.probes import depth, gram
from headwise.types import GONE, LayerKeep


def without(family, model, gone, seed=4):
    """A random plan, and the same with some layers gone altogether."""
    plan = random_plan(family, model, seed)
    layers = tuple(GONE if i in gone else layer for i, layer in enumerate(plan.target.layers))
    keep = tuple(LayerKeep() if i in gone else keep for i, keep in enumerate(plan.keep))
    return plan, replace(plan, target=plan.target.with_layers(layers), keep=keep)


@pytest.mark.parametrize(("family", "kind"), KINDS)
@pytest.mark.parametrize("gone", [(0,), (1,), (0, 2)], ids=str)
def test_a_removed_layer_is_one_that_is_skipped(family, kind, gone):
    if family.keeps_first and 0 in gone:
        pytest.skip(f"the first layer of {kind} models stays")
    model = family.tailor(tiny(family, kind, {}))
    ids, count = rows(model), len(family.layers(model))
    moments = gram.collect(family, model, ids, mlp=False)
    all_layers, plan = without(family, model, gone)
    made, whole = (reshape(family, model, p, moments) for p in (plan, all_layers))
    stream = family.embed(whole, ids)
    for index, context in enumerate(family.layer_contexts(whole, ids)):
        if index not in gone:
            stream = family.run_layer(whole, index, stream, context)
    assert torch.allclose(logits(made), family.logits(whole, family.answering(stream, ids)), atol=1e-5)
    assert sum(p.numel() for p in made.parameters()) == parameters(plan.target), "formulas count no norms of it"
    assert len(family.layers(made)) == count - len(gone) == len(family.shape_of(made.config).layers)
    for name, value in made.config.to_dict().items():
        if isinstance(value, list) and len(getattr(model.config, name, None) or []) == count:
            assert len(value) == count - len(gone), f"{name} has one entry per layer"


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_layers_make_up_for_those_removed_behind_them(family, kind):
    model = family.tailor(tiny(family, kind, {}))
    shape = family.shape_of(model.config)
    left = tuple(GONE if index == 1 else layer for index, layer in enumerate(shape.layers))
    shorter = family.build(model, left, family.state_of(model))
    healed, _ = refit(family, model, shorter, rows(model))
    want = logits(model)
    assert (logits(healed) - want).square().mean() <= (logits(shorter) - want).square().mean()


def test_layers_go_in_the_order_of_what_they_cost_together():
    model = family.tailor(tiny(family, "llama", {}))
    with torch.no_grad():  # the second layer does nothing, so it must go first and cost nothing
        block = family.blocks(model)[1]
        block.output.weight.zero_()
        block.down.weight.zero_()

    def remove(gone):
        layers = tuple(GONE if i in gone else s for i, s in enumerate(family.shape_of(model.config).layers))
        return family.build(model, layers, family.state_of(model))

    reading, order = depth.measure(family, model, rows(model), 2, remove, 0)
    assert order[0] == 1 and reading.at(0, 1) == pytest.approx(0.0, abs=1e-6)
    assert reading.at(0, 2) > 1e-6 and reading.ticks == ((0, 1, 2),)
