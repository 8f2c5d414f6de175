"""Which kernel was quickest for what, measured once on this machine and kept as JSON. Needs no torch."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError
from headwise.files.json import read_object
from headwise.types import write_atomically

VERSION = 3  # of kernels and their names: measurements of other versions are dropped


def cache_folder() -> Path:
    """Where measurements are kept: $HEADWISE_CACHE, $XDG_CACHE_HOME/headwise or ~/.cache/headwise."""
    if own := os.environ.get("HEADWISE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwise"


class KernelTable:
    """Rows by case. A file that cannot be read or written costs a warning and a new measurement, no more."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file or cache_folder() / "kernels.json"
        self.rows: dict[str, dict[str, Any]] = self._read()

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            if not self.file.exists():
                return {}
            found = read_object(self.file)
            if found["version"] != VERSION:
                return {}
            return {str(key): _row(row) for key, row in found["rows"].items()}
        except (HeadwiseError, OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError) as error:
            warnings.warn(f"{self.file} cannot be read ({error}); kernels are measured anew.", stacklevel=2)
            return {}

    def get(self, key: str) -> str | None:
        """The quickest path, if it was measured."""
        row = self.rows.get(key)
        return None if row is None else row["path"]

    def put(self, key: str, path: str, ms: dict[str, float]) -> None:
        """Add a measurement to those that other processes wrote meanwhile; the file is replaced as a whole."""
        row = {"path": path, "ms": {name: round(time, 6) for name, time in ms.items()}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a broken file it was warned already
            self.rows = {**self._read(), **self.rows, key: row}
        try:
            found = {"version": VERSION, "rows": self.rows}
            write_atomically(self.file, json.dumps(found, indent=1, sort_keys=True) + "\n")
        except OSError as error:
            warnings.warn(f"{self.file} cannot be written ({error}); kernels are measured again.", stacklevel=2)

    def clear(self) -> None:
        """Forget everything."""
        self.rows = {}
        self.file.unlink(missing_ok=True)


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return {"path": str(row["path"]), "ms": {str(name): float(time) for name, time in row["ms"].items()}}
