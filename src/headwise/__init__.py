"""Headwise fits a Transformer to a budget: probe, allocate, reshape, heal, verify, report.

>>> import headwise  # doctest: +SKIP
>>> headwise.run("embedded", budget="kv=75%", out="runs/demo")  # doctest: +SKIP

Importing this is light: torch is imported when a function needs it.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from headwise import _autoregister, _notebook, machine

if TYPE_CHECKING:
    from headwise.api import allocate, export, load, probe, reshape, run, verify
    from headwise.research.designs.proposals import design
    from headwise.research.train.run import train

__all__ = ["allocate", "design", "export", "load", "probe", "reshape", "run", "train", "verify"]

machine.settle()  # before anything imports torch
_autoregister.install()
_notebook.install()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("headwise")
    if name == "design":
        return import_module("headwise.research.designs.proposals").design
    if name == "train":
        return import_module("headwise.research.train.run").train
    if name in __all__:
        return getattr(import_module("headwise.api"), name)
    raise AttributeError(f"module 'headwise' has no attribute '{name}'")
