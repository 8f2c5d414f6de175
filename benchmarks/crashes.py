"""What a kill, a full disk or a second process leaves behind, and whether the same command then ends as if unharmed.

A scenario is a command, or a few, on a tiny model in a folder of its own. It is run once without a fault: that is the
reference. Every case copies the folder as it was before, breaks the command in one way, runs it again, and compares.

stuck      the command cannot be finished: it ends with an error, or differently than the reference did
lost       something that was whole before is gone: the model, another result, a file of the user's, the source
different  a file has other bytes than in the reference
left       a file or folder that the reference does not have
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from folders import NOTES, OUT, Reference, compared, lost, tree
from forks import Command, Outcome, call, typed, warm
from scenarios import REPORT, Scenario
from watched import SCRATCH, Fault

LIMIT = 120.0  # seconds that a command may take
LOADER = 127  # the exit code of the system's loader where a new thread gets no memory


class Lab:
    """Folders of scenarios and cases under one root."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def inputs(self) -> Path:
        """The model and the text that every scenario begins with."""
        return self.root / "inputs"

    def start_of(self, scenario: Scenario) -> Path:
        """The folder as it is before the scenario's commands."""
        return self.root / "starts" / re.sub(r"\W+", "-", scenario.name)

    def fresh(self, start: Path, name: str) -> Path:
        """A copy of a folder for one case."""
        case = self.root / "cases" / name
        shutil.rmtree(case, ignore_errors=True)
        shutil.copytree(start, case, symlinks=True)
        (case / SCRATCH).mkdir(exist_ok=True)
        return case

    def after(self, steps: tuple[list[str], ...]) -> Path:
        """The inputs after some undisturbed commands; made once, and what they import stays imported."""
        if not steps:
            return self.inputs
        place = self.root / "after" / hashlib.sha1(repr(steps).encode()).hexdigest()[:12]
        if not place.exists():
            case = self.fresh(self.after(steps[:-1]), place.name)
            done = warm(Command(steps[-1], case, modules=True))
            if done.code not in (0, 3):
                raise SystemExit(f"{typed(steps[-1])} fails without a fault:\n{done.text}")
            place.parent.mkdir(exist_ok=True)
            shutil.copytree(case, place)
        return place

    def prepare(self, scenario: Scenario) -> Reference:
        """Make the start and the reference of a scenario."""
        start = self.start_of(scenario)
        shutil.copytree(self.after(scenario.before), start)
        if scenario.foreign:
            (start / OUT / NOTES).write_text("not to be lost\n")
        case = self.fresh(start, f"reference-{start.name}")
        commands, done = [], []
        for step in scenario.steps:
            commands.append(Command(step, case, modules=True))
            done.append(commands[-1].wait(LIMIT))
            if done[-1].code not in (0, 3):
                raise SystemExit(f"{scenario.name} fails without a fault:\n{done[-1].text}")
        return Reference(
            tuple(each.changes for each in done),
            tuple(each.code for each in done),
            tuple(each.seconds for each in done),
            tree(start),
            tree(case),
            tuple(sorted({name for command in commands for name in command.modules})),
            scenario.replaces,
            scenario.loose,
        )


# What a broken command left.


def model_gone(case: Path, reference: Reference) -> list[str]:
    """A finished run has a whole model, the old or the new one, as soon as anything reads the folder again."""
    files = [case / OUT / name for name in ("report.html", "report.md", "frontier.json")]
    kept = {file: file.read_bytes() if file.exists() else None for file in files}
    done = call(REPORT, case, LIMIT)
    found = ["stuck: report ends in a traceback"] if done.traced else []
    for file, content in kept.items():  # what only this question wrote
        file.unlink(missing_ok=True) if content is None else file.write_bytes(content)
    now, name = tree(case), f"{OUT}/model/model.safetensors"
    if now.get(name) not in (reference.before[name], reference.after[name]):
        found.append(f"lost: {name}, after {typed(REPORT)}")
    return found


def stale_report(case: Path) -> list[str]:
    """A report that was there says what the records say."""
    pages = [case / OUT / name for name in ("report.html", "report.md")]
    if not all(page.exists() for page in pages):
        return []
    before = [page.read_bytes() for page in pages]
    done = call(REPORT, case, LIMIT)
    if done.code not in (0, 3):
        return [f"stuck: {typed(REPORT)} ends with {done.code}: {done.last_line}"]
    return [f"different: {p.name} is stale" for p, old in zip(pages, before, strict=True) if p.read_bytes() != old]


# Cases.


def resumed(case: Path, scenario: Scenario, reference: Reference, first: int) -> list[str]:
    """Run a broken scenario again from step `first`; how it ends and what the folder then holds."""
    found: list[str] = []
    for number in range(first, len(scenario.steps)):
        done = call(scenario.steps[number], case, LIMIT)
        if done.code == reference.codes[number] and not done.traced:
            continue
        if done.code == 2 and number == len(scenario.steps) - 1 and not compared(case, reference):
            continue  # it was finished when it was killed, and is not done again
        kind = "hangs" if done.hung else f"ends with {done.code}"
        found.append(f"stuck: {typed(scenario.steps[number])} {kind}: {done.last_line}")
        return [*found, *(problem for problem in compared(case, reference) if problem.startswith("lost"))]
    return [*found, *compared(case, reference), *stale_report(case)]


def broken(case: Path, scenario: Scenario, reference: Reference, step: int, fault: Fault) -> Outcome:
    """Run a scenario up to a step, and that one with a fault."""
    for number in range(step):
        call(scenario.steps[number], case, LIMIT)
    return call(scenario.steps[step], case, LIMIT, fault=fault)


def crash(case: Path, scenario: Scenario, reference: Reference, asked: dict[str, Any]) -> list[str]:
    """Killed before a change of a file, perhaps with half of the last file, perhaps twice."""
    step, point = asked["step"], asked["point"]
    broken(case, scenario, reference, step, Fault(asked["action"], point))
    found = lost(case, reference)
    if scenario.over:
        found += model_gone(case, reference)
    if again := asked.get("again"):
        call(scenario.steps[step], case, LIMIT, fault=Fault("kill", again))
        found += lost(case, reference)
    return [*found, *resumed(case, scenario, reference, step)]


def timed(case: Path, scenario: Scenario, reference: Reference, asked: dict[str, Any]) -> list[str]:
    """Killed at a random time."""
    step = asked["step"]
    for number in range(step):
        call(scenario.steps[number], case, LIMIT)
    Command(scenario.steps[step], case).wait(LIMIT, strike=asked["share"] * reference.seconds[step])
    return [*lost(case, reference), *resumed(case, scenario, reference, step)]


def term(case: Path, scenario: Scenario, reference: Reference, asked: dict[str, Any]) -> list[str]:
    """SIGTERM before a change of a file: one line, code 143; or the end of a command that was finished by then."""
    done = broken(case, scenario, reference, asked["step"], Fault("term", asked["point"]))
    found = lost(case, reference)
    if done.code not in (143, reference.codes[asked["step"]]) or done.traced:
        found.append(f"end: SIGTERM ends with {done.code}{', a traceback' if done.traced else ''}: {done.last_line}")
    return [*found, *resumed(case, scenario, reference, asked["step"])]


def pair(case: Path, scenario: Scenario, reference: Reference, asked: dict[str, Any]) -> list[str]:
    """A second process in the folder while the first stands still before a change: refused, and the first named."""
    first = Command(scenario.steps[0], case, fault=Fault("stop", asked["point"]))
    if not first.stopped():
        first.wait(LIMIT)
        return ["end: the first process did not reach the change"]
    second = call(scenario.steps[0], case, LIMIT)
    first.resume()
    done = first.wait(LIMIT)
    found = []
    if second.code != 2 or second.traced or str(first.pid) not in second.text:
        found.append(f"end: the second process ends with {second.code} and does not name the first: {second.last_line}")
    if done.code != reference.codes[0]:
        return [*found, f"stuck: the first process ends with {done.code}: {done.last_line}"]
    return [*found, *resumed(case, scenario, reference, 1)]


def _ends_well(done: Outcome, what: str) -> list[str]:
    """A command that ran out of something ends with code 2 and a line."""
    if done.code in (0, 3) and not done.traced:
        return []  # it did not need it
    if done.code == 2 and not done.traced and "error" in done.last_line:
        return []
    how = "hangs" if done.hung else f"ends with {done.code}{', a traceback' if done.traced else ''}"
    return [f"end: {what}: {how}: {done.last_line}"]


def file_size(case: Path, scenario: Scenario, reference: Reference, asked: dict[str, Any]) -> list[str]:
    """No file may grow beyond a limit."""
    for number in range(asked["step"]):
        call(scenario.steps[number], case, LIMIT)
    done = call(scenario.steps[asked["step"]], case, LIMIT, Fault(file_bytes=asked["bytes"]))
    found = [*_ends_well(done, f"files limited to {asked['bytes']:,} bytes"), *lost(case, reference)]
    return [*found, *resumed(case, scenario, reference, asked["step"])]


def memory(case: Path, scenario: Scenario, reference: Reference, asked: dict[str, Any]) -> list[str]:
    """Little memory: a line, or the system ends the process; never a traceback, never a file that cannot be resumed."""
    done = call(scenario.steps[0], case, LIMIT, Fault(memory=asked["bytes"]))
    found = []
    aborted = done.code < 0 or done.code == LOADER and "cannot allocate memory" in done.last_line
    if not aborted or done.hung:  # compiled code that gets no memory aborts: nothing of ours runs then
        found = _ends_well(done, f"{asked['bytes'] // 2**20} MiB more than at its start")
    # Libraries that get little memory compute in smaller parts, so that what they kept may differ in its last bits.
    again = [problem for problem in resumed(case, scenario, reference, 0) if not problem.startswith("different")]
    return [*found, *lost(case, reference), *again]


def _mounted(folder: Path, size: int) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    return shutil.which("mount") is not None and subprocess.run(command, stderr=-3, check=False).returncode == 0


def _small(folder: Path, size: int, act: Callable[[], list[str]]) -> list[str] | None:
    """Do something with a folder on a disk of its own with so many bytes; None where mounting is not allowed."""
    aside = folder.parent.parent / f"{folder.parent.name}-{folder.name}.aside"  # beside the case
    folder.rename(aside)
    folder.mkdir()
    if not _mounted(folder, 2**26):
        folder.rmdir()
        aside.rename(folder)
        return None
    try:
        shutil.copytree(aside, folder, symlinks=True, dirs_exist_ok=True)
        subprocess.run(["mount", "-o", f"remount,size={_used(folder) + size}", str(folder)], check=True)
        return act()
    finally:
        os.chdir("/")
        subprocess.run(["umount", "-l", str(folder)], check=False)
        shutil.rmtree(aside, ignore_errors=True)


def _used(folder: Path) -> int:
    found = os.statvfs(folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def disk(case: Path, scenario: Scenario, reference: Reference, asked: dict[str, Any]) -> list[str] | None:
    """A disk with a few bytes left: one line, code 2; with space again, the run resumes."""
    place = case / SCRATCH if asked["where"] == "TMPDIR" else case

    def act() -> list[str]:
        done = call(scenario.steps[0], case, LIMIT)
        what = f"{asked['bytes']:,} bytes left on the disk of {asked['where']}"
        found = [*_ends_well(done, what), *lost(case, reference)]
        subprocess.run(["mount", "-o", f"remount,size={2**27}", str(place)], check=True)
        finished = done.code == reference.codes[0]  # it needed less
        return [*found, *resumed(case, scenario, reference, int(finished))]

    return _small(place, asked["bytes"], act)


def real(case: Path, scenario: Scenario, reference: Reference, asked: dict[str, Any]) -> list[str]:
    """A process that was started, not forked, and a signal at a random time."""
    number = getattr(signal, asked["signal"])
    environment = {**os.environ, "TMPDIR": str(case / SCRATCH)}
    command = [sys.executable, "-m", "headwise", *scenario.steps[0]]
    process = subprocess.Popen(command, cwd=case, env=environment, stdout=-1, stderr=-2, text=True)
    time.sleep(asked["seconds"])
    process.send_signal(number)
    text = process.communicate(timeout=LIMIT)[0]
    found = lost(case, reference)
    early = not (case / OUT).exists()  # still importing: nothing of ours has begun
    done = process.returncode in (-number, reference.codes[0])
    late = done and (len(scenario.steps) > 1 or not compared(case, reference))  # finished: the interpreter was ending
    if number == signal.SIGTERM and not (early or late) and (process.returncode != 143 or "Traceback" in text):
        found.append(f"end: SIGTERM ends with {process.returncode}: {(text.strip().splitlines() or [''])[-1]}")
    try:
        again = subprocess.run(command, cwd=case, env=environment, stdout=-1, stderr=-2, text=True, timeout=3 * LIMIT)
    except subprocess.TimeoutExpired:
        return [*found, "stuck: the second process hangs"]
    if again.returncode != reference.codes[0] and compared(case, reference):
        found.append(f"stuck: the second process ends with {again.returncode}: {again.stdout.strip()[-200:]}")
    return [*found, *resumed(case, scenario, reference, 1)]
