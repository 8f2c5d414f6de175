"""The table of plans and healings: resumed, added to, and never asking the source twice."""

from __future__ import annotations

import bz2
import importlib
import json
import sys
from pathlib import Path

import pytest
from test_pipeline import folder  # noqa: F401

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

    first = measure("kv=75%", "--plan", "uniform", "--plan", "exact, 3 rounds", "--shared")
    assert [row["method"] for row in first["rows"]] == ["uniform", "uniform + refit", "exact, 3 rounds + refit"]
    assert first["rows"][0]["heal_tokens"] == 0 < first["rows"][1]["heal_tokens"] < first["rows"][2]["heal_tokens"]
    assert set(first["zero_shot"]) == set(first["rows"][0]["zero_shot"]) and "acc_change" in str(first["rows"][0])
    assert str(folder.parent) not in out.read_text(), "no paths of this machine"
    asked = []
    monkeypatch.setattr("headwise.stages.probe.probe", lambda *told, **more: asked.append(told))
    monkeypatch.setattr(quality.Table, "_ask_source", lambda *told: asked.append(told))
    assert measure("kv=75%", "--plan", "uniform") == first
    second = measure("kv=50%", "--plan", "uniform")
    assert not asked and second["rows"][:3] == first["rows"] and second["settings"]["budgets"] == ["kv=75%", "kv=50%"]
    assert [row["budget"] for row in second["rows"][3:]] == ["kv=50%"] * 2
    assert second["hardware"] == first["hardware"] and first["hardware"].endswith(", shared with other work")
    with pytest.raises(SystemExit, match="other settings"):
        measure("kv=50%", "--seed", "1")


def part(path, plans, options=("tokens=9",), **changes):
    """A result with a few plans, as a run beside others leaves it."""
    settings = {"model": "m", "budgets": ["kv=50%"], "seed": 0, "heal_options": list(options)}
    about = dict.fromkeys(
        ("evaluation", "evaluation_tokens", "evaluation_length", "calibration_tokens", "healing_tokens"), 9
    )
    about |= {"versions": {}, "hardware": "a GPU", "date": "2026-01-02", "probe_seconds": 2.0, "perplexity_before": 4.0}
    known = {"budget": "kv=50%", "of_published": None, "heal_tokens": 1, "seconds": 1.0, "measured_low": 0.1}
    rows = [
        known
        | {"method": plan if heal == "none" else f"{plan} + {heal}", "plan": plan, "heal": heal}
        | {"measured": value, "measured_high": value + 0.1}
        for plan, value in plans.items()
        for heal in ("none", "distill")
    ]
    path.write_text(json.dumps({"settings": settings, **about, "rows": rows} | changes))
    return str(path)


@pytest.fixture
def join(quality, tmp_path, monkeypatch):
    def call(*files, out=tmp_path / "all.json"):
        monkeypatch.setattr(sys, "argv", ["quality.py", "--join", *files, "--out", str(out)])
        quality.main()
        return json.loads(out.read_text())

    return call


def test_results_that_were_measured_side_by_side_are_joined(join, tmp_path, capsys):
    first = part(tmp_path / "a.json", {"exact": 0.2, "uniform": 0.5}, hardware="a GPU, shared with other work")
    second = part(tmp_path / "b.json", {"published": 0.4, "uniform": 0.6}, ["micro=2", "tokens=9"], date="2026-01-03")
    found = join(first, second)
    names = ["published", "published + distill", "uniform", "uniform + distill", "exact", "exact + distill"]
    assert [row["method"] for row in found["rows"]] == names
    assert [row["of_published"] for row in found["rows"][::2]] == [1.0, 0.6 / 0.4, 0.5], "the later uniform stands"
    assert "kv=50% uniform: as in" in capsys.readouterr().out
    assert found["hardware"] == "a GPU, shared with other work" and found["date"] == "2026-01-03"
    other = [row["method"] for row in found["rows"] if "heal_options" in row]
    assert other == ["published + distill", "uniform + distill"] and found["settings"]["heal_options"] == ["tokens=9"]
    field = importlib.import_module("field")
    said = "healing options tokens=9 (micro=2, tokens=9 for kv=50% published by distillation, kv=50% uniform by distill"
    settings = found["settings"] | {"data": None}
    assert said in field.about(found | {"settings": settings})
    whole = tmp_path / "all.json"
    assert join(str(whole), first, out=whole)["rows"][4]["heal"] == "none", "a result may be added to"
    with pytest.raises(SystemExit, match=r"all.json exists; choose another --out"):
        join(first, second)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"healing_tokens": 8}, "healing_tokens is 9 in one and 8 in the other"),
        ({"options": ["tokens=8"]}, r"heal_options is \['tokens=9'\] in one and \['tokens=8'\] in the other"),
        ({"hardware": "a CPU"}, "hardware is a GPU in one and a CPU in the other"),
        ({"settings": {"budgets": [], "model": "n"}}, "model is m in one and n in the other"),
    ],
)
def test_results_of_other_settings_are_not_joined(join, tmp_path, changes, said):
    first, second = (part(tmp_path / f"{n}.json", {"exact": 0.2}, **more) for n, more in enumerate(({}, changes)))
    with pytest.raises(SystemExit, match=said):
        join(first, second)


def test_what_is_no_result_is_not_joined(join, tmp_path):
    with pytest.raises(SystemExit, match=r"b.json is no result of quality.py"):
        join(part(tmp_path / "a.json", {"exact": 0.2}), str(tmp_path / "b.json"))
