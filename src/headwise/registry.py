"""Finds plug-ins by looking in a folder: adding one is adding a file, and nothing else has to know."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from functools import cache
from types import ModuleType

from headwise.errors import UnknownNameError


@cache
def names(package: str) -> tuple[str, ...]:
    """The plug-ins of a package, sorted: its modules that do not start with an underscore. Imports none of them."""
    folder = importlib.import_module(package)
    return tuple(sorted(m.name for m in pkgutil.iter_modules(folder.__path__) if not m.name.startswith("_")))


def find(package: str, name: str) -> ModuleType:
    """The module `name` of `package`; an unknown name is refused with the nearest known one.

    >>> find("headwise.budgets", "kv").NAME
    'kv'
    """
    known = names(package)
    if name not in known:
        kind = {"strategies": "strategy", "families": "family"}.get(folder := package.rsplit(".", 1)[-1], folder[:-1])
        near = difflib.get_close_matches(name, known, 1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise UnknownNameError(f"no {kind} is called '{name}'.{hint} Known: {', '.join(known)}.")
    return importlib.import_module(f"{package}.{name}")
