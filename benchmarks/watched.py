"""What happens to a process of the fault campaign, and the audit hook that sees every change of a file."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
NATIVE = "native.write"  # a file that compiled code opens and writes
MOST = 20_000  # changes that are reported
MEMORY = "/dev/shm/"
SCRATCH = "tmp"  # TMPDIR of a command, in its folder; changes there are not counted


def _bytes_of(path: str) -> int:
    """The size of a file; 0 where another thread renamed it meanwhile."""
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


class Fault(NamedTuple):
    """What happens to a process: an action just before its change of a file number `point`, or limits."""

    action: str = ""  # kill; tear: leave half of the last file, then kill; term: SIGTERM; stop: SIGSTOP
    point: int = 0
    file_bytes: int | None = None  # that a file may have
    memory: int | None = None  # bytes, beyond what the process has at its start

    def limit(self) -> None:
        """Set the limits of this process."""
        if self.file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.file_bytes, self.file_bytes))
        if self.memory is not None:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + self.memory, used + self.memory))


class Change(NamedTuple):
    """A change of a file: the audit event, the path in the folder, and whether the file before it can be torn."""

    event: str
    path: str
    tears: bool


def _at(path: Any, folder: int = -1) -> str:
    """The absolute path of an audited one; empty for an open file."""
    if isinstance(path, int) or path is None:
        return ""
    name = os.fsdecode(path)
    start = os.readlink(f"/proc/self/fd/{folder}") if folder is not None and folder >= 0 else os.getcwd()
    return os.path.normpath(os.path.join(start, name))


CHANGES: dict[str, Callable[..., list[str]]] = {  # audit event -> the paths that it changes
    "open": lambda path, mode, flags: [_at(path)] if flags & WRITES else [],
    "os.rename": lambda old, new, a, b: [_at(old, a), _at(new, b)],
    "os.remove": lambda path, folder: [_at(path, folder)],
    "os.rmdir": lambda path, folder: [_at(path, folder)],
    "os.mkdir": lambda path, mode, folder: [_at(path, folder)],
    "os.link": lambda old, new, a, b: [_at(new, b)],
    "os.symlink": lambda old, new, folder: [_at(new, folder)],
    "os.truncate": lambda path, length: [_at(path)],
    "os.chmod": lambda path, mode, folder: [_at(path, folder)],
    NATIVE: lambda path: [_at(path)],
}


@dataclass
class Watch:
    """The audit hook of a child: numbers changes inside `root`, acts before one, reports to a pipe."""

    root: str
    fault: Fault
    pipe: int
    count: int = 0
    last: str = ""  # the file that was opened for writing last
    own: threading.local = field(default_factory=threading.local)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in CHANGES or getattr(self.own, "busy", False):
            return
        self.own.busy = True
        try:
            for path in [path for path in CHANGES[event](*arguments) if path][-1:]:
                self.changed(event, path)
        finally:
            self.own.busy = False

    def changed(self, event: str, path: str) -> None:
        """A change is about to happen."""
        disk = all(name.startswith(MEMORY) for name in (path, self.root))  # in memory, but files as any
        if path.startswith(f"{self.root}/{SCRATCH}") or path.startswith(("/dev/", "/proc/")) and not disk:
            return
        if event == "os.mkdir" and os.path.isdir(path):
            return
        if not path.startswith(f"{self.root}/"):
            os.write(self.pipe, f"outside\t{event} {path}\n".encode(errors="replace"))
            return
        self.count += 1
        tears = bool(self.last) and _bytes_of(self.last) > 1
        if self.count > MOST:  # a loop that tries again and again
            return
        name = os.path.relpath(path, self.root)
        os.write(self.pipe, f"change\t{event}\t{name}\t{int(tears)}\n".encode(errors="replace"))
        if self.count == self.fault.point:
            self.act(tears)
        if event in ("open", NATIVE):
            self.last = path

    def act(self, tears: bool) -> None:
        """The fault."""
        if self.fault.action == "tear" and tears:
            os.truncate(self.last, os.path.getsize(self.last) // 2)
        names = {"term": signal.SIGTERM, "stop": signal.SIGSTOP}
        os.kill(os.getpid(), names.get(self.fault.action, signal.SIGKILL))
