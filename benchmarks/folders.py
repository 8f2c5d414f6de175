"""What a folder holds, as far as it must be the same after a fault as without one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from watched import SCRATCH, Change

OUT, SOURCE, TEXT, NOTES = "out", "source", "text.txt", "notes.txt"  # run folder, model, text, a file of the user's
PRECIOUS = ("readings.json", "moments.safetensors", "plan.json")
VOLATILE = re.compile(r"seconds|date|time|started|resumed|pid|host|machine|_ms($|_)|per_second|^ms$")  # keys of JSON
DIGEST = re.compile(r"^(sha256:)?[0-9a-f]{16,128}$")  # of files that hold times
NORMALISED = (
    "values of JSON keys that hold dates, seconds, milliseconds, tokens per second, process or machine, or 'resumed'",
    "digests in JSON (of files that hold such values) and the path of the folder itself",
    "report.html and report.md: not compared with the reference, but with what headwise report then writes",
    "logs/ of a training: TensorBoard begins a file whenever it is started",
    "headwise search and headwise reproduce: which files there are, since trials and times differ",
    "runs that had too little memory: libraries then compute in smaller parts, and last bits differ",
)


class Reference(NamedTuple):
    """A scenario that was not disturbed: changes of files and exit codes by step, and what the folder held after."""

    changes: tuple[tuple[Change, ...], ...]
    codes: tuple[int, ...]
    seconds: tuple[float, ...]
    before: dict[str, bytes]
    after: dict[str, bytes]
    modules: tuple[str, ...] = ()  # that its commands imported
    replaces: bool = False  # a whole run, which must be kept until the new one is finished
    loose: bool = False  # two undisturbed runs differ in bytes: only names are compared


def _plain(value: Any, key: str = "") -> Any:
    """JSON without what differs from run to run."""
    if VOLATILE.search(key) and not isinstance(value, (dict, list)):
        return f"<{key}>"
    if isinstance(value, dict):
        return {name: _plain(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, key) for item in value]
    return "<digest>" if isinstance(value, str) and DIGEST.match(value) else value


def normalised(path: Path, case: Path) -> bytes:
    """What is compared of a file."""
    content = path.read_bytes()
    if path.suffix in (".json", ".jsonl"):
        try:
            lines = content.splitlines() if path.suffix == ".jsonl" else [content]
            content = "\n".join(json.dumps(_plain(json.loads(line)), sort_keys=True) for line in lines).encode()
        except (ValueError, RecursionError):
            pass  # damaged: compared as it is
    return hashlib.sha256(content.replace(str(case).encode(), b"<folder>")).digest()


def tree(case: Path) -> dict[str, bytes]:
    """Every file and folder beneath a folder, with what is compared of it; empty for folders and reports."""
    found = {}
    for path in sorted(case.rglob("*")):
        name = str(path.relative_to(case))
        if name.split("/")[0] == SCRATCH or f"{name}/".startswith(f"{OUT}/logs/"):
            continue
        written = not path.is_file() or path.suffix == ".html" or path.name in ("report.md", "README.md")
        with contextlib.suppress(FileNotFoundError):  # a process that a killed one had started still clears up
            found[name] = b"" if written else normalised(path, case)
    return found


def compared(case: Path, reference: Reference) -> list[str]:
    """How a folder differs from the reference, in words that begin with the kind of problem."""
    now, want = tree(case), reference.after
    found = [f"left: {name}" for name in sorted(set(now) - set(want))]
    found += [f"different: {name} is missing" for name in sorted(set(want) - set(now))]
    both = sorted(set(want) & set(now)) if not reference.loose else []
    found += [f"different: {name} has other bytes" for name in both if now[name] != want[name]]
    own = [name for name in reference.before if _given(name)]
    return found + [f"lost: {name} was changed" for name in own if now.get(name) != reference.before[name]]


def _given(name: str) -> bool:
    """Whether a file is the user's and not to be touched."""
    return name.split("/")[0] in (SOURCE, TEXT) or name == f"{OUT}/{NOTES}"


def _precious(name: str) -> bool:
    """Whether a file cannot be made again at once: not what is said about a model that is being replaced."""
    return name.startswith(f"{OUT}/model/") or name in [f"{OUT}/{name}" for name in PRECIOUS]


def lost(case: Path, reference: Reference) -> list[str]:
    """What a broken command took with it: every result is still somewhere, as it was before or as it is to become."""
    here = set(tree(case).values())
    found = []
    for name, content in reference.before.items():
        becomes = reference.after.get(name)
        kept = _given(name) or reference.replaces or _precious(name)
        if kept and content and becomes is not None and not {content, becomes} & here:
            found.append(f"lost: {name} is nowhere, neither the old nor the new one")
    return found
