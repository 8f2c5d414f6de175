"""Designs: what a user asked for is met, counted exactly, built by stock code or the runtime, and told plainly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

import headwise
from headwise import budgets, cost
from headwise.cli.commands import app
from headwise.errors import BudgetError, HeadwiseError, ModelError
from headwise.research.designs import configs, proposals, shapes

FAMILIES = ("llama", "gpt2", "bert")


def ask(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["design", *map(str, arguments)])


def designed(family: str, strategy: str, budget: str = "params=3M") -> proposals.Proposal:
    return headwise.design(family, budget, [strategy], vocab=2048, length=64)[0]


def counted(proposal: proposals.Proposal) -> int:
    return sum(parameter.numel() for parameter in proposal.build("meta").parameters())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("strategy", sorted(shapes.STRATEGIES))
def test_a_design_spends_no_more_than_it_has_and_nearly_all_of_it(family: str, strategy: str) -> None:
    found = designed(family, strategy)
    assert counted(found) == cost.parameters(found.shape) == found.prices["parameters"], "counted on the real model"
    assert 0.8 * 3e6 < counted(found) <= 3e6
    assert found.tailored == (len(set(found.shape.layers)) > 1), "stock where layers are alike"


def test_leaner_has_half_the_layers_and_more_heads() -> None:
    usual, lean = (designed("gpt2", name, "params=20M").shape for name in ("uniform", "leaner"))
    assert len(lean.layers) == len(usual.layers) // 2
    assert lean.layers[0].query_heads > usual.layers[0].query_heads
    assert lean.layers[0].qk_dim == 32 and usual.layers[0].qk_dim == 64
    assert shapes.log_conditioning(lean) < shapes.log_conditioning(usual)


def test_what_is_asked_for_is_kept() -> None:
    found = headwise.design("llama", "params=4M", ["uniform", "leaner"], vocab=1024, length=64, depth=3, heads=4)
    assert [len(p.shape.layers) for p in found] == [3, 3]
    assert {layer.query_heads for p in found for layer in p.shape.layers} == {4}


def test_two_budgets_hold_together() -> None:
    limits = ["params=5M", "kv=6KB@1"]
    found = headwise.design("llama", limits, ["uniform", "leaner", "taper"], vocab=2048, length=64)
    assert all(cost.parameters(p.shape) <= 5e6 and cost.kv_bytes_per_token(p.shape) <= 6e3 for p in found)


def test_a_model_to_be_like_gives_width_depth_and_meaning_to_percentages() -> None:
    source = configs.Maker("llama", like="embedded").source()
    for proposal in headwise.design("llama", "params=70%", ["uniform", "leaner"], like="embedded", length=64):
        assert proposal.shape.hidden_size == source.hidden_size
        assert cost.parameters(proposal.shape) <= 0.7 * cost.parameters(source)
        assert len(proposal.shape.layers) <= len(source.layers)


def test_nystromformer_is_designed_through_heads_depth_and_width() -> None:
    found = headwise.design("nystromformer", "params=3M", vocab=2048, length=128)
    assert [p.strategy for p in found] == ["uniform", "leaner"]
    assert all(counted(p) == cost.parameters(p.shape) for p in found)
    with pytest.raises(HeadwiseError, match="designed through heads, depth and width: use uniform or leaner"):
        headwise.design("nystromformer", "params=3M", ["taper"], vocab=2048)


@pytest.mark.parametrize("strategy", ["uniform", "taper"])
def test_a_written_design_is_built_and_learns(strategy: str, tmp_path: Path) -> None:
    found = designed("llama", strategy)
    found.write(tmp_path / "design")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "design"))
    assert sum(p.numel() for p in model.parameters()) == cost.parameters(found.shape)
    ids = torch.arange(24).reshape(2, 12)
    optimiser, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0], "every layer passes signal from its first step"
    with pytest.raises(HeadwiseError, match="exists and is not empty; add --overwrite"):
        found.write(tmp_path / "design")


@pytest.mark.parametrize("family", FAMILIES)
def test_activation_memory_is_about_what_training_keeps(family: str) -> None:
    found = headwise.design(family, "params=3M", ["uniform"], vocab=256, length=64)[0]
    model = found.build().train()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.full((2, 64), 7)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, labels=ids)
    assert proposals.activation_bytes(found.shape) == pytest.approx(sum(kept.values()) / ids.numel(), rel=0.5)


class TestErrors:
    """What is wrong, and what to type instead."""

    def test_budgets(self) -> None:
        with pytest.raises(BudgetError, match="a percentage of what"):
            headwise.design("llama", "params=50%")
        with pytest.raises(BudgetError, match=r"params=1k is too little: 2 layers of width 64 need"):
            headwise.design("llama", "params=1k")
        with pytest.raises(BudgetError, match="a design needs a budget"):
            headwise.design("llama", [])

    def test_names(self) -> None:
        with pytest.raises(HeadwiseError, match="no family is called 'lama'. Did you mean 'llama'"):
            headwise.design("lama", "params=5M")
        with pytest.raises(ModelError, match="qwen3 models cannot be designed yet; those that can: llama, gpt2"):
            headwise.design("qwen3", "params=5M")
        with pytest.raises(ModelError, match="embedded is a llama model, not gpt2; give --family llama"):
            headwise.design("gpt2", "params=50%", like="embedded")


class TestCommand:
    """`headwise design`."""

    def test_the_comparison_and_the_folders(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        small = ("--budget", "params=2M", "--depth", 6, "--vocab", 2048, "--length", 64, "--out", out)
        done = ask("--family", "llama", *small, "--strategy", "uniform,taper", "--measure")
        assert done.exit_code == 0, done.output
        assert "predicted conditioning" in done.stdout and "training, measured" in done.stdout
        told = json.loads((out / "designs.json").read_text())
        assert [row["strategy"] for row in told["designs"]] == ["uniform", "taper"]
        assert all((out / row["strategy"] / "config.json").is_file() for row in told["designs"])
        assert (out / "taper" / "modeling_headwise.py").is_file(), "layers differ: the runtime lies beside"
        again = ask("--family", "llama", *small)
        assert "exists and is not empty" in str(again.exception)

    def test_redesigns_say_what_they_need(self) -> None:
        assert "--redesign needs what should change" in str(ask("--redesign", "timm:vit_base_patch16_224").exception)
        assert "takes a whole number" in str(ask("--redesign", "timm:x", "--depth", "deep").exception)
        assert "go with --redesign only" in str(ask("--budget", "params=5M", "--depth", "1,2").exception)


def test_prices_are_those_of_the_budgets() -> None:
    found = designed("llama", "leaner")
    limit = budgets.parse("params=3M", found.shape)
    assert budgets.price(limit, found.shape) == found.prices["parameters"]


def test_images_are_read_patch_by_patch() -> None:
    found = headwise.design("vit", "params=3M", ["uniform", "leaner"])
    assert [p.length for p in found] == [197, 197] and all(counted(p) <= 3e6 for p in found)
    assert all(counted(p) == cost.parameters(p.shape) for p in found)
