"""Budgets: what can be written, what it means, and what is said about the rest."""

from __future__ import annotations

import pytest
from conftest import GRAIN

from headwise import budgets, cost
from headwise.errors import BudgetError, UnknownNameError
from headwise.types import LayerShape, ModelShape

LAYER = LayerShape(query_heads=4, kv_heads=2, qk_dim=16, v_dim=16, mlp_width=64, qk_width=16)
MODEL = ModelShape("llama", 64, 100, True, (LAYER,) * 3, GRAIN, element_bytes=2)
KV, PARAMS = cost.kv_bytes_per_token(MODEL), cost.parameters(MODEL)
EXAMPLES = (
    "attention=85%@1k, attention_params=75%, flops=80%@8k, kv=75%, kv=2GiB@32k, latency=80%@decode,32k,b8, "
    "memory=40%@8k,b8, params=20M, params=90%, weights=50%"
)


@pytest.mark.parametrize(
    ("text", "limit", "length"),
    [
        ("kv=50%", KV * 0.5, 2048),
        ("kv=100%", KV, 2048),
        ("kv=12.5%@4k", KV * 0.125, 4096),
        ("kv=2GiB@32k", 2 * 2**30 / 32768, 32768),
        ("kv=3MB@1000", 3000.0, 1000),
        ("kv=512B@1", 512.0, 1),
        ("kv=1.5KiB@1K", 1.5, 1024),
        ("params=20M", 20e6, 2048),
        ("params=7B", 7e9, 2048),
        ("params=1234", 1234.0, 2048),
        ("params=90%", PARAMS * 0.9, 2048),
        ("flops=80%@8k", 0.8 * cost.prefill_flops(MODEL, 8192), 8192),
        ("flops=80%", 0.8 * cost.prefill_flops(MODEL, 2048), 2048),
        ("flops=1.5T@8k", 1.5e12, 8192),
        ("flops=80%@0.5k", 0.8 * cost.prefill_flops(MODEL, 512), 512),
        ("attention=80%@1k", 0.8 * sum(cost.attention_flops(MODEL, layer, 1024) for layer in MODEL.layers), 1024),
        ("  kv = 50 % @ 8k ", KV * 0.5, 8192),
        ("weights=50%", cost.weight_bytes(MODEL) * 0.5, 2048),
        ("memory=1GiB@32k,b4", 2**30, 32768),
        ("memory=40%@1k", 0.4 * (cost.weight_bytes(MODEL) + 1024 * KV), 1024),
        ("memory=40%@1k, b8", 0.4 * (cost.weight_bytes(MODEL) + 8 * 1024 * KV), 1024),
    ],
)
def test_a_budget_is_read_as_it_is_meant(text: str, limit: float, length: int) -> None:
    budget = budgets.parse(text, MODEL)
    assert budget.limit == pytest.approx(limit, rel=1e-15)
    assert budget.length == length
    assert budget.text == text.replace(" ", ""), "the user's own words are kept for messages"
    assert budget.name in budgets.known()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("kv", f"cannot read the budget 'kv'. Write it like one of: {EXAMPLES}."),
        ("kv=", f"cannot read the budget 'kv='. Write it like one of: {EXAMPLES}."),
        ("kv=half", f"cannot read the budget 'kv=half'. Write it like one of: {EXAMPLES}."),
        ("kv=-5%", f"cannot read the budget 'kv=-5%'. Write it like one of: {EXAMPLES}."),
        ("kv=50%@", f"cannot read the budget 'kv=50%@'. Write it like one of: {EXAMPLES}."),
        ("kv=75", "cannot read the budget 'kv=75'; did you mean kv=75%?"),
        ("KV=75%", "cannot read the budget 'KV=75%'; did you mean kv=75%?"),
        ("kv=0.75@8k", "cannot read the budget 'kv=0.75@8k'; did you mean kv=75%@8k?"),
        ("Params=20M", "cannot read the budget 'Params=20M'; did you mean params=20M?"),
        ("kv=1.2.3%", f"'1.2.3' in the budget 'kv=1.2.3%' is not a number. Examples: {EXAMPLES}."),
        ("kv=0%", "kv=0%: a percentage of the source lies above 0 and at most at 100."),
        ("kv=101%", "kv=101%: a percentage of the source lies above 0 and at most at 100."),
        ("kv=5X@1k", "kv=5X@1k: 'X' is no unit of kv; known: %, b, kb, mb, gb, kib, mib, gib."),
        ("params=3GiB", "params=3GiB: 'GiB' is no unit of params; known: %, k, m, g, b, t, p."),
        ("kv=1GiB", "kv=1GiB: say for how many tokens, as in kv=1GiB@32k, or give a percentage."),
        ("kv=1GiB@0", f"'@0' in the budget 'kv=1GiB@0' is no context length. Examples: {EXAMPLES}."),
        ("kv=1GiB@1.2.3k", f"'@1.2.3k' in the budget 'kv=1GiB@1.2.3k' is no context length. Examples: {EXAMPLES}."),
        ("kv=50%@8k,b4", f"cannot read the budget 'kv=50%@8k,b4'. Write it like one of: {EXAMPLES}."),
        ("memory=50%@8k,4", f"cannot read the budget 'memory=50%@8k,4'. Write it like one of: {EXAMPLES}."),
        ("flops=50%@.", f"'@.' in the budget 'flops=50%@.' is no context length. Examples: {EXAMPLES}."),
    ],
)
def test_what_cannot_be_read_is_said_with_what_could(text: str, error: str) -> None:
    with pytest.raises(BudgetError) as caught:
        budgets.parse(text, MODEL)
    assert str(caught.value) == error


def test_an_unknown_price_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as caught:
        budgets.parse("param=50%", MODEL)
    known = "attention, attention_params, flops, kv, latency, memory, params, weights"
    assert str(caught.value) == f"no budget is called 'param'. Did you mean 'params'? Known: {known}."


@pytest.mark.parametrize("text", [text for text in EXAMPLES.split(", ") if not text.startswith("latency")])
def test_every_example_in_the_messages_can_be_read(text: str) -> None:
    assert text in budgets.EXAMPLES
    assert budgets.parse(text, MODEL).limit > 0


@pytest.mark.parametrize("name", sorted({*budgets.known()} - {"latency"}))  # which test_latency.py prices
def test_layers_and_what_no_plan_changes_add_up_to_the_model(name: str) -> None:
    budget = budgets.parse(f"{name}=50%@128", MODEL)
    one = MODEL.with_layers(MODEL.layers[:1])
    layer = budgets.layer_price(budget, MODEL, LAYER)
    assert budgets.price(budget, MODEL) == pytest.approx(budgets.price(budget, one) + 2 * layer)
    assert budgets.price(budget, MODEL) == pytest.approx(2 * budget.limit), "a share is of the source's own price"
