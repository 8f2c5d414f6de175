"""Plug-ins are found by their folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwise import registry
from headwise.errors import UnknownNameError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with two plug-ins, one private module and a name of its own."""
    package = tmp_path / "invented_colours"
    package.mkdir()
    for name in ("__init__", "red", "green", "_mixing"):
        (package / f"{name}.py").write_text(f"NAME = {name!r}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "invented_colours"


def test_names_are_sorted_and_leave_private_modules_out(folder: str) -> None:
    assert registry.names(folder) == ("green", "red")


def test_find_returns_the_module(folder: str) -> None:
    assert registry.find(folder, "red").NAME == "red"


def test_an_unknown_name_suggests_the_nearest(folder: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        registry.find(folder, "gren")
    assert str(caught.value) == "no invented_colour is called 'gren'. Did you mean 'green'? Known: green, red."


def test_a_private_module_is_no_plug_in(folder: str) -> None:
    with pytest.raises(UnknownNameError, match="no invented_colour is called '_mixing'"):
        registry.find(folder, "_mixing")


@pytest.mark.parametrize(
    ("package", "name", "text"),
    [
        (
            "headwise.strategies",
            "exat",
            "no strategy is called 'exat'. Did you mean 'exact'? Known: ",
        ),
        ("headwise.budgets", "energy", "no budget is called 'energy'. Known: "),
    ],
)
def test_messages_name_the_kind_of_plug_in(package: str, name: str, text: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        registry.find(package, name)
    assert str(caught.value) == f"{text}{', '.join(registry.names(package))}."


@pytest.mark.parametrize("package", ["headwise.strategies", "headwise.budgets"])
def test_every_plug_in_says_its_name_and_meaning(package: str) -> None:
    for name in registry.names(package):
        module = registry.find(package, name)
        assert name == module.NAME, "a plug-in is called like its file"
        assert module.MEANING, "help texts come from here"
