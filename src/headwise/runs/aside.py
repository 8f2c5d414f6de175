"""Replacing a run: its own files are kept in `.previous` until the new run is finished. Other files stay in place."""

import os
from collections.abc import Iterable
from pathlib import Path

from headwise.errors import OutputError
from headwise.files import disk
from headwise.runs.lock import NAME as LOCK

PREVIOUS = ".previous"
MOVING = ".headwise-moving"  # files on their way there; put back at the next start


def own(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """The files and folders of a run that are there."""
    return sorted({path for pattern in patterns for path in folder.glob(pattern)})


def strangers(folder: Path) -> list[Path]:
    """Everything in a folder, except for what an interrupted start left there."""
    passing = (LOCK, PREVIOUS, MOVING)
    return [path for path in folder.iterdir() if path.name not in passing and not disk.is_temporary(path.name)]


def refuse_inside(folder: Path, patterns: Iterable[str], inputs: Iterable[str | None]) -> None:
    """Refuse inputs that lie among a run's own files, which it replaces."""
    places = [folder.resolve() / path.name for path in own(folder, patterns)]
    for name in (name for name in inputs if name):
        where = [Path(name).resolve(), Path(os.path.abspath(name))]
        if any(path.is_relative_to(place) for place in places for path in where):
            raise OutputError(f"{name} lies in {folder}, which this run would replace; choose another --out.")


def set_aside(folder: Path, patterns: Iterable[str]) -> None:
    """Move a run's own files into `.previous`; if an earlier run waits there, delete them instead."""
    if (folder / PREVIOUS).exists():
        discard(folder, patterns)
        return
    moving = folder / MOVING
    moving.mkdir(exist_ok=True)
    for path in own(folder, patterns):
        os.rename(path, moving / path.name)
    os.rename(moving, folder / PREVIOUS)
    disk.sync(folder)


def discard(folder: Path, patterns: Iterable[str]) -> None:
    """Delete a run's own files."""
    for path in own(folder, patterns):
        disk.remove(path)


def give_back(folder: Path, patterns: Iterable[str], claim: Iterable[str]) -> None:
    """Undo the start of a run that is impossible: put the earlier run back.

    Where there was none, a run that wrote its `claim` alone leaves nothing.
    """
    if (folder / PREVIOUS).exists():
        put_back(folder, patterns)
    elif {path.name for path in own(folder, patterns)} <= set(claim):
        discard(folder, patterns)


def put_back(folder: Path, patterns: Iterable[str]) -> None:
    """Delete the new run's files and put the earlier run's in their places."""
    discard(folder, patterns)
    os.rename(folder / PREVIOUS, folder / MOVING)
    undo_move(folder)


def undo_move(folder: Path) -> None:
    """Put files back that were on their way; also at the next start after a kill."""
    if not (folder / MOVING).is_dir():
        return
    for path in sorted((folder / MOVING).iterdir()):
        os.rename(path, folder / path.name)
    (folder / MOVING).rmdir()
    disk.sync(folder)


def drop(folder: Path) -> None:
    """The new run is finished: delete the earlier one."""
    if (folder / PREVIOUS).exists():
        disk.remove(folder / PREVIOUS)
