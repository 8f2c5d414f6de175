"""Finds plug-ins by looking in a folder: adding one means adding a file, and no other file changes.

A plug-in is a module that says what it is in a constant, `MEANING = "..."`. Help texts read this constant from the
source file, without importing the module: most plug-ins need torch, which takes seconds to import.
"""

import ast
import difflib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

from headwise.errors import UnknownNameError

SINGULAR = {"strategies": "strategy", "families": "family", "heal": "healing"}


@cache
def names(package: str) -> tuple[str, ...]:
    """The plug-ins of a package, sorted: its modules that do not start with an underscore. Imports none of them."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(_folders(package)) if not m.name.startswith("_")))


def find(package: str, name: str) -> ModuleType:
    """The module `name` of `package`; an unknown name is refused with the nearest known one.

    >>> find("headwise.budgets", "kv").NAME
    'kv'
    """
    known = names(package)
    if name not in known:
        folder = package.rsplit(".", 1)[-1]
        kind = SINGULAR.get(folder, folder[:-1])
        raise UnknownNameError(f"no {kind} is called '{name}'.{nearest(name, known)} Known: {', '.join(known)}.")
    return importlib.import_module(f"{package}.{name}")


def nearest(name: str, known: Sequence[str]) -> str:
    """What was probably meant, as a question, or nothing.

    >>> nearest("exat", ("exact", "uniform"))
    " Did you mean 'exact'?"
    """
    near = difflib.get_close_matches(name, known, 1)
    return f" Did you mean '{near[0]}'?" if near else ""


def texts(package: str, constant: str = "MEANING") -> dict[str, str]:
    """A text that every plug-in of a package has as a constant, by name; read from the files, nothing is imported.

    >>> texts("headwise.budgets")["kv"]
    'KV cache'
    """
    return {name: text for name in names(package) for text in _texts_in(package, name, constant)}


def _texts_in(package: str, name: str, constant: str) -> Iterator[str]:
    path = next(path for folder in _folders(package) if (path := Path(folder, f"{name}.py")).is_file())
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == constant for t in node.targets):
            yield ast.literal_eval(node.value)


def _folders(package: str) -> list[str]:
    """Where the modules of a package lie. A package that is not imported yet stays so."""
    if package in sys.modules:
        return list(sys.modules[package].__path__)
    spec = importlib.util.find_spec(package)
    return list(spec.submodule_search_locations or ()) if spec else []
