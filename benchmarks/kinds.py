"""One small model of every kind that Headwise writes: what all benchmarks of serving begin with. Needs no network.

A kind is a way of cutting: rows of the cache per head, rows that heads share, rows in few bits, parameters, and a
model that stock transformers loads. Little text is read: what is asked is what an engine makes of a model, not how good
the cut is. Models are made once by every version of the package: a folder that another version made is made anew.

    python benchmarks/kinds.py FOLDER embedded shared/models/stories15M
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

from headwise import api, cuts, families, runtime
from headwise.errors import HeadwiseError
from headwise.files.disk import write_atomically
from headwise.runs.settings import Settings
from headwise.stages.in_memory import InMemory, load_source

HALF: dict[str, Any] = {"budgets": ("kv=50%",), "allow": ("qk", "v")}
KINDS: dict[str, dict[str, Any]] = {  # settings of each kind
    "per-head": {**HALF, "pool": "none"},
    "pooled": {**HALF, "pool": "all"},
    "coded": {"budgets": ("kv=25%",)},
    "parameters": {"budgets": ("params=80%",), "allow": ("qk", "v", "mlp", "heads", "kv_heads", "depth")},
    "portable": {**HALF, "portable": True},
}
SERVED: dict[str, dict[str, Any]] = {  # the same with the sizes that vLLM takes without filling up
    "per-head, --serve vllm": {**KINDS["per-head"], "serve": "vllm"},
    "pooled, --serve vllm": {**KINDS["pooled"], "serve": "vllm"},
    "portable, --serve vllm": {**KINDS["portable"], "serve": "vllm"},
}
LEAST = {"stories15M": "kv=67%"}  # of heads that vLLM takes: those of this model have 48 numbers, its smallest 32
EVERY = {**KINDS, **SERVED}
TEXTS = {"embedded": "stdlib"}  # what models read; all others read what they wrote themselves
SMALL: dict[str, Any] = {"tokens": 8_192, "eval_tokens": 4_096, "swap_tokens": 0, "length": 256, "device": "cpu"}
PLANNED = ("allow", "portable", "serve")  # settings that allocation is told again
MAKE_NONE = ("cli", "engines", "exports", "report", "runtime")  # rooms that change no weight of a model
STAMP = "made-by"  # in a run folder: the code that made it


def code() -> str:
    """What names the files that models are made by; engines, exports and the code beside a model make none."""

    def ask(*words: str) -> str:
        told = ["git", "-C", str(Path(__file__).parents[1]), *words]
        return subprocess.run(told, stdout=-1, stderr=-3, text=True, check=False).stdout

    if given := os.environ.get("HEADWISE_COMMIT"):
        return given
    lines = ask("ls-tree", "-r", "HEAD", "src/headwise") + ask("diff", "HEAD", "--stat", "src/headwise")
    kept = [line for line in lines.splitlines() if not any(f"headwise/{room}/" in line for room in MAKE_NONE)]
    return sha256("\n".join(kept).encode()).hexdigest()[:16]


def settings(model: str, kind: str) -> dict[str, Any]:
    """What a kind of a model is made with: half of the cache where that is within reach."""
    apart = kind in SERVED and "pooled" not in kind
    more = {"budgets": (LEAST[Path(model).name],)} if apart and Path(model).name in LEAST else {}
    return {**EVERY[kind], **more}


def budget(model: str, kind: str) -> str:
    """The budget of a kind in words; none of the source."""
    return "" if kind == "source" else ", ".join(settings(model, kind)["budgets"])


def source(model: str) -> Path:
    """The folder of a source model."""
    return Path(families.locate(model)[0])


def texts(model: str) -> InMemory:
    """A source model with the rows that its cut models are fitted to, and rows that none of them has seen."""
    return load_source(Settings(model=model, data=TEXTS.get(model, "self"), **SMALL))


def made(model: str, kind: str, work: Path, balanced: bool = True) -> Path:
    """The folder of a model of a kind, in the run folder that made it; 'source' is the source itself.

    `balanced=False`: without the step of saving that gives weights about the same size.
    """
    if kind == "source":
        return source(model)
    name = "".join(letter if letter.isalnum() else "-" for letter in f"{Path(model).name}-{kind}")
    folder = work / (name if balanced else f"{name}-plain")
    stamp = folder / STAMP
    if not stamp.exists() or stamp.read_text() != code():
        shutil.rmtree(folder, ignore_errors=True)
        _make(
            model,
            settings(model, kind),
            folder,
            nullcontext() if balanced else patch.object(cuts._save, "balance", list),
        )
        write_atomically(stamp, code())
    for path in (folder / "model").glob("*_headwise.py"):  # the code beside it is this version's
        shutil.copyfile(Path(runtime.__file__).with_name(path.name), path)
    return folder / "model"


def _make(model: str, settings: dict[str, Any], folder: Path, saving: AbstractContextManager[Any]) -> None:
    budget, asked = settings["budgets"], {name: value for name, value in settings.items() if name != "budgets"}
    text = TEXTS.get(model, "self")
    api.probe(model, folder, budget=budget, data=text, progress=False, **SMALL, **asked)
    api.allocate(folder, budget, **{name: value for name, value in asked.items() if name in PLANNED})
    with families.quietly(), saving:
        api.reshape(folder, heal="refit", progress=False)


def when(rows: list[dict[str, Any]], whole: dict[str, Any] | None = None) -> str:
    """On which days and at which commits the rows of a result were measured: one of each, if all is well.

    Of older results the file as a whole names both.
    """
    days, commits = (
        list(dict.fromkeys(row[name] if name in row else (whole or {})[name] for row in rows))
        for name in ("date", "commit")
    )
    return f"{', '.join(days)}, commit{'s' if commits[1:] else ''} {', '.join(commits)}"


def print_page(page: Path, name: str, script: str, lines: list[str]) -> None:
    """Put the lines that a result prints between a page's marker comments."""
    begin, end = f"<!-- {name}: printed by benchmarks/{script} -->", f"<!-- end of {name} -->"
    head, rest = page.read_text().split(begin)
    write_atomically(page, "\n".join([head + begin, "", *lines, "", end]) + rest.split(end)[1])


if __name__ == "__main__":
    for a_model in sys.argv[2:]:
        for a_kind in EVERY:
            try:
                print(made(a_model, a_kind, Path(sys.argv[1])), flush=True)
            except HeadwiseError as error:
                print(f"{a_model}, {a_kind}: {error}", flush=True)
