"""Digests of results, after the way in which they are computed changed.

    python -m experiments._redigest

For every result whose digest the code of its own commit confirms, the digest of that same code by the present way.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from experiments import _provenance
from experiments._lab import RESULTS
from headwise.types import write_atomically

ASK = "from experiments._provenance import digest; print(digest({name!r}))"


def main() -> None:
    """Rewrite what can be confirmed, and print what became of every result."""
    root = _provenance.ROOT
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        if "code" not in result:
            continue
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder, "tree")
            added = ["git", "worktree", "add", "-q", "--detach", str(tree), result["commit"].rstrip("+")]
            subprocess.run(added, cwd=root, check=True)
            try:
                told = [sys.executable, "-c", ASK.format(name=path.stem)]
                env = {"PYTHONPATH": f"{tree}/src:{tree}", "PATH": "/usr/bin:/bin"}
                before = subprocess.run(
                    told, cwd=tree, env=env, capture_output=True, text=True, check=True
                ).stdout.strip()
                _read_from(tree)
                after = _provenance.digest(path.stem)
            finally:
                _read_from(root)
                subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=root, check=True)
        confirmed = before == result["code"]
        print(path.stem, "confirmed" if confirmed else f"not confirmed: {before}", result["code"], "->", after)
        if confirmed:
            write_atomically(path, json.dumps(result | {"code": after}, indent=1) + "\n")


def _read_from(tree: Path) -> None:
    """Let digests be of another tree's code."""
    _provenance.ROOT, _provenance.PACKAGE = tree, tree / "src" / "headwise"
    for cached in (_provenance._tree, _provenance._pieces, _provenance._imports_of, _provenance._whole):
        cached.cache_clear()


if __name__ == "__main__":
    main()
