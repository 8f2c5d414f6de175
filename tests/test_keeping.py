"""What a run folder keeps: a verdict only for what was verified, other people's files, and the inputs it began with."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from conftest import Invented, invent
from report_parts import make_verdict

from headwise import strategies
from headwise.budgets import parse
from headwise.errors import BudgetError, DataError, HeadwiseError, OutputError, PlanError
from headwise.files import disk
from headwise.report._commands import another_budget, how_to_make
from headwise.runs import aside, fingerprint
from headwise.runs.folder import OWN, RunFolder
from headwise.runs.settings import Settings
from headwise.stages.allocate import allocate_in
from headwise.stages.report import write_report
from headwise.types import Plan, Readings, Sweep

ALLOW = ("qk", "v")


def tree(path: Path) -> dict[str, str]:
    """Every file below a path, by content."""
    files = (part for part in path.rglob("*") if part.is_file())
    return {str(part.relative_to(path)): hashlib.sha256(part.read_bytes()).hexdigest() for part in files}


@pytest.fixture
def world(tmp_path: Path) -> Settings:
    """A source model and a text, as far as a run folder looks at them."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text("{}")
    (tmp_path / "source" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "text.txt").write_text("calibration")
    return Settings(
        str(tmp_path / "source"), ("kv=75%",), data=str(tmp_path / "text.txt"), allow=ALLOW, heal="none", device="cpu"
    )


def readings_for(settings: Settings) -> Readings:
    return invent(settings.seed, Invented(dim=16, mlp_width=64, sizes=6))


@cache
def plan_for(settings: Settings) -> Plan:
    readings = readings_for(settings)
    shape = readings.source
    return strategies.allocate(
        readings, tuple(parse(text, shape) for text in settings.budgets), "exact", settings.allow
    )


def run(folder: RunFolder, settings: Settings, overwrite: bool = False, model: bytes = b"cut weights") -> RunFolder:
    """All stages, as the pipeline calls them, of a model that does not exist."""
    with folder.held("run", new=True):
        folder.claim(settings, settings.model, overwrite)
        with folder.replacing():
            if not folder.finished("probe"):
                readings_for(settings).save(folder.readings_file)
                disk.write_atomically(folder.moments_file, b"moments")
                folder.ledger.record("probe", ("readings.json", "moments.safetensors"))
            if not folder.finished("model", settings):
                folder.write_plan(plan_for(settings), settings)
                build(folder, settings, model)
            if not folder.finished("verdict"):
                folder.record_verdict(make_verdict(Plan.read(folder.plan_file)))
            disk.write_atomically(folder.report_file, "report")
            folder.ledger.record("report", ("report.html",), ("verdict.json",))
    return folder


def build(folder: RunFolder, settings: Settings, model: bytes) -> None:
    """The stages that write a model."""
    with folder.held("heal"):
        folder.write_json(folder.heal_file, {"method": settings.heal, "rehearsed": 0.1, "by": str(model)})
        disk.write_folder(folder.model, lambda new: (new / "model.safetensors").write_bytes(model))
        disk.write_atomically(folder.proof_file, model)
        folder.record_model(settings, ("model", "heal.json", "proof.safetensors"))


@pytest.fixture
def finished(world: Settings, tmp_path: Path) -> RunFolder:
    return run(RunFolder(tmp_path / "run"), world)


# A verdict counts for the plan and the model that were verified, and for no others.


def test_a_finished_run_has_a_verdict_and_can_be_asked_again(finished: RunFolder) -> None:
    dossier = write_report(finished)
    assert dossier.verdict is not None and dossier.unverified is None
    assert dossier.verdict.state in finished.report_file.read_text()


def test_a_new_plan_takes_the_verdict_away_and_the_old_plan_brings_it_back(finished: RunFolder) -> None:
    allocate_in(finished.path, ("kv=60%",), "exact", ALLOW, False, 0)
    dossier = write_report(finished)
    assert dossier.verdict is None and dossier.healing is None
    assert dossier.unverified == "the plan changed after the model was verified"
    page = finished.report_file.read_text()
    assert "not verified" in page and "✓ verified" not in page and dossier.unverified in page
    assert dossier.settings.budgets == ("kv=60%",), "the command that makes it again names the new budget"
    with pytest.raises(PlanError, match=r"does not follow plan.json; run: headwise heal"):
        finished.require_model()
    allocate_in(finished.path, ("kv=75%",), "exact", ALLOW, False, 0)
    assert finished.dossier().verdict is not None


def test_an_edited_plan_takes_the_verdict_away(finished: RunFolder) -> None:
    finished.plan_file.write_text(finished.plan_file.read_text().replace('"seed": 0', '"seed": 1'))
    assert finished.dossier().verdict is None


def test_another_model_takes_the_verdict_away(finished: RunFolder) -> None:
    (finished.model / "model.safetensors").write_bytes(b"other weights")
    dossier = finished.dossier()
    assert dossier.verdict is None and dossier.unverified == "the model changed after it was verified"
    with pytest.raises(PlanError, match="model is not what Headwise wrote"):
        finished.require_model()


def test_another_healing_ends_verdict_and_report(finished: RunFolder, world: Settings) -> None:
    build(finished, replace(world, heal="blockwise", heal_options=("steps=3",)), b"healed weights")
    assert finished.dossier().verdict is None and not finished.verdict_file.exists()
    assert not finished.report_file.exists() and not finished.finished("report")
    assert not finished.finished("model", world), "the run itself asked for another healing"


def test_a_run_without_its_record_is_not_called_verified(finished: RunFolder) -> None:
    finished.ledger.file.unlink()
    dossier = write_report(finished)
    assert dossier.verdict is None and dossier.healing is None and dossier.plan is not None
    with pytest.raises(PlanError, match="no finished model yet; run: headwise heal"):
        finished.require_model()


def test_commands_to_copy_repeat_the_healing(finished: RunFolder, world: Settings) -> None:
    build(finished, replace(world, heal="blockwise", heal_options=("steps=3",)), b"healed weights")
    allocate_in(finished.path, ("kv=60%",), "exact", ALLOW, False, 0)
    dossier, heal = finished.dossier(), "headwise heal {} --heal blockwise --heal-option steps=3\n"
    assert heal.format(finished.path) in how_to_make(dossier, "verify")
    lines = another_budget(dossier, Sweep("", "kv", (), ALLOW, (), (), 0, True), "kv=50%")
    assert heal.format(f"{finished.path}-kv50") in lines and f"cp -r {finished.path} " in lines


# Replacing a run.


def test_overwriting_keeps_what_is_not_ours(finished: RunFolder, world: Settings) -> None:
    (finished.path / "thesis.txt").write_text("mine")
    (finished.path / "notes").mkdir()
    (finished.path / "notes" / "a.txt").write_text("mine too")
    with pytest.raises(OutputError, match="holds a finished run"):
        run(finished, world)
    run(finished, replace(world, seed=1), overwrite=True)
    assert (finished.path / "thesis.txt").read_text() == "mine" and (finished.path / "notes" / "a.txt").exists()
    assert finished.require().seed == 1 and finished.dossier().verdict is not None
    assert not [path for path in finished.path.iterdir() if path.name.startswith(".")]


def test_another_run_in_the_folder_is_told_with_what_differs_and_how_its_readings_are_kept(
    finished: RunFolder, world: Settings
) -> None:
    with pytest.raises(OutputError, match=r"holds a finished run with these settings \(see .*report.html\); choose"):
        run(finished, world)
    other = replace(world, budgets=("kv=60%",), max_loss="2%")
    with pytest.raises(OutputError) as told:
        run(finished, other)
    said, place = str(told.value), finished.path
    assert f"(budgets was {world.budgets[0]} and is now kv=60%; max_loss was None and is now 2%)" in said
    assert f"headwise allocate {place} --budget kv=60%" in said and f"headwise verify {place} --max-loss 2%" in said
    assert said.endswith(f"&& headwise report {place}; or choose another --out or add --overwrite.")
    with pytest.raises(OutputError, match=r"\(seed was 0 and is now 1\); choose another --out"):
        run(finished, replace(world, seed=1))


def test_replacing_resumes_after_a_kill_before_the_first_new_file(finished: RunFolder, world: Settings) -> None:
    (finished.path / "notes.txt").write_text("mine")
    aside.set_aside(finished.path, OWN)  # killed here: only the user's file and the earlier run are left
    finished.claim(world, world.model, overwrite=True)
    assert finished.require() == world and (finished.path / "notes.txt").read_text() == "mine"


def test_overwriting_refuses_inputs_that_would_go(finished: RunFolder, world: Settings) -> None:
    before = tree(finished.path)
    for change in ({"model": str(finished.model)}, {"data": str(finished.card_file.with_name("plan.json"))}):
        with pytest.raises(OutputError, match="which this run would replace; choose another --out"):
            run(finished, replace(world, **change), overwrite=True)
    (finished.model / "text.txt").write_text("x")
    with pytest.raises(OutputError, match=r"text.txt lies in"):
        run(finished, replace(world, eval=str(finished.model / "text.txt")), overwrite=True)
    (finished.model / "text.txt").unlink()
    assert tree(finished.path) == before


@pytest.mark.parametrize("error", [DataError, BudgetError])
def test_a_command_that_cannot_work_gives_the_old_run_back(
    finished: RunFolder, world: Settings, error: type[HeadwiseError]
) -> None:
    before = tree(finished.path)
    with pytest.raises(error), finished.held("run", new=True):
        finished.claim(replace(world, seed=1), world.model, overwrite=True)
        with finished.replacing():
            assert not finished.plan_file.exists() and (finished.path / aside.PREVIOUS / "plan.json").exists()
            raise error("there is no such text.")
    assert tree(finished.path) == before


def test_a_file_of_our_name_that_somebody_else_wrote_is_no_run(tmp_path: Path, world: Settings) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text('{"speed": "10 km/h"}')
    with pytest.raises(OutputError, match="holds no run of headwise"):
        run(RunFolder(tmp_path / "other"), world, overwrite=True)
    assert (tmp_path / "other" / "run.json").read_text() == '{"speed": "10 km/h"}'


def test_a_folder_with_nothing_but_unfinished_files_is_empty(tmp_path: Path, world: Settings) -> None:
    folder = RunFolder(tmp_path / "new")
    folder.path.mkdir()
    (folder.path / f"{disk.UNFINISHED}plan.json.1").write_text("half")
    (folder.path / f"{disk.UNFINISHED}model.ab12cd34").mkdir()
    run(folder, world)
    assert not [path for path in folder.path.iterdir() if path.name.startswith(".")]


# Inputs.


def unfinished(folder: RunFolder, settings: Settings) -> None:
    with pytest.raises(KeyboardInterrupt), folder.held("run", new=True):
        folder.claim(settings, settings.model)
        raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["text.txt", "source/model.safetensors", "source/config.json"])
def test_a_resume_with_another_input_is_refused(tmp_path: Path, world: Settings, name: str) -> None:
    folder = RunFolder(tmp_path / "run")
    unfinished(folder, world)
    before = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(before + b"\n")
    with pytest.raises(OutputError, match=f"began with another .*{Path(name).name}; restore it"):
        run(folder, world)
    with pytest.raises(OutputError, match=f"{Path(name).name} changed since the run in"):
        folder.same_inputs(world.model)
    (tmp_path / name).write_bytes(before)
    os.utime(tmp_path / name, (1, 1))
    run(folder, world)  # content counts, not time


def test_a_resume_with_another_setting_says_which(tmp_path: Path, world: Settings) -> None:
    folder = RunFolder(tmp_path / "run")
    unfinished(folder, world)
    with pytest.raises(OutputError, match="tokens was 65536 and is now 128"):
        run(folder, replace(world, tokens=128))
    run(folder, replace(world, tokens=128), overwrite=True)


def test_large_files_are_told_apart_by_size_ends_and_parts(tmp_path: Path) -> None:
    large = tmp_path / "large.bin"
    with large.open("wb") as file:
        file.truncate(fingerprint.WHOLE + fingerprint.MIB)
    prints = {fingerprint.of_file(large)}
    for place in (0, fingerprint.WHOLE // 2 // fingerprint.BLOCK * fingerprint.BLOCK, fingerprint.WHOLE):
        with large.open("r+b") as file:
            file.seek(place)
            file.write(b"x" * (fingerprint.MIB if place else 1))
        prints.add(fingerprint.of_file(large))
    os.truncate(large, fingerprint.WHOLE + fingerprint.MIB + 1)
    assert len({*prints, fingerprint.of_file(large)}) == 5


def test_the_record_names_its_kind_and_what_each_stage_was_made_from(finished: RunFolder) -> None:
    record = json.loads(finished.ledger.file.read_text())
    assert (record["headwise"], record["version"]) == ("Finished", 1)
    stages = {stage["name"]: stage for stage in record["stages"]}
    assert list(stages) == ["probe", "plan", "model", "verdict", "report"]
    assert stages["verdict"]["used"]["model"] == stages["model"]["made"]["model"]
    assert stages["model"]["used"]["plan.json"] == stages["plan"]["made"]["plan.json"]
