"""Real pretrained models, where they lie beside the checkout: skipped elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from headwise import cli

SHARED = Path(__file__).parents[2] / "shared"
STORIES = SHARED / "models" / "stories260K"
TEXT = SHARED / "data" / "text" / "tinystories-sample.txt"


@pytest.mark.skipif(not (STORIES.is_dir() and TEXT.is_file()), reason="no pretrained model beside the checkout")
@pytest.mark.parametrize("way", [[], ["--portable"]], ids=["tailored", "portable"])
def test_a_pretrained_model_is_cut_and_proven(tmp_path, monkeypatch, way):
    few = ["--tokens", "8192", "--eval-tokens", "4096", "--swap-tokens", "1024", "--length", "128", "--device", "cpu"]
    where = ["--data", str(TEXT), "--out", str(tmp_path / "run")]
    few += ["--max-loss", "100%"]  # of so little text
    monkeypatch.setattr(sys, "argv", ["headwise", "run", str(STORIES), "--budget", "kv=87.5%", *few, *where, *way])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert all(check["passed"] for check in verdict["checks"])
    if not way:  # one size and one set of pairs for all layers cost this tiny model dearly
        assert verdict["quality"]["perplexity_after"] < 1.10 * verdict["quality"]["perplexity_before"]
