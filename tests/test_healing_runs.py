"""Healing within runs: options that are refused, and what a run folder and its report keep of a healing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from test_pipeline import ROUNDS, RUN, call, refused

from headwise import families
from headwise.checks import exactness
from headwise.errors import HeadwiseError
from headwise.families.llama import FAMILY as llama
from headwise.runs.settings import Settings
from headwise.types import Check


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"heal": "blokwise"}, "no healing is called 'blokwise'. Known: none, blockwise, refit"),
        ({"heal_options": ("speed=3",)}, "no healing option is called 'speed'. Known: tokens, steps, rate"),
        ({"heal_options": ("steps=many",)}, "'many' is no number; write it as steps=100"),
        ({"heal_options": ("rate=-1",)}, "rate is -1; it must be above 0"),
    ],
    ids=str,
)
def test_healings_that_do_not_exist_are_refused_before_anything_is_loaded(asked, message):
    known = {"heal": "blockwise", **asked}
    with pytest.raises(HeadwiseError) as found:
        Settings(model="any", **known)
    for part in message.split("Known: "):
        assert part.rstrip(" ,") in str(found.value) or all(name in str(found.value) for name in part.split(", "))


def test_a_run_with_an_unknown_option_in_its_file_is_refused_in_one_line(tmp_path, capsys):
    Settings(model="any").save(tmp_path / "run.json")
    data = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**data, "heal_options": ["steps=5", "match=1"]}))
    line = refused(capsys, "heal", tmp_path)
    assert "run.json: no healing option is called 'match'" in line and line.strip().count("\n") == 0


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run whose layers learned, in two rounds."""
    place = tmp_path_factory.mktemp("heal")
    llama.tiny(vocab_size=4096, tie_word_embeddings=True).save_pretrained(place / "tiny")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path(families.locate("embedded")[0]) / name, place / "tiny" / name)
    more = [*ROUNDS, "--heal", "blockwise", "--heal-option", "steps=12"]
    with pytest.MonkeyPatch.context() as patch:  # reloading in a fresh process takes seconds and is tested elsewhere
        patch.setattr(exactness, "reload_check", lambda *told: Check("reloads", True, "not tried", ""))
        assert call("run", place / "tiny", *RUN, *more, "--out", place / "run") == 0
    return place / "run"


def test_the_curve_lands_in_the_folder_and_in_the_report(run, capsys):
    found = json.loads((run / "heal.json").read_text())
    assert found["method"] == "blockwise" and len(found["curve"]) > 2 and len(found["rounds"]) == 1
    assert found["rounds"][0]["method"] == "blockwise", "models are healed between rounds as well"
    refit, learned = found["stages"]
    assert (refit["method"], learned["method"]) == ("refit", "blockwise")
    gains = {"stream"} | ({"attention", "mlp"} if refit["kept"] else set())  # of a stage that did harm there are none
    assert gains <= set(found["layers"][0]), "what every layer gained by the stages that were kept"
    assert len(found["layers"][0]["stream"]["curve"]) == len(found["curve"]), "every layer's own curve is kept"
    assert found["rehearsed_before"] > 0
    page = (run / "report.html").read_text()
    assert "loss while healing" in page and "Method: blockwise" in page and "before healing" in page
    assert "--heal blockwise" in page and "--heal-option steps=12" in page, "the command that makes the run again"
    assert not list(run.rglob("*blockwise-*")), "unfinished work is gone once the model is there"


def test_a_folder_is_healed_anew_by_another_method(run, capsys):
    assert call("heal", run, "--heal", "blockwise", "--heal-option", "steps=6") == 0
    assert json.loads((run / "heal.json").read_text())["curve"][-1]["step"] == 6
    assert "Known: " in refused(capsys, "heal", run, "--heal", "prayer")
    assert call("heal", run) == 0
    assert json.loads((run / "heal.json").read_text())["method"] == "refit"
