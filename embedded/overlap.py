"""Content overlap between Python files, measured on windows of consecutive code lines.

The demo of the package calibrates and evaluates on the standard library of whoever runs it, so no file that
shares code with the standard library may enter the training corpus. A window is a run of consecutive lines,
stripped, without blank and comment-only lines; two files that share windows share text, however the text around
them differs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

WINDOW = 6
VERIFY_WINDOW = 13
MAX_TRIVIAL = 2  # a window with more trivial lines than this says nothing about copying
_TRIVIAL = re.compile(r"(import\s|from\s+\S+\s+import\b|\W*$|\W*\w{1,6}\W*$|(return|yield)\b.{0,12}$)")


def code_lines(text: str) -> list[str]:
    """The stripped lines of `text` without blank and comment-only ones."""
    stripped = (line.strip() for line in text.splitlines())
    return [line for line in stripped if line and not line.startswith("#")]


def window_hashes(lines: list[str], size: int) -> Iterator[int]:
    """The hash of every window of `size` lines (stable within one process only)."""
    hashes = [hash(line) for line in lines]
    return map(hash, zip(*(hashes[start:] for start in range(size)), strict=False))


def telling_windows(lines: list[str]) -> Iterator[int]:
    """The hashes of the `WINDOW`-line windows that are not mostly imports, brackets and single short words."""
    trivial = [_TRIVIAL.match(line) is not None for line in lines]
    for start, value in enumerate(window_hashes(lines, WINDOW)):
        if sum(trivial[start : start + WINDOW]) <= MAX_TRIVIAL:
            yield value


class StandardLibrary:
    """The windows of every Python file below the given standard library folders, their tests included."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self.files = 0
        self.windows: set[int] = set()
        self.verify: set[int] = set()
        self._found: set[int] = set()
        for folder in folders:
            for path in sorted(folder.rglob("*.py")):
                parts = path.relative_to(folder).parts
                if "site-packages" not in parts and "dist-packages" not in parts:
                    self._add(path)

    def _add(self, path: Path) -> None:
        lines = code_lines(path.read_text(encoding="utf-8", errors="replace"))
        self.files += 1
        self.windows.update(telling_windows(lines))
        self.verify.update(window_hashes(lines, VERIFY_WINDOW))

    def shared(self, lines: list[str]) -> int:
        """How many windows of `lines` occur in the standard library."""
        return sum(value in self.windows for value in window_hashes(lines, WINDOW))

    def mark(self, lines: list[str]) -> None:
        """Note which long windows of the standard library occur in a kept file."""
        self._found.update(self.verify.intersection(window_hashes(lines, VERIFY_WINDOW)))

    def verification(self) -> dict[str, float]:
        """The share of all long standard library windows that occur anywhere in the files marked so far."""
        total, found = len(self.verify), len(self._found)
        return {"lines_per_window": VERIFY_WINDOW, "windows": total, "found": found, "fraction": found / max(1, total)}


class NearDuplicates:
    """Recognises files whose code is the same as, or mostly assembled from, files seen before."""

    SAMPLE = 8  # one window in this many is remembered
    LIMIT = 0.5  # share of the remembered windows seen before at which a file counts as a near duplicate

    def __init__(self) -> None:
        self._files: set[int] = set()
        self._windows: set[int] = set()

    def reason(self, lines: list[str]) -> str | None:
        """Why the file is a duplicate; None (and the file is remembered) when it is not."""
        whole = hash(tuple("".join(line.split()).lower() for line in lines))
        if whole in self._files:
            return "duplicate"
        windows = {value for value in window_hashes(lines, WINDOW) if value % self.SAMPLE == 0}
        if len(windows) >= 4 and len(windows & self._windows) > self.LIMIT * len(windows):
            return "near_duplicate"
        self._files.add(whole)
        self._windows |= windows
        return None
