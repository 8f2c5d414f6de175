"""How much of an evaluation text is also in the calibration text: such text makes a cut look better than it is.

Stripped lines are compared by their hashes; very short ones are left out. No torch.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

SHORTEST = 20  # characters of a line that counts
BYTES = 8  # of text per token, at most
LEAST, MOST = 1 << 20, 64 << 20  # characters of a text that are compared
WORTH_SAYING = 0.05


def share(calibration: str, evaluation: str, tokens: int, eval_tokens: int, seed: int = 0) -> float | None:
    """The share of the evaluation's lines that are also in the calibration text, in the part that a run reads.

    None where it is unknown: text that the model writes, data sets, images and recordings.
    """
    ours, theirs = (name.removesuffix("+self") for name in (calibration, evaluation))
    if "self" in (ours, theirs):
        return None
    if ours == theirs or _same_file(ours, theirs):
        return 1.0
    known, wanted = _lines(ours, tokens, seed), _lines(theirs, eval_tokens, seed)
    if known is None or wanted is None:
        return None
    seen = set(map(hash, known))
    found = [hash(line) in seen for line in wanted]
    return sum(found) / len(found) if found else None


def repeated(source: str, tokens: int, seed: int = 0) -> float | None:
    """The share of a text's lines that occur more than once in the part that a run reads; None where it is unknown."""
    lines = _lines(source, tokens, seed) if source != "self" else None
    counts = Counter(map(hash, lines)) if lines is not None else {}
    return sum(number for number in counts.values() if number > 1) / sum(counts.values()) if counts else None


def in_words(shared: float | None) -> str:
    """The overlap as a clause; empty where it is small."""
    if shared is None or shared <= WORTH_SAYING:
        return ""
    return f"{shared:.0%} of its lines are also in the calibration text"


def _same_file(first: str, second: str) -> bool:
    paths = Path(first), Path(second)
    return all(path.exists() for path in paths) and paths[0].samefile(paths[1])


def _lines(source: str, tokens: int, seed: int) -> Iterator[str] | None:
    """The lines to compare, of as much text as a run may read; None for other sources."""
    from headwise.data import documents, text_files  # which need torch

    most = min(MOST, max(LEAST, BYTES * tokens))
    if source == "stdlib":
        return _counting(_up_to(most, (line for text in documents(source, seed) for line in text.splitlines())))
    files = text_files(Path(source))
    return _counting(_up_to(most, (line for file in files for line in _file_lines(file)))) if files else None


def _file_lines(path: Path) -> Iterator[str]:
    """The lines of a text file or of the texts of a jsonl file, up to where it is damaged: it is refused elsewhere."""
    from headwise.data.files import DAMAGED, OPENERS

    opener = OPENERS.get(path.suffix, open)
    records = ".jsonl" in path.suffixes[-2:]
    with suppress(*DAMAGED), opener(path, "rt", encoding="utf-8", errors="replace") as file:
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
