"""Which code a result was measured with, and where.

python benchmarks/provenance.py > commit.txt   # for a machine that gets the files without their repository, where
HEADWISE_COMMIT=$(cat commit.txt) python benchmarks/scale.py ...   # results then name the same commit
"""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def commit() -> str:
    """The commit of this tree, with a plus where files differ; `HEADWISE_COMMIT` where there is no repository."""

    def ask(*words: str) -> str:
        told = ["git", *words]
        return subprocess.run(told, cwd=Path(__file__).parent, stdout=-1, stderr=-3, text=True, check=False).stdout

    if given := os.environ.get("HEADWISE_COMMIT"):
        return given
    changed = any("results/" not in line for line in ask("status", "--porcelain", "-uno").splitlines())
    return ask("rev-parse", "--short=12", "HEAD").strip() + ("+" if changed else "")


def hardware() -> dict[str, Any]:
    """The processor's own name and how many cores this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {"processor": model, "cores": len(os.sched_getaffinity(0))}


if __name__ == "__main__":
    print(commit())
