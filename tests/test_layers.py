"""The package's layers: imports point down, plug-ins do not know each other, planning and reporting need no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "headwise"

CORE = {"errors", "files", "disk", "keeping", "registry", "types", "cost", "theory", "budgets", "strategies"}
TORCH = {
    "linalg", "data", "images", "audio", "families", "runtime", "tasks", "probes", "cuts", "heal", "checks", "train",
    "processes", "moments", "steps", "fast", "memory", "tensors", "devices", "own_text", "overlap", "bars",
}  # fmt: skip
# Run folders, and what is done there without torch.
RUN = {
    "rounds",
    "healing",
    "settings",
    "runfolder",
    "reporting",
    "planning",
    "report",
    "frontier",
}

# Layer -> layers that its modules may import, beside their own. What is not listed here may not exist.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "machine": set(),  # what the processor may do, before torch is imported
    "files": {"errors"},  # the one reader of JSON
    "tensors": {"errors", "files"},  # the one reader of safetensors
    "devices": {"errors"},
    "registry": {"errors"},
    "disk": {"errors"},  # files written whole or not at all
    "keeping": {"errors", "files", "types", "disk"},  # locks, and records of what is finished
    "types": {"errors", "files", "disk"},
    "cost": {"errors", "types"},
    "theory": {"errors", "types"},
    "linalg": {"errors"},
    "memory": set(),
    "processes": {"errors", "devices"},
    "data": {"errors"},
    "own_text": {"errors"},  # that a model writes
    "overlap": {"errors", "data"},  # lines of one text in another
    "images": {"errors", "data"},
    "audio": {"errors"},
    "runtime": set(),  # copied into saved models
    "fast": {"errors", "files", "types", "runtime"},  # fast inference, never needed
    "families": {"errors", "registry", "types", "linalg", "runtime", "data", "audio", "memory"}
    | {"files", "tensors", "cost"},
    "tasks": {"errors", "files", "registry", "data", "images", "audio", "families"},  # what a model is for
    "steps": {"errors", "types", "families", "fast"},  # a model run for its time
    "probes": {"errors", "processes", "registry", "types", "cost", "families", "linalg", "theory", "data", "tasks"}
    | {"runtime", "steps", "memory", "fast", "keeping"},
    "budgets": {"errors", "registry", "types", "cost"},
    "strategies": {"errors", "registry", "types", "cost", "theory", "budgets"},
    "moments": {"errors", "disk", "types", "tensors", "cuts"},
    "cuts": {"errors", "disk", "types", "families", "linalg", "runtime"},
    "search": CORE | {"families", "designs", "train", "data", "plots"},  # headwise search
    "heal": {"errors", "registry", "types", "families", "linalg", "data", "tasks", "processes", "train"}
    | {"files", "tensors"},
    "checks": {"errors", "types", "cost", "budgets", "memory", "data", "families", "tasks", "steps"}
    | {"tensors", "runtime", "disk"},
    "train": {"errors", "processes", "types", "cost", "families", "linalg", "data", "cuts", "runtime"}
    | {"files", "tensors", "keeping", "disk"},
    "designs": CORE | {"families", "runtime", "cuts"},  # headwise design
    "report": {"errors", "registry", "types", "cost", "budgets"},  # prices for its tables: formulas only
    "rounds": {"errors", "types", "budgets", "strategies"},
    "frontier": CORE,  # the exact answer to many limits
    "settings": CORE,
    "healing": {"errors", "files"},  # the record of one
    "runfolder": CORE | {"settings", "frontier", "healing"},
    "reporting": CORE | {"runfolder", "report", "frontier"},
    "planning": CORE | {"settings", "runfolder", "report"},
    "workbench": CORE | TORCH | RUN,
    "latencies": CORE | TORCH | RUN,  # tables of measured times
    "stream": CORE | TORCH | RUN | {"workbench"},  # models larger than memory
    "preflight": CORE | TORCH | RUN | {"workbench", "stream"},  # what can be checked before work begins
    "probing": CORE | TORCH | RUN | {"workbench", "latencies"},
    "pipeline": CORE | TORCH | RUN | {"workbench", "latencies", "stream", "preflight", "probing"},
    "api": CORE | TORCH | RUN | {"pipeline", "stream"},
    "redesign": {"errors", "families"},  # models of timm built anew
    "plots": {"errors", "types"},
    "figures": {"errors", "types", "report", "plots"},
    "calculators": {"errors", "types", "theory", "plots"},  # headwise theory
    "reproduce": {"errors", "files", "registry", "types", "plots", "probes", "checks"},  # headwise reproduce
    "show": {"errors", "files", "types", "families", "strategies", "runfolder", "report"},
    "bars": set(),
    "cli_options": {"settings", "types"},
    "cli": {
        "errors",
        "bars",
        "cli_options",
        "settings",
        "heal",
        "strategies",
        "types",
        "report",
        "reporting",
        "pipeline",
        "api",
        "show",
        "calculators",
        "reproduce",
        "designs",
        "fast",
        "search",
        "train",
        "runfolder",
        "planning",
        "figures",
    },
    "_autoregister": {"runtime"},
    "_notebook": {"types", "report"},
    "__init__": {"api", "designs", "train", "_autoregister", "_notebook", "types", "errors", "machine"},
    "__main__": {"cli"},
}
RELAXED = {("heal", "headwise.probes._watch"), ("checks", "headwise.probes._watch")}
RELAXED |= {("settings", "headwise.heal._options")}  # which needs no torch
PLUG_INS = {"families", "tasks", "probes", "budgets", "strategies", "heal", "checks"}  # one thing per file
NO_TORCH = {"errors", "files", "machine", "registry", "types", "cost", "theory", "budgets", "strategies", "report"}
HEAVY = {"torch", "transformers", "accelerate", "datasets", "safetensors"}
NO_DRAWERS = {"utils", "util", "common", "helpers", "helper", "misc"}

MODULES = sorted(path for path in PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    """The module's name: headwise.types.plan."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(("headwise", *(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)))


def layer_of(module: str) -> str:
    """The row of the table that a module belongs to."""
    return module.split(".")[1]


def is_module(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it; `from headwise import budgets` counts as headwise.budgets."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative imports hide which layer is meant"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            own = {name for name in inner if name.startswith("headwise.") and is_module(name)}
            found |= own | ({node.module or ""} if own != inner else set())
    return found


def ours(path: Path) -> set[str]:
    return {name for name in imports(path) if name.startswith("headwise.")}


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_imports_point_down_the_table(path: Path) -> None:
    layer = layer_of(dotted(path))
    assert layer in ALLOWED, f"{layer} is in no row of the table: say what it may import"
    for name in sorted(ours(path)):
        allowed = layer_of(name) in ALLOWED[layer] | {layer} or (layer, name) in RELAXED
        assert allowed, f"{dotted(path)} may not import {name}"


def test_no_layer_imports_one_that_imports_it() -> None:
    below: dict[str, set[str]] = {layer: set() for layer in ALLOWED}
    for path in MODULES:
        below[layer_of(dotted(path))] |= {layer_of(name) for name in ours(path)} - {layer_of(dotted(path))}
    done: set[str] = set()
    while ready := [layer for layer in below if layer not in done and below[layer] <= done]:
        done |= set(ready)
    assert done == set(below), f"these layers import each other in a circle: {sorted(set(below) - done)}"


@pytest.mark.parametrize("folder", sorted(PLUG_INS))
def test_siblings_of_a_plug_in_folder_do_not_import_each_other(folder: str) -> None:
    paths = sorted((PACKAGE / folder).glob("*.py"))
    assert paths, f"{folder} is empty"
    for path in paths:
        if path.name == "__init__.py":
            continue
        for name in ours(path):
            if layer_of(name) == folder:
                assert name.rsplit(".", 1)[-1].startswith("_"), f"{dotted(path)} imports its sibling {name}"


@pytest.mark.parametrize("path", [p for p in MODULES if layer_of(dotted(p)) in NO_TORCH], ids=dotted)
def test_planning_and_reporting_never_name_torch(path: Path) -> None:
    roots = {name.split(".")[0] for name in imports(path)}
    assert not roots & HEAVY, f"{dotted(path)} imports {sorted(roots & HEAVY)}"


def test_the_runtime_stands_alone() -> None:
    for path in sorted((PACKAGE / "runtime").glob("*.py")):
        others = {name for name in ours(path) if layer_of(name) != "runtime"}
        assert not others, f"{path.name} is copied into saved models, so it cannot import {sorted(others)}"


IMPORTS = [
    "import headwise",
    "import headwise.types, headwise.cost, headwise.budgets.kv, headwise.budgets.params, headwise.budgets.flops",
    "import headwise.strategies.exact, headwise.strategies.uniform, headwise.strategies.portable, headwise.report",
    "import headwise.planning, headwise.runfolder",
    "import headwise.cli",
    "import runpy, sys; sys.argv = ['headwise', '--help']\n"
    "try: runpy.run_module('headwise', run_name='__main__')\nexcept SystemExit as end: assert not end.code, end.code",
]


@pytest.mark.parametrize("code", IMPORTS, ids=lambda code: code.splitlines()[0][:60])
def test_a_fresh_process_gets_by_without_torch(code: str) -> None:
    check = "import sys; heavy = sorted({'torch', 'transformers'} & set(sys.modules)); assert not heavy, heavy"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{check}"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_files_stay_small_and_there_is_no_drawer(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    most = 780 if dotted(path) == "headwise.runtime.modeling_headwise" else 350  # one file: it is copied into models
    assert lines < most, f"{dotted(path)} has {lines} lines; split it by idea"
    assert path.stem.lstrip("_") not in NO_DRAWERS, f"{path.stem} says nothing about what lives there"
    assert not NO_DRAWERS & set(path.relative_to(PACKAGE).parts), "nor does such a folder"
