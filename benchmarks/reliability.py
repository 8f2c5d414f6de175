"""Writes docs/RELIABILITY.md from the committed result of the fault campaign: no figure is typed by hand.

python benchmarks/reliability.py          # rewrite docs/RELIABILITY.md
python benchmarks/reliability.py --check  # exit 1 if it is not what the result says
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "RELIABILITY.md"
RESULT = HERE / "results" / "faults.json"
OTHERS = "faults-*.json"  # of other machines and commits
PROMISES = """# Reliability

What Headwise promises when something goes wrong:

- **Killed at any instant** (SIGKILL, power): run the same command again. It finishes and leaves the same files as a run
  that was never interrupted, byte for byte. Temporary files of the killed run are removed.
- **Nothing is lost.** The source model, the text and your own files in the run folder are never changed. At every
  instant there is a finished model, the old or the new one. `--overwrite` keeps the old run until the new one is
  finished.
- **SIGTERM** ends in one line with exit code 143. The same command resumes.
- **A full disk, too little memory**: one line with exit code 2. With space again, the same command resumes.
- **Two processes** in one run folder: the second is refused in one line that names the first, which continues
  undisturbed.
- **Damaged files and odd arguments**: a command accepts them or refuses them in one line. No traceback, no endless
  loop, no change outside the run folder.
- **What is written elsewhere** (exports, designs, pictures, comparisons of runs) is there whole or not at all. After a
  kill, the same command finishes it and removes what was left.
"""
METHOD = """## How it is tested

`python benchmarks/faults.py --crashes {crashes} --mutations {mutations}` runs the campaign, `benchmarks/reliability.py`
prints this page from its result. Every case is determined by a random seed. Models are tiny (two layers, random
weights), so that a command takes about a second; commands, files and formats are the same for any model.

- A scenario first runs without a fault. This gives the reference and the list of its changes to files: files opened
  for writing, renamed, removed, linked or truncated, and folders made or removed.
- A case runs the scenario again and kills the process just before one of these changes, or leaves half of the file that
  was being written, or kills it twice, or kills it at a random time. Most processes are forked from one that has
  imported everything; some are started as a user starts them.
- Then the same command runs again, and its folder is compared with the reference.
- Damaged inputs are files of every kind that Headwise reads, with flipped, lost or added bytes, other values, deep
  nesting and false headers, or with something else in their place (a folder, a pipe, a link to nowhere). Each is
  read by a command under a limit of {longest} seconds, while every change of a file is watched. A tenth of them are
  command lines of every command with one odd value, or with one too many or too few (the rows `arguments`).
"""
COLUMNS = {
    "stuck": "the command cannot be finished",
    "lost": "something that was whole before is gone or changed",
    "different": "a file has other bytes",
    "left": "a file that an undisturbed run does not have is still there",
}
NAMES = {
    "term": "SIGTERM",
    "file_size": "files may not grow beyond a limit",
    "disk": "full disk (run folder or TMPDIR)",
    "memory": "little memory",
    "pair": "two processes in one folder",
}
LIMITS = """## What is not covered

- The disk itself: a machine that loses power after a write but before the disk has stored it. Files and folders are
  synced before a rename is relied on, but no power was cut.
- Network file systems, several machines on one folder, systems other than Linux.
- A kill during a write is represented by half of the file; other parts of a file were not tried.
- Compiled code that gets no memory may end the process without a message; the run must still resume. Python itself
  waits forever for a thread that got no memory to start (`Thread.start`): seen with 1 to 10 MiB left, while
  transformers loaded a model. Models in host memory are now loaded without threads; other libraries may start some.
  Stop such a command; the same command resumes.
- `headwise search`: what a killed trial found is lost; the study resumes with another trial.
- `headwise demo` is killed nowhere: it is `headwise run` with given settings. Engines (`verify --engine`) are not
  started: without one the command must end in one line, which is among the odd arguments.
- Models of real size, GPUs and several processes of one run (`torchrun`): the code that writes files is the same.
- That a damaged file is *noticed*: a changed weight or a changed word of text is a legal input.
"""


def _table(titles: list[str], rows: list[list[Any]]) -> list[str]:
    cells = [f"| {' | '.join(f'{c:,}' if isinstance(c, int) else str(c) for c in row)} |" for row in rows]
    return [f"| {' | '.join(titles)} |", f"| --- |{' ---: |' * (len(titles) - 1)}", *cells, ""]


def crashes(result: dict[str, Any]) -> list[str]:
    """Kills by scenario."""
    titles = ["scenario", "changes of files", "before a change or half a file", "twice", "random time", *COLUMNS]
    kinds = ("crash", "twice")
    rows = [
        [name, row["changes"], *(row[kind] for kind in kinds), row["timed"] + row["real"], *(row[c] for c in COLUMNS)]
        for name, row in result["scenarios"].items()
    ]
    total = result["crashes"]
    many = [sum(row[kind] for row in result["scenarios"].values()) for kind in (*kinds, "timed", "real")]
    changes = sum(row["changes"] for row in result["scenarios"].values())
    rows.append(["**all**", changes, *many[:2], many[2] + many[3], *(total[c] for c in COLUMNS)])
    told = "; ".join(f"{name}: {words}" for name, words in COLUMNS.items())
    started = f"{many[3]} of them were started, not forked" if many[3] else "all were forked"
    return [f"## Kills: {total['cases']:,}", "", f"{told}. Processes: {started}.", "", *_table(titles, rows)]


def beside(result: dict[str, Any]) -> list[str]:
    """Everything that is no kill and no damaged file."""
    if not result["beside"]:
        return []
    titles = ["fault", "cases", "wrong end", *COLUMNS]
    rows = [
        [NAMES[kind], row["cases"] - row["impossible"], row["end"], *(row[c] for c in COLUMNS)]
        for kind, row in result["beside"].items()
    ]
    note = "Wrong end: another exit code than promised, a traceback, or no line that says what happened."
    return ["## Limits, signals, second processes", "", note, "", *_table(titles, rows)]


def files(result: dict[str, Any]) -> list[str]:
    """Damaged inputs by file."""
    total = result["mutations"]
    columns = ["accepted", "refused", "traceback", "hang", "outside", "crash"]
    titles = ["file", "cases", "accepted", "refused", "traceback", "hang", "written outside", "crash"]
    rows = [[name, row["cases"], *(row[c] for c in columns)] for name, row in result["files"].items()]
    counted = [sum(row[c] for row in result["files"].values()) for c in columns[:2]]
    rows.append(["**all**", total["cases"], *counted, *(total[c] for c in columns[2:])])
    return [f"## Damaged inputs: {total['cases']:,}", "", *_table(titles, rows)]


def failures(result: dict[str, Any]) -> list[str]:
    """What went wrong, in words."""
    if not result["failures_in_all"]:
        return ["Nothing went wrong.", ""]
    total = result["failures_in_all"]
    told = "One problem:" if total == 1 else f"{total:,} problems; the first ones of each kind in each row:"
    return ["## What went wrong", "", told, "", *(f"- {' '.join(words.split())}" for words in result["failures"]), ""]


def measured(result: dict[str, Any]) -> list[str]:
    """Which cases, where and when, and everything that was counted."""
    made = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    place = f"{result['hardware']['processor']}, {result['hardware']['cores']} cores"
    counts = f"{result['cases']:,} of {result['asked']:,} cases with random seed {result['settings']['seed']}"
    about = f"{counts} on commit {result['commit']}, {result['date']}, {place}, {made}."
    if len(result.get("places", {})) > 1:
        told = "; ".join(f"{number:,} on {name}" for name, number in result["places"].items())
        about += f" Begun on one machine and resumed on another: {told}."
    left = [f"{name} (without {package})" for name, package in result.get("left_out", {}).items()]
    lines = [about, "", *([f"Not run on this machine: {', '.join(left)}.", ""] if left else [])]
    return [*lines, *failures(result), *crashes(result), *beside(result), *files(result)]


def summary(result: dict[str, Any]) -> list[str]:
    """The last campaign in a sentence for every promise."""
    kills, inputs = result["crashes"], result["mutations"]
    bad = sum(row["end"] + sum(row[c] for c in COLUMNS) for row in result["beside"].values())
    aside = sum(row["cases"] - row["impossible"] for row in result["beside"].values())
    return [
        "The last campaign:",
        "",
        f"- {kills['cases']:,} kills: {', '.join(f'{kills[c]:,} {c}' for c in COLUMNS)}.",
        f"- {inputs['cases']:,} damaged inputs: {inputs['traceback']:,} tracebacks, {inputs['hang']:,} hangs, "
        f"{inputs['outside']:,} writes outside the run folder, {inputs['crash']:,} crashes.",
        f"- {aside:,} cases of little memory, full disks, signals and second processes: {bad:,} wrong.",
        "",
    ]


def others(results: list[dict[str, Any]]) -> list[str]:
    """Campaigns on other machines and commits, in a row each, and what they found."""
    if not results:
        return []
    kinds = [*COLUMNS, "end", "traceback", "hang", "outside", "crash"]
    titles = ["commit", "date", "machine", "cases of", "hang: seconds", "kills", "limits and signals",
              "damaged inputs", *kinds]  # fmt: skip
    rows, told = [], []
    for result in results:
        parts = [result["crashes"], result["mutations"], *result["beside"].values()]
        counts = [sum(part.get(kind, 0) for part in parts) for kind in kinds]
        aside = sum(row["cases"] - row["impossible"] for row in result["beside"].values())
        place = f"{result['hardware']['processor']}, {result['hardware']['cores']} cores"
        cases = f"{result['cases']:,} of {result['asked']:,}"
        kills, inputs = result["crashes"]["cases"], result["mutations"]["cases"]
        longest = round(30 * result["settings"].get("patience", 1))
        rows.append([result["commit"], result["date"], place, cases, longest, kills, aside, inputs, *counts])
        told += [f"- {result['commit']}: {' '.join(words.split())}" for words in result["failures"]]
    found = ["What they found; the first ones of each kind in each row:", "", *told, ""] if told else []
    note = (
        "Each with the code of its commit; wrong ends are in the column `end`. A hang is judged by the clock: on a "
        "machine with other work, a long command such as an export to ONNX may count as one."
    )
    return ["## Other campaigns", "", note, "", *_table(titles, rows), *found]


def page(result: dict[str, Any], more: list[dict[str, Any]]) -> str:
    """The whole page; `more` are results of other machines and commits."""
    asked = result["settings"]
    method = METHOD.format(
        crashes=asked["crashes"], mutations=asked["mutations"], longest=round(30 * asked.get("patience", 1))
    )
    same = ["Not compared byte for byte:", "", *(f"- {words}" for words in result["normalised"]), ""]
    return "\n".join([PROMISES, *summary(result), method, *same, *measured(result), *others(more), LIMITS])


def written() -> str:
    """The page of the committed results."""
    more = [json.loads(path.read_text()) for path in sorted(RESULT.parent.glob(OTHERS))]
    made = page(json.loads(RESULT.read_text()), sorted(more, key=lambda result: result["date"], reverse=True))
    made = re.sub(r"/\S*/headwise-faults-\w+/", "", made)  # where the campaign had its folders
    return made.encode(errors="backslashreplace").decode()  # words that were tried need not be UTF-8


def main() -> None:
    """Rewrite or check."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    made = written()
    if parser.parse_args().check:
        sys.exit(0 if PAGE.read_text() == made else "docs/RELIABILITY.md is stale; run benchmarks/reliability.py")
    PAGE.write_text(made)


if __name__ == "__main__":
    main()
