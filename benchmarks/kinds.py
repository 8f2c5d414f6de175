"""One small model of every kind that Headwise writes, saved in a folder: what the benchmarks of serving begin with.

A kind is a way of cutting: rows of the cache per head, rows that heads share, rows in few bits, parameters, and a
model that stock transformers loads. Used by finetune.py and serving_weights.py; needs no network.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

from headwise import cuts, families, pipeline
from headwise.files.disk import write_atomically
from headwise.runs.settings import Settings
from headwise.stages.in_memory import InMemory, load_source

KINDS: dict[str, dict[str, Any]] = {  # settings of each kind
    "per-head": {"budgets": ("kv=50%",), "allow": ("qk", "v"), "pool": "none"},
    "pooled": {"budgets": ("kv=50%",), "allow": ("qk", "v"), "pool": "all"},
    "coded": {"budgets": ("kv=20%",)},
    "parameters": {"budgets": ("params=80%",), "allow": ("mlp", "heads", "kv_heads")},
    "portable": {"budgets": ("kv=50%",), "portable": True},
}
SMALL = {"tokens": 8_192, "eval_tokens": 4_096, "swap_tokens": 0, "length": 256, "device": "cpu"}


def load(model: str, kind: str, **changes: Any) -> tuple[Settings, InMemory]:
    """The settings of a kind, and the source with its calibration and evaluation rows."""
    settings = Settings(model=model, **{**SMALL, **KINDS[kind], **changes})
    return settings, load_source(settings)


def save(model: str, kind: str, folders: dict[bool, Path], **changes: Any) -> InMemory:
    """Cut and refit a model, and save it in each of `folders`: balanced (the usual way, True) or not (False)."""
    settings, source = load(model, kind, **changes)
    fitted = pipeline.fit(settings, source)
    usual = cuts._save.balance
    for balanced, folder in folders.items():
        with families.quietly(), patch.object(cuts._save, "balance", usual if balanced else list):
            cuts.save(source.family, fitted.model, source.tokenizer, folder, fitted.plan.portable)
    return source


def print_page(page: Path, name: str, script: str, lines: list[str]) -> None:
    """Put the lines that a result prints between a page's marker comments."""
    begin, end = f"<!-- {name}: printed by benchmarks/{script} -->", f"<!-- end of {name} -->"
    head, rest = page.read_text().split(begin)
    write_atomically(page, "\n".join([head + begin, "", *lines, "", end]) + rest.split(end)[1])
