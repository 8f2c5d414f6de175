"""Encoders from the command line to the report, for every task that they have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_pipeline import call, refused
from test_tasks import HEADS, text, tokenizer  # noqa: F401  # a fixture

from headwise import families
from headwise.checks import exactness
from headwise.families import MASKED
from headwise.families.bert import FAMILY as bert
from headwise.types import Check

SMALL = ["--tokens", "1024", "--eval-tokens", "512", "--swap-tokens", "128", "--length", "32", "--device", "cpu"]


def saved(folder: Path, head: str, family=bert, kind: str = "bert") -> Path:
    model = family.tiny(kind, head=head)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


PAGES = {
    "masked": ("AutoModelForMaskedLM", "loss went from", "fill-mask"),
    "embedding": ("AutoModel", "cosine to the source is", "sentence-similarity"),
    "classification": ("AutoModelForSequenceClassification", "KL to the source is", "text-classification"),
}
SAID = {
    "masked": "loss ",
    "embedding": "mean cosine to the source's embeddings ",
    "classification": "KL to the source ",
}


@pytest.mark.parametrize("name", HEADS)
def test_an_encoder_from_folder_to_report(name, text, tmp_path, capsys):  # noqa: F811
    model, out = saved(tmp_path / "source", HEADS[name]), tmp_path / "run"
    if name == "embedding":
        (model / "1_Pooling").mkdir()
        (model / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
        modules = [{"idx": 0, "name": "0", "path": ""}, {"idx": 1, "name": "1", "path": "1_Pooling"}]
        (model / "modules.json").write_text(json.dumps(modules))
    assert call("run", model, "--budget", "attention_params=80%", "--data", text, *SMALL, "--out", out) == 0
    said = capsys.readouterr().out
    assert SAID[name] in said and "all 3 checks passed" in said and "cache" not in said
    verdict = json.loads((out / "verdict.json").read_text())
    assert verdict["samples"] == [] and set(verdict["size"]) == {"parameters_before", "parameters_after"}
    assert "decode_ms_per_token_after" not in verdict["speed"] and verdict["speed"]["prefill_ms_per_token_after"] > 0
    auto, words, tag = PAGES[name]
    page, card = (out / "report.html").read_text(), (out / "report.md").read_text()
    assert words in page and f"{auto}.from_pretrained" in card and f"pipeline_tag: {tag}" in card
    assert "nats per token" not in page and "KV cache" not in page
    loaded, _ = families.load(str(out / "model"))
    assert families.task_of(loaded.config) == name
    for file in ("modules.json", "1_Pooling/config.json") if name == "embedding" else ():
        assert (out / "model" / file).read_bytes() == (model / file).read_bytes(), "still a sentence-transformers model"
    assert call("allocate", out, "--budget", "attention_params=90%") == 0


def test_what_encoders_cannot_do_is_said(text, tmp_path, capsys):  # noqa: F811
    model = saved(tmp_path / "source", MASKED)
    run = ["run", model, *SMALL, "--out", tmp_path / "run", "--overwrite"]
    given = ["--data", text, "--budget"]
    assert "bert models keep no cache; use params, flops or attention" in refused(capsys, *run, *given, "kv=75%")
    assert "give --data FILE" in refused(capsys, *run, "--budget", "params=99%")
    found = refused(capsys, *run, *given, "params=99%", "--task", "causal")
    assert "bert models cannot be reshaped for the task causal, only for: classification, embedding, masked" in found
    assert "no task is called 'writing'" in refused(capsys, *run, *given, "params=99%", "--task", "writing")


def test_another_task_than_the_heads_own(text, tmp_path, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr(exactness, "reload_check", lambda *given: Check(exactness.RELOADS, True, "", ""))
    model = saved(tmp_path / "source", MASKED)
    run = ["run", model, "--budget", "attention_params=80%", "--data", text, *SMALL, "--task"]
    assert call(*run, "embedding", "--out", tmp_path / "run") == 0, "a pooler that is not in the file is not needed"
    assert "mean cosine" in capsys.readouterr().out
    assert "damaged: 4 tensors are missing" in refused(capsys, *run, "classification", "--out", tmp_path / "other")
