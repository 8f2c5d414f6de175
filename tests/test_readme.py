"""What README and documentation show is what happens: commands run, figures are those of committed results."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import failing

from headwise import cli, families, probes
from headwise.checks import _fresh, quality, speed
from headwise.families.llama import FAMILY as llama
from headwise.latency import measured
from headwise.report import figures

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FEW = "--tokens 256 --eval-tokens 128 --swap-tokens 0 --length 64 --context 64 --data calibration.txt"
LESS = {  # the same commands on less text
    "run": FEW,
    "probe": FEW.replace("--eval-tokens 128 ", ""),
    "heal": "--heal-option steps=1",
    "search": "--trials 1 --steps 2",
    "train": "--steps 2 --length 64 --batch-tokens 128 --eval-tokens 128 --data calibration.txt",
}
SETTINGS = dict(tokens=256, eval_tokens=128, swap_tokens=0, length=64, context=64, data="calibration.txt")
ELSEWHERE = ("EVIDENCE.md", "SERVING.md", *(page.name for page in (ROOT / "docs" / "serving").glob("[!i]*.md")))


class Clock:
    """Times of stacks of layers by a formula, in the place of measured ones."""

    chain, device, dtype, captured = 2, torch.device("cpu"), torch.float32, True

    def __init__(self, family, model, *more, **other):
        self.shape = family.shape_of(model.config)

    def __call__(self, stacks):
        return [[1 + sum(layer.qk_dim + layer.v_dim for layer in stack)] * 3 for stack in stacks]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder to work in, with two texts, and a smaller model in the place of the embedded one.

    What has tests of its own and is slow is left out: diagnostics, some checks, timing, and the drawing of figures.
    """
    modules = (argparse, shutil, subprocess, inspect)
    for name, some in (("calibration.txt", modules[:3]), ("heldout.txt", modules[3:])):
        (tmp_path / name).write_text("\n\n".join(inspect.getsource(module) for module in some))
    folder, own = tmp_path / "small", families.locate
    sizes = dict(hidden_size=64, num_attention_heads=4, head_dim=16, intermediate_size=128, num_hidden_layers=2)
    llama.tiny(vocab_size=4096, tie_word_embeddings=True, num_key_value_heads=2, **sizes).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path(own("embedded")[0]) / name, folder / name)
    monkeypatch.setattr(families, "locate", lambda name: (str(folder), {}) if name == "embedded" else own(name))
    monkeypatch.setattr(_fresh.subprocess, "Popen", failing("not started in this test"))
    monkeypatch.setattr(speed, "measure", lambda *given, **more: {})
    monkeypatch.setattr(quality, "samples", lambda *given, **more: ())
    monkeypatch.setattr(probes, "describe", lambda *given, **more: [])
    monkeypatch.setattr(figures, "encoded", lambda figure, suffix: b"")
    monkeypatch.setattr(measured, "Stacks", Clock)
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def blocks(page, language):
    """Blocks of code in a page, those inside lists too."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [inspect.cleandoc(code) for _, code in found]


def commands():
    """Every headwise command in a console block, in order, each once."""
    pages = [page for page in PAGES if page.name not in ELSEWHERE]  # those have tests of their own, or take hours
    whole = [re.sub(r"\\\n\s*", "", block) for page in pages for block in blocks(page, "console")]
    lines = [line for block in whole for line in block.splitlines()]
    return list(dict.fromkeys(line for line in lines if line.startswith("headwise ")))


def test_every_command_runs(home, monkeypatch, capsys):
    found = commands()
    assert len(found) >= 25
    for line in found:
        command = shlex.split(line.replace("tokens=200000", "tokens=256").replace("Qwen/Qwen2.5-0.5B", "embedded"))
        less = LESS.get(command[1], "").split() if "--heal" in command or command[1] != "heal" else []
        if command[1] == "run" and "--heal" not in command:
            less += ["--heal", "none"]  # `heal` is shown by commands of its own
        monkeypatch.setattr(sys, "argv", [*command, *less])
        try:
            cli.main()
        except SystemExit as stop:
            # On so little text, and not reloaded, a run is not verified, which is code 3.
            assert stop.code in (None, 0, 3), f"{line}: {capsys.readouterr().err[-500:]}"


def test_commands_inside_sentences_have_flags_that_exist():
    reference = (ROOT / "docs" / "reference" / "commands.md").read_text()
    sections = dict(re.findall(r"^## headwise ([a-z]+)\n(.*?)(?=^## )", reference, re.MULTILINE | re.DOTALL))
    assert {"run", "allocate", "theory"} <= set(sections)
    for page in PAGES:
        for name, rest in re.findall(r"`headwise ([a-z]+)((?: [^`\n]*)?)`", page.read_text()):
            assert name in sections, f"{page.name}: there is no command {name}"
            known = reference if name == "theory" else sections[name]
            missing = {flag for flag in re.findall(r"--[a-z][a-z-]+", rest) if f"`{flag}`" not in known} - {"--help"}
            assert not missing, f"{page.name}: headwise {name} has no {missing}"


def python_of(page):
    """A page's Python, with the settings that make its runs short."""
    few = ", ".join(f"{name}={value!r}" for name, value in SETTINGS.items())
    code = "\n".join(blocks(page, "python"))
    code = re.sub(r'(headwise\.run\([^)]*out="[^"]*")', rf"\1, {few}", code)
    return re.sub(r'(headwise\.probe\("embedded", "[^"]*")', rf"\1, {few}", code)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if blocks(page, "python") and page.name not in ELSEWHERE],
    ids=lambda page: page.stem,
)
def test_the_python_lines_run(page, home, monkeypatch):
    code = python_of(page)
    for folder in set(re.findall(r'"runs/([\w-]+)/model"', code)) - set(re.findall(r'out="runs/([\w-]+)"', code)):
        shutil.copytree("small", f"runs/{folder}/model")  # of a command earlier in the page
    exec(compile(code, page.name, "exec"), {})


@pytest.mark.parametrize("book", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_notebooks_run_and_hold_their_outputs(book, home):
    cells = [cell for cell in json.loads(book.read_text())["cells"] if cell["cell_type"] == "code"]
    assert any(cell["outputs"] for cell in cells), "make notebooks"
    errors = [one for cell in cells for one in cell["outputs"] if one["output_type"] == "error"]
    assert not errors and all(cell["execution_count"] for cell in cells), "make notebooks"
    few = "tokens=256, data='calibration.txt'"
    inside: dict[str, object] = {}
    for cell in cells:
        code = re.sub(r"(?<!eval_)(?<!swap_)(?<!new_)tokens=\d+", few, "".join(cell["source"]))
        exec(compile(code, book.name, "exec"), inside)


@pytest.mark.parametrize("script", ["benchmarks/tables.py", "docs/reference.py", "docs/drawings.py"])
def test_what_scripts_print_is_what_they_would_print_now(script):
    done = subprocess.run([sys.executable, ROOT / script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = {target for page in PAGES for target in re.findall(r"\bmake ([a-z]+)\b", "\n".join(blocks(page, "bash")))}
    assert {"demo", "test", "docs"} <= named
    assert not [target for target in named if f"\n{target}:" not in makefile]


def test_the_example_runs(home, tmp_path, capsys):
    example = runpy.run_path(str(ROOT / "examples" / "budget_sweep.py"))
    example["main"](tmp_path / "sweep", tokens=512, swap_tokens=0, length=64, context=64, data="calibration.txt")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in rows] == ["50%", "40%", "30%", "25%", "20%"]
    assert all(float(bits) < float(dimensions) for _, bits, dimensions in rows)


def test_the_page_of_families_is_what_the_command_prints(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["headwise", "families", "--markdown"])
    with contextlib.suppress(SystemExit):
        cli.main()
    table = capsys.readouterr().out.strip()
    assert table in (ROOT / "docs" / "FAMILIES.md").read_text(), "headwise families --markdown > docs/FAMILIES.md"


def anchors(page):
    """Where a page can be jumped to, as forges and the site name it."""
    text = re.sub(r"^( *)```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def test_no_link_is_dead():
    dead = []
    for page in PAGES:
        text = re.sub(r"^( *)```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for link, anchor in re.findall(r"\]\(([^)#\s]*)(#[^)\s]*)?\)", text):
            if re.match(r"[a-z]+:", link):
                continue
            target = (page.parent / link).resolve() if link else page
            if target == ROOT / "docs" / "index.md":
                continue  # the README, in the site
            if not target.exists() or (anchor and target.suffix == ".md" and anchor[1:] not in anchors(target)):
                dead.append(f"{page.relative_to(ROOT)}: {link}{anchor}")
    assert not dead


def test_the_readme_stays_short_and_every_page_is_in_the_navigation():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:]]
    missing = [page for page in pages if page not in navigation and not page.startswith(("serving/", "SERVING"))]
    assert not missing
