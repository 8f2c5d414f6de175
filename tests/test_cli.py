"""The command line: a flag is written once, beside its setting, and a printed command makes the same run."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from headwise import cli
from headwise.registry import names, texts
from headwise.runs.flags import described, settings_of, with_flags, words
from headwise.runs.settings import Settings

OTHER = Settings(
    model="a model", budgets=("kv=75%", "params=20M"), data="text file.txt", eval="other.txt", task="causal",
    strategy="uniform", rounds=2, heal="distill", heal_options=("tokens=1e6", "rate=3e-3"), portable=True,
    allow=("qk", "depth"), seed=3, device="cpu", tokens=100, eval_tokens=200, swap_tokens=0, length=64, context=128,
    trust_remote_code=True, stream=False, max_loss="2%",
)  # fmt: skip


@pytest.mark.parametrize("settings", [OTHER, Settings(model="m", budgets=("kv=75%",), stream=True, pool="all")])
def test_the_words_for_settings_give_the_same_settings(settings: Settings) -> None:
    app, found = typer.Typer(), []

    @app.command()
    @with_flags(Settings, "run")
    def run(settings: dict[str, Any]) -> None:
        found.append(Settings(**settings))

    typed = words(Settings, "run", settings.to_json())
    assert CliRunner().invoke(app, typed, catch_exceptions=False).exit_code == 0
    assert found == [settings]


def test_a_command_without_flags_has_the_defaults_of_the_settings() -> None:
    app, found = typer.Typer(), []

    @app.command()
    @with_flags(Settings, "run")
    def run(settings: dict[str, Any]) -> None:
        found.append(Settings(**settings))

    assert CliRunner().invoke(app, ["m", "--budget", "kv=75%"]).exit_code == 0
    assert found == [Settings(model="m", budgets=("kv=75%",))]


def test_every_setting_has_a_flag() -> None:
    assert {f.name for f in fields(Settings)} - {s.name for s in described(Settings)} == set()


@pytest.mark.parametrize("command", ["run", "probe", "allocate", "reshape", "heal", "verify"])
def test_help_names_every_flag_and_what_every_plug_in_means(command: str) -> None:
    shown = " ".join(CliRunner().invoke(cli.app, [command, "--help"], env={"COLUMNS": "200"}).output.split())
    for setting in settings_of(Settings, command):
        assert setting.flag.argument or setting.written in shown
        for meaning in texts(setting.flag.plug_ins).values() if setting.flag.plug_ins else ():
            assert meaning in shown


@pytest.mark.parametrize("package", [s.flag.plug_ins for s in described(Settings) if s.flag.plug_ins])
def test_every_plug_in_that_a_flag_names_has_a_meaning(package: str) -> None:
    assert set(texts(package)) == set(names(package))


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['headwise', 'run', '--help']\nfrom headwise.cli import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("word", "told"), [("", "is empty"), ("\udcff", "is not UTF-8")])
def test_words_that_can_be_no_name_are_refused(
    word: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["headwise", "export", word, "--to", "gguf"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert told in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
