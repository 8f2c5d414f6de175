"""Models of every family in use: saved and loaded elsewhere, trained, compiled. And: a family is added by one file."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import transformers
from tiny_models import (
    HERE,
    KINDS,
    attending,
    cut,
    load_elsewhere,
    logits,
    random_plan,
    rows,
    save_all,
    tiny,
)

from headwise import families, registry
from headwise.runtime import foreign_code
from headwise.types import LayerKeep, Plan

# One of each of our modules that a compiler sees: kept pairs, norms and windows, a cap, no positions, partly rotary
# heads, an output projection elsewhere, a gated MLP, a hook, and stacks with norms before and after.
COMPILED = ("llama", "gemma2", "smollm3", "gpt2", "gpt_neox", "bert", "modernbert", "dinov2", "t5", "bart")
NEW = """
from headwise.families import Architecture
from headwise.families._rotary import Rotary


class SeedOss(Rotary):
    name = "seed_oss"
    kinds = {"seed_oss": Architecture(stem="SeedOss")}
    summary = "Seed-OSS"
    small = {"attention_dropout": 0.0, "residual_dropout": 0.0, "attention_out_bias": True}


FAMILY = SeedOss()
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    made = {}
    for family in HERE:
        for kind in family.model_types:
            model = tiny(family, kind, {})
            made[kind] = family, cut(family, model, random_plan(family, model, 5))
    save_all(folder, made)
    return folder


@pytest.mark.parametrize("name", ["with headwise", "without headwise"])
def test_saved_models_load_in_a_fresh_process(name, saved):
    load_elsewhere(name, saved)


def test_the_order_of_imports_does_not_matter(saved):
    kinds = json.loads((saved / "kinds.json").read_text())
    (saved / "kinds.json").write_text(json.dumps({"llama": kinds["llama"]}))  # the same story for all
    try:
        load_elsewhere("headwise last", saved)
    finally:
        (saved / "kinds.json").write_text(json.dumps(kinds))


def test_the_runtime_is_one_file_for_all_and_a_model_carries_its_anatomy(saved):
    for kind in json.loads((saved / "kinds.json").read_text()):
        config = json.loads((saved / kind / "config.json").read_text())
        anatomy = families.family_of_type(kind).kinds[kind].to_json()
        assert foreign_code(saved / kind) is None, "the file beside the weights is the package's, byte for byte"
        assert config["headwise_anatomy"] == json.loads(json.dumps(anatomy)), "all that the family says, and no more"


def test_models_that_were_saved_without_their_anatomy_load_with_headwise(saved, tmp_path):
    config = json.loads((saved / "bert" / "config.json").read_text())
    del config["headwise_anatomy"]
    for file in (saved / "bert").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert torch.allclose(logits(attending(model, "eager")), torch.load(saved / "bert.pt")["want"], atol=1e-5)


def test_a_family_is_one_file(tmp_path, monkeypatch):
    (tmp_path / "seed_oss.py").write_text(NEW)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    registry.names.cache_clear()
    try:
        family = families.family_of(transformers.SeedOssConfig())
        assert family in families.known() and family.name == "seed_oss", "listed"
        model = tiny(family, "seed_oss", {})
        shape = family.shape_of(model.config)
        plan = Plan("tiny", shape, shape, tuple(LayerKeep() for _ in shape.layers), "test", (), {}, 0.0, 0)
        assert torch.equal(logits(cut(family, model, plan)), logits(model)), "tailored without a change"
        made = cut(family, model, random_plan(family, model, 5))
        assert family.shape_of(made.config).layers != shape.layers, "cut"
        save_all(tmp_path, {"seed_oss": (family, made)})
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "seed_oss")
        assert torch.equal(logits(attending(again, "eager")), logits(made)), "reloaded"
        load_elsewhere("without headwise", tmp_path)
    finally:
        registry.names.cache_clear()
        sys.modules.pop("headwise.families.seed_oss", None)


@pytest.mark.parametrize(("family", "kind"), KINDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_gradients_reach_every_parameter(family, kind, seed):
    model = tiny(family, kind, {})
    made = cut(family, model, random_plan(family, model, seed)).train()
    made.gradient_checkpointing_enable()
    for each in (model, made):
        family.run(each, rows(model)).square().mean().backward()
    idle = {name for name, p in model.named_parameters() if p.grad is None}  # a head may leave something out
    grads = {name: p.grad for name, p in made.named_parameters() if name not in idle}
    assert len(idle) <= 2 and all(grad is not None and grad.isfinite().all() for grad in grads.values())


@pytest.mark.parametrize("kind", COMPILED)
def test_a_cut_model_compiles_without_a_break(kind):
    family = families.family_of_type(kind)
    model = tiny(family, kind, {})
    made = cut(family, model, random_plan(family, model, 5))
    attending(made, "sdpa")
    torch._dynamo.reset()  # what other families compiled counts against a limit
    with torch.no_grad():
        got = family.run(torch.compile(made, backend="eager", fullgraph=True), rows(made))
    assert torch.allclose(got, logits(made), atol=1e-5)
