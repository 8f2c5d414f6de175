"""Mutated inputs: every kind of file that Headwise reads, damaged in seeded ways, and a command that reads it.

Some are command lines with one odd value (arguments.py).

The command may succeed or refuse the file in one line (exit code 0, 2 or 3). Anything else is a problem:

traceback  a traceback was printed
hang       it took longer than 30 seconds
outside    it changed something outside the run folder
crash      another exit code, or a signal
"""

from __future__ import annotations

import fnmatch
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import arguments
import tiny_inputs
from crashes import LIMIT, Lab
from folders import OUT, SOURCE, TEXT
from forks import apart, call, typed
from mutations import PLACES, kind_of, mutations, put
from scenarios import ALLOCATE, GGUF, ONNX, PROBE, REPORT, RUN, SEARCH, TRAIN, VALUES, VERIFY
from watched import SCRATCH, Fault

NO_FAULT = Fault()
UNFINISHED, WHOLE = ".headwise-tmp-", ".headwise-new-"  # see headwise/files/disk.py
LONGEST = 30.0  # seconds
PLACED = 0.04  # share of cases in which something else stands where the file was
MEMORY = 6 * 2**30  # beyond what a command has at its start: a mutated size must not take the machine down
FEW = ["--tokens", "32", "--swap-tokens", "0", "--length", "16", "--device", "cpu", "--out", OUT]
TIMED = "decode,16,b1"
OURS = (OUT, f".{OUT}", f"{UNFINISHED}{OUT}", f"{WHOLE}{OUT}")  # where a command may write
RANDOM = re.compile(r"(^|/)\.[^/]+\.[a-z0-9_]{8}(/|$)")  # names that tempfile makes
SAID = 0.1  # share of cases that are command lines
SHOWN = ("readings.json", "plan.json", "verdict.json")


@dataclass(frozen=True)
class Target:
    """A file of a base folder, and a command that reads it."""

    base: str
    file: str
    command: tuple[str, ...]

    @property
    def row(self) -> str:
        """What it is counted under."""
        if (name := self.base.rpartition(" ")[0]) in BROKEN:
            return f"{name}: any file"
        return f"{self.base}: {self.file.removeprefix(f'{OUT}/')}"


def _probe(model: str, data: str) -> list[str]:
    return ["probe", model, "--budget", "params=97%", "--data", data, *FEW]


READERS: dict[str, list[list[str]]] = {  # file of a finished run -> commands that read it
    "run.json": [REPORT, ALLOCATE, VERIFY, RUN],
    "readings.json": [ALLOCATE, REPORT],
    "plan.json": [REPORT, ["reshape", OUT]],
    "heal.json": [REPORT, VERIFY],
    "verdict.json": [REPORT],
    "frontier.json": [REPORT],
    "moments.safetensors": [["reshape", OUT]],
    "proof.safetensors": [VERIFY],
    "model/*": [VERIFY],
    "latency-*": [["allocate", OUT, "--budget", f"latency=95%@{TIMED}"], REPORT],
    "*.json": [REPORT, RUN],
}
EXPORTED = {  # file of a run whose model other engines can compute -> commands
    "model/*": [
        [*GGUF, "--out", f"{OUT}/new.gguf"],
        [*ONNX, "--out", f"{OUT}/new.onnx"],
        [*VERIFY, "--engine", "vllm"],
    ],
    "model.gguf": [["probe", f"{OUT}/model.gguf", "--budget", "params=97%", "--data", TEXT, *FEW[:-1], f"{OUT}/probe"]],
}
TIMING = ["probe", SOURCE, "--latency", TIMED, *PROBE[2:]]
FOLDERS: dict[str, tuple[tuple[list[str], ...], dict[str, list[list[str]]]]] = {  # base -> how it is made, readers
    "finished": ((RUN,), READERS),
    "timed": ((TIMING,), {name: READERS[name] for name in ("latency-*",)}),
    "exported": ((VALUES, GGUF) if find_spec("gguf") else (VALUES,), EXPORTED),
    "searched": ((SEARCH,) if find_spec("optuna") else (), {"journal.log": [SEARCH], "pareto.json": [SEARCH]}),
    "kernels": ((), {"kernels.json": [["kernels"], ["kernels", "--json"]]}),
}
KERNELS = {"version": 2, "rows": {f"decode {n} cpu": {"path": "sdpa", "ms": {"sdpa": 0.5, "own": 0.7}} for n in (1, 2)}}
INPUTS = {  # base -> model, data, files that are damaged
    "model": (SOURCE, TEXT, f"{SOURCE}/*"),
    "shards": ("shards", TEXT, "shards/*"),
    "GGUF": ("gguf/model.gguf", TEXT, "gguf/*"),
    "images": (SOURCE, "images.npz", "*"),
    "speech": (SOURCE, "wavs", "*"),
    **{f"text {n}": (SOURCE, f"texts/{n}", f"texts/{n}") for n in ("plain.txt", "lines.jsonl")},
    **{f"text {n}": (SOURCE, f"texts/{n}", f"texts/{n}") for n in ("packed.txt.xz", "packed.txt.gz", "packed.txt.bz2")},
}
ALSO = {  # base -> more commands that read its files
    "model": [
        TRAIN,
        ["design", "--like", SOURCE, "--budget", "params=90%", "--device", "cpu", "--out", OUT],
        ["export", SOURCE, "--to", "gguf", "--out", f"{OUT}.gguf"],
    ],
}
BROKEN = {  # base -> a command that is killed on the way, and resumed on a damaged file
    "unfinished run": RUN,
    "unfinished rounds": [*RUN, "--allow", "qk,v", "--rounds", "2"],
    "unfinished blockwise": [*RUN, "--heal", "blockwise", "--heal-option", "steps=2"],
    "unfinished distillation": [*RUN, "--heal", "distill", "--heal-option", "tokens=256"],
    "unfinished stream": [*RUN, "--stream"],
    "unfinished training": TRAIN,
}
SHARES = (0.45, 0.65, 0.85)  # of the changes of files after which a command is killed


def _plain_run(inputs: Path, base: Path, step: list[str], fault: Fault = NO_FAULT) -> int:
    """A run folder; how many changes of files it took."""
    shutil.copytree(inputs, base)
    (base / SCRATCH).mkdir(exist_ok=True)
    done = call(step, base, LIMIT, fault=fault)
    if done.code not in (0, 3) and not fault.point:
        raise SystemExit(f"{typed(step)} fails without a fault:\n{done.text}")
    return len(done.changes)


def _folder(lab: Lab, base: Path) -> None:
    """The folder of finished commands, or of measured kernels."""
    shutil.copytree(lab.after(FOLDERS[base.name][0]), base)
    if base.name == "kernels":
        (base / OUT).mkdir()
        (base / OUT / "kernels.json").write_text(json.dumps(KERNELS))


def _killed(inputs: Path, folder: Path, name: str, step: list[str]) -> None:
    """The folders of a command that was killed on the way."""
    count = _plain_run(inputs, folder / f"{name}, whole", step)
    for share in SHARES:
        _plain_run(inputs, folder / f"{name} {share:.0%}", step, Fault("kill", max(1, int(count * share))))


def _input(inputs: Path, base: Path) -> None:
    """A folder with inputs of one kind beside the model and text of scenarios."""
    if base.name in ("images", "speech"):
        base.mkdir(parents=True)
        return {"images": tiny_inputs.vision, "speech": tiny_inputs.speech}[base.name](base)
    shutil.copytree(inputs, base)
    if base.name == "shards":
        tiny_inputs.model(base / "shards", True)
    elif base.name == "GGUF":
        (base / "gguf").mkdir()
        tiny_inputs.gguf_model(base / "gguf" / "model.gguf")
    elif base.name.startswith("text "):
        tiny_inputs.texts(base / "texts")
    return None


def _sound(inputs: Path, base: Path) -> None:
    """Inputs of one kind that a command accepts: what is refused undamaged shows nothing when it is damaged."""
    apart(_input, inputs, base)
    model, data, _ = INPUTS[base.name]
    control = base.with_name(f"{base.name}, control")
    shutil.copytree(base, control)
    (control / SCRATCH).mkdir(exist_ok=True)
    done = call(_probe(model, data), control, LIMIT)
    if done.code not in (0, 3):
        raise SystemExit(f"{typed(_probe(model, data))} fails without a fault:\n{done.text}")
    shutil.rmtree(control)


BASES = (*INPUTS, *FOLDERS, *BROKEN)


def makers(lab: Lab, folder: Path, chosen: Sequence[str]) -> list[Callable[[], Any]]:
    """What makes the folders that inputs are damaged in."""
    inputs = lab.inputs
    found: dict[str, Callable[[], Any]] = {base: partial(_sound, inputs, folder / base) for base in INPUTS}
    found |= {base: partial(_folder, lab, folder / base) for base in FOLDERS}
    found |= {name: partial(_killed, inputs, folder, name, step) for name, step in BROKEN.items()}
    return [found[name] for name in chosen if name != "GGUF" or find_spec("gguf")]


def _files(base: Path, pattern: str) -> list[str]:
    """Files whose damage can matter, in an order that is always the same; temporary ones have random names."""
    names = sorted(str(path.relative_to(base)) for path in base.rglob("*") if path.is_file())
    known = [name for name in names if name != TEXT and not name.startswith(SCRATCH) and not RANDOM.search(name)]
    return [name for name in known if fnmatch.fnmatch(name, pattern)]


def _readers(base: str, name: str) -> list[list[str]]:
    """Commands that read a file of a folder."""
    found = next((commands for pattern, commands in FOLDERS[base][1].items() if fnmatch.fnmatch(name, pattern)), [])
    return [*found, ["show", f"{OUT}/{name}"]] if found and name in SHOWN else found


def targets(folder: Path) -> list[tuple[float, list[Target]]]:
    """What can be damaged, in groups with their weights: more cases where a command is quick."""
    groups: list[tuple[float, list[Target]]] = []
    for base, (model, data, pattern) in INPUTS.items():
        files, weight = _files(folder / base, pattern), 2.0 if base.startswith("text ") else 3.0
        commands = [_probe(model, data), *ALSO.get(base, [])]
        groups.append((weight, [Target(base, file, tuple(command)) for file in files for command in commands]))
    for base in FOLDERS:
        for file in _files(folder / base, f"{OUT}/*"):
            name = file.removeprefix(f"{OUT}/")
            weight = 5.0 if base == "finished" and name.endswith(".json") and "/" not in name else 1.0
            groups.append((weight, [Target(base, file, tuple(command)) for command in _readers(base, name)]))
    for name, step in BROKEN.items():
        bases = [f"{name} {share:.0%}" for share in SHARES]
        groups.append((1.0, [Target(b, file, tuple(step)) for b in bases for file in _files(folder / b, f"{OUT}/*")]))
    return [(weight, group) for weight, group in groups if group]


def cases(folder: Path, seed: int, count: int) -> Iterator[dict[str, Any]]:
    """So many damaged inputs, all drawn: group, file and command, and damage."""
    draw, groups = random.Random(seed), targets(folder)
    said = round(SAID * count) if (folder / "exported").exists() else 0
    for number, (command, how) in zip(range(said), arguments.cases(random.Random(f"{seed} arguments")), strict=False):
        row = f"{arguments.ROW}: {command[0]}"
        asked = {"id": f"said/{number}", "kind": "damage", "base": "exported", "command": command, "row": row}
        yield {**asked, "file": "", "how": how}
    for number, (_, group) in enumerate(draw.choices(groups, [weight for weight, _ in groups], k=count - said)):
        target = draw.choice(group)
        yield {
            "id": f"damage/{number}",
            "kind": "damage",
            "seed": draw.randrange(2**31),
            "base": target.base,
            "file": target.file,
            "command": list(target.command),
            "row": target.row,
        }


def damaged(path: Path, seed: int) -> str:
    """Damage a file; how, in words."""
    draw = random.Random(seed)
    if draw.random() < PLACED:
        place = draw.choice(PLACES)
        put(path, place)
        return f"{place} in its place"
    content = path.read_bytes()
    if path.suffix == ".jsonl" and content and draw.random() < 0.6:
        lines = content.splitlines(keepends=True)
        at = draw.randrange(len(lines))
        how, lines[at] = next(mutations(seed, "json", lines[at], 1))
        path.write_bytes(b"".join([*lines[:at], lines[at] + b"\n", *lines[at + 1 :]]))
        return f"line {at + 1}: {how}"
    how, content = next(mutations(seed, kind_of(path), content, 1))
    path.write_bytes(content)
    return how


def run_case(lab: Lab, folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Damage one file and run one command."""
    case = lab.fresh(folder / asked["base"], asked["id"].replace("/", "-"))
    if not (case / asked["file"]).exists():  # drawn on another machine
        return {"row": asked["row"], "ended": "impossible", "problems": []}
    how = damaged(case / asked["file"], asked["seed"]) if asked["file"] else asked["how"]
    done = call(asked["command"], case, LONGEST, Fault(memory=MEMORY))
    found = []
    if done.hung:
        found.append(f"hang: longer than {LONGEST:.0f} s")
    elif done.traced:
        found.append(f"traceback: {done.last_line}")
    elif done.code not in (0, 2, 3):
        found.append(f"crash: ends with {done.code}: {done.last_line}")
    written = [c.path for c in done.changes if asked["file"] and not c.path.startswith(OURS)]
    found += [f"outside: {what}" for what in (*done.outside, *written)][:3]
    shutil.rmtree(case, ignore_errors=True)
    ended = "accepted" if done.code in (0, 3) else "refused" if done.code == 2 else "failed"
    words = f"{asked['base']}: {asked['file']}: {how}; {typed(asked['command'])}"
    return {"row": asked["row"], "ended": ended, "problems": found, "words": words}
