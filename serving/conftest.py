"""Writes what `make serve-test` found: tests, seconds and versions, to benchmarks/results/serve-test-NAME.json.

Only a run of a whole file is written, and only where HEADWISE_RECORD is set:

    HEADWISE_RECORD=1 make serve-test && python benchmarks/serving.py
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "benchmarks"))
ALWAYS = ("torch", "transformers")
_start = time.time()


def versions(name: str) -> dict[str, str]:
    """What is installed of the packages that a file names."""
    words = (line.split("==")[0].split(">=")[0].strip() for line in (HERE / f"{name}.txt").read_text().splitlines())
    asked = dict.fromkeys((*ALWAYS, *(word for word in words if word and not word.startswith("#"))))
    return {package: metadata.version(package) for package in asked}


def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
    """Write the record of one file's tests."""
    files = {Path(item.fspath).stem.removeprefix("test_") for item in session.items}
    if not os.environ.get("HEADWISE_RECORD") or len(files) != 1:
        return
    from provenance import commit

    from headwise.files.disk import write_atomically

    (name,), told = files, session.config.pluginmanager.get_plugin("terminalreporter").stats
    found = {
        "file": f"serving/test_{name}.py",
        **{outcome: len(told.get(outcome, [])) for outcome in ("passed", "failed", "error", "skipped")},
        "seconds": time.time() - _start,
        "versions": versions(name),
        "hardware": f"{platform.machine()} CPU, {os.cpu_count()} cores shared with other work, Python "
        + platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
    }
    place = HERE.parent / "benchmarks" / "results" / f"serve-test-{name}.json"
    write_atomically(place, json.dumps(found, indent=1) + "\n")
