"""The package as users meet it: its version, its files, its names, its typed keywords, and its completion."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path
from typing import get_type_hints

import pytest
from clean_install import files
from typer.testing import CliRunner

import headwise
from headwise import api, cli
from headwise.errors import WRONG_TORCHVISION
from headwise.progress.shown import following
from headwise.research.train.run import train
from headwise.research.train.settings import TrainKeywords, TrainSettings
from headwise.runs.keywords import RunKeywords
from headwise.runs.settings import Settings

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_written_once_and_every_page_has_it() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == headwise.__version__
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == headwise.__version__
    assert CliRunner().invoke(cli.app, ["--version"]).output == f"headwise {headwise.__version__}\n"


def test_every_file_of_the_package_is_declared() -> None:
    """Files that no pattern names are in neither wheel nor source distribution; `make dist` looks into both."""
    patterns = PROJECT["tool"]["setuptools"]["package-data"]
    declared = {
        path.relative_to(ROOT / "src").as_posix()
        for package, names in patterns.items()
        for name in names
        for path in (ROOT / "src" / package.replace(".", "/")).glob(name)
    }
    assert {name for name in files() if not name.endswith(".py")} == declared


def test_the_packages_names_are_shown_before_they_are_used() -> None:
    assert {*headwise.__all__} <= {*dir(headwise)} and {"run", "load", "train"} <= {*headwise.__all__}
    for name in headwise.__all__:
        assert getattr(headwise, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'rnu'"):
        _ = headwise.rnu


def test_type_checkers_and_signatures_see_every_setting() -> None:
    for keywords, settings, given in (
        (RunKeywords, Settings, {"model", "budgets"}),
        (TrainKeywords, TrainSettings, {"config", "data"}),
    ):
        wanted = {name: kind for name, kind in get_type_hints(settings).items() if name not in given}
        assert get_type_hints(keywords) == wanted
    for function, settings in ((api.run, Settings), (api.probe, Settings), (train, TrainSettings)):
        shown = inspect.signature(function).parameters
        named = {name for name in get_type_hints(settings) if name != "budgets"}
        assert named <= set(shown) and "settings" not in shown
        assert shown["seed"].default == 0 and shown["progress"].default is True


def test_progress_is_shown_unless_it_is_told_not_to(capsys: pytest.CaptureFixture[str]) -> None:
    for shown, said in ((True, "probing\n"), (False, "")):
        with following(None, shown) as track:
            assert list(track([1, 2], "probing")) == [1, 2]
        assert capsys.readouterr().err == said
    with following(lambda items, label: [label], True) as track:
        assert list(track([1, 2], "mine")) == ["mine"]


def test_the_shell_completes_commands_and_names() -> None:
    for typed, at, wanted in (("headwise ru", 1, {"run"}), ("headwise run --strategy ex", 3, {"exact"})):
        asked = {"_HEADWISE_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(at)}
        assert set(CliRunner().invoke(cli.app, prog_name="headwise", env=asked).output.split()) == wanted
    shown = CliRunner().invoke(cli.app, ["--show-completion", "bash"], prog_name="headwise").output
    assert "complete -o default -F _headwise_completion headwise" in shown


def test_a_torchvision_that_does_not_fit_is_told_in_one_line(monkeypatch, capsys) -> None:
    def broken() -> None:
        raise ImportError("Could not import module 'PreTrainedModel'.") from RuntimeError(
            "operator torchvision::nms does not exist"
        )

    monkeypatch.setattr(cli.commands, "app", broken)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2 and capsys.readouterr().err == f"error: {WRONG_TORCHVISION}\n"
