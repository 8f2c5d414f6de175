"""Runs that code the cache in bits: what they make, plans that a user edits, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from coded_models import sharp_folder

from headwise import api, cost, families, pipeline
from headwise.budgets import price
from headwise.errors import HeadwiseError
from headwise.families.llama import FAMILY as llama
from headwise.preflight import check
from headwise.probes import swap
from headwise.probes._layers import reading
from headwise.runs.folder import RunFolder
from headwise.runs.settings import Settings
from headwise.stages.source import codes_rows, heads_to_pool
from headwise.tasks.causal import Causal
from headwise.tasks.masked import TASK as masked
from headwise.types import Plan, Readings, code_bytes

SMALL: dict[str, Any] = dict(tokens=512, eval_tokens=256, swap_tokens=64, length=64, device="cpu", heal="none")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that attends sharply, with the embedded model's tokens, and a small text."""
    return sharp_folder(tmp_path_factory.mktemp("source") / "tiny", 3_000)


def settings(folder: Path, *budgets: str, **more: Any) -> Settings:
    given = {**SMALL, "model": str(folder), "data": str(folder.parent / "text.txt"), **more}
    return Settings(budgets=budgets, **given)


@pytest.fixture(scope="module")
def finished(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that limits the cache."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    pipeline.run(settings(folder, "kv=25%"), out)
    return out


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def edit(out: Path, **changes: Any) -> None:
    """Change the first layer of a plan's target; a field that becomes None is left out."""
    plan = json.loads((out / "plan.json").read_text())
    layer = {**plan["target"]["layers"][0], **changes}
    plan["target"]["layers"][0] = {name: value for name, value in layer.items() if value is not None}
    (out / "plan.json").write_text(json.dumps(plan))


def share(plan: Plan) -> float:
    return cost.kv_bytes_per_token(plan.target) / cost.kv_bytes_per_token(plan.source)


# What a run makes.


def test_a_run_meets_its_budgets_and_what_it_made_is_as_planned(finished: Path) -> None:
    verdict, plan = json.loads((finished / "verdict.json").read_text()), Plan.read(finished / "plan.json")
    assert verdict["checks"] and all(check["passed"] for check in verdict["checks"])
    assert verdict["size"]["kv_bytes_per_token_after"] == cost.kv_bytes_per_token(plan.target)
    assert 0.2 < share(plan) <= 0.25
    for layer in plan.target.layers:
        assert layer.coded and layer.pooled == 2 and 0 < sum(layer.k_code) <= layer.qk_dim
    model = api.load(finished / "model")
    with torch.no_grad():
        cache = model(torch.arange(3, 23)[None]).past_key_values
    rows = [(one.keys.dtype, one.keys.shape[-1]) for one in cache.layers]
    assert rows == [(torch.uint8, code_bytes(layer.k_code, layer.qk_dim) - 1) for layer in plan.target.layers]


def test_one_probing_answers_every_budget(copied: Path) -> None:
    shares, damages = [], []
    for budget in ("kv=100%", "kv=75%", "kv=25%", "kv=12%"):
        plan = api.allocate(copied, budget)
        assert all(layer.coded for layer in plan.target.layers) and Plan.read(copied / "plan.json") == plan
        shares.append(share(plan))
        damages.append(plan.predicted_damage)
    assert shares == sorted(shares, reverse=True) and shares[1] <= 0.75 and shares[3] <= 0.12
    assert damages == sorted(damages) and damages[1] < damages[3]


def test_fine_codes_differ_in_price_where_noise_hides_their_damage() -> None:
    """Any change shows 0.001 nats, as in arithmetic of few bits: codes keep the order that gradients give them."""
    sizes, predicted = (16, 8, 6, 4, 2), (0.0, 1e-6, 1e-5, 2e-4, 0.05)
    found = {("damage.k_bits", 0): {8: (0.001, 0.0), 4: (0.0012, 0.0), 2: (0.101, 0.0)}}
    curve = reading(
        "fisher", "damage.k_bits", "bytes", [(sizes, predicted, None)], "nats", "Predicted loss increase", 8, 0
    )
    (damages,) = swap.corrected(curve, found, 64, 0, "KL").values
    assert damages == pytest.approx((0.0, 2e-6, 2e-5, 4e-4, 0.1), rel=0.01)


def test_a_probing_for_the_cache_prices_bits_alone_and_one_for_no_budget_prices_all(
    copied: Path, folder: Path, tmp_path: Path
) -> None:
    ranks = dict(allow=("qk", "v", "mlp"))
    with pytest.raises(HeadwiseError, match="priced bits of the cache alone; probe again"):
        api.allocate(copied, "kv=50%", **ranks)
    assert {order for layer in Readings.read(copied / "readings.json").orders for order in layer} == {
        "k_bits",
        "v_bits",
    }
    out = tmp_path / "any"
    asked = settings(folder)
    with pipeline.claimed(asked, RunFolder(out), "probe", False):
        pipeline.measure(asked, RunFolder(out), ())
    coded, whole = api.allocate(out, "kv=25%"), api.allocate(out, "kv=50%", **ranks)
    assert share(whole) <= 0.5 and not any(layer.coded for layer in whole.target.layers)
    assert whole.predicted_damage > coded.predicted_damage, "twice the bytes, in whole numbers, do more damage"
    api.reshape(out)
    assert llama.shape_of(api.load(out / "model").config).layers == whole.target.layers


@pytest.mark.parametrize("budget", ("params=99%", "flops=97%"))
def test_other_budgets_are_met_beside_that_of_the_cache(folder: Path, budget: str) -> None:
    asked = settings(folder, "kv=25%", budget)
    plan = pipeline.fit(asked, pipeline.load_source(asked)).plan
    assert all(layer.coded for layer in plan.target.layers)
    for limit in plan.budgets:
        spent, before = price(limit, plan.target), price(limit, plan.source)
        assert spent <= limit.limit < before, limit.text


@pytest.mark.parametrize("pool, heads", (("none", 1), ("2", 2), ("auto", 2)))
def test_heads_share_rows_as_asked_and_a_seed_gives_the_same_model_again(folder: Path, pool: str, heads: int) -> None:
    asked = settings(folder, "kv=25%", pool=pool)
    made = [pipeline.fit(asked, pipeline.load_source(asked)) for _ in range(2 if pool == "none" else 1)]
    assert all(layer.pooled == heads and layer.coded for layer in made[0].plan.target.layers)
    assert share(made[0].plan) <= 0.25
    if len(made) > 1:
        assert made[0].plan == made[1].plan
        pairs = zip(made[0].model.parameters(), made[1].model.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_a_model_in_half_precision_stays_so_and_is_verified(folder: Path, tmp_path: Path) -> None:
    source = shutil.copytree(folder, tmp_path / "half")
    families.load(str(folder))[0].bfloat16().save_pretrained(source)
    shutil.copy(folder.parent / "text.txt", tmp_path)
    found = pipeline.run(settings(source, "kv=25%", pool="none"), tmp_path / "run")
    assert found.verdict is not None and all(check.passed for check in found.verdict.checks)
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["dtype"] == "bfloat16"


# A plan in the hands of its user.


def test_a_legal_edit_of_a_code_is_carried_out_and_judged(copied: Path) -> None:
    plan = Plan.read(copied / "plan.json")
    dim = plan.target.layers[0].qk_dim
    edit(copied, k_code={"8": dim})
    api.reshape(copied, heal="refit")
    edited = Plan.read(copied / "plan.json")
    assert api.load(copied / "model").config.headwise["layers"][0]["k_code"] == {"8": dim}
    checks = {check.name: check for check in api.verify(copied).checks}
    assert checks["cache bytes per token as planned"].passed
    assert checks["budget kv=25%"].passed == (
        cost.kv_bytes_per_token(edited.target) <= 0.25 * cost.kv_bytes_per_token(plan.source)
    )
    assert cost.kv_bytes_per_token(edited.target) > cost.kv_bytes_per_token(plan.target)


@pytest.mark.parametrize(
    "changes, said",
    (
        (
            dict(k_code={"4": 39, "2": 1}),
            r"layers\[0\]: k_code gives bits to 40 numbers of a cached row, which has 32; give counts",
        ),
        (dict(k_code={"4": -1}), r"layers\[0\]: k_code gives bits to .* counts from 0 that add up"),
        (dict(k_code={"13": 4}), r"layers\[0\]: k_code gives a count for '13' bits; widths are 1 to 12 bits"),
        (dict(k_code={"4": 1.5}), r"layers\[0\].k_code\[4\] must be int"),
        (dict(k_code="4"), r"layers\[0\].k_code must be a list"),
        (dict(v_code=None), r"layer 0: keys and values are coded together"),
        (dict(k_code={"4": 40}, qk_dim=40), r"qk_dim 40 is larger than qk_width 32"),
    ),
)
def test_an_impossible_code_is_refused_with_its_place(copied: Path, changes: dict[str, Any], said: str) -> None:
    edit(copied, **changes)
    with pytest.raises(HeadwiseError, match=said):
        api.reshape(copied)
    with pytest.raises(HeadwiseError, match=r"does not follow plan.json; run: headwise heal"):
        api.verify(copied)


# What is refused, and what does not apply.


def test_a_budget_out_of_reach_is_refused_at_once_and_the_proposed_one_is_met(folder: Path, finished: Path) -> None:
    with pytest.raises(HeadwiseError, match=r"kv=1% is out of reach.*Try --budget kv=\d") as refused:
        check(settings(folder, "kv=1%"), folder.parent / "out")
    proposed = str(refused.value).partition("Try --budget ")[2].partition(",")[0]
    assert check(settings(folder, proposed), folder.parent / "out") is not None
    copy = shutil.copytree(finished, folder.parent / "proposed")
    assert 100 * share(api.allocate(copy, proposed)) <= float(proposed[3:-1])


def test_a_coded_model_is_not_cut_again(finished: Path, folder: Path) -> None:
    for budget in ("kv=10%", "params=90%"):
        with pytest.raises(HeadwiseError, match="coded in bits already; cut the model that it was made from"):
            check(settings(folder, budget, model=str(finished / "model")), folder.parent / "out")


def test_encoders_and_other_budgets_know_no_bits(folder: Path) -> None:
    bert = families.family_of_type("bert")
    shapes = bert.shape_of(bert.tiny("bert").config), llama.shape_of(llama.tiny().config)
    asked = Settings(model="", budgets=("params=80%",))
    assert not codes_rows(asked, shapes[0], masked) and heads_to_pool(asked, shapes[0]) == 1
    assert not codes_rows(asked, shapes[1], Causal()) and heads_to_pool(asked, shapes[1]) == 1
    assert codes_rows(Settings(model="", budgets=("kv=80%",)), shapes[1], Causal())
