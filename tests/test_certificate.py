"""The certificate: sizes as counted on the model, quality at every length, retrieval, and a verdict that means it."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forked import failing
from torch import nn

from headwise import cli, families, heal
from headwise.checks import _fresh, certificate, exactness, quality
from headwise.checks import _lengths as lengths
from headwise.checks import _retrieval as retrieval
from headwise.cuts import save
from headwise.errors import OutputError
from headwise.families.gemma import FAMILY as gemma
from headwise.families.llama import FAMILY as llama
from headwise.heal import refit
from headwise.heal._job import Job
from headwise.runs.folder import RunFolder
from headwise.stages.texts import LongText
from headwise.tasks.causal import Causal
from headwise.types import Budget, Check, Gain, Healing, LayerKeep, LengthQuality, Plan, Retrieval, Verdict
from headwise.types.verdict import damage_limit

ENDS = ("before", "after", "after_low", "after_high")
QUALITY = dict(zip((f"perplexity_{end}" for end in ENDS), (8.0, 8.1, 8.0, 8.2), strict=True))
SMALL = ["--tokens", "1024", "--eval-tokens", "512", "--swap-tokens", "128", "--length", "64", "--device", "cpu"]


def call(*arguments: object) -> int:
    """The exit code of the command line, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["headwise", *map(str, arguments)])
        try:
            cli.main()
        except SystemExit as stop:
            return int(stop.code or 0)
    return 0


def at(length: int, damage: float, width: float = 0.01, rows: int = 4) -> LengthQuality:
    low, high = damage - width, damage + width
    return LengthQuality(length, rows, 2.0, 2.0 + damage, damage, low, high, damage, low, high)


def far(distance: int, before: float, after: float) -> Retrieval:
    change = after - before
    return Retrieval(distance, 16, before, after, change - 0.02, change + 0.02, 1.0, 1.0, 0.0, 0.0)


def verdict(*found: LengthQuality, **changes: object) -> Verdict:
    """A verdict of a model that was calibrated at 512 tokens and will be served at 2,048."""
    damage = {"measured": 0.01, "measured_low": 0.005, "measured_high": 0.015}
    checks = (Check("parameters as planned", True, "1", "1"),)
    plain = Verdict.of(
        QUALITY, {"parameters_before": 4, "parameters_after": 3}, {}, damage, checks, (), "held out from text", 512, "",
        "2030-01-01", found, (), 512, 2048, "10%", damage_limit("10%"),
    )  # fmt: skip
    return replace(plain, **changes)


# Sizes: the model is looked at, never the plan.


def claims(model: nn.Module, text: str, limit: float, spent: float) -> Plan:
    """A plan that changes nothing, with whatever a hand wrote into its file."""
    shape = llama.shape_of(model.config)
    keep = (LayerKeep(),) * len(shape.layers)
    name = text.partition("=")[0]
    return Plan("tiny", shape, shape, keep, "exact", (Budget(name, "", limit, 64, text),), {name: spent}, 0.0, 0)


@pytest.mark.parametrize("text", ["kv=75%", "params=75%", "flops=75%@64", "attention=75%@64", "attention_params=75%"])
def test_a_budget_is_checked_on_the_model_whatever_its_plan_claims(text: str) -> None:
    model = llama.tailor(llama.tiny())
    shape = llama.shape_of(model.config)
    plan = exactness.priced_again(claims(model, text, limit=1e18, spent=1.0), shape)
    *counts, budget = exactness.count_checks(model, plan, shape)
    assert all(check.passed for check in counts) and budget.name == f"budget {text}"
    assert not budget.passed, (
        "neither an edited limit nor what the plan says it spends makes a whole model three quarters"
    )
    if text == "kv=75%":
        full = 2 * shape.cache_bytes * sum(layer.kv_heads * layer.qk_dim for layer in shape.layers)
        assert f"{full:,} bytes per token" == budget.observed and f"at most {0.75 * full:,.0f}" == budget.expected


def test_a_plan_for_another_model_is_no_plan_for_this_one() -> None:
    model = llama.tailor(llama.tiny())
    shape = llama.shape_of(model.config)
    other = replace(shape, vocab_size=2 * shape.vocab_size)
    failed = [check.name for check in exactness.count_checks(model, claims(model, "kv=100%", 1e9, 1.0), other)]
    assert "plan made for this model" in failed


def test_sizes_are_those_of_the_tensors_not_of_the_configuration() -> None:
    model = llama.tailor(llama.tiny())
    said = llama.shape_of(model.config)
    model.config.headwise["layers"][0]["mlp_width"] //= 2
    assert exactness.counted_shape(model).layers == said.layers


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model stored in bfloat16, with the embedded tokenizer."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    llama.tiny(vocab_size=4096, tie_word_embeddings=True).to(torch.bfloat16).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path(families.locate("embedded")[0]) / name, path / name)
    return path


@pytest.mark.usefixtures("new_processes")
def test_a_bfloat16_model_reloads_as_it_was_and_an_edited_plan_is_found_out(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    run = ["run", source, "--budget", "kv=75%", "--data", "stdlib", "--heal", "none", *SMALL, "--out", out]
    assert call(*run, "--json") == 0, "a bfloat16 model reloads within the tolerance"
    found = json.loads(capsys.readouterr().out)["verdict"]
    assert [q["length"] for q in found["lengths"]] == [64, 128] and found["context"] == 128
    assert {q["rows"] * q["length"] for q in found["lengths"]} == {512}, "every length reads the same text"
    plan = json.loads((out / "plan.json").read_text())
    limit = plan["budgets"][0]["limit"]
    assert plan["spent"]["kv"] <= limit and any("k_code" in layer for layer in plan["target"]["layers"])
    plan["target"], plan["keep"] = plan["source"], [LayerKeep().to_json()] * len(plan["keep"])
    plan["budgets"][0]["limit"] *= 10
    (out / "plan.json").write_text(json.dumps(plan))
    monkeypatch.setattr(exactness, "reload_check", lambda *given: Check(exactness.RELOADS, True, "", ""))
    assert call("reshape", out) == 0 and call("verify", out) == 3
    said = capsys.readouterr().out
    assert "FAILED (budget kv=75%)" in said and "not verified" in said
    check = next(c for c in RunFolder(out).dossier().verdict.checks if c.name == "budget kv=75%")  # type: ignore[union-attr]
    assert check.observed == f"{limit / 0.75:,.0f} bytes per token" and check.expected == f"at most {limit:,.0f}"
    assert call("report", out) == 0 and "✗ NOT MET" in (out / "report.html").read_text()


def test_only_what_a_file_holds_is_rounded(source: Path, tmp_path: Path) -> None:
    model, tokenizer = families.load(str(source))
    exact = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for portable in (False, True):
        found = save(llama, llama.tailor(model), tokenizer, tmp_path / str(portable), portable)
        assert all(torch.equal(buffer, exact[name]) for name, buffer in found.named_buffers() if name in exact)
        again = llama.tailor(families.load(str(tmp_path / str(portable)))[0])
        rows = llama.example(model.config)
        assert torch.equal(llama.run(found.float(), rows), llama.run(again, rows)), "the proof is of what was stored"


def test_equal_proofs_have_equal_bytes(tmp_path: Path) -> None:
    proof, found = tmp_path / "proof.safetensors", set()
    for _ in range(8):
        exactness.save_proof({"logits": torch.ones(1)}, proof, "AutoModel", "bfloat16", "cuda")
        found.add(proof.read_bytes())
    assert len(found) == 1, "a run that was killed and resumed ends in the same bytes"
    assert exactness._read_proof(proof)[0] == ("AutoModel", "bfloat16", "cuda")


def test_a_full_disk_is_no_failure_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = tmp_path / "proof.safetensors"
    exactness.save_proof({"logits": torch.ones(1)}, proof, "AutoModel")
    monkeypatch.setattr(_fresh.subprocess, "Popen", failing("OSError: [Errno 28] No space left on device"))
    with pytest.raises(OutputError, match=r"needs room in .* free some space"):
        exactness.reload_check(tmp_path / "model", proof, True)
    assert [path.name for path in tmp_path.iterdir()] == [proof.name], "nothing is left behind"


# Quality at every length.


def test_logits_of_some_positions_at_a_time_are_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    models = (gemma.tailor(gemma.tiny("gemma2")), gemma.tailor(gemma.tiny("gemma2", rms_norm_eps=0.1)))
    rows = gemma.example(models[0].config, 3, 21)
    task = Causal()
    with torch.no_grad():
        whole = task.compare(*(task.outputs(gemma, model, task.prepare(rows, 0)) for model in models), rows)
    monkeypatch.setattr(lengths, "LOGITS", 1)
    found = lengths.predicted(gemma, models, rows, lambda items, label: items, "")
    assert not isinstance(found, str)
    for name, column in (
        ("loss_before", whole.loss_before),
        ("loss_after", whole.loss_after),
        ("kl", whole.divergence),
    ):
        torch.testing.assert_close(getattr(found, name).mean(1).float(), column.float(), atol=1e-5, rtol=1e-4)


def test_lengths_grow_to_the_context_and_read_the_same_text() -> None:
    assert lengths.lengths_for(512, 131072) == (512, 2048, 8192, 32768, 131072)
    assert len(lengths.lengths_for(8, 32768)) == 5 and lengths.lengths_for(512, 512) == (512,)
    text = lengths.joined(torch.tensor([[1, 5, 6, 7], [1, 8, 9, 10]] * 9), start=1)
    assert (text == 1).sum() == 1, "rows that begin alike are one text with one beginning"
    rows, words = lengths.rows_by_length(text, 1, 4, 16, 32)
    assert words == [] and [len(found) for found in rows.values()] == [10, 2]
    assert rows[4][:, 1:].flatten().tolist() == rows[16][:, 1:].flatten().tolist()
    rows, words = lengths.rows_by_length(text[:20], 1, 4, 16, 32)
    assert len(rows[16]) == 1 and "16 tokens: the evaluation text has 20 tokens, 32 are needed" in words[0]


def test_text_that_a_model_wrote_certifies_no_more_than_its_rows() -> None:
    _, tokenizer = families.load("embedded")
    config = llama.tiny(vocab_size=4096).config
    asked = certificate.rows_for(config, tokenizer, None, 64, 128, 512)
    assert asked.lengths == {} and "--eval FILE with at least 256 tokens" in asked.not_measured[0]
    text = LongText(torch.arange(3, 1003), None)
    assert set(certificate.rows_for(config, tokenizer, text, 64, 128, 512).lengths) == {64, 128}


def test_rows_too_long_for_this_memory_are_not_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama.tailor(llama.tiny())
    rows = {64: llama.example(model.config, 2, 64)}
    monkeypatch.setattr(lengths.memory, "available_bytes", lambda device="cpu": 10**6)
    found = certificate.measure(llama, model, model, certificate.Asked(rows, {}, (), 64, 64))
    assert found.lengths == () and "GB of memory" in found.not_measured[0]


# Retrieval.


def test_passages_come_again_and_only_their_copies_count() -> None:
    tokens = torch.arange(10, 4000)
    for distance in retrieval.distances_for(1024):
        ids, places = retrieval.rows_for(distance, tokens, start=1)
        again = torch.zeros_like(ids[:, 1:], dtype=torch.float64)
        again[:, distance - 1 :] = (ids[:, distance:] == ids[:, :-distance]).double()
        found = retrieval.summed_up(lengths.Tokens(again, again, again, again, 0 * again, again), distance, places)
        assert found.accuracy_before == 1 and found.accuracy_after == 0 and found.passages >= 8
        assert ids.shape[1] <= 1024 and bool((ids[:, 0] == 1).all()) and again.mean() < 0.6
        assert found.lost and "points less" in verdict(retrieval=(found,)).reasons[-1]


def test_the_embedded_model_retrieves_what_is_near() -> None:
    model, tokenizer = families.load("embedded")
    model = families.family_of(model.config).tailor(model)
    rows = retrieval.rows_by_distance(model.config, tokenizer, 129)
    assert not set(rows[64].ids.flatten().tolist()) & set(tokenizer.all_special_ids)
    found = certificate.measure(llama, model, model, certificate.Asked({}, rows, (), 64, 128)).retrieval[0]
    assert found.possible and found.accuracy_before == found.accuracy_after > 0.5


# Healing that does harm.


def test_a_healing_that_does_harm_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = llama.tailor(llama.tiny())
    torch.manual_seed(0)
    rows = torch.randint(3, 90, (8, 24))
    text = Causal().prepare(rows, 0)
    cut = llama.tailor(whole)
    with torch.no_grad():
        llama.blocks(cut)[0].output.weight.mul_(0.9)

    def judge(model: nn.Module) -> quality.Comparison:
        return quality.compare(llama, whole, model, rows)

    job = Job(llama, Causal(), whole, cut, text, text)
    kept, record = heal.healed("refit", job, judge)
    assert record.kept and kept is not cut and record.rehearsed <= record.rehearsed_before + 1e-9

    monkeypatch.setattr(refit, "WORTHWHILE", 1e-3)
    same, record = heal.healed("refit", job, judge)
    assert (
        same is cut and not record.kept and "left out: the damage is below 0.001 nats per token" in str(record.reason)
    )
    monkeypatch.setattr(refit, "WORTHWHILE", None)

    def harmful(job: Job) -> tuple[nn.Module, Healing]:
        worse = llama.tailor(job.cut)
        with torch.no_grad():
            for parameter in worse.parameters():
                parameter.add_(torch.randn_like(parameter))
        return worse, Healing("refit", 1, layers=({"mlp": Gain(1.0, 0.1)},))

    monkeypatch.setattr(refit, "heal", harmful)
    kept, record = heal.healed("refit", job, judge)
    assert kept is cut and record.kept is False and record.rehearsed == record.rehearsed_before
    assert "healing by refit raised the damage on held-out text" in record.reason == caplog.messages[0]
    assert record.layers == ({},), "what it gained is gone with it"
