"""What the README shows is what happens: its commands run, its figures are the committed results'."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headwise import cli, families
from headwise.checks import exactness, quality, speed
from headwise.families.llama import FAMILY as llama
from headwise.report import figures
from headwise.types import write_atomically

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FEW = "--tokens 512 --eval-tokens 256 --swap-tokens 0 --length 64 --context 64 --data text.txt"
LESS = {  # the same commands on less text
    "run": FEW.split(),
    "heal": ["--heal-option", "steps=1"],
    "search": ["--trials", "1", "--steps", "2"],
}


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A smaller model in the place of the embedded one, with its tokenizer, and a short text."""
    (tmp_path / "text.txt").write_text(
        "\n\n".join(inspect.getsource(module) for module in (argparse, shutil, subprocess))
    )
    folder, own = tmp_path / "small", families.locate
    sizes = dict(hidden_size=128, head_dim=32, intermediate_size=256, num_hidden_layers=2)
    llama.tiny(vocab_size=4096, tie_word_embeddings=True, **sizes).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path(own("embedded")[0]) / name, folder / name)
    monkeypatch.setattr(families, "locate", lambda name: (str(folder), {}) if name == "embedded" else own(name))


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder to work in. Slow parts of verifying and the drawing of figures have tests of their own: left out."""
    failed = subprocess.CompletedProcess([], 1, "", "not started in this test")
    monkeypatch.setattr(exactness.subprocess, "run", lambda *given, **more: failed)
    monkeypatch.setattr(speed, "measure", lambda *given, **more: {})
    monkeypatch.setattr(quality, "samples", lambda *given, **more: ())
    monkeypatch.setattr(figures, "save", lambda figure, path: write_atomically(path, ""))
    monkeypatch.chdir(tmp_path)


def commands():
    """Every headwise command in the README's console blocks, in order."""
    blocks = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines() if line.startswith("headwise ")]


def test_every_command_runs(home, small, monkeypatch, capsys):
    found = commands()
    assert len(found) >= 10
    for command in found:
        less = LESS.get(command[1], []) if "--heal-option" in command or command[1] != "heal" else []
        monkeypatch.setattr(sys, "argv", [*command, *less])
        try:
            cli.main()
        except SystemExit as stop:
            # On so little text, and not reloaded, a run is not verified, which is code 3.
            assert stop.code in (None, 0, 3), f"{' '.join(command)}: {capsys.readouterr().err[-500:]}"


def test_the_python_lines_run_on_the_embedded_model(home):
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    few = 'out="runs/first", tokens=512, eval_tokens=256, swap_tokens=0, length=64, context=64'
    assert 'out="runs/first"' in code
    exec(compile(code.replace('out="runs/first"', few), "README.md", "exec"), {})


def test_the_figures_are_the_results():
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "tables.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^    make (\w+)", README, re.MULTILINE):
        assert f"\n{target}:" in makefile


def test_the_example_runs(tmp_path, capsys):
    example = runpy.run_path(str(ROOT / "examples" / "budget_sweep.py"))
    example["main"](tmp_path / "sweep", tokens=1024, swap_tokens=128, length=64)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in rows] == ["50%", "40%", "30%", "25%", "20%"]
    assert all(float(bits) < float(dimensions) for _, bits, dimensions in rows)


def test_the_page_of_families_is_what_the_command_prints(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["headwise", "families", "--markdown"])
    with contextlib.suppress(SystemExit):
        cli.main()
    table = capsys.readouterr().out.strip()
    assert table in (ROOT / "docs" / "FAMILIES.md").read_text(), "headwise families --markdown > docs/FAMILIES.md"
