"""Weights in few bits: how they are rounded, what they take, how they are chosen, and the model that is saved."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bits_parts import code
from coded_models import sharp_folder
from conftest import Invented, curve, invent

from headwise import budgets as prices
from headwise import cost, families, pipeline, strategies
from headwise.checks.exactness import stored_bytes
from headwise.cuts import save
from headwise.errors import HeadwiseError, PlanError
from headwise.families.llama import FAMILY as llama
from headwise.linalg import rounded, rounding_cost
from headwise.preflight import check
from headwise.runs.settings import Settings
from headwise.stages import packing, words
from headwise.types import LayerShape, ModelShape, Plan, Readings
from headwise.types.weights import ENDS, FIELDS, MATRICES, WIDTHS, group_of, matrix_bytes

ROWS = torch.randint(3, 90, (8, 32), generator=torch.Generator().manual_seed(0))


def moment_of(size: int) -> torch.Tensor:
    torch.manual_seed(1)
    x = torch.randn(256, size) @ torch.randn(size, size)
    return x.mT @ x / len(x)


# Rounding.


def test_rounding_keeps_to_its_bits_and_makes_good_what_columns_are_off() -> None:
    weight, moment, price = torch.randn(24, 64), moment_of(64), torch.rand(24)
    clever, plain = (rounded(weight, moment, WIDTHS[1:], 32, second_order=order) for order in (True, False))
    for new, nearest in zip(clever, plain, strict=True):
        assert -(2 ** (new.bits - 1)) <= int(new.whole.min()) and int(new.whole.max()) < 2 ** (new.bits - 1)
        assert new.scale.shape == (24, 2) and new.scale.dtype == torch.bfloat16
        costs = [rounding_cost(weight, one, moment, price) for one in (new, nearest)]
        assert costs[0] < costs[1], "columns that follow make good what one is off"
        assert torch.equal(rounded(weight, moment, (new.bits,), 32)[0].whole, new.whole), "widths do not meet"
    assert (clever[0].dense() - weight).abs().max() < 0.05, "eight bits are nearly exact"
    off = plain[3].dense() - weight
    assert rounding_cost(weight, plain[3], moment, price) == pytest.approx(
        0.5 * float(torch.trace(torch.diag(price) @ off @ moment @ off.mT)), rel=1e-4
    )


def test_columns_that_no_input_uses_do_no_harm() -> None:
    moment = moment_of(32)
    moment[5], moment[:, 5] = 0.0, 0.0
    (new,) = rounded(torch.randn(4, 32), moment, (4,), 16)
    assert torch.isfinite(new.dense()).all()


# Choosing.


def with_bits(readings: Readings, seed: int, names: tuple[str, ...]) -> Readings:
    """Readings that price two widths of some matrices, and of the table of words."""
    rng, layers = random.Random(seed), len(readings.source.layers)
    more = [curve(rng, f"w_{name}", (16, 4) if name in names else (16,), layers) for name in MATRICES]
    return replace(readings, curves=(*readings.curves, *more, curve(rng, "w_embed", (16, 4), 1)))


@pytest.mark.parametrize("seed", range(8))
def test_bits_of_weights_and_sizes_are_chosen_together_and_no_plan_is_better(seed: int) -> None:
    names, allow = ("q", "o", "down"), ("v", "mlp", "weights")
    readings = with_bits(invent(seed, Invented(2, 2, 1, 4, 16, 2)), seed, names)
    source = replace(readings.source, tied_embeddings=True)
    readings = replace(readings, shape=source)
    text = ("weights=70%", "memory=80%@64,b2")[seed % 2]
    budget = prices.parse(text, source)
    plan = strategies.allocate(readings, (budget,), allow=allow)
    assert prices.price(budget, plan.target) <= budget.limit and plan.gap == 0

    def options(index: int, layer: LayerShape) -> list[tuple[float, LayerShape]]:
        found = []
        for v, mlp, *bits in itertools.product(*(_sized(readings, kind, index) for kind in ("v", "mlp", *_w(names)))):
            sizes = dict(zip(_w(names), (tick for tick, _ in bits), strict=True))
            damage = v[1] + mlp[1] + sum(price for _, price in bits)
            found.append((damage, replace(layer, v_dim=v[0], mlp_width=mlp[0], **sizes)))
        return found

    best = min(
        first[0] + second[0] + table[1]
        for first, second in itertools.product(*(options(i, layer) for i, layer in enumerate(source.layers)))
        for table in _sized(readings, "w_embed", 0)
        if prices.price(budget, replace(source.with_layers((first[1], second[1])), w_embed=table[0])) <= budget.limit
    )
    assert plan.predicted_damage == pytest.approx(best, rel=1e-9)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def _w(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"w_{name}" for name in names)


def _sized(readings: Readings, kind: str, layer: int) -> list[tuple[int, float]]:
    found = readings.curve(f"damage.{kind}")
    assert found is not None
    return list(zip(found.ticks[layer], found.values[layer], strict=True))


def test_what_parts_of_a_layer_take_adds_up() -> None:
    source = invent(4, Invented(1, 2, 1, 8, 16, 2)).source
    (layer,) = source.layers
    parts: list[dict[str, Any]] = [{"k_code": code(b8=2, b4=2)}, {"v_code": code(b6=4)}]
    parts += [{name: 4} for name in FIELDS]
    for text in ("weights=60%", "memory=60%@64,b2"):
        price = partial(prices.layer_price, prices.parse(text, source), source)
        changes = [price(replace(layer, **part)) - price(layer) for part in parts]
        whole = replace(layer, **{name: value for part in parts for name, value in part.items()})
        assert price(whole) == price(layer) + sum(changes), "or a plan would overspend"


def test_what_was_not_priced_is_said() -> None:
    readings = invent(3)
    with pytest.raises(PlanError, match=r"weights=60% needs prices of bits of weights, and this probing has none"):
        strategies.allocate(readings, (prices.parse("weights=60%", readings.source),))


# Saving.


def packed_folder(path: Path, tied: bool, widths: Sequence[int] = (8, 6, 5, 4, 3, 2, 8)) -> tuple[Any, Any, ModelShape]:
    """A tiny model, all of whose matrices are rounded to different widths, or those given; saved; and the target."""
    pytest.importorskip("compressed_tensors")
    stock = llama.tiny(tie_word_embeddings=tied, intermediate_size=48)
    model = llama.tailor(stock)
    shape = llama.shape_of(model.config)
    bits = dict(zip(FIELDS, widths, strict=True))
    ends = dict(zip(ENDS, (5, 16 if tied else 6), strict=True))
    target = replace(shape.with_layers(tuple(replace(layer, **bits) for layer in shape.layers)), **ends)
    frame = llama.build(model, target.layers, llama.state_of(model))
    rounded_model, packed = packing.packed_model(llama, frame, target, ROWS, 0)
    tokenizer = families.tokenizer_of("embedded")
    return save(llama, rounded_model, tokenizer, path, False, torch.bfloat16, None, packed), model, target


@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_model_takes_what_was_counted_and_loads_again(tied: bool, tmp_path: Path) -> None:
    saved, source, target = packed_folder(tmp_path / "model", tied)
    pairs = 8 * sum(layer.kv_heads * layer.qk_width // 2 for layer in target.layers)  # which no layer lost
    assert stored_bytes(tmp_path / "model") == cost.weight_bytes(target) - pairs
    again, _ = families.load(str(tmp_path / "model"))
    assert llama.shape_of(again.config).layers == target.layers and again.config.headwise["w_embed"] == 5
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, saved.get_parameter(name).float()), name
    assert not torch.equal(llama.run(again, ROWS), llama.run(source, ROWS))
    with pytest.raises(PlanError, match="few bits already"):
        check(Settings(model=str(tmp_path / "model"), budgets=("weights=50%",)), tmp_path / "run")


def test_group_sizes_divide_rows_and_bytes_follow() -> None:
    assert [group_of(size) for size in (128, 96, 48, 20)] == [64, 32, 16, 20]
    assert matrix_bytes(3, 20, 3) == 3 * (4 * 2 + 2) + 16 and matrix_bytes(3, 20, 16) == 120


# Runs.


def test_a_run_fits_all_memory_and_stock_transformers_loads_it(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    folder = sharp_folder(tmp_path / "tiny", 3_000)
    small: dict[str, Any] = dict(tokens=512, eval_tokens=256, swap_tokens=64, length=64, device="cpu")
    asked = Settings(model=str(folder), data=str(tmp_path / "text.txt"), budgets=("memory=35%@64,b4",), **small)
    notes = check(asked, tmp_path / "run")
    assert "at 16 bits per number become at most" in notes[0] and "bits of every weight matrix" in notes[0]
    pipeline.run(asked, tmp_path / "run")
    verdict, plan = json.loads((tmp_path / "run/verdict.json").read_text()), Plan.read(tmp_path / "run/plan.json")
    assert all(one["passed"] for one in verdict["checks"]), verdict["checks"]
    assert {"weight bytes as planned", "budget memory=35%@64,b4"} <= {one["name"] for one in verdict["checks"]}
    assert plan.target.packed and all(layer.coded for layer in plan.target.layers)
    assert verdict["size"]["weight_bytes_after"] == stored_bytes(tmp_path / "run/model")
    assert 2 <= words.mean_bits(plan.target) < 16 and "expected damage" in words.expected(plan)
    page = (tmp_path / "run/report.html").read_text()
    assert "Where the memory goes" in page and "packed=True)" in page, "or memory would be that of unpacked weights"


def test_a_run_without_the_package_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.stages.source.find_spec", lambda name: None)
    with pytest.raises(HeadwiseError, match=r"pip install compressed-tensors; or leave them in 16 bits: --allow qk,v"):
        check(Settings(model="embedded", budgets=("weights=50%",)), tmp_path / "run")
