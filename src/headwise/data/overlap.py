"""How much of an evaluation text also stands in the calibration text: what a cut was fitted to flatters it.

By hashes of lines, stripped, those that are too short to say anything left out. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

SHORTEST = 20  # characters of a line that counts
BYTES = 8  # of text for a token, at most: what is read of a file for so many tokens
LEAST, MOST = 1 << 20, 64 << 20  # characters of a text that are looked at
WORTH_SAYING = 0.05


def share(calibration: str, evaluation: str, tokens: int, eval_tokens: int, seed: int = 0) -> float | None:
    """The share of the evaluation's lines that are in the calibration too, of what a run reads of both.

    None where it cannot be told: of text that the model writes, of data sets, of images and recordings.
    """
    ours, theirs = (name.removesuffix("+self") for name in (calibration, evaluation))
    if "self" in (ours, theirs):
        return None
    if ours == theirs or _same_file(ours, theirs):
        return 1.0
    known, asked = _lines(ours, tokens, seed), _lines(theirs, eval_tokens, seed)
    if known is None or asked is None:
        return None
    seen = set(map(hash, known))
    found = [hash(line) in seen for line in asked]
    return sum(found) / len(found) if found else None


def in_words(shared: float | None) -> str:
    """What to say of it; nothing where it is too little."""
    if shared is None or shared <= WORTH_SAYING:
        return ""
    return f"{shared:.0%} of its lines are also in the calibration text"


def _same_file(first: str, second: str) -> bool:
    paths = Path(first), Path(second)
    return all(path.exists() for path in paths) and paths[0].samefile(paths[1])


def _lines(source: str, tokens: int, seed: int) -> Iterator[str] | None:
    """Lines that count, of as much of a text as may be read for so many tokens; None for other sources."""
    from headwise.data import documents  # which needs torch

    most = min(MOST, max(LEAST, BYTES * tokens))
    if source == "stdlib":
        return _counting(_up_to(most, (line for text in documents(source, seed) for line in text.splitlines())))
    return _counting(_up_to(most, _file_lines(Path(source)))) if Path(source).is_file() else None


def _file_lines(path: Path) -> Iterator[str]:
    """The lines of a text file or of the texts of a jsonl file; what cannot be read is refused elsewhere."""
    from headwise.data import OPENERS

    opener = OPENERS.get(path.suffix, open)
    records = ".jsonl" in path.suffixes[-2:]
    with opener(path, "rt", encoding="utf-8", errors="replace") as file:
        while line := file.readline(MOST):
            yield from _record_lines(line) if records else (line,)


def _record_lines(line: str) -> list[str]:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError):
        return []
    text = item.get("text") if isinstance(item, dict) else item
    return text.splitlines() if isinstance(text, str) else []


def _up_to(characters: int, lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield line
        characters -= len(line) + 1
        if characters <= 0:
            return


def _counting(lines: Iterable[str]) -> Iterator[str]:
    return (kept for line in lines if len(kept := line.strip()) >= SHORTEST)
