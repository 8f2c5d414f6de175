"""Healing by distillation: what it learns, and what it never harms."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from headwise import families
from headwise.checks import quality
from headwise.cuts import reshape
from headwise.cuts.balance import balance
from headwise.families.bert import FAMILY as bert
from headwise.families.llama import FAMILY as llama
from headwise.heal import _lora, _loss, distill
from headwise.heal._job import Job
from headwise.heal._loss import Batch, DistillationLoss
from headwise.heal._trainer import divided
from headwise.probes import gram
from headwise.runs.heal_options import Options
from headwise.tasks.causal import Causal
from headwise.tasks.embedding import TASK as Embedding
from headwise.types import LayerKeep, Plan

FEW = Options.parse(["steps=24", "batch=256"])


def damaged(model, family, scale=0.3):
    """A tailored copy whose layers lost something that training can bring back."""
    torch.manual_seed(1)
    cut = family.tailor(model)
    with torch.no_grad():
        for block in family.blocks(cut):
            block.output.weight *= 1 - scale * torch.rand_like(block.output.weight)
    return cut


def job_of(family, task, source, cut, options=FEW, rows=40, **more):
    torch.manual_seed(0)
    text, held = torch.randint(3, 90, (rows, 32)), torch.randint(3, 90, (16, 32))
    return Job(family, task, source, cut, task.prepare(text, 0), task.prepare(held, 0), options=options, **more)


@pytest.fixture(scope="module")
def source():
    torch.manual_seed(0)
    return llama.tailor(llama.tiny())


@pytest.fixture(scope="module")
def job(source):
    return job_of(llama, Causal(), source, damaged(source, llama))


def held_out(job, model):
    return float(quality.compare(job.family, job.source, model, job.rehearsal.inputs, task=job.task).kl.mean())


def test_the_divergence_falls_on_text_that_nothing_was_fitted_to(job):
    before = {name: tensor.clone() for name, tensor in job.cut.state_dict().items()}
    healed, record = distill.heal(job)
    assert held_out(job, healed) < 0.7 * held_out(job, job.cut)
    assert record.divergence_after < record.divergence_before
    assert [point.step for point in record.curve] == list(range(1, 25)) and record.curve[-1].held_out is not None
    assert all(torch.equal(before[name], tensor) for name, tensor in job.cut.state_dict().items()), "a copy is healed"
    assert all(parameter.requires_grad for parameter in healed.parameters())
    assert torch.equal(healed.lm_head.weight, job.cut.lm_head.weight), "embeddings and head are the source's own"


def test_a_healthy_model_is_not_harmed(job):
    healthy = replace(job, cut=llama.tailor(job.source), options=Options.parse(["steps=8", "batch=128"]))
    healed, record = distill.heal(healthy)
    assert record.divergence_after <= record.divergence_before and held_out(job, healed) < 1e-6
    forced = replace(healthy, options=Options.parse(["steps=8", "batch=128", "rate=0.1"]))
    healed, _ = distill.heal(forced)
    assert held_out(job, healed) < 1e-6, "a rate that ruins it leads back to the start"


def test_encoders_learn_their_embeddings():
    torch.manual_seed(0)
    model = bert.tailor(bert.tiny("bert"))
    task = Embedding(model.config.hidden_size)
    work = job_of(bert, task, model, damaged(model, bert))
    healed, record = distill.heal(work)
    assert held_out(work, healed) < 0.9 * held_out(work, work.cut), record


def test_low_rank_changes_merge_into_the_weights(job):
    student = llama.tailor(job.cut)
    plain = llama.run(student, job.rehearsal.inputs)
    assert _lora.add(llama.layers(student), 2) == 7 * len(llama.layers(student))
    assert torch.equal(llama.run(student, job.rehearsal.inputs), plain), "nothing is changed at first"
    for name, parameter in student.named_parameters():
        if name.endswith("up_OR"):
            torch.nn.init.normal_(parameter, std=0.1)
    changed = llama.run(student, job.rehearsal.inputs)
    _lora.merge(student)
    assert not torch.allclose(changed, plain, atol=1e-3)
    torch.testing.assert_close(llama.run(student, job.rehearsal.inputs), changed)
    assert set(student.state_dict()) == set(job.cut.state_dict())
    healed, _ = distill.heal(replace(job, options=replace(FEW, lora=4)))
    assert held_out(job, healed) < 0.9 * held_out(job, job.cut)
    assert set(healed.state_dict()) == set(job.cut.state_dict())


def gradient(loss, rows):
    loss.zero_grad()
    loss([Batch(rows)]).backward()
    return torch.cat([p.grad.flatten() for p in loss.parameters() if p.grad is not None])


def test_pieces_and_layers_that_compute_again_change_nothing(job, monkeypatch):
    rows = job.calibration.batches(256)[0]
    full = gradient(DistillationLoss(llama, job.task, job.source, llama.tailor(job.cut)), rows)
    lean = DistillationLoss(llama, job.task, job.source, llama.tailor(job.cut), recompute=True).train()
    monkeypatch.setitem(_loss.AT_ONCE, "cpu", 90 * 10)
    torch.testing.assert_close(gradient(lean, rows), full, rtol=1e-4, atol=1e-6)


def test_balancing_changes_no_answer_and_evens_the_factors(source):
    shape, rows = llama.shape_of(source.config), torch.randint(3, 90, (8, 32))
    smaller = shape.with_layers(tuple(replace(layer, qk_dim=8, v_dim=10) for layer in shape.layers))
    plan = Plan("", shape, smaller, (LayerKeep(),) * len(shape.layers), "", (), {}, 0.0, 0)
    cut = reshape(llama, source, plan, gram.collect(llama, source, rows, False))
    before = llama.run(cut, rows)
    balance(llama.blocks(cut))
    assert torch.equal(llama.run(cut, rows), before)
    for block in llama.blocks(cut):
        values, output = (w.detach().square().mean() for w in (block.attention.v_proj.weight, block.output.weight))
        assert 0.3 < float(values / output) < 3


def test_rows_to_choose_by_are_never_learned_from(job):
    learned, held = divided(job.calibration, torch.device("cpu"))
    seen = {tuple(row) for row in learned.inputs.tolist()}
    assert len(held.inputs) == 5 and not any(tuple(row) in seen for row in held.inputs.tolist())


@torch.no_grad()
def test_zero_shot_scores_are_those_of_single_endings(source, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    zero_shot = importlib.import_module("zero_shot")
    tokenizer = AutoTokenizer.from_pretrained(families.locate("embedded")[0])
    torch.manual_seed(3)
    model = llama.tailor(llama.tiny(vocab_size=4096))
    model.lm_head.weight.data *= 30
    asked = [("def main():", ("return", "import numpy")), ("class A", ("b", "pass and more of it", "c d"))]
    best, normed = [], []
    for context, endings in asked:  # one by one, without batches
        logs = []
        for ending in endings:
            ids = torch.tensor(tokenizer([f"{context} {ending}"])["input_ids"])
            first = len(tokenizer(context)["input_ids"])
            found = llama.run(model, ids).log_softmax(-1)[0, first - 1 : -1]
            logs.append(float(found.gather(-1, ids[0, first:, None]).sum()))
        best.append(max(range(len(logs)), key=logs.__getitem__))
        normed.append(max(range(len(logs)), key=lambda i: logs[i] / len(endings[i])))
    for size in (1, 4096):
        items = [zero_shot.Item(*pair, right) for pair, right in zip(asked, best, strict=True)]
        assert zero_shot.Exam(tokenizer, items).scores(model, size).acc.tolist() == [1, 1]
        items = [zero_shot.Item(*pair, right) for pair, right in zip(asked, normed, strict=True)]
        scores = zero_shot.Exam(tokenizer, items).scores(model, size)
        assert scores.acc_norm.tolist() == [1, 1]
        assert scores.to_json(scores)["acc_norm_change"] == 0
    last = zero_shot.Exam(tokenizer, [zero_shot.Item("import", ("os",), 0)] * 2).scores(model)
    assert last.acc_norm is None and last.to_json()["items"] == 2
