"""Kills before every change of a file, a full disk, SIGTERM: the same command resumes, and ends in the same bytes."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from test_keeping import build, finished, plan_for, run, tree, world  # noqa: F401
from test_pipeline import folder  # noqa: F401

from headwise import pipeline
from headwise.errors import OutputError
from headwise.files import disk
from headwise.probes import gram
from headwise.probes.swap import Swapper
from headwise.runs import aside
from headwise.runs.folder import RunFolder
from headwise.runs.settings import Settings
from headwise.runs.unfinished import Progress

STRIDE = 5  # from one kill to the next; 1 tries all
CHANGES = ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync")
Action = Callable[[], object]


def killed_at(number: int, action: Action) -> bool:
    """Do something in a process of its own that is killed before a change of a file; whether it was."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads: the child only writes files
        child = os.fork()
    if child == 0:
        try:
            _kill_before(number)
            action()
            os._exit(0)
        except BaseException:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), f"it failed instead of being killed at {number}"
    return code != 0


def _kill_before(number: int) -> None:
    left = [number]
    for name in CHANGES:

        def change(own: Callable[..., Any], *given: Any, **named: Any) -> Any:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return own(*given, **named)

        setattr(os, name, partial(change, getattr(os, name)))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills need no sync, which takes most of the time."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def kills(base: Path, at: Path, action: Callable[[RunFolder], object]) -> Iterator[RunFolder]:
    """The folder after kills at some changes, each begun from a copy of `base` at one place; last, unbroken."""
    number, was_killed = len(at.name) % STRIDE, True
    while was_killed:
        shutil.rmtree(at, ignore_errors=True)
        if base.exists():
            shutil.copytree(base, at)
        was_killed = killed_at(number, lambda: action(RunFolder(at)))
        number += STRIDE
        yield RunFolder(at)
    assert number > 20, "every change of a file is a place to be killed at"


def hidden(path: Path) -> list[str]:
    return [part.name for part in path.rglob(".*")]


def test_a_first_run_that_is_killed_anywhere_resumes_to_the_same_bytes(world: Settings, tmp_path: Path) -> None:  # noqa: F811
    plan_for(world)
    expected = tree(run(RunFolder(tmp_path / "whole"), world).path)
    for after in kills(tmp_path / "nothing", tmp_path / "run", lambda found: run(found, world)):
        with after.held("report", new=True):
            pass
        if not after.finished("report"):
            run(after, world)
        assert tree(after.path) == expected and not hidden(after.path)


def test_an_overwritten_run_is_there_until_the_new_one_is_finished(finished: RunFolder, world: Settings) -> None:  # noqa: F811
    new = replace(world, seed=1)
    plan_for(new)
    old, work = tree(finished.path), finished.path.parent
    expected = tree(run(RunFolder(work / "whole"), new).path)
    for after in kills(finished.path, work / "run-2", lambda found: run(found, new, overwrite=True)):
        with after.held("report", new=True):
            pass
        previous = after.path / aside.PREVIOUS
        done = after.finished("report") and after.require().seed == 1
        assert done or tree(previous if previous.exists() else after.path) == old, "the old run is whole"
        if not done:
            run(after, new, overwrite=True)
        assert tree(after.path) == expected and not hidden(after.path)


def test_a_second_build_that_is_killed_never_lends_its_model_a_verdict(finished: RunFolder, world: Settings) -> None:  # noqa: F811
    healed, work = replace(world, heal="refit"), finished.path.parent
    weights = (finished.model / "model.safetensors").read_bytes()
    whole = RunFolder(shutil.copytree(finished.path, work / "whole"))
    build(whole, healed, b"healed weights")
    for after in kills(finished.path, work / "run-2", lambda found: build(found, healed, b"healed weights")):
        with after.held("report"):
            assert not hidden(after.model), "what was interrupted is completed or undone"
            found = (after.model / "model.safetensors").read_bytes()
            verdict, _ = after.verdict()
            assert found in (weights, b"healed weights") and (verdict is None or found == weights)
        build(after, healed, b"healed weights")
        assert tree(after.path) == tree(whole.path) and not hidden(after.path)


def test_files_are_synced_before_they_are_renamed_and_their_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    for name in ("fsync", "replace"):
        own = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, own=own, name=name: (seen.append(name), own(*given))[1])
    disk.write_atomically(tmp_path / "a.json", "{}")
    assert seen == ["fsync", "replace", "fsync"]


# No space left.


def test_a_full_disk_is_one_line_and_the_run_resumes(world: Settings, tmp_path: Path) -> None:  # noqa: F811
    at = RunFolder(tmp_path / "run")
    message = r"No space left on device.*run the same command again: it resumes"
    for error in (
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    ):
        with pytest.raises(OutputError, match=message), at.held("run", new=True):
            at.claim(world, world.model)
            raise error
    assert run(at, world).finished("report")


def test_short_lived_files_lie_on_the_disk_of_the_run(tmp_path: Path) -> None:
    with disk.scratch(tmp_path / "logits") as made:
        (made / "logits").write_bytes(b"x")
        assert made.parent == tmp_path and disk.is_temporary(made.name)
    assert not list(tmp_path.iterdir())


# SIGTERM.

WAIT = """
import sys, time
from headwise import cli
from headwise.stages import allocate
def wait(*_):
    print("waiting", flush=True)
    time.sleep(60)
allocate._allocated = wait
sys.argv = ["headwise", "allocate", sys.argv[1], "--budget", "kv=60%"]
cli.main()
"""


def test_sigterm_ends_in_one_line_and_gives_the_lock_back(finished: RunFolder) -> None:  # noqa: F811
    before = tree(finished.path)
    command = [sys.executable, "-c", WAIT, str(finished.path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "waiting\n"
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143 and said == "interrupted; the same command resumes where it stopped.\n"
    assert tree(finished.path) == before


# Probing.


def stopping(at: str, after: int) -> Any:
    """A way to show progress that is interrupted while some work is done."""

    def track(items: Any, what: str) -> Any:
        for number, item in enumerate(items):
            if what == at and number == after:
                raise KeyboardInterrupt
            yield item

    return track


def test_a_probing_that_is_killed_resumes_and_ends_in_the_same_bytes(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Settings(
        str(folder), ("kv=75%",), data="stdlib", tokens=512, eval_tokens=64, swap_tokens=64, length=32,
        allow=("qk", "v", "depth"), device="cpu",
    )  # fmt: skip
    bench, measured = pipeline.load_source(asked), list[int]()
    own = Swapper.damage
    monkeypatch.setattr(Swapper, "damage", lambda self, *given: (measured.append(given[0]), own(self, *given))[1])
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)  # readings say how long they took
    whole, broken = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "broken")
    pipeline.probe_in(whole, asked, bench)
    count = len(measured)
    for stage, number in (("measured damage", 3), ("depth", 1), ("depth, healed", 0)):
        with pytest.raises(KeyboardInterrupt):
            pipeline.probe_in(broken, asked, bench, stopping(stage, number))
        monkeypatch.setattr(gram, "collect", lambda *_: pytest.fail("second moments are measured again"))
    with (broken.probing / "pieces-0.jsonl").open("a") as file:
        file.write('{"key": "cut off')
    pipeline.probe_in(broken, asked, bench)
    assert len(measured) == 2 * count, "nothing is measured twice"
    assert tree(broken.path) == tree(whole.path) and not broken.probing.exists()


def test_pieces_of_other_work_do_not_count(tmp_path: Path) -> None:
    assert Progress(tmp_path, "a").piece("x", lambda: [1.5, float("inf")]) == [1.5, float("inf")]
    assert Progress(tmp_path, "a").piece("x", lambda: pytest.fail("made again")) == [1.5, float("inf")]
    assert Progress(tmp_path, "b").piece("x", lambda: 2) == 2


def test_a_pipe_in_the_place_of_a_record_is_no_record_and_nothing_waits_for_it(tmp_path: Path) -> None:
    at = RunFolder(tmp_path / "run")
    at.path.mkdir()
    os.mkfifo(at.settings_file)
    assert not at.is_ours()
