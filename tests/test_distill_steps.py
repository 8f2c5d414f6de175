"""The steps of a distillation: shares of each tensor's size, the choice of a rate, and replays of a captured step."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from test_distill import FEW, damaged, job_of
from torch import nn

from headwise.families.llama import FAMILY as llama
from headwise.heal import _lora, _rate, distill
from headwise.heal._adam import RelativeAdam, sizes_of
from headwise.runs.heal_options import Options
from headwise.tasks.causal import Causal
from headwise.training import captured
from headwise.training.captured import CapturedStep
from headwise.training.loop import FitSettings, State, fit

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.fixture(scope="module")
def job():
    torch.manual_seed(0)
    source = llama.tailor(llama.tiny())
    return job_of(llama, Causal(), source, damaged(source, llama))


def test_first_steps_are_shares_of_the_tensors_sizes():
    weights = [nn.Parameter(torch.randn(40, 30) * size) for size in (1e-4, 1.0, 30.0)]
    before = [weight.detach().clone() for weight in weights]
    sizes = [float(weight.detach().square().mean().sqrt()) for weight in weights]
    optimiser = RelativeAdam(weights, sizes, 0.01, (0.9, 0.95))
    for weight in weights:
        weight.grad = torch.randn_like(weight) * 1e-5
    optimiser.step()
    for weight, old, size in zip(weights, before, sizes, strict=True):
        moved = (weight.detach() - old).abs() / size
        torch.testing.assert_close(moved, torch.full_like(moved, 0.01), rtol=0.02, atol=1e-6)


@pytest.mark.parametrize("at_once", [10, 1 << 20])
def test_steps_are_those_of_adam_with_a_rate_of_its_own_for_every_tensor(at_once, monkeypatch):
    monkeypatch.setattr("headwise.heal._adam.AT_ONCE", at_once)
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(4) * 0.01)]
    theirs = [nn.Parameter(weight.detach().clone()) for weight in ours]
    sizes = [2.0, 0.03]
    one = RelativeAdam(ours, sizes, 0.02, (0.9, 0.95))
    groups = [{"params": [w], "lr": 0.02 * size} for w, size in zip(theirs, sizes, strict=True)]
    other = torch.optim.Adam(groups, betas=(0.9, 0.95), eps=1e-12)
    for _ in range(20):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        one.step()
        other.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_sizes_let_everything_move_and_nothing_jump():
    model = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.Module())
    model[2].empty = nn.Parameter(torch.zeros(0, 32))
    model.register_parameter("alone", nn.Parameter(torch.zeros(3, 3)))
    with torch.no_grad():
        model[0].weight.normal_(std=0.02)
        model[0].bias.zero_()
    sizes = sizes_of(model)
    assert sizes["0.weight"] == pytest.approx(0.02, rel=0.1)
    assert sizes["0.bias"] == sizes["0.weight"], "a bias of zero moves as the weight does"
    assert sizes["1.weight"] == sizes["1.bias"] == 1
    assert 0.02 * 0.9 < sizes["alone"] <= 1, "what is zero and has nothing beside it moves as the usual tensor"
    assert set(sizes) == {"alone", "0.weight", "0.bias", "1.weight", "1.bias"}, "empty tensors do not learn"
    model[0].weight.requires_grad_(False)
    assert "0.weight" not in sizes_of(model)


def test_low_rank_changes_at_their_full_size_are_as_large_as_the_weight():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 48, bias=False))
    with torch.no_grad():
        model[0].weight.normal_(std=0.05)
    _lora.add([model], 8)
    sizes = sizes_of(model)
    change = model[0].parametrizations.weight[0].requires_grad_(False)
    up = torch.randn(48, 8) * sizes["0.parametrizations.weight.0.up_OR"]
    ratio = (up @ change.down_RI).square().mean().sqrt() / model[
        0
    ].parametrizations.weight.original.square().mean().sqrt()
    assert 0.8 < ratio.item() < 1.25


def test_small_tensors_heal_at_a_rate_that_suits_the_large_ones(job):
    """The same function with MLP channels a thousand times smaller, which the weights behind them make up for."""
    small = llama.tailor(job.cut)
    with torch.no_grad():
        for layer in llama.layers(small):
            layer.mlp.up_proj.weight *= 1e-3
            layer.mlp.down_proj.weight *= 1e3
    options = replace(FEW, rate=0.01)
    found = [distill.heal(replace(job, cut=cut, options=options))[1] for cut in (job.cut, small)]
    assert found[1].divergence_after == pytest.approx(found[0].divergence_after, rel=0.02)


def trial(rate, divergence):
    return {"rate": rate, "divergence": divergence, "loss": divergence}


def test_a_rate_is_the_largest_that_a_short_trial_does_not_refuse():
    trials = [trial(0.0, 1.0), trial(1e-3, 0.9), trial(3e-3, 0.85), trial(1e-2, 0.9), trial(3e-2, 2.0)]
    long, short = FitSettings(steps=1000), FitSettings(steps=4)
    assert _rate.best(trials, long) == 1e-2, "what a large rate disturbs at first it makes good in a long course"
    assert _rate.best(trials, short) == 3e-3, "but not in one that is no longer than a trial"
    assert _rate.best(trials[:3] + trials[4:], long) == 3e-3
    harmful = [trial(0.0, 1.0), trial(1e-3, 1.01), trial(3e-3, 1.05)]
    assert _rate.best(harmful, long) == 3e-3, "nor does harm at first speak against a long one"
    assert _rate.best(harmful, short) is None


def test_trials_change_nothing_and_stop_at_a_rate_that_ruins(job):
    work = distill.Distillation(job)
    trainer, before = work.trainer, work.trainer.copy()
    found = _rate.tried(trainer, work.fitting, trainer.judge(), lambda rate: ())
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.copy().items())
    for number in range(1, len(found) - 1):
        least = min(row["divergence"] for row in found[:number])
        assert found[number]["divergence"] <= _rate.HOPELESS * least, "the last one only may ruin the model"


def replayed(work):
    """What a captured graph does, without one: reads and writes the same memory as `work`."""
    return work


def refuse(work):
    raise RuntimeError("operation not permitted when stream is capturing\nand more")


def learned(job, move_by, options, device="cpu", rows=40):
    made = job_of(llama, Causal(), job.source.to(device), job.cut.to(device), options, rows=rows)
    trainer = distill.Distillation(made).trainer
    settings = FitSettings(steps=12, rate=0.01, warm_up=0.3, last_rate=0.0, accumulate=trainer.parts, point_every=4)
    state = trainer.state(settings)
    curve = fit(trainer.loss, trainer.batches, settings, trainer.mean_loss, state=state, move_by=move_by)
    return [(p.loss, p.gradient_norm) for p in curve], trainer.copy(), move_by


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("text", ["batch=256", "batch=256 micro=64", "batch=256 lora=4"])
def test_replayed_steps_are_the_ordinary_ones(job, text, device):
    options = Options.parse([*text.split(), "steps=12"])
    curve, weights, _ = learned(job, None, options, device)
    step = CapturedStep() if device == "cuda" else CapturedStep(replayed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again, others, _ = learned(job, step, options, device)
    assert step.replay is not None, "a step was captured"
    close = dict(rel=1e-6) if device == "cpu" else dict(rel=0.02)  # bfloat16, and sums in another order
    for (loss, norm), (loss2, norm2) in zip(curve, again, strict=True):
        assert loss2 == pytest.approx(loss, **close) and norm2 == pytest.approx(norm, **close)
    for name, tensor in weights.items():
        size = float(tensor.square().mean().sqrt()) + 1e-3
        torch.testing.assert_close(others[name], tensor, rtol=0, atol=size * (1e-5 if device == "cpu" else 0.05))


def test_a_capture_makes_no_mask_that_ordinary_steps_do_without(job, monkeypatch):
    found, attend = [], nn.functional.scaled_dot_product_attention

    def look(q, k, v, attn_mask=None, **more):
        found.append(attn_mask is not None)
        return attend(q, k, v, attn_mask=attn_mask, **more)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", look)
    monkeypatch.setattr("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: True)
    llama.run(job.cut, job.rehearsal.inputs.to(job.cut.device))
    with captured._without_masks():
        llama.run(job.cut, job.rehearsal.inputs.to(job.cut.device))
    assert found and found == [True] * (len(found) // 2) + [False] * (len(found) // 2)


def test_steps_that_cannot_be_captured_are_done_by_the_loop(job):
    options = Options.parse(["batch=256", "steps=12"])
    curve, weights, _ = learned(job, None, options)
    with pytest.warns(UserWarning, match="not captured, which is slower: operation not permitted") as said:
        again, others, step = learned(job, CapturedStep(refuse), options)
    assert len(said) == 1 and again == curve and step.replay is None
    assert all(torch.equal(others[name], tensor) for name, tensor in weights.items())


def test_batches_of_another_shape_are_not_replayed():
    model = nn.Linear(3, 1)
    optimiser = RelativeAdam(list(model.parameters()), [1.0, 1.0], 0.01, (0.9, 0.95))
    state, settings = State(model, optimiser, torch.zeros(2)), FitSettings(steps=10, rate=0.01, point_every=1)
    seen = []

    def loss(model, rows):
        seen.append(rows)
        return model(rows).square().mean()

    sizes = [4] * 8 + [2, 4]
    rows = [torch.randn(size, 3) for size in sizes]
    step = CapturedStep(replayed)
    fit(model, rows.__getitem__, settings, loss, state=state, move_by=step)
    assert [len(found) for found in seen] == sizes
    assert seen[8] is rows[8] and seen[7] is seen[9] is step.held[0], "the odd one as it is, the others in one place"


def test_on_a_cpu_and_where_steps_differ_nothing_is_captured(job):
    def trainer(options=FEW, rows=40):
        return distill.Distillation(job_of(llama, Causal(), job.source, job.cut, options, rows=rows)).trainer

    def on_a_gpu(trainer):
        trainer.device = torch.device("cuda")
        return trainer.capturable()

    assert not trainer().capturable() and on_a_gpu(trainer())
    assert not on_a_gpu(trainer(replace(FEW, recompute=1)))
    uneven = trainer(replace(FEW, batch=6 * 32, micro=4 * 32), rows=41)
    assert on_a_gpu(uneven) == (uneven.rows % uneven.parts == 0)
    table = trainer()
    table.loss.student.model.embed_tokens.requires_grad_(True)
    assert not on_a_gpu(table), "gradients of embeddings are sorted"


def test_a_healing_that_stopped_goes_on_to_the_last_bit(job, tmp_path):
    def stopping(items, label):
        for item in items:
            if item == 17 and not isinstance(label, str):
                raise KeyboardInterrupt
            yield item

    asked = replace(job, options=replace(FEW, rate=3e-3))
    whole, _ = distill.heal(asked)
    with pytest.raises(KeyboardInterrupt):
        distill.heal(replace(asked, folder=tmp_path, track=stopping))
    assert list((tmp_path / "distill").glob("step-*")), "there is a checkpoint to resume from"
    again, _ = distill.heal(replace(asked, folder=tmp_path))
    found = whole.state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in again.state_dict().items())
    other = llama.tailor(job.cut).state_dict()
    assert not all(torch.equal(tensor, other[name]) for name, tensor in found.items()), "something was learned"


@pytest.mark.parametrize("lost", [float("nan"), float("inf")])
def test_a_trial_that_gives_no_number_is_never_chosen_and_never_an_error(lost):
    long, good = FitSettings(steps=2000), {"rate": 1e-3, "divergence": 0.1, "loss": 0.2}
    broken = {"rate": 3e-3, "divergence": lost, "loss": lost}
    assert _rate.best([{"rate": 0.0, "divergence": lost, "loss": lost}, good, broken], long) == 1e-3
    assert _rate.best([broken, {**broken, "rate": 0.0}], long) is None, "nothing was learned: weights stay"
    assert _rate.best([trial(0.0, -1e-9), trial(1e-3, -2e-9)], long) == 1e-3, "rounding may make it negative"
