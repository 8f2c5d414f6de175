"""One process at a time works in a run folder."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_keeping import ALLOW, finished, world  # noqa: F401

from headwise.errors import OutputError, PlanError
from headwise.exports import export
from headwise.research.train.claim import held as training_in
from headwise.research.train.settings import TrainSettings
from headwise.runs.folder import RunFolder
from headwise.runs.lock import locked
from headwise.stages.allocate import allocate_in
from headwise.stages.report import write_report

HOLD = """
import sys
from pathlib import Path
from headwise.runs.lock import locked
with locked(Path(sys.argv[1]), "heal"):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    """A process that holds the lock of a folder until it is killed or this process ends."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_command_is_refused_and_a_killed_one_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = holder(tmp_path)
    monkeypatch.setattr("headwise.runs.lock.time.sleep", lambda _: pytest.fail("it waits in place of refusing"))
    message = rf"in use by process {process.pid} on .*headwise heal, since 20"
    with pytest.raises(OutputError, match=message), locked(tmp_path, "run"):
        pass
    monkeypatch.undo()
    process.kill()
    process.wait()
    with locked(tmp_path, "run"), locked(tmp_path, "report") as taken:
        assert not taken, "a stage within a run needs no second lock"
    assert not list(tmp_path.iterdir()), "nothing is left"


def test_only_the_first_of_several_processes_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with locked(tmp_path, "run"):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "1")
        with RunFolder(tmp_path).held("run", new=True):
            pass


def test_a_lock_that_ends_in_an_error_leaves_no_new_folder(tmp_path: Path) -> None:
    with pytest.raises(PlanError), locked(tmp_path / "new", "run"):
        raise PlanError("no.")
    assert not (tmp_path / "new").exists()


def test_stages_ask_for_the_lock(finished: RunFolder) -> None:  # noqa: F811
    process = holder(finished.path)
    try:
        with pytest.raises(OutputError, match="in use by process"):
            allocate_in(finished.path, ("kv=60%",), "exact", ALLOW, False, 0)
        with pytest.raises(OutputError, match="in use by process"):
            write_report(finished)
        other = TrainSettings(config="nothing", data="nothing")
        with pytest.raises(OutputError, match="in use by process"), training_in(finished.path, other):
            pass
        if find_spec("gguf"):
            with pytest.raises(OutputError, match="in use by process"):
                export(finished.path, "gguf", finished.path / "model.gguf")
    finally:
        process.kill()
        process.wait()
