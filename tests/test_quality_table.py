"""The table of plans and healings: resumed, added to, and never asking the source twice."""

from __future__ import annotations

import bz2
import importlib
import json
import sys
from pathlib import Path

import pytest
from test_distill import folder  # noqa: F401

ASKED = ["--heal", "none", "--heal", "refit", "--data", "stdlib"]
ASKED += ["--tokens", "512", "--eval-tokens", "128", "--swap-tokens", "0", "--length", "32", "--device", "cpu"]


@pytest.fixture
def quality(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module("quality")


def items(data):
    """Two items of every zero-shot task."""
    data.mkdir()
    (data / "hellaswag_val_full.txt.bz2").write_bytes(bz2.compress(b"def f\n0\nof\nx\ny\nz\n" * 2))
    choice = {"query": "What?", "choices": ["a", "b"], "gold": 1}
    lines = {"lambada_openai": {"context": "import", "continuation": "os"}, "arc_easy": choice, "piqa": choice}
    for name, line in lines.items():
        (data / f"{name}.jsonl").write_text(f"{json.dumps(line)}\n" * 2)
    return data


def test_a_table_is_added_to_and_the_source_is_asked_once(quality, folder, tmp_path, monkeypatch):  # noqa: F811
    out, data = tmp_path / "field.json", items(tmp_path / "tasks")

    def measure(budget, *more):
        told = ["quality.py", str(folder), "--budget", budget, *ASKED, "--zero-shot", str(data), "--out", str(out)]
        monkeypatch.setattr(sys, "argv", [*told, *more])
        quality.main()
        return json.loads(out.read_text())

    first = measure("kv=75%", "--plan", "uniform", "--plan", "exact, 3 rounds")
    assert [row["method"] for row in first["rows"]] == ["uniform", "uniform + refit", "exact, 3 rounds + refit"]
    assert first["rows"][0]["heal_tokens"] == 0 < first["rows"][1]["heal_tokens"] < first["rows"][2]["heal_tokens"]
    assert set(first["zero_shot"]) == set(first["rows"][0]["zero_shot"]) and "acc_change" in str(first["rows"][0])
    assert str(folder.parent) not in out.read_text(), "no paths of this machine"
    asked = []
    monkeypatch.setattr(quality.pipeline, "probe", lambda *told, **more: asked.append(told))
    monkeypatch.setattr(quality.Table, "_ask_source", lambda *told: asked.append(told))
    assert measure("kv=75%", "--plan", "uniform") == first
    second = measure("kv=50%", "--plan", "uniform")
    assert not asked and second["rows"][:3] == first["rows"] and second["settings"]["budgets"] == ["kv=75%", "kv=50%"]
    assert [row["budget"] for row in second["rows"][3:]] == ["kv=50%"] * 2
    with pytest.raises(SystemExit, match="other settings"):
        measure("kv=50%", "--seed", "1")
