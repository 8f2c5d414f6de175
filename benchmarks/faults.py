"""The fault campaign: Headwise is killed, starved and fed with damaged files, and must come out of it whole.

    python benchmarks/faults.py --crashes 1000 --mutations 10000 --minutes 40 --jobs 2
    python benchmarks/faults.py --crashes 25 --mutations 25 --scenario probe --out slice.json

Crashes: a process dies before a change of a file, with half of a file, twice, or at a random time; the same command
must then finish and leave the same bytes as one that was never disturbed (crashes.py). Beside them: SIGTERM, files that
may not grow, full disks, little memory, two processes in one folder. Mutations: damaged inputs (damage.py). Every case
follows from the seed. Results of cases are kept in a journal beside --out: a campaign that was killed, or stopped
after its minutes, is resumed by the same command. Writes `benchmarks/results/faults.json`; `benchmarks/reliability.py`
prints docs/RELIABILITY.md from it. Linux only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pickle
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from select import select
from typing import Any

import crashes
import damage
import folders
import forks
import tiny_inputs
from crashes import Lab
from fault_cases import Case, beside_cases, crash_cases, kinds_of, named, summary, words_of
from folders import SOURCE, TEXT, Reference
from provenance import commit, hardware
from scenarios import LEFT_OUT, RUN, SCENARIOS, Scenario

RESULT = Path(__file__).parent / "results" / "faults.json"
SETTINGS = ("seed", "crashes", "mutations", "jobs", "scenario", "patience")
STOP = 0.5  # seconds between looks at the clock


def pooled(tasks: Iterable[tuple[Any, Callable[[], Any]]], jobs: int, until: float) -> Iterator[tuple[Any, Any]]:
    """Results of tasks, each in a process of its own, so many at once; none is begun after `until`."""
    waiting, running = iter(tasks), {}
    more = True
    while more or running:
        while more and len(running) < jobs and time.monotonic() < until:
            if (task := next(waiting, None)) is None:
                more = False
                break
            running[_begun(task[1])] = task[0]
        more = more and time.monotonic() < until
        for pipe in select(list(running), [], [], STOP)[0]:
            with open(pipe, "rb") as file:
                content = file.read()
            os.wait()
            yield running.pop(pipe), pickle.loads(content) if content else None


def _begun(work: Callable[[], Any]) -> int:
    """The pipe through which a forked process tells what its work gave."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    if os.fork() == 0:
        os.close(reading)
        try:
            found: Any = work()
        except BaseException:
            found = {"problems": [f"harness: {traceback.format_exc()}"]}
        with open(writing, "wb") as file:
            pickle.dump(found, file)
        os._exit(0)
    os.close(writing)
    return reading


ACTS: dict[str, Callable[..., list[str] | None]] = {
    "crash": crashes.crash,
    "twice": crashes.crash,
    "timed": crashes.timed,
    "real": crashes.real,
    "term": crashes.term,
    "pair": crashes.pair,
    "file_size": crashes.file_size,
    "disk": crashes.disk,
    "memory": crashes.memory,
}


def run_crash(lab: Lab, scenario: Scenario, references: dict[str, Reference], asked: Case) -> Case:
    """One broken command and what became of it."""
    name = f"{hashlib.sha1(asked['id'].encode()).hexdigest()[:12]}"
    case = lab.fresh(lab.start_of(scenario), name)
    found = ACTS[asked["kind"]](case, scenario, references[scenario.name], asked)
    shutil.rmtree(case, ignore_errors=True)
    if found is None:
        return {"row": scenario.name, "problems": [], "impossible": True}
    return {"row": scenario.name, "problems": found, "words": words_of(asked, references) if found else ""}


# The campaign.


class Journal:
    """Results of cases, one line each, kept until the campaign is finished."""

    def __init__(self, path: Path, about: Case) -> None:
        self.path, self.done = path, {}
        lines = path.read_text().splitlines() if path.exists() else []
        kept = []
        for line in lines:
            try:
                kept.append(json.loads(line))
            except ValueError:  # the line that was being written
                break
        self.resumed = bool(kept) and kept[0] == about
        if self.resumed:
            self.done = {row["id"]: row for row in kept[1:]}
        rows = [about, *self.done.values()]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def cases(self, draw: Callable[[], list[Case]]) -> list[Case]:
        """What is to be done: as it was drawn at the first start, which may have been on another machine."""
        kept = self.path.with_name("cases.json")
        if not (self.resumed and kept.exists()):
            kept.write_text(json.dumps(draw()))
        found: list[Case] = json.loads(kept.read_text())
        return found

    def add(self, row: Case) -> None:
        """Keep a result."""
        self.done[row["id"]] = row
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")


def workplace(out: Path) -> Path:
    """An empty folder for the campaign; disks that a killed one left mounted there are taken off."""
    root = Path(tempfile.gettempdir()) / f"headwise-faults-{hashlib.sha1(str(out.resolve()).encode()).hexdigest()[:8]}"
    for line in Path("/proc/mounts").read_text().splitlines():
        if (place := line.split()[1]).startswith(f"{root}/"):
            subprocess.run(["umount", "-l", place], check=False)
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    return root


def prepared(root: Path, chosen: list[Scenario], jobs: int, damaged: list[str]) -> dict[str, Reference]:
    """Inputs, references of the scenarios, and the folders in which inputs are damaged."""
    forks.prepare(root)
    lab = Lab(root)
    lab.inputs.mkdir()
    tiny_inputs.text(lab.inputs / TEXT)
    forks.apart(tiny_inputs.model, lab.inputs / SOURCE)
    lab.after((RUN,))
    for steps in [*(s.before for s in chosen), *(damage.FOLDERS[n][0] for n in damaged if n in damage.FOLDERS)]:
        lab.after(steps)
    tasks: list[tuple[str, Callable[[], Any]]] = [(s.name, partial(lab.prepare, s)) for s in chosen]
    tasks += [("inputs", work) for work in damage.makers(lab, root / "bases", damaged)]
    found = {}
    for name, result in pooled(tasks, jobs, float("inf")):
        if isinstance(result, dict):
            raise SystemExit(f"{name}: {result['problems'][0]}")
        found[name] = result
    forks.import_all({name for s in chosen for name in found[s.name].modules})
    return {s.name: found[s.name] for s in chosen}


def campaign(asked: argparse.Namespace) -> Case:
    """Run what is not in the journal yet, for as long as allowed."""
    start = time.monotonic()
    names = ("seed", "crashes", "mutations", "scenario", "inputs")
    asked_for = {name: getattr(asked, name) for name in names} | {"commit": commit()}
    journal = Journal(asked.out.parent / f".{asked.out.stem}" / "journal.jsonl", asked_for)
    if not asked.minutes:
        return concluded(journal, journal.cases(list), {}, start)
    chosen = [s for s in SCENARIOS if not asked.scenario or s.name in asked.scenario]
    root = workplace(asked.out)
    references = prepared(root, chosen, asked.jobs, asked.inputs if asked.mutations else [])
    lab, bases = Lab(root), root / "bases"
    cases = journal.cases(lambda: drawn(asked, references, bases))
    by_name = {s.name: s for s in chosen}
    here = [case for case in cases if case["kind"] == "damage" or case["scenario"] in by_name]  # drawn elsewhere
    todo = [case for case in here if case["id"] not in journal.done]

    def work(case: Case) -> Callable[[], Case]:
        if case["kind"] == "damage":
            return lambda: damage.run_case(lab, bases, case)
        return lambda: run_crash(lab, by_name[case["scenario"]], references, case)

    print(f"{len(cases)} cases, {len(todo)} to do; ready after {time.monotonic() - start:.0f} s", flush=True)
    shown = time.monotonic()
    for case, row in pooled(((c, work(c)) for c in todo), asked.jobs, start + 60 * asked.minutes):
        row = row or {"problems": ["harness: the process of the case died"]}
        about = {"id": case["id"], "kind": case["kind"], "row": case.get("scenario", case.get("row")), "place": place()}
        journal.add({**about, **row})
        if time.monotonic() - shown > 15 or row["problems"] and asked.loud:
            shown = time.monotonic()
            print(progress(journal, len(cases), shown - start, row if asked.loud else None), flush=True)
    shutil.rmtree(root, ignore_errors=True)
    return concluded(journal, cases, references, start)


def concluded(journal: Journal, cases: list[Case], references: dict[str, Reference], start: float) -> Case:
    """What the journal says about these cases; a journal that has all of them is not needed any more."""
    wanted = {case["id"] for case in cases}
    rows = [row for name, row in journal.done.items() if name in wanted]
    places = dict(Counter(row.get("place", "") for row in rows))
    if cases and len(rows) == len(cases):
        shutil.rmtree(journal.path.parent)
    return summary(rows, references, len(cases)) | {"places": places, "seconds": round(time.monotonic() - start)}


def drawn(asked: argparse.Namespace, references: dict[str, Reference], bases: Path) -> list[Case]:
    """All cases, in a random order that follows from the seed."""
    cases = crash_cases(asked.seed, asked.crashes, references)
    cases += beside_cases(asked.seed, asked.crashes, references)
    cases = [named(case) for case in cases]
    cases += damage.cases(bases, asked.seed, asked.mutations) if asked.mutations else []
    random.Random(asked.seed).shuffle(cases)
    return cases


def progress(journal: Journal, count: int, seconds: float, row: Case | None) -> str:
    """One line: how far, and which problems so far."""
    found = Counter(kind for row in journal.done.values() for kind in kinds_of(row))
    told = ", ".join(f"{name} {number}" for name, number in sorted(found.items())) or "no problems"
    more = f"\n    {row.get('words')}: {row['problems'][0]}" if row and row["problems"] else ""
    return f"{seconds:.0f} s: {len(journal.done)} of {count} cases; {told}{more}"


def machine() -> Case:
    """Hardware and versions."""
    found = {name: metadata.version(name) for name in ("torch", "transformers", "safetensors")}
    return {"hardware": hardware(), "versions": {"python": platform.python_version(), **found}}


def place() -> str:
    """This machine in a few words: a campaign may be resumed on another."""
    found = hardware()
    return f"{found['processor']}, {found['cores']} cores"


def main() -> None:
    """Run, record, print; exit code 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--crashes", type=int, default=1000)
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument(
        "--minutes",
        type=float,
        default=40.0,
        help="begin no further case after so many; 0: sum up what the journal has",
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scenario", action="append", choices=[s.name for s in SCENARIOS], help="only these")
    parser.add_argument("--inputs", action="append", choices=damage.BASES, help="damage only these")
    parser.add_argument("--patience", type=float, default=1.0, help="multiplies every limit of time")
    parser.add_argument("--loud", action="store_true", help="tell every failure at once")
    asked = parser.parse_args()
    asked.inputs = asked.inputs or list(damage.BASES)
    forks.patience = asked.patience
    found = campaign(asked)
    about = {
        "benchmark": "faults: kills, limits and damaged inputs on a tiny model",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        **machine(),
        "settings": {name: getattr(asked, name) for name in SETTINGS},
        "normalised": list(folders.NORMALISED),
        "left_out": LEFT_OUT,
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(about | found, indent=1) + "\n")
    print(json.dumps({name: found[name] for name in ("cases", "asked", "crashes", "beside", "mutations", "seconds")}))
    for words in found["failures"]:
        print(f"- {words}")
    if found["cases"] < found["asked"]:
        print(f"{found['asked'] - found['cases']} cases are left; the same command resumes.")
    sys.exit(1 if found["failures_in_all"] else 0)


if __name__ == "__main__":
    main()
