"""A slice of the fault campaign, and what it does with its own results. The whole: benchmarks/faults.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import fault_cases  # noqa: E402
import folders  # noqa: E402
import reliability  # noqa: E402
from watched import Change, Fault, Watch  # noqa: E402

SLICE = [
    "--crashes",
    "6",
    "--mutations",
    "12",
    "--seed",
    "1",
    "--scenario",
    "heal a finished run",
    "--inputs",
    "finished",
]

linux = pytest.mark.skipif(sys.platform != "linux", reason="the campaign reads /proc and uses pidfd")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("faults") / "slice.json"
    command = [sys.executable, BENCHMARKS / "faults.py", "--out", out, "--jobs", "1", "--minutes", "5", *SLICE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert out.exists(), done.stderr
    result = json.loads(out.read_text())
    assert result["cases"] == result["asked"], "none was left out"
    return result


def of_kind(result, *kinds):
    return [words for words in result["failures"] if words.split(" in '")[0] in kinds]


@linux
def test_killed_anywhere_a_finished_run_is_healed_to_the_same_bytes(found):
    assert found["crashes"]["cases"] == 6
    assert not of_kind(found, *fault_cases.KILLS)
    assert [found["crashes"][name] for name in ("stuck", "lost", "different", "left")] == [0] * 4


@linux
def test_a_second_process_is_refused_and_the_first_is_named(found):
    assert found["beside"]["pair"]["cases"] and not of_kind(found, "pair")


@linux
def test_sigterm_full_disks_and_little_memory_end_in_a_line_and_resume(found):
    assert set(found["beside"]) == set(fault_cases.BESIDE)
    assert not of_kind(found, "term", "file_size", "disk", "memory")


@linux
def test_damaged_files_are_accepted_or_refused_in_a_line(found):
    total = found["mutations"]
    assert total["cases"] == 12 and sum(row["refused"] for row in found["files"].values()) > 0
    assert not [words for words in found["failures"] if words.startswith("finished: ")]
    assert [total[name] for name in ("traceback", "hang", "outside", "crash")] == [0] * 4


# The campaign itself: it must be able to fail.


def reference(changes=9):
    row = tuple(Change("os.rename", f"out/{n}", n % 2 == 0) for n in range(changes))
    before = {"source/config.json": b"s", "out/model": b"", "out/model/model.safetensors": b"old"}
    return folders.Reference((row, row), (0, 0), (1.0, 1.0), before, {**before, "out/model/model.safetensors": b"new"})


def test_cases_follow_from_the_seed_and_cover_every_scenario():
    known = {"a": reference(40), "b": reference(30)}
    cases = fault_cases.crash_cases(1, 100, known)
    assert len(cases) == 100 and cases == fault_cases.crash_cases(1, 100, known)
    assert cases != fault_cases.crash_cases(2, 100, known)
    names = [fault_cases.named(case)["id"] for case in cases if case["kind"] == "crash"]
    assert len(set(names)) == len(names) == 70, "no point twice"
    assert {case["scenario"] for case in cases} == {"a", "b"}
    assert {case["kind"] for case in fault_cases.beside_cases(1, 100, known)} == set(fault_cases.BESIDE)


def test_files_that_differ_are_left_or_are_gone_are_seen(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "source").mkdir()
    for name, content in {"out/a.json": '{"seconds": 1, "x": 2}', "out/b": "b", "source/c": "c"}.items():
        (tmp_path / name).write_text(content)
    whole = folders.tree(tmp_path)
    want = folders.Reference((), (), (), whole, whole)
    (tmp_path / "out/a.json").write_text('{"seconds": 3, "x": 2}')
    assert folders.compared(tmp_path, want) == [], "times may differ"
    (tmp_path / "out/a.json").write_text('{"seconds": 3, "x": 4}')
    (tmp_path / "out/b").rename(tmp_path / "out/.b.tmp")
    (tmp_path / "source/c").write_text("d")
    assert folders.compared(tmp_path, want) == [
        "left: out/.b.tmp",
        "different: out/b is missing",
        "different: out/a.json has other bytes",
        "different: source/c has other bytes",
        "lost: source/c was changed",
    ]
    assert folders.lost(tmp_path, want) == ["lost: source/c is nowhere, neither the old nor the new one"]
    assert len(folders.lost(tmp_path, want._replace(replaces=True))) == 2, "and everything of a run that is replaced"


def test_failures_are_counted_by_case_and_told_in_words():
    rows = [
        {"id": "1", "kind": "crash", "row": "a", "problems": ["left: x", "left: y"], "words": "crash in 'a'"},
        {"id": "2", "kind": "pair", "row": "a", "problems": ["end: no"], "words": "pair in 'a'"},
        {"id": "3", "kind": "damage", "row": "f", "ended": "refused", "problems": []},
    ]
    found = fault_cases.summary(rows, {"a": reference()}, 4)
    assert found["crashes"] == {"cases": 1, "stuck": 0, "lost": 0, "different": 0, "left": 1}
    assert found["scenarios"]["a"]["changes"] == 18 and found["beside"]["pair"]["end"] == 1
    assert found["failures"] == ["crash in 'a': left: x (and 1 more)", "pair in 'a': end: no"]
    assert found["failures_in_all"] == 2 and found["files"]["f"]["refused"] == 1


def test_the_page_is_what_the_result_says():
    if reliability.RESULT.exists():
        assert reliability.PAGE.read_text() == reliability.written()


def test_a_folder_in_memory_is_watched_and_devices_are_not():
    reading, writing = os.pipe()
    watch = Watch("/dev/shm/case", Fault(), writing)
    for path in ("/dev/shm/case/out/plan.json", "/dev/null", "/dev/shm/case/tmp/x", "/dev/shm/other"):
        watch.changed("open", path)
    os.close(writing)
    with open(reading) as file:
        assert file.read().splitlines() == ["change\topen\tout/plan.json\t0", "outside\topen /dev/shm/other"]
