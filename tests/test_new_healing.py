"""Adding a healing is adding one file: it is listed in the help text, its options are known, and it runs."""

from __future__ import annotations

import json
import sys

import pytest
from test_healing_processes import save_tiny
from test_pipeline import call

import headwise.heal
from headwise import registry
from headwise.checks import exactness
from headwise.errors import HeadwiseError
from headwise.runs.settings import Settings
from headwise.types import Check

METHOD = '''
"""Louder: multiplies every output projection by what it lost in norm."""

import torch

from headwise.types import Healing

NAME = "louder"
MEANING = "brings back the norm of output projections"
AFTER = "refit"
OPTIONS = ("tokens",)


@torch.no_grad()
def heal(job):
    """A copy of the cut model with louder output projections."""
    model = job.family.tailor(job.cut)
    factors = []
    for block, whole in zip(job.family.blocks(model), job.family.blocks(job.source)):
        factors.append(float(whole.output.weight.norm() / block.output.weight.norm()))
        block.output.weight.mul_(factors[-1])
    return model, Healing(NAME, tokens=0, details={"factors": factors})
'''


@pytest.fixture
def louder(tmp_path, monkeypatch):
    """The healing, in a folder beside the package's own."""
    (tmp_path / "louder.py").write_text(METHOD)
    monkeypatch.setattr(headwise.heal, "__path__", [*headwise.heal.__path__, str(tmp_path)])
    registry.names.cache_clear()
    yield
    monkeypatch.undo()
    registry.names.cache_clear()
    sys.modules.pop("headwise.heal.louder", None)


def test_it_is_listed_in_the_help_text_with_its_meaning(louder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert call("run", "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "louder" in shown and "brings back the norm" in shown


def test_its_name_and_options_are_known(louder):
    assert Settings(model="any", heal="louder").heal == "louder"
    headwise.heal.check("louder", ("tokens=5",))
    with pytest.raises(HeadwiseError, match="--heal louder does not read the option lora, but distill would"):
        headwise.heal.check("louder", ("lora=5",))


def test_it_runs_after_the_healing_that_it_starts_from(louder, tmp_path, monkeypatch):
    monkeypatch.setattr(exactness, "reload_check", lambda *told: Check("reloads", True, "not tried", ""))
    small = dict(tokens=512, eval_tokens=128, swap_tokens=0, length=32, device="cpu", data=str(tmp_path / "text.txt"))
    save_tiny(tmp_path)
    headwise.run(str(tmp_path / "tiny"), "kv=75%", tmp_path / "run", heal="louder", **small)
    record = json.loads((tmp_path / "run" / "heal.json").read_text())
    assert record["method"] == "louder" and [stage["method"] for stage in record["stages"]] == ["refit", "louder"]
    assert len(record["factors"]) == len(record["layers"]), "heal.json keeps what only this method records"
    assert "Method: louder" in (tmp_path / "run" / "report.html").read_text()
