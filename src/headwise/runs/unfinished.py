"""Results of long work, each kept as soon as it is there, so that work that was killed resumes. No torch."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwise.runs.lock import is_first


class Progress:
    """Results by name, one line of JSON each, in a file for every process. Without a folder nothing is kept.

    `key` stands for the work: lines of other work, and a line that a kill cut off, do not count.
    """

    def __init__(self, folder: Path | None = None, key: str = "") -> None:
        self.folder, self.key, self.known = folder, key, dict[str, Any]()
        for path in sorted(folder.glob("pieces-*.jsonl")) if folder else ():
            for line in path.read_bytes().splitlines() if path.is_file() else ():
                self._learn(line)

    def _learn(self, line: bytes) -> None:
        try:
            found = json.loads(line)
            if found["key"] == self.key:
                self.known[found["name"]] = found["value"]
        except (ValueError, KeyError, TypeError):
            return

    def piece(self, name: str, make: Callable[[], Any]) -> Any:
        """The result called `name`, as JSON gives it back: known from before, or made and kept now."""
        if name not in self.known:
            self.known[name] = json.loads(text := json.dumps(make()))
            self._keep(name, text)
        return self.known[name]

    def _keep(self, name: str, text: str) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        rank = "0" if is_first() else os.environ.get("RANK", "0")
        with (self.folder / f"pieces-{rank}.jsonl").open("a") as file:  # a line that was cut off ends before this one
            file.write(f'\n{{"key": {json.dumps(self.key)}, "name": {json.dumps(name)}, "value": {text}}}\n')
