"""Slips that everybody makes: a mistyped folder, a model without its tokenizer, a folder where a file is usual."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import random
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import headwise
from headwise import cli, data, families, preflight
from headwise.data import images, overlap
from headwise.errors import DataError, HeadwiseError, ModelError
from headwise.families import _missing
from headwise.families.llama import FAMILY as llama
from headwise.research.theory import profiles
from headwise.runs.settings import Settings
from headwise.types import DEFAULT_UNITS

TEXT = "\n".join(f"line {number} has words enough to count as a line of text" for number in range(400))


@pytest.fixture(scope="module")
def model(tiny_folder):
    return str(tiny_folder)


def notes(model, **asked):
    """What a run would be told before it begins."""
    small = dict(tokens=1024, eval_tokens=512, swap_tokens=128, length=64, device="cpu", data="stdlib")
    usual = {"budgets": ("kv=75%",), "allow": ("qk", "v"), **small}
    return preflight.check(Settings(model=model, **{**usual, **asked}), "nowhere")


def test_a_mistyped_model_is_told_before_a_network_is_asked(model, tmp_path, monkeypatch):
    """Near names are those of folders that hold a model; a hub id waits for the hub only where that answers."""
    asked = []
    monkeypatch.setattr(_missing, "_answers", lambda host: asked.append(host))
    monkeypatch.chdir(Path(model).parent)
    (tmp_path / "tiny").mkdir()
    for wrong, said in (
        (f"{Path(model).parent}/tinny", f"tinny does not exist. Did you mean {model}?"),
        ("./tinny", "./tinny does not exist. Did you mean tiny?"),
        (f"{tmp_path}/tinny", "tinny does not exist. Give a hub id"),
        ("a b", "a b does not exist. Give a hub id"),
    ):
        with pytest.raises(ModelError, match=re.escape(said)):
            families.locate(wrong)
    monkeypatch.chdir(Path(model).parent.parent)
    here = f"{Path(model).parent.name}/tinny"
    with pytest.raises(ModelError, match=f"{here} does not exist, though the folder .* Did you mean .*tiny"):
        families.locate(here)
    assert not asked, "none of these can be a hub id"
    with pytest.raises(ModelError, match="no folder some/model is here, and huggingface.co cannot be reached"):
        families.locate("some/model")
    monkeypatch.setattr(_missing, "_answers", lambda host: True)
    assert families.locate("some/model") == ("some/model", {})


def test_a_missing_tokenizer_is_named(model, tmp_path):
    bare = Path(shutil.copytree(model, tmp_path / "bare"))
    (bare / "tokenizer.json").unlink()
    for read in (notes, families.load):
        with pytest.raises(ModelError, match="bare holds no tokenizer; save the model's tokenizer beside it"):
            read(str(bare))


def test_a_folder_of_texts_is_read_in_the_order_of_its_names(model, tmp_path):
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "b.txt").write_text("second")
    (folder / "a.jsonl").write_text('{"text": "first"}')
    (folder / "inner" / "c.py").write_text("third = 3")
    (folder / "picture.png").write_bytes(b"\x89PNG\r\n\0\0")
    (folder / ".hidden.txt").write_text("hidden")
    assert list(data.documents(str(folder))) == ["first", "second", "third = 3"]
    (folder / "long.txt").write_text(TEXT)
    assert notes(model, data=str(folder)) == []
    (tmp_path / "one.txt").write_text(TEXT)
    assert overlap.share(str(folder), str(tmp_path / "one.txt"), 65_536, 65_536) == 1.0
    for file in folder.rglob("*.*"):
        file.unlink()
    with pytest.raises(DataError, match="the folder .*folder holds no text file"):
        notes(model, data=str(folder))


def test_odd_inputs_are_refused_or_read_and_nothing_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "images.npz")
    with pytest.raises(DataError, match="holds no images"):
        images.peek(str(tmp_path / "images.npz"))
    with pytest.raises(HeadwiseError, match="at most"):
        profiles.parse("geometric:0.5", 10**6)
    assert llama.class_name(SimpleNamespace(architectures=5)) == ""


def test_a_mistyped_budget_and_healing_are_told_before_anything_is_imported(tmp_path, monkeypatch, capsys):
    for command, words in (
        (["--budget", "kv=75"], "did you mean kv=75%?"),
        (["--budget", "kv=50%", "--heal", "refti"], "Did you mean 'refit'?"),
        (["--budget", "cache=50%"], "did you mean kv, as in kv=75%?"),
        ([], "--budget is missing, as in: headwise run embedded --budget kv=25% --out runs/first"),
    ):
        monkeypatch.setattr(sys, "argv", ["headwise", "run", "embedded", *command, "--out", str(tmp_path / "run")])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        found = capsys.readouterr().err
        assert stop.value.code == 2 and words in found and "starting" not in found


def test_a_missing_folder_is_answered_with_an_example(monkeypatch, capsys):
    for name in ("allocate", "heal", "verify"):
        monkeypatch.setattr(sys, "argv", ["headwise", name, *(["--budget", "kv=20%"] * (name == "allocate"))])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        told = f"FOLDER is missing, as in: headwise {name} runs/first"
        assert stop.value.code == 2 and told in capsys.readouterr().err


def test_the_embedded_model_is_offered_for_a_name_like_it(monkeypatch):
    monkeypatch.setattr(_missing, "_answers", lambda host: False)
    with pytest.raises(ModelError, match="Did you mean embedded"):
        _missing.check("embeded")


def test_completion_offers_what_users_call():
    assert {name for name in dir(headwise) if not name.startswith("__")} == {*headwise.__all__} - {"__version__"}


@pytest.mark.parametrize(("suffix", "pack"), [(".bz2", bz2.compress), (".gz", gzip.compress), (".xz", lzma.compress)])
def test_a_packed_text_that_is_damaged_far_inside_is_refused_in_one_line(model, tmp_path, suffix, pack):
    draw = random.Random(0)
    text = "\n".join("".join(draw.choices("abcdefghij klmnop", k=60)) for _ in range(20_000))
    whole, path = pack(text.encode()), tmp_path / f"text.txt{suffix}"
    path.write_bytes(whole[: len(whole) * 4 // 5] + whole[len(whole) * 4 // 5 + 40 :])
    assert notes(model, data=str(path)) == [], "its beginning is sound"
    assert overlap.repeated(str(path), 1_000_000) is not None, "as far as it can be read"
    with pytest.raises(DataError, match="cannot be read as text"):
        list(data.documents(str(path)))


def test_the_demo_can_be_made_again_as_its_answer_says(monkeypatch):
    asked = {}
    monkeypatch.setattr("headwise.cli.commands._run", lambda out, as_json, **settings: asked.update(settings))
    monkeypatch.setattr(sys, "argv", ["headwise", "demo", "--out", "runs/demo", "--overwrite"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code and asked["overwrite"] and asked["model"] == "embedded"


def test_a_run_with_a_limit_on_the_cache_says_what_it_chooses_and_why(model):
    def said(**asked):
        asked = {"allow": DEFAULT_UNITS, "pool": "auto", **asked}
        return [text for text in notes(model, **asked) if "fewer bits" in text]

    assert "least damage for these bytes" in said()[0] and "share cached rows" in said()[0]
    assert "share cached rows" not in said(pool="none")[0]
    assert not said(allow=("qk", "v")) and not said(budgets=("params=90%",))
