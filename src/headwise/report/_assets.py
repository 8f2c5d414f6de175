"""The page's style and script: real files beside this one, put into the page whole, so that it loads nothing."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

SCRIPTS = ("theme", "select", "tables", "explore", "heat")  # in this order: later ones call earlier ones


@cache
def css() -> str:
    """The style sheet."""
    return _read("page.css")


@cache
def script() -> str:
    """One function, so that nothing leaks into the page's names; it takes its data from the page."""
    body = "\n".join(_read(f"{name}.js") for name in SCRIPTS)
    start = 'const data = JSON.parse(document.getElementById("data").textContent);'
    return f'(() => {{\n"use strict";\n{start}\n{body}}})();\n'


def _read(name: str) -> str:
    return (files("headwise.report") / "assets" / name).read_text(encoding="utf-8")


def policy() -> str:
    """Nothing may be fetched, and of all scripts only this one runs, whatever the dossier holds."""
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
