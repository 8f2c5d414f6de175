"""`headwise advise`: a value for every line, evidence only where it was measured, and where it was not, a plain "
"word."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import headwise
from headwise.errors import HeadwiseError
from headwise.research import advise

ROOT = Path(__file__).parents[1]


def item(outcome: str, **measured: Any) -> dict[str, Any]:
    where = {"kind": "text", "width": [256, 512], "layers": [4, 12], "context": [256, 1024]} | measured
    base = {"what": "it", "gain": 0.1, "low": 0.05, "high": 0.15, "unit": "nats", "margin": 0.01, "void": []}
    return {**base, "outcome": outcome, "measured": where, "source": "experiments/results/b6_decoders.json"}


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Advice from these items about heads."""

    def give(*items: dict[str, Any]) -> None:
        topics = json.loads(advise.KNOWN.read_text())
        told = {name: {**topic, "items": list(items) if name == "heads" else []} for name, topic in topics.items()}
        (tmp_path / "advice.json").write_text(json.dumps(told))
        monkeypatch.setattr(advise, "KNOWN", tmp_path / "advice.json")

    return give


@pytest.mark.parametrize(
    ("outcome", "measured", "basis", "words"),
    [
        ("shown", {}, "measured", "more than 8 heads"),
        ("against", {}, "measured", "8 heads, not more"),
        ("undecided", {}, "no evidence here", "8 heads (usual practice)"),
        ("void", {}, "no evidence here", "8 heads (usual practice)"),
        ("shown", {"width": [64, 128]}, "no evidence here", "8 heads (usual practice)"),
        ("shown", {"context": [16, 16]}, "no evidence here", "8 heads (usual practice)"),
        ("shown", {"kind": "images"}, "no evidence here", "8 heads (usual practice)"),
    ],
)
def test_only_what_was_decided_within_what_was_measured_counts(
    known: Any, outcome: str, measured: dict[str, Any], basis: str, words: str
) -> None:
    known(item(outcome, **measured))
    line = headwise.advise(512, 12, 1024).lines[0]
    assert (line.topic, line.basis) == ("heads", basis) and line.advice.startswith(words)
    assert line.evidence[0]["low"] == 0.05 and line.evidence[0]["source"].endswith("b6_decoders.json")


def test_comparisons_that_disagree_are_no_evidence(known: Any) -> None:
    known(item("shown"), item("against"))
    assert headwise.advise(512, 12).lines[0].basis == "no evidence here"


def test_the_command_answers_in_json_with_sources() -> None:
    app = importlib.import_module("headwise.cli.commands").app
    asked = ["advise", "--width", "768", "--layers", "12", "--context", "1024", "--params", "100M", "--flops", "2e18"]
    found = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    lines = {line["topic"]: line for line in found["lines"]}
    wanted = {"heads", "head dimension", "key/value heads", "depth against width", "where early ends", "parameters"}
    assert wanted <= set(lines) and found["asked"]["params"] == 1e8
    assert lines["key/value heads"]["basis"] == "no evidence here"
    assert lines["head dimension"]["advice"].startswith("64") and "84.9M" in lines["parameters"]["advice"]
    for line in lines.values():
        assert all((ROOT / each["source"]).is_file() for each in line["evidence"]), "every source is a committed result"
        assert line["basis"] == "arithmetic" or line["evidence"] or line["basis"] == "no evidence here"
    assert "[no evidence here]" in CliRunner().invoke(app, asked).stdout


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"width": 0, "layers": 1}, "--width 0: at least 1"),
        ({"width": 63, "layers": 1}, "--width 63 is odd"),
        ({"width": 64, "layers": 1, "params": "many"}, "--params many: give a number above zero, such as 100M"),
        ({"width": 64, "layers": 1, "flops": "1.2.3"}, "--flops 1.2.3: give a number"),
    ],
)
def test_bad_input_says_what_to_type(given: dict[str, Any], words: str) -> None:
    with pytest.raises(HeadwiseError, match=words):
        headwise.advise(**given)
