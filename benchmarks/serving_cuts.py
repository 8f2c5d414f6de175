"""One model of every kind of cut, for the benchmarks of serving. A folder that is there already is not made again.

Little text is read: what is asked is whether an engine computes the same as transformers, not how good the cut is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headwise import api, families

LITTLE: dict[str, Any] = {"tokens": 2_048, "swap_tokens": 0, "length": 128}
HALF = {"budgets": ("kv=50%",), "allow": ("qk", "v")}
KINDS: dict[str, dict[str, Any]] = {  # kind of cut -> what differs from the defaults of a run
    "per-head": {**HALF, "pool": "none"},
    "per-head, --serve vllm": {**HALF, "pool": "none", "serve": "vllm"},
    "pooled": {**HALF, "pool": "all"},
    "pooled, --serve vllm": {**HALF, "pool": "all", "serve": "vllm"},
    "coded": {"budgets": ("kv=50%",)},
    "parameters": {"budgets": ("params=80%",), "allow": ("qk", "v", "mlp", "heads", "kv_heads", "depth")},
    "portable": {"budgets": ("kv=50%",), "allow": ("qk", "v"), "portable": True},
}
PLAN = ("strategy", "allow", "portable", "seed", "serve", "multiple", "same_dims")  # settings that allocation follows


def source(model: str) -> Path:
    """The folder of a source model."""
    return Path(families.locate(model)[0])


def made(model: str, kind: str, work: Path) -> Path:
    """The folder of a model that was cut in some way."""
    settings = KINDS[kind]
    name = "".join(letter if letter.isalnum() else "-" for letter in f"{Path(model).name}-{kind}")
    folder = work / name
    if not (folder / "model" / "config.json").exists():
        own = {} if model == "embedded" else {"data": "stdlib"}
        api.probe(model, folder, overwrite=True, heal="none", **LITTLE, **own, **settings)
        api.allocate(folder, settings["budgets"], **{k: v for k, v in settings.items() if k in PLAN})
        api.reshape(folder)
    return folder / "model"
