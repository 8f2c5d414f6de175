"""Forked interpreters: what a command starts as `python -c ...` needs no seconds of imports either.

`start` forks a process that has imported torch and transformers but never headwise, and gives what stands for
`subprocess` in a module that starts this interpreter: its `Popen` asks that process for a fork. The fork ends with the
process that asked for it, as a child that was started does.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def settle(folder: Path, environment: dict[str, str]) -> None:
    """Make this forked process look as if it had just been started in a folder."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    cache = environment.get("HF_MODULES_CACHE")
    for module in list(sys.modules.values()) if cache else ():
        if "HF_MODULES_CACHE" in getattr(module, "__dict__", {}):
            module.HF_MODULES_CACHE = cache


def finish(work: Callable[[], Any]) -> None:
    """Run the work as an interpreter would, and exit."""
    code: Any = 0
    try:
        work()
    except SystemExit as stop:
        code = stop.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _python(request: dict[str, Any], pipes: Sequence[int]) -> None:
    """Run what an interpreter was asked to run; never returns."""
    for number, pipe in enumerate(pipes):
        os.dup2(pipe, number)
        os.close(pipe)
    sys.stdin = os.fdopen(0)
    settle(Path(request["folder"]), request["environment"])
    for name, limit in request["limits"]:
        resource.setrlimit(name, limit)
    sys.argv = ["-c", *request["arguments"]]
    space = {"__name__": "__main__", "__builtins__": __builtins__}
    finish(lambda: exec(compile(request["code"], "-c", "exec"), space))


def _serve(place: str) -> None:
    """Fork an interpreter for every request until the parent is gone; never returns."""
    parent = os.getppid()
    server = socket.socket(socket.AF_UNIX)
    server.bind(place)
    server.listen(64)
    server.settimeout(1.0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while os.getppid() == parent:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        with contextlib.suppress(TimeoutError):
            client, _ = server.accept()
            if os.fork() == 0:
                _answer(client)
            client.close()
    os._exit(0)


def _answer(client: socket.socket) -> None:
    """Run one request in a child, and end it when nobody waits any more; tell its exit code; never returns."""
    first, pipes, _, _ = socket.recv_fds(client, 1 << 16, 3)
    request = json.loads(first + (b"" if first.endswith(b"\n") else client.makefile("rb").readline()))
    alive, held = os.pipe()
    child = os.fork()
    if child == 0:
        client.close()
        _python(request, pipes)
    for pipe in (*pipes, held):
        os.close(pipe)
    if client in select.select([client, alive], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):
        client.sendall(f"{code}\n".encode())
    os._exit(0)


class Interpreter:
    """What `subprocess.Popen` gives for `python -c CODE ARGUMENTS` with three pipes of text."""

    def __init__(self, place: str, command: Sequence[str], env: dict[str, str]) -> None:
        given, printed, told = os.pipe(), os.pipe(), os.pipe()
        limits = [(name, resource.getrlimit(name)) for name in (resource.RLIMIT_FSIZE, resource.RLIMIT_AS)]
        request = {"code": command[2], "arguments": command[3:], "folder": os.getcwd()}
        asked = json.dumps({**request, "environment": env, "limits": limits}).encode() + b"\n"
        self.server = socket.socket(socket.AF_UNIX)
        self.server.connect(place)
        theirs = [given[0], printed[1], told[1]]
        socket.send_fds(self.server, [asked], theirs)
        for pipe in theirs:
            os.close(pipe)
        self.stdin = os.fdopen(given[1], "w")
        self.outputs = {printed[0]: b"", told[0]: b""}
        self.open = set(self.outputs)
        self.returncode: int | None = None

    def communicate(self, given: str = "") -> tuple[str, str]:
        """What it prints on both outputs until it ends."""
        with contextlib.suppress(OSError, ValueError):
            self.stdin.write(given)
        with contextlib.suppress(OSError):
            self.stdin.close()
        while self.open:
            for pipe in select.select(self.open, [], [])[0]:
                part = os.read(pipe, 1 << 16)
                self.outputs[pipe] += part
                if not part:
                    self.open.discard(pipe)
                    os.close(pipe)
        self.poll(None)
        printed, told = (content.decode(errors="replace") for content in self.outputs.values())
        return printed, told

    def poll(self, seconds: float | None = 0) -> int | None:
        """The exit code, if it ended within so many seconds."""
        if self.returncode is None and select.select([self.server], [], [], seconds)[0]:
            self.returncode = int(self.server.recv(64) or -signal.SIGKILL)
        return self.returncode

    def kill(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            self.server.shutdown(socket.SHUT_WR)


def start(place: str) -> Any:
    """Begin to serve at a socket; what stands for `subprocess` in a module that starts interpreters."""
    if os.fork() == 0:
        _serve(place)
    while not os.path.exists(place):
        time.sleep(0.01)

    def popen(command: Sequence[str], *, env: dict[str, str], **_: Any) -> Interpreter:
        return Interpreter(place, command, env)

    return SimpleNamespace(PIPE=subprocess.PIPE, Popen=popen)
