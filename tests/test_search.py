"""Searches: trials meet the budget, bad ones are given up, studies resume, and the front says what was found."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from headwise.cli.commands import app
from headwise.errors import BudgetError, HeadwiseError
from headwise.research.designs import configs
from headwise.research.search import front, space, study
from headwise.research.search.settings import SearchSettings

pytest.importorskip("optuna")
SMALL = dict(family="llama", budget=("params=800k",), steps=6, batch=2, length=32, tokens=2_000)


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(300)))
    return str(path)


def settings(text: str, trials: int = 3, **changes: Any) -> SearchSettings:
    return SearchSettings(**{**SMALL, "data": text, "trials": trials, "depth": 2, **changes})


def test_a_command_finds_writes_and_goes_on(text: str, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def ask(trials: int, *more: object) -> Any:
        flags = ["--budget", "params=800k", "--data", text, "--out", out, "--steps", 6, "--batch", 2, "--length", 32]
        return CliRunner().invoke(app, ["search", *map(str, [*flags, "--tokens", 2000, "--trials", trials, *more])])

    done = ask(2, "--depth", 2)
    assert done.exit_code == 0, done.output
    assert "2 of 2 trials" in done.stderr and "best loss" in done.stdout
    found = json.loads((out / "pareto.json").read_text())
    assert found["trials"] == 2 and all(row["parameters"] <= 800_000 for row in found["rows"])
    best = next(row for row in found["rows"] if row["number"] == found["best"])
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out / "best"))
    assert sum(p.numel() for p in model.parameters()) == best["parameters"], "the best shape, ready to train"
    assert (out / "pareto.svg").is_file() and "<table" in (out / "search.html").read_text()
    more = ask(3, "--depth", 2)
    assert "3 of 3 trials" in more.stderr and "1 of 3" not in more.stderr, "what was done is not done again"
    assert "was begun with depth 2, not 1" in str(ask(4, "--depth", 1).exception)
    journal = out / "journal.log"
    journal.write_text(journal.read_text().replace("hidden_size", "hidden"))
    assert "is damaged; begin another" in str(ask(3, "--depth", 2).exception)


def test_workers_share_a_storage(text: str, tmp_path: Path) -> None:
    where = f"sqlite:///{tmp_path / 'study.db'}"
    study.search(settings(text, 1), tmp_path / "one", where)
    both, _ = study.search(settings(text, 2, seed=1), tmp_path / "two", where)
    assert study.finished(both) == 2, "the second worker found the first one's trial"


def test_a_trial_that_falls_behind_is_given_up(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "START_UP", 1)
    losses = iter([1.0] * study.LOOKS + [9.0] * study.LOOKS)
    monkeypatch.setattr(study.Trials, "judge", lambda self, model: next(losses))
    found, _ = study.search(settings(text, 2), tmp_path / "out")
    states = [trial.state.name for trial in found.trials]
    assert states == ["COMPLETE", "PRUNED"] and len(list(losses)) > 0, "long before its end"


def test_time_ends_a_search(text: str, tmp_path: Path) -> None:
    found, _ = study.search(settings(text, 3), tmp_path / "out", minutes=-1.0)
    assert study.finished(found) == 0


class TestSpace:
    """What a trial may be."""

    def test_the_widest_that_fits(self) -> None:
        from headwise import budgets, cost

        maker = configs.Maker("llama", 512, 64)
        wanted = space.Proportions(depth=3, head_dim=32, mlp_share=1.0, taper=0.5)
        limits = (budgets.parse("params=2M", maker.make(configs.Sketch(64, 1, 1, 64, 64))),)
        found = space.widest(maker.make, limits, maker.rules(False), wanted)
        heads = [layer.query_heads for layer in found.layers]
        assert cost.parameters(found) <= 2e6 and heads[0] > heads[-1] and len(heads) == 3
        model = configs.build(maker.config(found), maker.kind.auto, "meta")
        assert sum(p.numel() for p in model.parameters()) == cost.parameters(found)
        with pytest.raises(BudgetError, match="no 3 layers with heads of 128 fit"):
            few = (budgets.parse("params=50k", found),)
            space.widest(maker.make, few, maker.rules(False), wanted._replace(head_dim=128))

    def test_refusals(self, text: str) -> None:
        with pytest.raises(HeadwiseError, match="trials train language models, which bert is none of"):
            settings(text, family="bert")
        with pytest.raises(HeadwiseError, match="trials is 0; it must be at least 1"):
            settings(text, 0)
        with pytest.raises(BudgetError, match="a search has no model to take a percentage of"):
            study.Trials(settings(text, budget=("params=50%",)))


class TestFront:
    """What was found."""

    ROWS = [
        {"number": n, "loss": loss, "parameters": size, "train_flops_per_token": size, "layers": [], "params": {}}
        for n, (loss, size) in enumerate([(3.0, 10), (2.0, 20), (2.5, 30), (None, 5), (2.0, 25)])
    ]

    def test_no_other_is_better_for_less(self) -> None:
        assert front.front(self.ROWS, "parameters") == [0, 1]
        found = front.summary(self.ROWS, {})
        assert found["best"] == 1 and found["given_up"] == 1

    def test_a_page_escapes_what_comes_from_outside(self) -> None:
        layer = {"query_heads": 2, "qk_dim": 8}
        rows = [row | {"layers": [layer], "hidden_size": 16} for row in self.ROWS]
        page = front.page(front.summary(rows, {"data": "<script>alert(1)</script>"}), "")
        assert "<script>alert" not in page and "&lt;script&gt;" in page and "given up" in page


def test_without_optuna_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(HeadwiseError, match=r'pip install "headwise\[search\]"'):
        study.installed()
