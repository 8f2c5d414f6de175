"""Pages of the report in a real browser: opened, watched for complaints, and read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwise.types import Plan


class Visit:
    """A page that was opened, and everything it complained of or asked the network for."""

    def __init__(self, browser: Any, path: Path, **context: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **context})
        self.page = self.context.new_page()
        self.page.set_default_timeout(10_000)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, kind: Any, *_: object) -> None:
        self.context.close()
        if kind is None:
            assert self.complaints == [], "nothing to complain of"
            assert all(url.startswith(("file:", "blob:")) for url in self.requests), self.requests
            assert sum(url.startswith("file:") for url in self.requests) == 1, "one file, which loads nothing"


def sizes(page: Any) -> list[list[int]]:
    """Of every layer on the screen: query heads, query/key and value dimension, MLP width."""
    script = """rows => rows.map(row => [".n-heads", ".n-qk", ".n-v", ".c-mlp .sr"].map(
        name => parseInt(row.querySelector(name).textContent)))"""
    return page.eval_on_selector_all("#model tbody tr", script)


def planned(plan: Plan) -> list[list[int]]:
    return [[s.query_heads, s.qk_dim, s.v_dim, s.mlp_width] for s in plan.target.layers]


def lines(page: Any) -> list[tuple[str, str]]:
    """Every line that the heads are drawn with."""
    script = "paths => paths.map(p => [p.getAttribute('d'), p.getAttribute('stroke-width')])"
    return [tuple(pair) for pair in page.eval_on_selector_all("#model .heads path", script)]


def wide(page: Any) -> float:
    """By how much the page is wider than the screen."""
    return page.evaluate("document.documentElement.scrollWidth - innerWidth")


def barriers(page: Any) -> dict[str, str]:
    """What axe-core finds serious or critical, with the first place where it does."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page).response["violations"]
    return {v["id"]: v["nodes"][0]["html"][:200] for v in found if v["impact"] in ("serious", "critical")}
