"""The projection of queries in two thin factors: what that costs, how it is chosen, and the model that is saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from coded_models import sharp_folder
from transformers import AutoModelForCausalLM

from headwise import cost, families, pipeline
from headwise.cuts import reshape_layer, save
from headwise.errors import HeadwiseError
from headwise.families.llama import FAMILY as llama
from headwise.linalg import two_factors
from headwise.probes import weights
from headwise.runs.folder import RunFolder
from headwise.runs.settings import Settings
from headwise.types import LayerKeep
from headwise.types.weights import ranks

ROWS = torch.randint(3, 90, (8, 32), generator=torch.Generator().manual_seed(0))


def test_factors_lose_what_their_singular_values_say_and_less_than_others() -> None:
    torch.manual_seed(0)
    weight, x, price = torch.randn(24, 16), torch.randn(64, 16) @ torch.randn(16, 16), torch.rand(24) + 0.1
    moment = x.mT @ x / len(x)

    def lost(new: torch.Tensor) -> float:
        off = (new - weight).double()
        return 0.5 * float((price.double() * ((off @ moment.double()) * off).sum(1)).sum())

    rows, s, columns = two_factors(weight, moment, price)
    assert lost(rows @ columns) < 1e-8, "all of them give the matrix back"
    for rank in (1, 5, 12):
        found = lost(rows[:, :rank] @ columns[:rank])
        assert found == pytest.approx(0.5 * float(s[rank:].square().sum()), rel=1e-4)
        u, t, v = torch.linalg.svd(weight, full_matrices=False)
        assert found < lost((u[:, :rank] * t[:rank]) @ v[:rank])


def test_a_layer_of_full_rank_answers_as_before_and_is_counted() -> None:
    model = llama.tailor(llama.tiny())
    shape = llama.shape_of(model.config)
    moments = weights.collect(llama, model, ROWS, 0)
    for rank in (32, 8):
        target = replace(shape.layers[1], q_rank=rank)
        layer = reshape_layer(llama, model, 1, target, LayerKeep(), moments[1])
        assert sum(p.numel() for p in layer.parameters()) == cost.layer_parameters(shape, target)
        with llama.replaced(model, 1, layer):
            after = model(ROWS).logits
        same = bool(torch.allclose(after, model(ROWS).logits, atol=1e-4))
        assert same == (rank == 32), "the tiny model's queries have rank 32"


def test_ranks_are_chosen_saved_and_loaded(tmp_path: Path) -> None:
    folder = sharp_folder(tmp_path / "source", 3000)
    settings = Settings(
        model=str(folder), data=str(tmp_path / "text.txt"), budgets=("params=97%",), allow=("mlp", "rank"),
        tokens=2048, length=64, eval_tokens=512, swap_tokens=256, pool="none",
    )  # fmt: skip
    source: Any = pipeline.load_source(settings)
    probed = pipeline.probe_in(RunFolder(tmp_path / "run"), settings, source, diagnose=False)
    plan = pipeline.allocate(settings, source, probed.readings, pipeline.budgets_of(settings, source))
    alone = replace(settings, allow=("mlp",))
    without = pipeline.allocate(alone, source, probed.readings, pipeline.budgets_of(alone, source))
    assert any(layer.q_rank for layer in plan.target.layers)
    assert plan.predicted_damage < without.predicted_damage, "one more way to spend the budget"
    fitted = source.fit(settings, probed, plan, None, lambda items, label: items)
    with families.quietly():
        saved: Any = save(source.family, fitted.model, source.tokenizer, tmp_path / "model", False)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True)
    assert sum(p.numel() for p in loaded.parameters()) == cost.parameters(plan.target)
    assert torch.allclose(loaded.eval()(ROWS).logits.float(), saved(ROWS).logits.float(), atol=1e-4)
    again = pipeline.load_source(replace(settings, model=str(tmp_path / "model")))
    assert [layer.q_rank for layer in again.shape.layers] == [layer.q_rank for layer in plan.target.layers]
    probed = pipeline.probe(replace(settings, model=str(tmp_path / "model")), again, diagnose=False)
    sizes = probed.readings.curve("damage.q_rank").ticks
    assert all(ticks[0] == layer.query_rank for ticks, layer in zip(sizes, again.shape.layers, strict=True))


def test_ranks_that_save_nothing_are_not_offered() -> None:
    for rows, columns in ((576, 576), (64, 48), (10, 10)):
        full, *smaller = ranks(rows, columns, rows)
        assert full == rows and all(rank * (rows + columns) < rows * columns for rank in smaller)


def test_families_without_ranks_say_so(tmp_path: Path) -> None:
    from headwise.families.gpt2 import FAMILY as gpt2
    from headwise.stages.source import refuse_units

    with pytest.raises(HeadwiseError, match="gpt2 models cannot lose rank"):
        refuse_units(Settings(model="x", allow=("rank",)), gpt2)
