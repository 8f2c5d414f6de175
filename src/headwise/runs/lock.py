"""One command at a time in a folder. The system gives the lock back when its holder ends, however it ends."""

import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from headwise.errors import OutputError
from headwise.files import disk

NAME = ".headwise-lock"
TAKEN = (errno.EAGAIN, errno.EACCES)
_held: dict[Path, int] = {}  # folder: thread
log = logging.getLogger("headwise")


def is_first() -> bool:
    """Whether this process is the one that writes: the only one, or the first of those that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1")) < 2 or os.environ.get("RANK", "0") == "0"


@contextmanager
def locked(folder: Path, command: str, patience: float = 0.0) -> Iterator[bool]:
    """Hold the lock of a folder, which is created where needed; gives False where this thread holds it already.

    `patience`: seconds to keep trying.
    """
    where = folder.resolve()
    if not is_first() or _held.get(where) == threading.get_ident():
        yield False
        return
    made = _make(folder)
    handle = _take(folder, command, patience)
    _held[where] = threading.get_ident()
    try:
        yield True
    finally:
        del _held[where]
        (folder / NAME).unlink(missing_ok=True)  # first: a process that opened it meanwhile sees that it is gone
        os.close(handle)
        with suppress(OSError):
            if made:
                folder.rmdir()  # only if nothing was written


@contextmanager
def output(path: Path, command: str) -> Iterator[None]:
    """Hold a file or folder that a command writes outside of a run folder, once what a kill left of it is gone.

    Errors of the disk end in one line. Parents that were made for it go again if nothing is written.
    """
    where = Path(os.path.abspath(path))
    if not where.name or (where.exists() and not where.is_file() and not where.is_dir()):  # such as /dev/null
        raise OutputError(f"{path} cannot be replaced; choose another --out.")
    made = [parent for parent in where.parents if not parent.exists()]
    own = where.with_name(f"{disk.UNFINISHED}{where.name}.lock")
    try:
        with disk.explained(path), locked(own, command):
            disk.recover_one(where)
            yield
    finally:
        for folder in (own, *made):  # from the innermost
            with suppress(OSError):
                folder.rmdir()  # only if it is empty


def _make(folder: Path) -> bool:
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file; choose another --out.")
    try:
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        return made
    except OSError as error:
        raise OutputError(f"{folder} cannot be written ({error.strerror}); choose another --out.") from None


def _take(folder: Path, command: str, patience: float) -> int:
    end = time.monotonic() + patience
    while True:
        handle = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in TAKEN:
                log.warning("%s lies on a file system without locks: start no second command in it.", folder)
                return handle
            holder = _holder(handle)
            os.close(handle)
            if time.monotonic() >= end:
                raise OutputError(f"{folder} is in use by {holder}; wait until it ends.") from None
            time.sleep(0.05)
            continue
        if _in_place(handle, folder / NAME):
            _sign(handle, command)
            return handle
        os.close(handle)  # its holder ended and deleted it


def _in_place(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _sign(handle: int, command: str) -> None:
    since = datetime.now().astimezone().isoformat(" ", "seconds")
    text = json.dumps({"process": os.getpid(), "host": socket.gethostname(), "command": command, "since": since})
    with suppress(OSError):  # a full disk: the lock holds without a name
        os.ftruncate(handle, 0)
        os.pwrite(handle, text.encode(), 0)


def _holder(handle: int) -> str:
    try:
        found = json.loads(os.pread(handle, 4096, 0))
        who = f"process {found['process']} on {found['host']}"
        return f"{who} (headwise {found['command']}, since {found['since']})"
    except (ValueError, KeyError, TypeError):
        return "another process"
