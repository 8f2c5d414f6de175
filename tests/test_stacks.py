"""Stacks train what they say: the same as models alone, the same as transformers' and the runtime's own code."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:  # experiments live beside the package
    sys.path.insert(0, str(ROOT))

from experiments import (  # noqa: E402
    _data,
    _lab,
    _listops,
    _points,
    _rates,
    _rules,
    _stack,
    _tasks,
    _training,
    b3_grid,
    b6_decoders,
    b8_design,
)  # fmt: skip

import headwise  # noqa: E402
from headwise.errors import DataError, HeadwiseError  # noqa: E402
from headwise.training.loop import pace  # noqa: E402

CPU = torch.device("cpu")


def decoder(**changes: Any) -> _stack.Net:
    return _stack.even(2, 4, 32, 64, length=16, symbols=64, causal=True)._replace(**changes)


def task(batch: int = 4) -> _tasks.NextToken:
    return _tasks.NextToken(_data.texts("text", "tiny", None, CPU), 16, batch, 8)


def test_members_do_not_touch_each_other() -> None:
    net, members = decoder(), [_stack.Member(0, 1e-2), _stack.Member(3, 3e-3)]
    together = _stack.train(net, members, task().loss(net, [0, 3], 6), 6, CPU)
    for place, member in enumerate(members):
        alone = _stack.train(net, [member], task().loss(net, [member.seed], 6), 6, CPU)
        torch.testing.assert_close(alone.curve[:, 0], together.curve[:, place])
    assert together.curve[-1].max() < together.curve[0].min(), "and they learn"


def test_a_member_is_trained_by_adamw_with_its_own_rate_and_clipping() -> None:
    torch.manual_seed(0)
    start, data = torch.randn(2, 6), torch.randn(8, 2, 6) * 5
    rates, settings = [0.1, 0.02], _training.settings_of(8, [0.1, 0.02], warm_up=0.25, decay=0.05)
    found = _training.train_stack(start, lambda w, step: (w - data[step][0]).square().sum(1), rates, settings)
    for place, rate in enumerate(rates):
        weight = torch.nn.Parameter(start[place].clone())
        adam = torch.optim.AdamW([weight], betas=(0.9, 0.95), weight_decay=0.05)
        for step in range(8):
            adam.param_groups[0]["lr"] = rate * pace(step, settings)
            loss = (weight - data[step, place]).square().sum()
            assert float(loss.detach()) == pytest.approx(float(found.curve[step, place]), rel=1e-5)
            weight.grad = torch.autograd.grad(loss, weight)[0]
            torch.nn.utils.clip_grad_norm_([weight], 1.0)
            adam.step()
        torch.testing.assert_close(found.flat[place], weight.detach())


def test_a_member_that_diverges_leaves_the_others_alone() -> None:
    settings = _training.settings_of(6, [0.1, 0.1], warm_up=0.0, decay=0.0)
    scale = torch.tensor([1.0, math.nan])
    losses: _training.Losses = lambda w, _: (w * scale[:, None]).square().sum(1)  # noqa: E731
    found = _training.train_stack(torch.ones(2, 3), losses, [0.1, 0.1], settings)
    assert found.curve[-1, 0] < found.curve[0, 0] and found.curve[-1, 1].isnan()


@pytest.mark.parametrize("strategy", ["uniform", "taper", "bound"])
def test_a_stack_computes_what_the_design_computes(strategy: str) -> None:
    proposal = headwise.design("llama", "params=700k", [strategy], vocab=64, length=32, depth=4)[0]
    torch.manual_seed(0)
    model = proposal.build().float().eval()
    net, held = b8_design.net_of(proposal.shape, 32), model.state_dict()
    w = {"embed": held["model.embed_tokens.weight"][None]}
    for i in range(len(net.layers)):
        q, k, v, o, gate, up, down = (
            held[f"model.layers.{i}.{name}_proj.weight"].T
            for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
        )
        parts = {"qkv": torch.cat([q, k, v], 1), "out": o, "up": torch.cat([gate, up], 1), "down": down}
        w |= {f"{i}.{name}": part[None] for name, part in parts.items()}
    assert {name: tuple(value.shape[1:]) for name, value in w.items()} == net.shapes
    ids = torch.arange(60).reshape(1, 2, 30) % 64
    ours = _stack.logits(net, w, _stack.hidden(net, w, ids)).view(2, 30, 64)
    torch.testing.assert_close(ours, model(ids[0]).logits, rtol=1e-4, atol=1e-4)


def test_nystrom_attention_nears_the_exact_one() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 32, 8).unbind()
    exact = F.scaled_dot_product_attention(q, k, v)
    few, all_of_them = ((_stack.nystrom(q, k, v, count, None, None) - exact).abs().mean() for count in (4, 32))
    assert all_of_them < 0.02 < few
    keep = (torch.arange(32) < 20).expand(1, 2, -1)
    shown = _stack.nystrom(q, k, v, 4, keep, None)
    moved = _stack.nystrom(q, k.clone().index_fill_(2, torch.arange(20, 32), 9.0), v, 4, keep, None)
    torch.testing.assert_close(shown, moved), "what is not there is not seen"


def test_conditioning_is_that_of_the_heads_outputs() -> None:
    net = decoder(causal=False)
    flat = _stack.stacked(net, [_stack.Member(0, 0.0)], CPU)
    x, seen = torch.arange(32).reshape(1, 2, 16), []
    _stack.hidden(net, _stack.named(net, flat), x, None, seen)
    wanted = [float(torch.linalg.cond(z).log().mean().exp()) for z in seen]
    assert _stack.conditioning(net, flat, x)[0].tolist() == pytest.approx(wanted, rel=0.02)


def test_flops_and_parameters_are_counted_right() -> None:
    net = decoder()
    assert net.parameters == 64 * 32 + 16 * 32 + 2 * (4 * 32 * 32 + 2 * 32 * 64)
    forward = 2 * 16 * (2 * (4 * 32 * 32 + 2 * 32 * 64) + 64 * 32 + 16 * 32 + 2 * 64 * 8)
    assert net.flops == 3 * forward


def test_lists_come_to_what_they_say() -> None:
    made = _listops.examples(50, 8, 40, 1, CPU)
    for row, keep, answer in zip(*made, strict=True):
        assert _listops.read(row[keep].tolist()) == int(answer)
        assert 8 <= int(keep.sum()) <= 40
    assert torch.equal(made.tokens, _listops.examples(50, 8, 40, 1, CPU).tokens)


def test_an_order_depends_on_the_seed_alone() -> None:
    both = _data.orders([5, 9], 4, 3, 7, CPU)
    assert torch.equal(both[:, 1], _data.orders([9], 4, 3, 7, CPU)[:, 0])
    assert sorted(both[:, 0].flatten()[:7].tolist()) == list(range(7)), "every example once before any twice"


def test_missing_data_says_how_to_pack_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="code-train.u16.xz is missing; pack the data with: python -m exp"):
        _data.texts("code", "full", tmp_path, CPU)


def test_time_that_is_over_leaves_parts_out_and_goes_on_later(tmp_path: Path) -> None:
    late = _lab.Parts(tmp_path / "parts.json", ["x"], minutes=0.0)
    late._start -= 1.0
    jobs = {"a": lambda: 1, "b": lambda: 2}
    assert _points.work(jobs, late, lambda items, _: items, "jobs") == ["a", "b"]
    parts = _lab.Parts(tmp_path / "parts.json", ["x"])
    assert _points.work(jobs, parts, lambda items, _: items, "jobs") == [] and dict(parts) == {"a": 1, "b": 2}


def test_intervals() -> None:
    found = _points.mean([1.0, 2.0, 3.0])
    assert found.mean == 2.0 and found.high - found.mean == pytest.approx(2.4841, abs=1e-3), "Student's t, two degrees"
    assert _points.difference([3.0, 4.0], [1.0, 2.0]) == _points.Mean(2.0, 2.0, 2.0)
    assert _points.correlation([1, 2, 3, 4], [4, 3, 2, 1])["rho"] == pytest.approx(-1)  # type: ignore[index]


def test_nothing_is_said_without_what_it_rests_on(tmp_path: Path) -> None:
    late = _lab.Parts(tmp_path / "parts.json", ["x"], minutes=0.0)
    late._start -= 1.0
    with pytest.raises(HeadwiseError, match="time was over before a could be measured; what is done is kept"):
        _points.work({"a": lambda: 1}, late, lambda items, _: items, "jobs", ["a"])


def test_rates_at_the_edge_are_told() -> None:
    model = {"rate": 0.1, "rates": {"0.1": 2.0, "0.2": 3.0}}
    found = _points.edges({"a": model, "b": model | {"rate": 0.2}, "c": {"rate": 0.1, "rates": {"0.1": 2.0}}})
    assert "Of 3 models, best rates were 1 at the lowest rate tried (a), 1 at the highest (b), 1 at the only" in found
    inside = {"rate": 0.1, "rates": {"0.05": 2.0, "0.1": 1.0, "0.2": 3.0}}
    assert not _points.edges({"a": inside | {"settled": True}})
    assert "chosen in a shorter training" in _points.edges({"a": inside})


def test_rules_without_results_say_what_to_run() -> None:
    empty = _rules.page({})
    assert empty.count("Not measured yet") == len(_rules.RULES)
    assert "run `headwise reproduce b2_conditioning` and `headwise reproduce b3_grid` and" in empty


def test_rules_follow_the_numbers() -> None:
    def model(loss: float, depth: int) -> dict[str, Any]:
        return {"loss": [loss, loss + 0.01], "depth": depth, "width": 8, "parameters": 1, "seconds": 1.0, "rate": 1.0}

    def answer(wide: float) -> str:
        models = {"deep": model(3.0, 12), "wide lean": model(wide, 4)}
        return _rules.page({"b6_decoders": {"models": models, "left_out": []}})

    assert "fewer and wider is better. Spend on width before depth." in answer(2.5)
    assert "more and narrower is better. Spend on depth before width." in answer(3.5)


def test_a_rate_is_found_between_worse_ones_and_added_rates_keep_what_is_done() -> None:
    best, asked = {"low": 0.25, "high": 8.0}, []

    def attempt(name: str) -> _rates.Attempt:
        def train(rates: Sequence[float]) -> list[dict[str, Any]]:
            asked.extend((name, rate) for rate in rates)
            return [{"tried": abs(math.log(rate / best[name])), "loss": [rate]} for rate in rates]

        return train

    parts: dict[str, Any] = {}
    attempts = {name: attempt(name) for name in best}
    short, long = _rates.Ladder((0.5, 1.0, 2.0), (1.0, 2.0)), _rates.Ladder((0.125, 0.25, 0.5, 1.0, 2.0), (1.0, 2.0))
    assert not _rates.search(attempts, short, parts, lambda items, _: items, "rates")
    assert asked == [("low", 1.0), ("low", 2.0), ("high", 1.0), ("high", 2.0), ("low", 0.5)]
    assert not _rates.search(attempts, long, parts, lambda items, _: items, "rates")
    assert asked[5:] == [("low", 0.25), ("low", 0.125)], "only what is new is trained"
    found = _rates.best("low", long, parts)
    assert found is not None and found["rate"] == 0.25 and found["loss"] == [0.25] and len(found["rates"]) == 5
    assert _rates.best("other", long, parts) is None


def test_the_grids_rival_is_chosen_without_the_test_set() -> None:
    def cell(depth: int, held: float, accuracy: float) -> dict[str, Any]:
        sizes = {"depth": depth, "heads": 3, "mlp": 8, "parameters": depth, "flops": depth, "seconds": depth}
        return {**sizes, "accuracy": [accuracy, accuracy + 0.001], "rate": 0.1, "rates": {"0.1": held}}

    def judged(chosen: float, other: float) -> str:
        cells = {"deep": cell(12, 1.0, 0.6), "chosen": cell(8, 0.8, chosen), "lucky": cell(4, 0.9, other)}
        return b3_grid.verdict({"original": "deep", "cells": cells})

    assert judged(0.7, 0.5) == "confirmed with conditions", "better, but nothing is known of heads and MLP width"
    assert judged(0.5, 0.7) == "refuted", "what only the test set prefers does not count"


def test_designs_are_compared_over_the_seeds_that_both_have() -> None:
    found = b8_design.paired({"loss": [3.0, 3.5]}, {"loss": [2.0, 2.5, 9.0]})
    assert found == _points.Mean(1.0, 1.0, 1.0)


def test_a_decoders_lead_counts_only_if_no_other_rate_can_undo_it() -> None:
    def models(settled_deep: bool, settled_lean: bool) -> dict[str, Any]:
        deep = {"loss": [3.0, 3.01], "rate": 0.1, "settled": settled_deep}
        return {"models": {"deep": deep, "lean": {"loss": [2.0, 2.01], "rate": 0.1, "settled": settled_lean}}}

    assert b6_decoders.verdict(models(True, False)) == "confirmed", "the better model can only gain"
    assert b6_decoders.verdict(models(False, True)) == "refuted", "the worse one might catch up"
    unsure = models(False, True)
    assert "rates not settled: deep at 0.1" in b6_decoders.in_words(unsure, "lean")
    unsure["models"]["deep"]["losses"] = {"0.1": [3.0, 3.01], "0.2": [2.5, 2.51]}
    unsure["models"]["lean"]["losses"] = {"0.2": [2.75, 2.76]}
    assert "+0.250 [+0.250, +0.250] with both at rate 0.2" in b6_decoders.in_words(unsure, "lean")
