"""Headwise fits a Transformer to a budget: probe, allocate, reshape, heal, verify, report.

>>> import headwise  # doctest: +SKIP
>>> headwise.run("embedded", budget="kv=75%", out="runs/demo")  # doctest: +SKIP

Importing this is light: torch is imported when a function needs it.
"""

from __future__ import annotations

__version__ = "0.2.0"  # written here only: pyproject.toml reads it

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headwise import _autoregister, _notebook, machine

if TYPE_CHECKING:
    from headwise.api import allocate, export, load, probe, reshape, run, verify
    from headwise.research.advise import advise
    from headwise.research.designs.proposals import design
    from headwise.research.train.run import train

__all__ = [
    "__version__",
    "advise",
    "allocate",
    "design",
    "export",
    "load",
    "probe",
    "reshape",
    "run",
    "train",
    "verify",
]
ELSEWHERE = {"advise": "advise", "design": "designs.proposals", "train": "train.run"}  # in `research`

machine.settle()  # before anything imports torch
_autoregister.install()
_notebook.install()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'headwise' has no attribute '{name}'")
    place = f"headwise.research.{ELSEWHERE[name]}" if name in ELSEWHERE else "headwise.api"
    return getattr(import_module(place), name)


def __dir__() -> list[str]:
    """What users call, for completion; nothing that this file imports for itself."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
