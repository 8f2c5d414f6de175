"""What a result was made by: the code that its run reaches, the files it read, and which of its values code wrote.

The digest covers every definition of `experiments/` that an experiment's `run` reaches, and every module of headwise
that holds what those import, with what these import in turn; comments, docstrings and the code that judges, draws or
words a result are not part of it. So a result is of the present code exactly if nothing changed that could have made
it another.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "headwise"
WORDS_ONLY = ("cli", "report", "progress", "errors", "_notebook")  # rooms of headwise that measure nothing
_read: dict[str, str] = {}


def used(path: Path, name: str | None = None) -> Path:
    """Note that an input file or folder is read, by its hash; returns the path."""
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    whole = hashlib.sha256()
    for each in files:
        whole.update(each.name.encode() + b"\0")
        with each.open("rb") as file:
            while block := file.read(1 << 22):
                whole.update(block)
    _read[name or path.name] = whole.hexdigest()[:16]
    return path


def forget() -> None:
    """Begin a new list of inputs."""
    _read.clear()


def inputs() -> dict[str, str]:
    """Names and hashes of what was read since `forget`."""
    return dict(sorted(_read.items()))


def digest(name: str, start: str = "run") -> str:
    """A short hash of the code that the run of an experiment reaches."""
    whole = hashlib.sha256()
    modules: set[str] = set()
    for module, piece, node in sorted(_reached(name, start), key=lambda found: found[:2]):
        whole.update(f"{module}.{piece}:{_spelled(node)}\n".encode())
        modules |= _imported(node) | _imported_by_name(module, node)
    for dotted in sorted(_closure(modules)):
        whole.update(f"{dotted}:{_whole(dotted)}\n".encode())
    return whole.hexdigest()[:16]


def _spelled(node: Any) -> str:
    """Code as one line, the same under every version of Python: fields that are empty are left out, since versions
    differ in which there are.

    >>> print(_spelled(ast.parse("x = 1")))
    Module(body=[Assign(targets=[Name(id='x' ctx=Store())] value=Constant(value=1))])
    """
    if isinstance(node, list):
        return f"[{' '.join(map(_spelled, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, value) for name, value in ast.iter_fields(node) if value is not None and value != []]
    fields += [("value", None)] * (isinstance(node, ast.Constant) and node.value is None)
    return f"{type(node).__name__}({' '.join(f'{name}={_spelled(value)}' for name, value in fields)})"


@functools.cache
def _tree(path: Path) -> ast.Module:
    """A file's code without its docstrings."""
    found = ast.parse(path.read_text())
    for each in ast.walk(found):
        if isinstance(each, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(each) is not None:
            each.body = each.body[1:] or [ast.Pass()]
    return found


@functools.cache
def _pieces(module: str) -> dict[str, ast.stmt]:
    """Definitions of a module of experiments, by the names they bind; imports too."""
    found: dict[str, ast.stmt] = {}
    for node in _tree(ROOT / "experiments" / f"{module}.py").body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id: node for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name.partition(".")[0]): node for alias in node.names}
    return found


def _reached(name: str, start: str) -> Iterator[tuple[str, str, ast.stmt]]:
    """Definitions that one refers to, directly or through others."""
    waiting, seen = [(name, start)], set()
    while waiting:
        module, piece = place = waiting.pop()
        node = _pieces(module).get(piece)
        if node is None or place in seen:
            continue
        seen.add(place)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("experiments"):
            waiting += _behind(node, piece)
            continue
        yield module, piece, node
        for each in ast.walk(node):
            if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
                source = _pieces(module).get(each.value.id)
                if isinstance(source, ast.ImportFrom) and source.module == "experiments":
                    waiting.append((each.value.id, each.attr))
            if isinstance(each, ast.Name):
                waiting.append((module, each.id))
            if isinstance(each, ast.ImportFrom) and (each.module or "").startswith("experiments."):
                waiting += [(each.module.partition(".")[2], alias.name) for alias in each.names if each.module]


def _behind(node: ast.ImportFrom, piece: str) -> list[tuple[str, str]]:
    """What a name stands for that a module of experiments imports from another."""
    inner = (node.module or "").partition(".")[2]
    return [(inner, alias.name) for alias in node.names if inner and (alias.asname or alias.name) == piece]


def _imported(node: ast.AST, package: str = "") -> set[str]:
    """Modules of headwise that a piece of code imports, by their names or from the `package` that it lies in."""
    found: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.ImportFrom) and each.level == 1 and package:
            found |= {_home(f"{package}.{each.module}", alias.name) for alias in each.names}
        elif isinstance(each, ast.ImportFrom) and (each.module or "").startswith("headwise"):
            found |= {_home(str(each.module), alias.name) for alias in each.names}
        elif isinstance(each, ast.Import):
            found |= {alias.name for alias in each.names if alias.name.startswith("headwise")}
    return found


def _home(module: str, name: str) -> str:
    """The module of headwise where a name is defined that another may pass on: what else that one has does not matter.

    >>> _home("headwise.types", "LayerShape")
    'headwise.types.shape'
    """
    if _path(f"{module}.{name}") is not None:
        return f"{module}.{name}"
    path = _path(module)
    if path is None or path.name != "__init__.py":
        return module
    for each in _tree(path).body:
        if isinstance(each, ast.ImportFrom) and (each.module or "").startswith("headwise"):
            for alias in each.names:
                if (alias.asname or alias.name) == name:
                    return _home(str(each.module), alias.name)
    return module


def _imported_by_name(module: str, node: ast.AST) -> set[str]:
    """Modules of headwise behind the names that a piece of code uses."""
    sources = (_pieces(module).get(each.id) for each in ast.walk(node) if isinstance(each, ast.Name))
    return {name for source in sources if isinstance(source, ast.Import | ast.ImportFrom) for name in _imported(source)}


def _path(dotted: str) -> Path | None:
    base = PACKAGE.joinpath(*dotted.split(".")[1:])
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def _closure(names: set[str]) -> set[str]:
    """Modules of headwise with all that they import, rooms that only word things left out."""
    waiting, found = list(names), set()
    while waiting:
        dotted = waiting.pop()
        if dotted in found or _path(dotted) is None or dotted.split(".")[1:2] in [[room] for room in WORDS_ONLY]:
            continue
        found.add(dotted)
        waiting += _imports_of(dotted)
    return found - {"headwise"}


@functools.cache
def _imports_of(dotted: str) -> tuple[str, ...]:
    path = _path(dotted)
    package = dotted if path is not None and path.name == "__init__.py" else dotted.rpartition(".")[0]
    return () if path is None or dotted == "headwise" else tuple(sorted(_imported(_tree(path), package)))


@functools.cache
def _whole(dotted: str) -> str:
    path = _path(dotted)
    return "" if path is None else hashlib.sha256(_spelled(_tree(path)).encode()).hexdigest()


def shown(found: dict[str, Any]) -> dict[str, Any]:
    """What may be shown of a result: times that were copied into it by hand, and what was computed from them, may "
    "not."""
    if not found.get("times_of_an_earlier_run"):
        return found
    kept = dict(found)
    for group in ("models", "cells"):
        if group in found:
            kept[group] = {
                name: {key: value for key, value in model.items() if key != "seconds"}
                for name, model in found[group].items()
                if "equal time" not in name
            }
    return kept


def made_by(name: str, result: dict[str, Any]) -> str:
    """A sentence on the code that made a result: that of today, or earlier code."""
    if "code" not in result:
        return (
            "Made by earlier code, commit unknown: the run stored neither its commit nor a digest of its code (the "
            f"commit in the file, {result['commit']}, was added afterwards)."
        )
    if result["code"] == digest(name):
        return f"Made by the present code (digest {result['code']}), commit {result['commit']}."
    return f"Made by earlier code (digest {result['code']}, commit {result['commit']})."
