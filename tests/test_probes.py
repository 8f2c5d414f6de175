"""Probes give the moments and prices that their formulas say, however they are computed."""

from __future__ import annotations

import copy

import pytest
import torch

from headwise import families, linalg, probes, processes, registry
from headwise.families._watch import watching
from headwise.families.llama import FAMILY as llama
from headwise.linalg import eliminated_together, elimination_order, ridge, ridge_step, roots, value_basis
from headwise.probes import _backward, fisher, gram, sensitivity
from headwise.probes._channels import channel_order
from headwise.probes._products import Gram
from headwise.runtime.modeling_headwise import _signed, _turned
from headwise.tasks.causal import Causal

CLOSE = 1e-5  # of the largest value


def off(found, right):
    """The largest error, relative to the largest value."""
    found, right = found.detach().double(), right.detach().double()
    return float((found - right).abs().max() / right.abs().max())


@pytest.fixture(scope="module")
def model():
    """A small decoder whose query heads share keys and whose MLP is wider than one panel."""
    family = next(family for family in families.known() if family.name == "llama")
    stock = family.tiny("llama", num_attention_heads=4, num_key_value_heads=2, intermediate_size=520)
    return family, family.tailor(stock), torch.arange(60).reshape(5, 12) % 90 + 3


@pytest.mark.parametrize("width", [1, 7, 512, 513, 1030])
def test_a_sum_of_panels_is_the_whole_product(width):
    parts = torch.randn(3, 20, width, generator=torch.Generator().manual_seed(0))
    running = Gram()
    for part in parts:
        running.add(part)
    found, rows = running.total(), parts.flatten(0, 1).double()
    assert torch.equal(found, found.mT) and off(found, rows.mT @ rows) < CLOSE


def test_moments_are_means_over_all_tokens(model):
    family, tailored, ids = model
    seen = {}
    with watching(family.blocks(tailored), lambda *a: seen.update({a[0]: a[1:]}), lambda i, h: seen.update({(i,): h})):
        family.run(tailored, ids)
    for layer, found in enumerate(gram.collect(family, tailored, ids, mlp=True)):
        q, k, _, z = (x.double() for x in seen[layer])
        h, groups, count = seen[(layer,)].double().flatten(0, 1), k.shape[1], ids.numel()
        about = k - k.mean(2, keepdim=True)
        right = {
            "gram_q": torch.einsum("bghtk,bghtl->gkl", *[q.unflatten(1, (groups, -1))] * 2),
            "gram_k": torch.einsum("bgtk,bgtl->gkl", about, about),
            "power_k": k.square().sum((0, 2)),
            "gram_z": torch.einsum("bthv,bthw->hvw", z, z),
            "gram_mlp": h.mT @ h,
        }
        assert set(found) == set(right)
        for name, moment in right.items():
            assert off(found[name], moment / count) < CLOSE, name


def test_moments_and_prices_are_those_of_double_precision(model):
    family, tailored, ids = model
    readings = []
    for each in (tailored, copy.deepcopy(tailored).double()):
        moments = gram.collect(family, each, ids, mlp=True)
        readings.append((moments, *sensitivity.measure(family, each, ids, moments, True, 0)))
    (moments, curves, _), (right, wanted, _) = readings
    for layer, double in zip(moments, right, strict=True):
        assert all(off(layer[name], double[name]) < 1e-4 for name in double)
    for curve, double in zip(curves, wanted, strict=True):
        for row, want in zip(curve.values, double.values, strict=True):
            assert row == pytest.approx(want, rel=1e-3, abs=1e-3 * max(want)), curve.kind


def test_prices_are_those_of_the_formula(model):
    """Half the mean square of what the removed coordinates times their gradients come to, at every token."""
    family, tailored, ids = model
    moments = gram.collect(family, tailored, ids, mlp=True)
    probe = sensitivity.Sensitivity(family, tailored, moments, True, Causal())
    probe.run(ids, 0)
    seen = {}

    def keep(layer, q, k, v, z):
        seen[layer] = (q, z)
        q.retain_grad()
        z.retain_grad()

    with watching(family.blocks(tailored), keep):
        batch = Causal().prepare(ids, 0)
        Causal().loss(Causal().outputs(family, tailored, batch), batch.labels).backward()
    for layer, (q, z) in seen.items():
        block = family.blocks(tailored)[layer]
        p, r = value_basis(moments[layer]["gram_z"], block.output.weight.detach(), block.attention.kv_heads)
        p, r = (m.repeat_interleave(2, 0).to(z) for m in (p, r))
        a = torch.einsum("bthv,hvc,hcw,bthw->btc", z, p, r, z.grad)
        tails = torch.stack([0.5 * a[..., c:].sum(-1).square().mean(1) for c in range(a.shape[-1])], -1)
        assert off(torch.cat(probe.sums[layer].tails["v"]), tails) < 1e-4
        heads = (z * z.grad).sum(-1).flatten(0, 1)
        assert off(probe.sums[layer].cross["heads"][0], heads.mT @ heads) < 1e-4
        pairs = (q * q.grad).unflatten(1, (2, 2)).sum(2).unflatten(-1, (2, -1)).sum(-2).transpose(0, 1).flatten(1, 2)
        assert off(probe.sums[layer].cross["qk_pairs"], pairs.mT @ pairs) < 1e-4
    tailored.zero_grad(set_to_none=True)


def test_units_go_in_the_order_of_what_their_loss_adds():
    a = torch.randn(30, 9, generator=torch.Generator().manual_seed(0)).double()
    cross, gone, damages = a.mT @ a / 30, [], []
    for _ in range(9):
        left = [unit for unit in range(9) if unit not in gone]
        costs = {unit: float(0.5 * cross[[*gone, unit]][:, [*gone, unit]].sum()) for unit in left}
        gone.append(min(costs, key=costs.get))
        damages.append(costs[gone[-1]])
    order, damage = elimination_order(cross)
    assert order == gone and damage == pytest.approx(damages)


def test_channels_go_by_what_the_others_cannot_make_up_for():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(200, 12, generator=draw).double() @ torch.randn(12, 12, generator=draw).double()
    gram, down, gone = x.mT @ x / 200, torch.randn(5, 12, generator=draw), []
    system = gram + 1e-3 * gram.diagonal().mean() * torch.eye(12)

    def left(channels):
        """The squared error of the output without some channels, the others' columns solved for."""
        stay = [channel for channel in range(12) if channel not in channels]
        lost, both = system[channels][:, channels], system[stay][:, channels]
        schur = lost - both.mT @ torch.linalg.solve(system[stay][:, stay], both)
        return float((down[:, channels].double() @ schur @ down[:, channels].double().mT).trace())

    for _ in range(12):
        gone.append(min({*range(12)} - {*gone}, key=lambda channel: left([*gone, channel])))
    assert channel_order(gram, down) == tuple(reversed(gone))


def test_many_orders_at_once_are_those_of_each():
    a = torch.randn(3, 40, 9, generator=torch.Generator().manual_seed(0))
    crosses = a.mT @ a
    for (order, damage), cross in zip(eliminated_together(crosses), crosses, strict=True):
        alone, cost = elimination_order(cross)
        assert order == alone and damage == pytest.approx(cost)


def test_roots_are_roots_and_inverses():
    a = torch.randn(3, 40, 6, generator=torch.Generator().manual_seed(0)).double()
    root, inverse = roots(a.mT @ a)
    assert off(root @ root, a.mT @ a) < 1e-12 and off(root @ inverse, torch.eye(6).double().expand(3, 6, 6)) < 1e-9


def test_a_step_of_ridge_leads_to_the_same_answer():
    draw = torch.Generator().manual_seed(0)
    x, y, start = (torch.randn(*size, generator=draw).double() for size in ((50, 6), (50, 3), (6, 3)))
    whole = ridge(x.mT @ x, x.mT @ y, start, 0.1)
    assert off(start + ridge_step(x.mT @ x, x.mT @ (y - x @ start), 0.1), whole) < 1e-12
    stacked = torch.cat((x, (0.1 * x.square().sum(0).mean()) ** 0.5 * torch.eye(6).double()))
    right = torch.linalg.lstsq(stacked, torch.cat((y, stacked[50:] @ start))).solution
    assert off(whole, right) < 1e-12, "the least squares that ridge stands for"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 12])
def test_turning_is_that_of_stock_code_to_the_last_bit(dtype, width):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 5, 16, generator=draw).to(dtype) for heads in (4, 2))
    angles = torch.rand(2, 5, width // 2, generator=draw) * 100
    cos, sin = (torch.cat((table, table), -1).to(dtype) for table in (angles.cos(), angles.sin()))
    for x, stock in zip((q, k), apply_rotary_pos_emb(q[..., :width], k[..., :width], cos, sin), strict=True):
        found = _turned(x, cos[:, None], _signed(*sin[:, None].chunk(2, -1)))
        assert torch.equal(found[..., :width], stock) and torch.equal(found[..., width:], x[..., width:])


def test_probes_that_describe_layers_are_found_in_their_folder():
    model = llama.tailor(llama.tiny())
    rows = llama.example(model.config, 4, 16)
    kinds = [{reading.probe for reading in probes.describe(llama, model, rows, 0, past=past)} for past in (True, False)]
    assert kinds == [{"saturation", "lags"}, {"conditioning"}], "those that need a past apart from the others"
    for name in registry.names("headwise.probes"):
        assert registry.find("headwise.probes", name).MEANING, "every probe says what it measures"


def test_prices_of_bits_do_not_depend_on_how_rows_are_batched(model):
    family, tailored, ids = model
    one, other = (fisher.collect(family, tailored, rows, 0) for rows in (ids, ids.flip(0)))
    for first, second in zip(one, other, strict=True):
        assert off(second["k_price"], first["k_price"]) < CLOSE and off(second["v_price"], first["v_price"]) < CLOSE
    again = fisher.collect(family, tailored, ids, 1)
    assert off(again[0]["v_price"], one[0]["v_price"]) > CLOSE, "labels are drawn, by the seed"


def test_labels_are_drawn_by_their_probabilities():
    probabilities = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3])
    rows = probabilities.log().expand(20_000, -1)
    found = _backward._drawn(rows, torch.Generator().manual_seed(0)).bincount(minlength=5) / 20_000
    assert found[[0, 2]].sum() == 0 and torch.allclose(found, probabilities, atol=0.02)


def test_labels_do_not_change_with_rounding():
    logits = 2.5 * torch.randn(256, 30_000, generator=torch.Generator().manual_seed(1))
    noise = 3e-5 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    found = [
        _backward._drawn(rows.log_softmax(-1), torch.Generator().manual_seed(0)) for rows in (logits, logits + noise)
    ]
    assert torch.equal(*found), "as a GPU and a CPU differ"
    assert len(found[0].unique()) > 100, "and not for want of chance"


def test_matrices_decomposed_side_by_side_are_those_of_one_thread():
    threads, drawn = torch.get_num_threads(), torch.Generator().manual_seed(0)
    rows = torch.randn(6, 2, processes.THREADED, 300, dtype=torch.float64, generator=drawn)
    moments = list(rows @ rows.mT)

    def work(moment: torch.Tensor) -> tuple[torch.Tensor, bool, int]:
        return linalg.priced_basis(moment, moments[0])[1], torch.is_grad_enabled(), torch.get_num_threads()

    try:
        torch.set_num_threads(1)
        one = [work(moment)[0] for moment in moments]
        torch.set_num_threads(3)
        with torch.no_grad():
            found = processes.side_by_side(work, moments, processes.THREADED)
        assert torch.get_num_threads() == 3, "as before"
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(ours, theirs) for ours, (theirs, _, _) in zip(one, found, strict=True)), "in their order"
    assert {(gradients, count) for _, gradients, count in found} == {(False, 1)}
