"""The small models that other engines are tried with: two sources, each cut in every way that a run can cut.

Made once into a folder and found there again. They are cut without healing on little text: an engine must compute
what transformers computes, however good a model is.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import headwise

SMALL: dict[str, Any] = dict(swap_tokens=0, length=256, seed=0)  # of calibration
TOKENS = {"embedded": 16_384}  # others have large vocabularies, which take long


class Kind(NamedTuple):
    """A way of cutting: its budget, and settings of probing and of allocating."""

    budget: str
    allow: tuple[str, ...]
    pool: str = "none"
    portable: bool = False


KINDS = {
    "per-head": Kind("kv=50%", ("qk", "v")),
    "pooled": Kind("kv=50%", ("qk", "v"), pool="all"),
    "coded": Kind("kv=25%", ("qk", "v", "bits"), pool="all"),
    "parameters": Kind("params=75%", ("qk", "v", "mlp", "heads", "depth")),
    "portable": Kind("kv=75%", ("qk", "v"), portable=True),
}


def made(source: str, kind: str, where: Path, data: str | None = None) -> str:
    """The folder of a model of a kind; the source itself is the kind 'source'."""
    if kind == "source":
        return source
    cut, out = KINDS[kind], where / f"{Path(source).name}-{kind}"
    if not (out / "heal.json").is_file() and not (out / "model").is_dir():
        asked = dict(budget=cut.budget, allow=cut.allow, pool=cut.pool, portable=cut.portable)
        headwise.probe(source, out, data=data, tokens=TOKENS.get(source, 4_096), **asked, **SMALL)
        headwise.allocate(out, cut.budget, allow=cut.allow, portable=cut.portable)
        headwise.reshape(out, heal="none")
    return str(out / "model")


if __name__ == "__main__":  # python benchmarks/serving_kinds.py FOLDER SOURCE [TEXT]
    for name in KINDS:
        print(made(sys.argv[2], name, Path(sys.argv[1]), *sys.argv[3:]), flush=True)
