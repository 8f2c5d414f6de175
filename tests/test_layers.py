"""The package's layers: imports point down, plug-ins do not know each other, planning and reporting need no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "headwise"

FIRST = {"errors", "files", "registry", "types", "cost", "budgets", "progress"}  # what nearly every room may use
MODEL = {"linalg", "memory", "devices", "processes", "data", "runtime", "families", "tasks"}  # and what needs torch

# Room -> rooms that its modules may import, beside its own. What is not listed here may not exist.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "machine": set(),  # what the processor may do, before torch is imported
    "memory": set(),
    "progress": set(),
    "runtime": set(),  # copied into saved models
    "registry": {"errors"},
    "files": {"errors"},  # the one reader of JSON, the one of safetensors, atomic writes
    "devices": {"errors"},
    "linalg": {"errors"},
    "data": {"errors"},  # text, images, recordings, as rows
    "processes": {"errors", "devices"},
    "types": {"errors", "files"},
    "cost": {"errors", "types"},
    "budgets": {"errors", "registry", "types", "cost"},
    "strategies": {"errors", "registry", "types", "cost", "budgets"},
    "report": {"errors", "files", "registry", "types", "cost", "budgets", "runs"},  # prices: formulas only
    "fast": {"errors", "files", "types", "devices", "runtime"},  # fast inference, never needed
    "families": {"errors", "files", "registry", "types", "cost", "linalg", "memory", "data", "runtime"},
    "tasks": {"errors", "files", "registry", "progress", "data", "families"},  # what a model is for
    "cuts": {"errors", "files", "types", "families", "linalg", "runtime"},
    "runs": FIRST | {"strategies", "cuts"},  # run folders
    "probes": FIRST | MODEL | {"runs"},
    "latency": FIRST | MODEL | {"runs", "fast"},
    "checks": FIRST | MODEL | {"latency"},
    "training": FIRST | MODEL | {"runs", "cuts"},  # the loop that distillation and training from scratch share
    "heal": FIRST | MODEL | {"runs", "cuts", "training"},
    "engines": FIRST | MODEL | {"checks"},  # what others serve models with
    "stages": FIRST | MODEL | {"runs", "strategies", "probes", "cuts", "heal", "checks", "engines", "report"},
    "stream": FIRST | MODEL | {"runs", "strategies", "probes", "cuts", "heal", "checks", "stages"},
    "preflight": FIRST | MODEL | {"runs", "strategies", "heal", "stages", "stream"},
    "pipeline": FIRST | MODEL | {"runs", "latency", "stages", "stream", "preflight"},
    "exports": FIRST | MODEL | {"runs"},  # formats of other engines
    "api": FIRST | MODEL | {"runs", "heal", "fast", "engines", "stages", "stream", "pipeline", "exports"},
    "research": FIRST | MODEL | {"runs", "strategies", "probes", "cuts", "training", "report"},  # no stage needs it
    "cli": FIRST
    | {"api", "engines", "exports", "families", "fast", "report", "research", "runs", "stages", "strategies"},
    "_autoregister": {"families"},
    "_notebook": {"types", "runs", "report"},
    "__init__": {"api", "research", "_autoregister", "_notebook", "machine"},
    "__main__": {"cli"},
}  # fmt: skip
PLUG_INS = {"families", "tasks", "probes", "budgets", "strategies", "heal", "checks", "exports"}  # one thing per file
NO_TORCH = {"errors", "machine", "progress", "registry", "types", "cost", "budgets", "strategies", "report"}
HEAVY = {"torch", "transformers", "accelerate", "datasets", "safetensors"}
KERNELS = {"headwise.fast.flash_decode", "headwise.fast.small"}
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
            if node.level == 1 and path.parent.name == "runtime":  # files that are copied beside a model together
                found.add(f"headwise.runtime.{node.module}")
                continue
            assert node.level == 0, f"{path.name}: relative imports hide which layer is meant"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            own = {name for name in inner if name.startswith("headwise.") and is_module(name)}
            found |= own | ({node.module or ""} if own != inner else set())
    return found


def ours(path: Path) -> set[str]:
    return {name for name in imports(path) if name.startswith("headwise.")}


def test_imports_point_down_the_table() -> None:
    for path in MODULES:
        layer = layer_of(dotted(path))
        assert layer in ALLOWED, f"{layer} is in no row of the table: say what it may import"
        for name in sorted(ours(path)):
            allowed = layer_of(name) in ALLOWED[layer] | {layer}
            assert allowed, f"{dotted(path)} may not import {name}"


def test_no_layer_imports_one_that_imports_it() -> None:
    below: dict[str, set[str]] = {layer: set() for layer in ALLOWED}
    for path in MODULES:
        layer = layer_of(dotted(path))
        below[layer] |= {layer_of(name) for name in ours(path)} - {layer}
    done: set[str] = set()
    while ready := [layer for layer in below if layer not in done and below[layer] <= done]:
        done |= set(ready)
    assert done == set(below), f"these layers import each other in a circle: {sorted(set(below) - done)}"


def test_siblings_of_a_plug_in_folder_do_not_import_each_other() -> None:
    for folder in sorted(PLUG_INS):
        paths = sorted((PACKAGE / folder).glob("*.py"))
        assert paths, f"{folder} is empty"
        for path in paths:
            for name in ours(path) if path.name != "__init__.py" else ():
                private = name.rsplit(".", 1)[-1].startswith("_")
                assert layer_of(name) != folder or private, f"{dotted(path)} imports its sibling {name}"


def test_planning_and_reporting_never_name_torch() -> None:
    for path in MODULES:
        if layer_of(dotted(path)) in NO_TORCH:
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
    "import headwise.stages.allocate, headwise.runs.folder",
    "import headwise; headwise.advise(768, 12, 1024)",
    "import headwise.cli.commands",
    "import runpy, sys; sys.argv = ['headwise', '--help']\n"
    "try: runpy.run_module('headwise', run_name='__main__')\nexcept SystemExit as end: assert not end.code, end.code",
]


@pytest.mark.parametrize("code", IMPORTS, ids=lambda code: code.splitlines()[0][:60])
def test_a_fresh_process_gets_by_without_torch(code: str) -> None:
    check = "import sys; heavy = sorted({'torch', 'transformers'} & set(sys.modules)); assert not heavy, heavy"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{check}"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_files_stay_small_and_there_is_no_drawer() -> None:
    for path in MODULES:
        lines = len(path.read_text().splitlines())
        most = 700 if dotted(path) == "headwise.runtime.modeling_headwise" else 350  # one file: copied into models
        assert lines < most, f"{dotted(path)} has {lines} lines; split it by idea"
        assert path.stem.lstrip("_") not in NO_DRAWERS, f"{path.stem} says nothing about what lives there"
        assert not NO_DRAWERS & set(path.relative_to(PACKAGE).parts), "nor does such a folder"


def test_functions_are_short_and_no_two_classes_share_a_name() -> None:
    classes: dict[str, Path] = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                assert node.name not in classes, f"{node.name} is in {dotted(path)} and in {dotted(classes[node.name])}"
                classes[node.name] = path
            elif isinstance(node, ast.FunctionDef) and dotted(path) not in KERNELS:
                assert node.end_lineno and node.end_lineno - node.lineno < 50, f"{dotted(path)}.{node.name} is too long"


def test_few_modules_stand_at_the_top() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 15, "group what belongs together"
