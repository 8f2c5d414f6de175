"""What the README shows is what happens: its commands run, its figures are the committed results'."""

from __future__ import annotations

import contextlib
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

from headwise import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FEW = ["--tokens", "1024", "--eval-tokens", "512", "--swap-tokens", "0", "--length", "64", "--context", "64"]


def commands():
    """Every headwise command in the README's console blocks, in order."""
    blocks = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines() if line.startswith("headwise ")]


def test_every_command_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = commands()
    assert len(found) >= 10
    for command in found:
        few = FEW if command[1] == "run" else []  # the same commands on less text
        monkeypatch.setattr(sys, "argv", [*command, *few])
        try:
            cli.main()
        except SystemExit as stop:
            # On so little text a run may be beyond its limit of quality, which is code 3.
            assert stop.code in (None, 0, 3), f"{' '.join(command)}: {capsys.readouterr().err[-500:]}"
    assert "--pool all" in capsys.readouterr().out, "a run on the cache alone says how to lose less"


def test_the_python_lines_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    few = 'out="runs/first", tokens=1024, eval_tokens=512, swap_tokens=128, length=64, context=64'
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
    assert [row[0] for row in rows] == ["90%", "75%", "60%", "50%"]
    assert all(float(exact) <= float(uniform) for _, exact, uniform in rows)


def test_the_page_of_families_is_what_the_command_prints(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["headwise", "families", "--markdown"])
    with contextlib.suppress(SystemExit):
        cli.main()
    table = capsys.readouterr().out.strip()
    assert table in (ROOT / "docs" / "FAMILIES.md").read_text(), "headwise families --markdown > docs/FAMILIES.md"
