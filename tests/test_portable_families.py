"""Families whose stock code fixes the head dimension: portable models differ from the source in their MLP only."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from conftest import invent
from test_pipeline import SMALL, call
from tiny_models import MORE, FakeTokenizer, cut, logits, random_plan, tiny

from headwise import budgets, families, strategies
from headwise.cuts import save
from headwise.errors import BudgetError, ModelError, PlanError
from headwise.families._decoder import Plain
from headwise.types import LayerKeep

PLAIN = [family for family in families.known() if isinstance(family, Plain)]
VARIANTS = [
    pytest.param(family, kind, changes, id=f"{kind}-{name}")
    for family in PLAIN
    for kind in family.model_types
    for name, changes in MORE[kind].items()
]


def narrow_plan(family, model, width=72):
    """All MLPs cut to one width, by random channels, and nothing else."""
    plan = random_plan(family, model, 6)
    channels = [tuple(sorted(torch.randperm(layer.mlp_width)[:width].tolist())) for layer in plan.source.layers]
    target = tuple(replace(layer, mlp_width=width) for layer in plan.source.layers)
    keep = tuple(LayerKeep(mlp_channels=kept) for kept in channels)
    return replace(plan, target=plan.source.with_layers(target), keep=keep, portable=True)


@pytest.mark.parametrize(("family", "kind", "changes"), VARIANTS)
def test_stock_code_loads_a_portable_model_and_gives_its_logits(family, kind, changes, tmp_path):
    model = tiny(family, kind, changes)
    made = cut(family, model, narrow_plan(family, model))
    folder = tmp_path / "model"
    save(family, made, FakeTokenizer(), folder, portable=True)
    stock, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    stock.config._attn_implementation = "eager"
    assert type(stock) is type(model), "an ordinary class, and no code beside the weights"
    assert not list(folder.glob("*.py")) and "auto_map" not in json.loads((folder / "config.json").read_text())
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.allclose(logits(stock), logits(made), atol=1e-5)
    assert not torch.allclose(logits(stock), logits(model), atol=1e-2)
    assert family.shape_of(stock.config).layers == family.shape_of(made.config).layers


@pytest.mark.parametrize("family", PLAIN, ids=lambda family: family.name)
def test_apart_and_together_undo_each_other(family):
    model = family.tiny()
    tensors = family.state_of(model)
    tailored = family.tailor(model)
    again = family.together(family.state_of(tailored), tailored.config)
    assert tensors.keys() == again.keys() and all(torch.equal(tensors[name], again[name]) for name in tensors)


@pytest.mark.parametrize("change", [{"v_dim": 8}, {"query_heads": 3, "kv_heads": 3}, {"mlp_width": 64}], ids=str)
@pytest.mark.parametrize("family", PLAIN, ids=lambda family: family.name)
def test_what_stock_code_cannot_follow_is_refused(family, change, tmp_path):
    model = tiny(family, family.model_types[0], {})
    plan = narrow_plan(family, model)
    first, keep = replace(plan.target.layers[0], **change), plan.keep[0]
    if "mlp_width" in change:  # another width than in the other layers
        keep = replace(keep, mlp_channels=keep.mlp_channels[: first.mlp_width])
    elif "query_heads" in change:
        keep = replace(keep, query_heads=(0, 1, 2), kv_heads=(0, 1, 2))
    layers = (first, *plan.target.layers[1:])
    plan = replace(plan, target=plan.target.with_layers(layers), keep=(keep, *plan.keep[1:]))
    with pytest.raises(ModelError, match="can only have its MLPs cut, all alike, and this plan cuts more; leave out"):
        save(family, cut(family, model, plan), FakeTokenizer(), tmp_path / "model", portable=True)
    assert not (tmp_path / "model").exists()


WAYS = {"tailored": ["--budget", "kv=75%", "--allow", "qk,v,mlp"], "portable": ["--portable"]}


@pytest.mark.parametrize(
    ("name", "way"), [("gpt2", "tailored"), ("opt", "tailored"), ("gpt_neox", "tailored"), ("gpt_neox", "portable")]
)
def test_the_command_line_cuts_them(name, way, tmp_path):
    family = next(family for family in PLAIN if family.name == name)
    family.tiny(vocab_size=4096).save_pretrained(tmp_path / "source")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path(families.locate("embedded")[0]) / file, tmp_path / "source" / file)
    options = ["--budget", "params=95%", "--data", "stdlib", *WAYS[way], *SMALL]
    assert call("run", tmp_path / "source", *options, "--out", tmp_path / "run") == 0
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert all(check["passed"] for check in verdict["checks"])


def readings_for(family, seed):
    """Invented readings of a model that may be portable in as much as the family says."""
    readings = invent(seed)
    shape = readings.source
    grain = replace(shape.grain, portable=family.shape_of(family.tiny().config).grain.portable)
    return replace(readings, shape=replace(shape, family=family.name, grain=grain))


@pytest.mark.parametrize("family", PLAIN, ids=lambda family: family.name)
def test_portable_plans_cut_only_what_stock_code_can_follow(family):
    readings = readings_for(family, 3)
    shape = readings.source

    def plan(text, allow):
        return strategies.allocate(readings, (budgets.parse(text, shape),), portable=True, allow=allow)

    found = plan("params=90%", ("qk", "v", "mlp", "heads", "kv_heads"))
    layer = found.target.layers[0]
    assert found.portable and set(found.target.layers) == {layer}
    assert layer.mlp_width < shape.layers[0].mlp_width
    assert replace(layer, mlp_width=0) == replace(shape.layers[0], mlp_width=0), "attention is whole"
    limits = f"Stock {family.name} code can only follow cuts of: mlp."
    with pytest.raises(BudgetError) as caught:
        plan("kv=75%", ("qk", "v", "mlp"))
    assert str(caught.value) == (
        "kv=75% is out of reach: with everything that may be cut (mlp) at its smallest legal size, 100.0% remains. "
        f"Try --budget kv=100%. {limits} Leave out --portable to cut more."
    )
    with pytest.raises(PlanError) as refused:
        plan("kv=75%", ("qk", "v"))
    assert str(refused.value) == (
        f"a portable plan has nothing to cut. {limits} Leave out --portable, or change --allow."
    )


def test_a_family_without_limits_is_as_portable_as_ever():
    shape = invent(8).source
    assert shape.grain.portable is None
    with pytest.raises(BudgetError) as caught:
        strategies.allocate(invent(8), (budgets.parse("kv=1%", shape),), portable=True)
    assert "Stock" not in str(caught.value)


def test_gpt2_models_that_are_not_supported_are_named():
    from headwise.families.gpt2 import FAMILY

    for setting in ("add_cross_attention", "reorder_and_upcast_attn"):
        model = FAMILY.tiny(**{setting: True})
        with pytest.raises(ModelError, match=f"this gpt2 model has {setting} .*, which is not supported"):
            FAMILY.tailor(model)


def test_gpt2_layers_that_scale_by_their_number_keep_it_when_others_go():
    from headwise.families.gpt2 import FAMILY
    from headwise.types import GONE

    model = FAMILY.tailor(FAMILY.tiny(scale_attn_by_inverse_layer_idx=True))
    ids = torch.arange(20).reshape(1, 20) + 3
    first, *others = FAMILY.shape_of(model.config).layers
    shorter = FAMILY.build(model, (GONE, *others), FAMILY.state_of(model))
    stream = FAMILY.embed(model, ids)
    for index, context in list(enumerate(FAMILY.layer_contexts(model, ids)))[1:]:
        with torch.no_grad():
            stream = FAMILY.run_layer(model, index, stream, context)
    want = FAMILY.logits(model, stream)
    assert torch.equal(logits(shorter, ids), want)
    assert torch.equal(logits(FAMILY.tailor(shorter), ids), want), "also when it is built again"
    with pytest.raises(ModelError, match="scale attention by their number"):
        FAMILY.to_stock(shorter)
