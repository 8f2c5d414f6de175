"""Installs the built wheel into a new environment in a temporary folder and uses it there. `make dist` runs it.

python tests/clean_install.py dist
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "headwise"
TINY = (
    "run embedded --budget kv=75% --heal none --tokens 2048 --eval-tokens 1024 --swap-tokens 0 --length 64 "
    "--context 64 --json"
)
LOAD = "import headwise; print(sum(p.numel() for p in headwise.load('run/model').parameters()))"


def files() -> set[str]:
    """Every file of the package, as both archives must hold it: headwise/report/page.css."""
    found = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(PACKAGE.parent).as_posix() for path in found}


def missing(folder: Path, version: str) -> list[str]:
    """The files that a wheel or a source distribution lacks."""
    with zipfile.ZipFile(folder / f"headwise-{version}-py3-none-any.whl") as wheel:
        lost = [f"wheel: {name}" for name in sorted(files() - set(wheel.namelist()))]
    with tarfile.open(folder / f"headwise-{version}.tar.gz") as source:
        held = set(source.getnames())
    wanted = {f"src/{name}" for name in files()} | {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"}
    return lost + [f"sdist: {name}" for name in sorted(wanted) if f"headwise-{version}/{name}" not in held]


def main(folder: Path) -> None:
    """Fail where an archive lacks a file, or the installed package does not work."""
    (wheel,) = folder.glob("*.whl")
    version = wheel.name.split("-")[1]
    assert not (lost := missing(folder, version)), f"left out of the archives: {lost}"
    with tempfile.TemporaryDirectory() as place:
        new = Path(place) / "new"
        venv.create(new, with_pip=True)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        clean |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"), "HEADWISE_CACHE": f"{place}/cache"}

        def say(*command: str, **more: str) -> str:
            done = subprocess.run(command, cwd=place, env={**clean, **more}, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                sys.exit(f"{' '.join(command)} ended with code {done.returncode}")
            return done.stdout.strip()

        pip = (str(new / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        say(*pip, "-c", str(ROOT / "constraints.txt"), str(wheel.resolve()))
        command = str(new / "bin" / "headwise")
        assert (told := say(command, "--version")) == f"headwise {version}", told
        assert say(command, _HEADWISE_COMPLETE="complete_bash", COMP_WORDS="headwise ru", COMP_CWORD="1") == "run"
        found = json.loads(say(command, *TINY.split(), "--out", "run"))
        assert all(check["passed"] for check in found["verdict"]["checks"]), found["verdict"]["checks"]
        assert (Path(place) / "run" / "report.html").is_file()
        print(f"{wheel.name} works in a new environment; its model has {int(say(pip[0], '-c', LOAD)):,} parameters")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
