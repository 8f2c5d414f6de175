"""Runs experiments and keeps their results: one JSON file each, written whole or not at all.

    headwise reproduce a4 --size tiny --out FOLDER

An experiment is a module `a*.py`, `b*.py` or `q*.py` in this folder with `CLAIM`, `TITLE`, `run`, `measured` and
`draw`; the last two take what `run` returned. What it is judged by stands in `_claims_a`, `_claims_b` and `_claims_q`.
A `run` that takes `parts` as well is given a dictionary that outlives a kill: what it finds there is done. Parts are
forgotten once the code that the run reaches changes (`_provenance`).
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import math
import platform
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.provenance import commit

from experiments import _claims_a, _claims_b, _claims_q, _provenance
from experiments._judge import RULES_DATE, Claim, Judged, Results
from experiments._provenance import made_by, shown
from headwise.devices import chosen
from headwise.errors import HeadwiseError, OutputError, UnknownNameError
from headwise.types import write_atomically

if TYPE_CHECKING:
    from headwise.progress import Track

__all__ = ["CLAIMS", "RULES_DATE", "made_by", "run", "shown"]  # what `headwise reproduce` takes from here, among others
FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
SIZES = ("tiny", "small", "full")
CLAIMS: dict[str, Claim] = {**_claims_a.CLAIMS, **_claims_b.CLAIMS, **_claims_q.CLAIMS}
PACKAGES = ("torch", "numpy", "scipy", "transformers", "timm", "headwise")
QUIET_SECONDS = 10.0  # between two lines of progress in a log


class Request(NamedTuple):
    """How an experiment is to be run."""

    size: str = "full"
    device: str = "auto"
    assets: Path | None = None  # folder of models and texts
    out: Path | None = None  # None: beside the experiments, for full results only
    overwrite: bool = False
    minutes: float | None = None  # after which no further part is begun
    shared: bool = False  # the machine has other work at the same time, which the result then says

    @property
    def folder(self) -> Path:
        return RESULTS if self.out is None else self.out


def experiments(folder: Path = FOLDER) -> tuple[str, ...]:
    """All experiments in order: claims of the first paper, of the second, open questions."""
    names = [path.stem for path in folder.glob("*.py") if re.fullmatch(r"[abq]\d+_\w+", path.stem)]
    return tuple(sorted(names, key=lambda name: (name[0], int(re.findall(r"\d+", name)[0]), name)))


def load(name: str) -> ModuleType:
    """The module of an experiment."""
    return importlib.import_module(f"experiments.{name}")


def find(text: str) -> str:
    """The experiment called so, by name (`a4_ngram`), short name (`a4`) or claim (`A4`, `Length`)."""
    known = experiments()
    wanted = text.lower()
    called = {alias.lower(): name for name in known for alias in (load_claim(name), name.partition("_")[0], name)}
    if wanted in called:
        return called[wanted]
    near = difflib.get_close_matches(wanted, called, 1)
    hint = f" Did you mean '{called[near[0]]}'?" if near else ""
    raise UnknownNameError(f"no experiment is called '{text}'.{hint} Known: {', '.join(known)}, all.")


def judged(name: str, found: dict[str, Any], results: Results | None = None) -> Judged:
    """What the rule of an experiment makes of a result; some rules look at other results too."""
    return CLAIMS[name].judge(found, {} if results is None else results)


def load_claim(name: str) -> str:
    """The claim that a module tests, read without importing it."""
    found = re.search(r'^CLAIM = "(.+)"$', (FOLDER / f"{name}.py").read_text(), re.MULTILINE)
    return found.group(1) if found else name


class Parts(dict[str, Any]):
    """Finished parts of a long experiment: setting one writes the file. Parts from other conditions are forgotten."""

    def __init__(self, path: Path, conditions: Sequence[str], minutes: float | None = None) -> None:
        super().__init__()
        self.path, self.conditions, self.minutes = path, list(conditions), minutes
        self.seconds, self._start = 0.0, time.perf_counter()  # spent before this attempt
        self.longest = 0.0  # seconds of one part of this attempt
        try:
            old = json.loads(path.read_text())
        except (OSError, ValueError):
            return
        if old.get("conditions") == self.conditions:
            self.update(old["parts"])
            self.seconds = old["seconds"]

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, plain(value))
        state = {"conditions": self.conditions, "seconds": self.spent(), "parts": dict(self)}
        write_atomically(self.path, json.dumps(state) + "\n")

    def spent(self) -> float:
        """Seconds of work, those of attempts that were killed included."""
        return self.seconds + time.perf_counter() - self._start

    def left(self) -> float:
        """Seconds of this attempt that are left."""
        return math.inf if self.minutes is None else 60 * self.minutes - (time.perf_counter() - self._start)

    def finish(self) -> None:
        """The whole is written; parts are no longer needed."""
        self.path.unlink(missing_ok=True)


def plain(value: Any) -> Any:
    """The value as a reader of its JSON will see it."""
    return json.loads(json.dumps(value, default=lambda array: array.tolist()))


def check(name: str, request: Request) -> Path:
    """Where the result will lie; refused before any work is done if it cannot be written there."""
    if request.size not in SIZES:
        raise HeadwiseError(f"no size is called '{request.size}'; give --size {', '.join(SIZES)}.")
    if request.assets is not None and not request.assets.is_dir():
        raise HeadwiseError(f"{request.assets} is no folder; give --assets a folder of models, or leave it out.")
    if request.size != "full" and request.folder.resolve() == RESULTS:
        raise OutputError(f"experiments/results holds full results, this one is {request.size}; give --out FOLDER.")
    path = request.folder / f"{name}.json"
    if path.exists() and not request.overwrite:
        raise OutputError(f"{path} exists; add --overwrite or give another folder with --out.")
    return path


def run(name: str, request: Request, track: Track) -> dict[str, Any]:
    """Run one experiment, write its result and return it."""
    path = check(name, request)
    module, device = load(name), chosen(request.device)
    hardware = machine(device)
    busy = ", shared with other work" if request.shared else ""
    conditions = [request.size, hardware, code := _provenance.digest(name)]
    parts = Parts(path.with_name(f".{name}-{request.size}.parts.json"), conditions, request.minutes)
    resumed, before = bool(parts), gpu_allocations(device)
    _provenance.forget()
    more = {"parts": parts} if "parts" in inspect.signature(module.run).parameters else {}
    found = plain(module.run(request.size, device, request.assets, track, **more))
    result = {
        "claim": module.CLAIM,
        "name": name,
        "size": request.size,
        "command": command(name, request),
        "arguments": request._replace(assets=None, out=None)._asdict(),
        "commit": commit(),
        "code": code,
        "inputs": _provenance.inputs(),
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": (hardware if resumed or gpu_allocations(device) > before else machine("cpu")) + busy,
        "versions": versions(),
        "seconds": round(parts.spent(), 1),
        "found": found,
    }
    write_atomically(path, json.dumps(result, indent=1) + "\n")
    if not found.get("left_out"):  # otherwise the same command resumes with --overwrite and more minutes
        parts.finish()
    return result


def command(name: str, request: Request) -> str:
    """What to type for the same result; folders of one's own stay out of it."""
    assets = "" if request.assets is None else " --assets ASSETS"
    return f"headwise reproduce {name} --size {request.size} --device {request.device}{assets}"


def machine(device: str) -> str:
    """The hardware in words."""
    import torch

    from headwise.checks import speed

    return speed.machine(torch.device(device))


def gpu_allocations(device: str) -> int:
    """Allocations so far: an experiment that makes none ran on the CPU, whatever device it was offered."""
    import torch

    return 0 if device == "cpu" else int(torch.cuda.memory_stats().get("allocation.all.allocated", 0))


def versions() -> dict[str, str]:
    """Of Python and of every package that matters, where installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


@contextmanager
def progress() -> Iterator[Track]:
    """Progress on standard error: bars on a terminal, a line now and then in a log."""
    if not sys.stderr.isatty():
        yield _lines
        return
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn

    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=Console(stderr=True)) as bars:
        yield lambda items, label: bars.track(items, description=label)


def _lines(items: Sequence[Any], label: str) -> Iterable[Any]:
    start = said = time.perf_counter()
    for index, item in enumerate(items):
        yield item
        now = time.perf_counter()
        if now - said > QUIET_SECONDS:
            said = now
            print(f"{label}: {index + 1} of {len(items)} after {now - start:.0f} s", file=sys.stderr, flush=True)


def summary(result: dict[str, Any]) -> str:
    """What was found, in a few lines."""
    module, found = load(result["name"]), result["found"]
    by_rule = judged(result["name"], found)
    return f"{module.CLAIM}: {module.TITLE}\n{module.measured(found)}\n{by_rule.number}\nverdict: {by_rule.told}"
