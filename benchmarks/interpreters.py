"""Forked interpreters: what a command starts as `python -c ...` needs no seconds of imports either.

`start` forks a process that has imported torch and transformers but never headwise. From then on `subprocess.run` asks
it for a fork wherever a command would start this interpreter and read what it prints; other commands run as ever.
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
from typing import Any

FLAGS = {"-I", "-E", "-s", "-B", "-u", "-P", "-S"}  # of an interpreter that may be forked instead of started


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
    arguments = request["arguments"]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, pipe in zip((1, 2), pipes, strict=True):
        os.dup2(pipe, number)
        os.close(pipe)
    settle(Path(request["folder"]), request["environment"])
    for name, limit in request["limits"]:
        resource.setrlimit(name, limit)
    if arguments[0] == "-c":
        code, sys.argv = arguments[1], ["-c", *arguments[2:]]
    else:
        code, sys.argv = Path(arguments[0]).read_text(), arguments
    space = {"__name__": "__main__", "__builtins__": __builtins__}
    finish(lambda: exec(compile(code, sys.argv[0], "exec"), space))


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
    """Run one request in a child and tell its exit code; never returns."""
    first, pipes, _, _ = socket.recv_fds(client, 1 << 16, 2)
    request = json.loads(first + (b"" if first.endswith(b"\n") else client.makefile("rb").readline()))
    child = os.fork()
    if child == 0:
        client.close()
        _python(request, pipes)
    for pipe in pipes:
        os.close(pipe)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):
        client.sendall(f"{code}\n".encode())
    os._exit(0)


def _asked(place: str, request: dict[str, Any], timeout: float | None) -> tuple[int, list[bytes]]:
    """The exit code of an interpreter and what it printed on both outputs."""
    out, error = os.pipe(), os.pipe()
    found = {out[0]: b"", error[0]: b""}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(place)
        socket.send_fds(server, [json.dumps(request).encode() + b"\n"], [out[1], error[1]])
        for pipe in (out[1], error[1]):
            os.close(pipe)
        left = set(found)
        while left:
            ready = select.select(left, [], [], timeout)[0]
            if not ready:
                raise TimeoutError
            for pipe in ready:
                part = os.read(pipe, 1 << 16)
                found[pipe] += part
                left -= set() if part else {pipe}
        code = int(server.makefile().readline() or -signal.SIGKILL)
    for pipe in found:
        os.close(pipe)
    return code, list(found.values())


def _forking(place: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """`subprocess.run` that forks interpreters where it can."""
    known = {"env", "capture_output", "text", "check", "cwd", "timeout", "stdin"}
    inherited = (resource.RLIMIT_FSIZE, resource.RLIMIT_AS)

    def run(command: Any, **named: Any) -> Any:
        rest = list(map(str, command[1:])) if isinstance(command, (list, tuple)) else []
        while rest and rest[0] in FLAGS:
            rest.pop(0)
        ours = rest and str(command[0]) == sys.executable and (rest[0] == "-c" or not rest[0].startswith("-"))
        if not ours or not named.get("capture_output") or set(named) - known:
            return real(command, **named)
        request = {
            "arguments": rest,
            "folder": str(named.get("cwd") or os.getcwd()),
            "environment": dict(named.get("env") or os.environ),
            "limits": [(name, resource.getrlimit(name)) for name in inherited],
        }
        try:
            code, found = _asked(place, request, named.get("timeout"))
        except TimeoutError:
            raise subprocess.TimeoutExpired(command, named["timeout"]) from None
        said = [part.decode(errors="replace") for part in found] if named.get("text") else found
        done = subprocess.CompletedProcess(command, code, *said)
        if named.get("check"):
            done.check_returncode()
        return done

    return run


def start(place: str) -> None:
    """Begin to serve at a socket, and let `subprocess.run` ask there."""
    if os.fork() == 0:
        _serve(place)
    while not os.path.exists(place):
        time.sleep(0.01)
    subprocess.run = _forking(place, subprocess.run)  # type: ignore[assignment]
