"""Runs code in a process of its own without waiting for imports: forked from one that has torch and transformers.

Every finished run loads its model again in a new process, without headwise. Importing torch and transformers takes most
of that time, and a suite has dozens of runs. So one process imports them once, never imports headwise, and forks for
every request. Tests that are about new processes as such start real ones.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

REAL = subprocess.Popen
SERVER = """
import io, json, os, sys, tempfile, traceback
import torch, transformers
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel, dynamic_module_utils
from transformers.utils import hub

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def child(asked, out, err):
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    sys.argv, tempfile.tempdir = ["-c", *asked["arguments"]], None
    hub.HF_MODULES_CACHE = dynamic_module_utils.HF_MODULES_CACHE = asked["env"]["HF_MODULES_CACHE"]
    sys.stdin, code = io.StringIO(asked["input"]), 0
    try:
        exec(compile(asked["code"], "<string>", "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


for line in sys.stdin:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if not (pid := os.fork()):
            child(json.loads(line), out.fileno(), err.fileno())
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said = [(file.seek(0), file.read().decode(errors="replace"))[1] for file in (out, err)]
    print(json.dumps([status, *said]), file=answers, flush=True)
"""


class Forking:
    """`subprocess` as `headwise.checks._fresh` uses it."""

    def __init__(self) -> None:
        self.server: subprocess.Popen[str] | None = None

    PIPE = subprocess.PIPE

    def Popen(self, command: list[str], *, env: dict[str, str], **more: Any) -> Any:
        """What `subprocess.Popen` gives for `python -c CODE ARGUMENTS`; a test may have replaced that."""
        if subprocess.Popen is not REAL or sys.platform != "linux":
            return subprocess.Popen(command, env=env, **more)
        return _Request(self, {"code": command[2], "arguments": command[3:], "env": env, "cwd": os.getcwd()})

    def answer(self, asked: dict[str, Any]) -> tuple[int, str, str]:
        """Exit code, output and errors of a request."""
        if self.server is None:
            lasting = {**os.environ, "HF_HUB_OFFLINE": "1"}  # `env` names a temporary folder that goes with the request
            self.server = subprocess.Popen(
                [sys.executable, "-c", SERVER], env=lasting, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            atexit.register(self.server.kill)
        assert self.server.stdin and self.server.stdout
        print(json.dumps(asked), file=self.server.stdin, flush=True)
        code, out, err = json.loads(self.server.stdout.readline())
        return code, out, err


class _Request:
    """A process that runs once it is given its input."""

    def __init__(self, forking: Forking, asked: dict[str, Any]) -> None:
        self.forking, self.asked = forking, asked
        self.returncode: int | None = None

    def communicate(self, given: str | None = None) -> tuple[str, str]:
        """Output and errors; nothing where it ran before or was killed."""
        if self.returncode is not None:
            return "", ""
        self.returncode, out, err = self.forking.answer({**self.asked, "input": given or ""})
        return out, err

    def poll(self) -> int | None:
        """The exit code, if it ended."""
        return self.returncode

    def kill(self) -> None:
        """It will not run any more."""
        self.returncode = -9 if self.returncode is None else self.returncode


def failing(errors: str) -> Any:
    """What may stand for `subprocess.Popen`: processes that print something and fail."""
    return lambda *given, **more: SimpleNamespace(
        returncode=1, communicate=lambda text=None: ("", errors), poll=lambda: 1, kill=lambda: None
    )
