"""Commands in forked processes: imports are paid once, and faults are set before each command.

`prepare` imports everything in a process without threads; then `Command` forks children that behave as `headwise` does.
There an audit hook sees every change of a file (the compiled writers of safetensors and tokenizers are announced to
it), numbers those inside the folder, can end or stop the process before one of them, and reports changes elsewhere.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import interpreters
from interpreters import finish, settle
from watched import NATIVE, SCRATCH, Change, Fault, Watch

patience = 1.0  # by which every limit of time is multiplied: more where other work shares the machine
SOURCES = Path(__file__).resolve().parents[1] / "src"  # the tree that is tested is the one that this file lies in


class Outcome(NamedTuple):
    """How a command ended."""

    code: int  # of exit; negative: the signal that ended it
    text: str  # everything that it printed
    seconds: float
    changes: tuple[Change, ...]
    outside: tuple[str, ...]  # changes outside the folder
    hung: bool

    @property
    def traced(self) -> bool:
        """Whether a traceback was printed."""
        return "Traceback (most recent call last)" in self.text

    @property
    def last_line(self) -> str:
        """The last line that was printed."""
        return ([line for line in self.text.splitlines() if line.strip()] or [""])[-1].strip()


_watch: Watch | None = None


def _announced(write: Callable[..., Any], path_of: Callable[..., str]) -> Callable[..., Any]:
    """A compiled writer that tells the hook what it is about to write."""

    def announced(*arguments: Any, **named: Any) -> Any:
        if _watch is not None:
            _watch(NATIVE, (path_of(*arguments, **named),))
        return write(*arguments, **named)

    return announced


def _announce_writers() -> None:
    import safetensors.numpy
    import safetensors.torch
    from transformers import PreTrainedTokenizerFast as Fast

    for module in (safetensors.torch, safetensors.numpy):
        module.serialize_file = _announced(module.serialize_file, lambda tensors, path, *_, **__: path)
    place = lambda self, save_directory, *_, **__: os.path.join(save_directory, "tokenizer.json")  # noqa: E731
    owner = next(kind for kind in Fast.__mro__ if "_save_pretrained" in vars(kind))
    owner._save_pretrained = _announced(owner._save_pretrained, place)


class Command:
    """A running `headwise` in a process of its own; its paths are relative to `folder`."""

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        fault: Fault = Fault(),  # noqa: B008  # immutable
        modules: bool = False,
    ) -> None:
        self.start, self.text, self.notes, self.hung = time.monotonic(), b"", b"", False
        printed, noted = os.pipe(), os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._become(arguments, folder.resolve(), fault, printed[1], noted[1], modules)
        os.close(printed[1])
        os.close(noted[1])
        self.pipes = {printed[0]: "text", noted[0]: "notes"}
        for pipe in self.pipes:
            os.set_blocking(pipe, False)

    @staticmethod
    def _become(arguments: Sequence[str], folder: Path, fault: Fault, printed: int, noted: int, modules: bool) -> None:
        """The child: never returns."""
        global _watch
        try:
            os.setpgid(0, 0)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(printed, 1)
            os.dup2(printed, 2)
            settle(folder, {**os.environ, "TMPDIR": str(folder / SCRATCH)})
            fault.limit()
            sys.argv = ["headwise", *arguments]
            _watch = Watch(str(folder), fault, noted)
            sys.addaudithook(_watch)
            from headwise.cli.commands import main
        except BaseException:
            traceback.print_exc()
            os._exit(70)

        def work() -> None:
            try:
                main()
            finally:
                if modules:
                    os.write(noted, ("modules\t" + " ".join(sys.modules) + "\n").encode())

        finish(work)

    def wait(self, seconds: float = 60, strike: float | None = None, blow: int = signal.SIGKILL) -> Outcome:
        """Until it ends, or for so long; `strike` seconds from its start it is sent the signal `blow`."""
        watched, longest = _watched(self.pid)
        seconds *= patience
        poll = select.poll()
        for number in (*watched, *self.pipes):
            poll.register(number, select.POLLIN)
        ended = False
        while not ended:
            now = time.monotonic() - self.start
            if strike is not None and now >= strike:
                os.kill(self.pid, blow)
                strike = None
            if now >= seconds:
                self.hung = True
                os.killpg(self.pid, signal.SIGKILL)
                break
            until = min(seconds, strike if strike is not None else seconds)
            ready = poll.poll(max(1, min(longest, until - now) * 1000))
            ended = any(number in watched for number, _ in ready) or (not watched and _ended(self.pid))
            for number, _ in ready:
                if number in self.pipes and not self._read(number):
                    poll.unregister(number)
        for number in watched:
            os.close(number)
        return self._outcome(os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]))

    def stopped(self, seconds: float = 60) -> bool:
        """Whether it stops itself within so long; False: it ended."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                return bool(found.si_code == os.CLD_STOPPED)
            for number in self.pipes:
                self._read(number)
            time.sleep(0.005)
        return False

    def resume(self) -> None:
        """Let a stopped process run again."""
        os.kill(self.pid, signal.SIGCONT)

    def _read(self, number: int) -> bool:
        """Take what a pipe holds; False when it is closed."""
        try:
            while found := os.read(number, 1 << 16):
                setattr(self, self.pipes[number], getattr(self, self.pipes[number]) + found)
        except BlockingIOError:
            return True
        return False

    def _outcome(self, code: int) -> Outcome:
        for number in self.pipes:
            self._read(number)
            os.close(number)
        lines = [line.split("\t") for line in self.notes.decode(errors="replace").splitlines()]
        changes = tuple(Change(e, p, t == "1") for kind, e, p, t in (x for x in lines if len(x) == 4) if kind)
        self.modules = next((x[1].split() for x in lines if x[0] == "modules"), [])
        outside = tuple(x[1] for x in lines if x[0] == "outside")
        text = self.text.decode(errors="replace")
        return Outcome(code, text, time.monotonic() - self.start, changes, outside, self.hung)


def _watched(pid: int) -> tuple[list[int], float]:
    """What becomes readable when a process ends, and how long to wait for it; systems without it are asked often."""
    try:
        return [os.pidfd_open(pid)], float("inf")
    except OSError:
        return [], 0.01


def _ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def call(arguments: Sequence[str], folder: Path, seconds: float = 60, fault: Fault = Fault()) -> Outcome:  # noqa: B008
    """Run a command to its end."""
    return Command(arguments, folder, fault).wait(seconds)


def apart(work: Callable[..., Any], *arguments: Any) -> None:
    """Call a function in a process of its own, so that nothing it starts stays here."""
    pid = os.fork()
    if pid == 0:
        for number in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        finish(lambda: work(*arguments))
    if os.waitpid(pid, 0)[1]:
        raise SystemExit(f"{work.__module__}.{work.__name__} failed; call it by itself to see why.")


def prepare(place: Path) -> None:
    """Import everything once; must come before any of it was imported. `place` holds the socket of interpreters."""
    os.environ.update(
        OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", HF_HOME=str(place / "hub"),
        PYTHONDONTWRITEBYTECODE="1", MPLCONFIGDIR=str(place / "plots"), NO_COLOR="1", COLUMNS="200",
        CUDA_VISIBLE_DEVICES="", HEADWISE_CACHE="out",
    )  # fmt: skip
    if "headwise" in sys.modules:
        raise SystemExit("headwise was imported too early; interpreters that commands start must not have it.")
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(SOURCES))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SOURCES), os.environ.get("PYTHONPATH"))))
    for name in ("torch", "transformers", "safetensors.torch", "safetensors.numpy", "transformers.modeling_utils"):
        importlib.import_module(name)
    for name in ("transformers.models.llama.modeling_llama", "transformers.generation.utils"):
        importlib.import_module(name)
    with contextlib.suppress(ImportError):  # which lists the fonts of the machine once
        importlib.import_module("matplotlib.font_manager")
    processes = interpreters.start(str(place / "python"))
    _announce_writers()
    importlib.import_module("headwise.cli.commands")
    importlib.import_module("headwise.checks._fresh").subprocess = processes  # type: ignore[attr-defined]
    gc.freeze()  # what is shared by all children is not looked at again by any


def warm(command: Command) -> Outcome:
    """Let a command end and import what it had to import, so that later ones find it."""
    done = command.wait(300)
    import_all(command.modules)
    return done


def import_all(names: Iterable[str]) -> None:
    """Import modules, so that no child has to."""
    for name in names:
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        print("an import started threads: forked processes may hang; set OPENBLAS_NUM_THREADS=1.", flush=True)
    gc.freeze()


def typed(arguments: Sequence[str]) -> str:
    """A command as a person would type it."""
    return f"headwise {shlex.join(arguments)}"
