"""A new process without headwise that loads a saved model and answers a stored text."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from headwise.files.disk import UNFINISHED

RELOAD = """
import ctypes, json, os, signal, sys
try:
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # Linux: end with the parent process
except (AttributeError, OSError):
    pass
if os.name == "posix":
    os.kill(int(sys.argv[1]), 0)  # raises where it ended before
import torch, transformers
from safetensors.torch import load_file, save_file
from transformers import activations, masking_utils, modeling_layers, modeling_utils  # models need them: takes seconds
line = sys.stdin.readline()
if not line:
    sys.exit("nothing to load")
folder, proof, out, remote, auto, dtype, device = json.loads(line)
auto = getattr(transformers, auto)
place = {"device_map": {"": device}} if device != "cpu" and torch.cuda.is_available() else {}
if not place:  # one tensor after the other: Python waits forever for a thread that gets no memory to start
    os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
model = auto.from_pretrained(folder, dtype=getattr(torch, dtype), trust_remote_code=remote == "yes", **place).eval()
assert "headwise" not in sys.modules
with torch.no_grad():
    given = {name: tensor.to(model.device) for name, tensor in load_file(proof).items() if name != "logits"}
    found = model(**given)
    coded = [part for part in model.modules() if getattr(part, "coders", None)]
    if coded:
        assert found["logits"].isfinite().all(), "answers are no numbers"
        for part in coded:
            part.coders = None
        found = model(**given)
    save_file({"logits": (found["logits"] if "logits" in found else found[0]).float().cpu().contiguous()}, out)
"""


class Fresh:
    """A new process without headwise that waits for a model to load, and its folder for temporary files."""

    ready: Fresh | None = None  # begun before it was needed: to import its libraries takes seconds

    def __init__(self, place: Path) -> None:
        self.place = place
        self.scratch = tempfile.TemporaryDirectory(dir=place, prefix=f"{UNFINISHED}reload-")
        places = dict.fromkeys(("HF_MODULES_CACHE", "TMPDIR"), self.scratch.name)
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = [sys.executable, "-c", RELOAD, str(os.getpid())]
        environment = {**os.environ, **places, "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(command, env=environment, text=True, **pipes)

    @classmethod
    def of(cls, place: Path) -> Fresh:
        """The process that waits beside the model's folder, or a new one."""
        waiting, cls.ready = cls.ready, None
        if waiting and waiting.place == place and waiting.process.poll() is None:
            return waiting
        return cls(place)

    def __enter__(self) -> Fresh:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()
        self.scratch.cleanup()


def expect_reload(place: Path) -> None:
    """Begin the process that `reload_check` of a model in this folder will need."""
    Fresh.ready = Fresh(place)
