"""Stacks train what they say: the same as models alone, the same as transformers' and the runtime's own code."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:  # experiments live beside the package
    sys.path.insert(0, str(ROOT))

from experiments import (  # noqa: E402
    _advice,
    _data,
    _lab,
    _listops,
    _points,
    _rates,
    _rules,
    _stack,
    _stories,
    _tasks,
    _training,
    _trials,
    q4_design,
    q6_scratch,
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
    net, held = q4_design.net_of(proposal.shape, 32), model.state_dict()
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


def test_beside_nystrom_attention_every_head_is_convolved_with_its_kernel() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4, 2, 48, 8).unbind()  # two members of two rows
    conv = torch.randn(2, 2, 33)
    added = _stack.nystrom(q, k, v, 8, None, conv) - _stack.nystrom(q, k, v, 8, None, None)
    for row in range(4):
        for head in range(2):
            kernel = conv[row // 2, head].expand(8, 1, -1)
            wanted = F.conv1d(v[row, head].T[None], kernel, padding=16, groups=8)[0].T
            torch.testing.assert_close(added[row, head], wanted, rtol=1e-3, atol=1e-3)


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
    assert (
        "Of 3 models, best learning rates were 1 at the lowest tried (a), 1 at the highest (b), 1 at the only" in found
    )
    inside = {"rate": 0.1, "rates": {"0.05": 2.0, "0.1": 1.0, "0.2": 3.0}}
    assert not _points.edges({"a": inside | {"settled": True}})
    assert "chosen in a shorter training" in _points.edges({"a": inside})


def test_rules_are_stated_only_where_comparisons_decide() -> None:
    def page(wide: float, rate: float) -> str:
        def model(loss: float, depth: int) -> dict[str, Any]:
            rates = {"rate": rate, "rates": {"1.0": 1, "2.0": 1, "3.0": 1}}
            return {"loss": [loss, loss + 0.001, loss], "depth": depth, "width": 8, "parameters": 1, **rates}

        found = {"tokens": 9, "models": {"deep": model(3.0, 12), "wide lean": model(wide, 4)}}
        return _rules.page({"b6_decoders": SimpleNamespace(found=found)})

    assert "On text, fewer and wider layers are better: 1 of 1 comparisons show it." in page(2.5, 2.0)
    assert "the evidence says no: 1 of 1 comparisons are against the statement that fewer and wider" in page(3.5, 2.0)
    assert "no rule: no comparison decides whether fewer and wider" in page(2.5, 1.0), "a rate at the edge"
    assert _rules.page({}).count("No evidence here") == len(_advice.TOPICS) + 2


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


def test_designs_are_compared_over_the_seeds_that_both_have() -> None:
    found = q4_design.paired({"loss": [3.0, 3.5]}, {"loss": [2.0, 2.5, 9.0]})
    assert found == _points.Mean(1.0, 1.0, 1.0)


def test_every_model_is_tuned_by_the_same_rule_and_a_killed_run_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = _trials.Trial(4, 2, (0, 1), _rates.Ladder((1e-3, 1e-2, 1e-1), (1e-2,)))
    nets = {
        name: _stack.even(1, heads, 8, 16, length=16, symbols=64, causal=True) for name, heads in (("a", 1), ("b", 2))
    }
    parts: dict[str, Any] = {}
    found, left = _trials.run_all(nets, task(), trial, parts, lambda items, _: items)
    assert not left and set(found) == {"a", "b"} and all(len(model["loss"]) == 2 for model in found.values())
    assert all(len(model["rates"]) == 3 for model in found.values()), "while the best is at an edge, others are tried"
    monkeypatch.setattr(_trials, "learn_at", None)
    assert _trials.run_all(nets, task(), trial, parts, lambda items, _: items)[0] == found, "nothing is trained again"


def test_an_experiment_ends_early_where_its_first_model_learns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = _trials.Trial(4, 3, (0, 1), _rates.Ladder((1e-9,), (1e-9,)))
    monkeypatch.setattr(_trials, "ENOUGH", 3)
    trained: dict[str, Any] = {}
    with pytest.raises(
        HeadwiseError, match=r"a has a loss of 4\.\d+ after 3 steps at its best rate, where knowing noth"
    ):
        _trials.run_all({"a": decoder()}, task(), trial, trained, lambda items, _: items)
    assert "a" not in trained, "no seed was trained"


def test_normed_queries_and_keys_have_the_length_that_is_learned() -> None:
    net = _stack.Net(8, (_stack.Layer(2, 4, 16),), 6, 32, causal=True, rotary=True, qk_norm=True)
    plain = net._replace(qk_norm=False)
    assert net.parameters == plain.parameters + 2, "a temperature per head"
    qkv = torch.randn(1, 6, 24)
    cold, warm = (_stack.attention(net, net.layers[0], qkv, None, warmth=torch.full((1, 2), w)) for w in (-9.0, 9.0))
    v = qkv[0, :, 16:]
    means = torch.stack([v[: t + 1].mean(0) for t in range(6)])
    torch.testing.assert_close(cold[0], means, atol=2e-3, rtol=0)  # cold heads look at all tokens alike
    unit = torch.nn.functional.normalize
    q, k = (part.view(6, 2, 4) for part in qkv[0].split((8, 8, 8), -1)[:2])
    seen = torch.einsum("qhd,khd->hqk", unit(q, dim=-1), unit(k, dim=-1)).masked_fill(torch.ones(6, 6).triu(1) > 0, -9)
    nearest = torch.stack([v.view(6, 2, 4)[seen[h].argmax(-1), h] for h in range(2)], 1).flatten(1)
    torch.testing.assert_close(warm[0], nearest, atol=1e-2, rtol=1e-2)  # hot ones at the most similar key


def test_initial_values_can_have_another_spectrum_of_the_same_size() -> None:
    net = _stack.Net(16, (_stack.Layer(2, 8, 16),), 4, 48, classes=3, patches=True)
    plain, tilted = (_stack.initial(net._replace(tilt=tilt), 0) for tilt in (None, 2.0))
    values = tilted["0.qkv"][:, -16:]
    sizes = torch.linalg.svdvals(values)
    torch.testing.assert_close(sizes[0] / sizes[3], torch.tensor(16.0), rtol=1e-3, atol=0)
    torch.testing.assert_close(values.norm(), plain["0.qkv"][:, -16:].norm())
    assert torch.equal(tilted["0.up"], plain["0.up"]) and torch.equal(tilted["0.qkv"][:, :32], plain["0.qkv"][:, :32])


def test_arms_spread_the_same_attention() -> None:
    for width, depth in ((64, 4), (256, 12)):
        for name, layers in q6_scratch.arms(width, depth).items():
            assert len(layers) == depth and sum(heads * dim for heads, dim in layers) == width * depth, name
    taper = [heads * dim for heads, dim in q6_scratch.arms(256, 12)["taper"]]
    assert taper == sorted(taper, reverse=True) and taper[0] > taper[-1]


def test_rows_that_a_model_wrote_are_renumbered_and_predicted_whole() -> None:
    rows = torch.from_numpy(_stories.compact(np.array([[5, 900, 5], [7, 5, 900]])).astype(np.int64))
    assert rows.tolist() == [[0, 2, 0], [1, 0, 2]]
    found = _tasks.NextToken(_data.Texts(rows, rows, 3), 2, 1, 1)
    assert found.count == 2 and torch.equal(found.rows, rows) and found.held("test") == 1
