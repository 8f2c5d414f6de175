"""Texts in files and folders: plain, jsonl, or compressed."""

import bz2
import codecs
import gzip
import json
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headwise.errors import DataError

SEPARATOR = "<|endoftext|>"
PEEKED = 1 << 16  # characters of a file that are checked before it is read
OPENERS: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
DAMAGED = (EOFError, lzma.LZMAError, zlib.error, OSError)  # what reading a damaged packed file raises
MEANING = (
    "a text or jsonl file (also .xz, .gz, .bz2), a folder of them, a datasets name (name:config:split), 'stdlib', "
    "'self' or FILE+self"
)


def texts_of(path: Path) -> Iterator[str]:
    """The texts of a file: one a line in jsonl, otherwise those between the marks of a text's end."""
    with _readable(path), OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
        if _inner(path) == ".jsonl":
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield record(json.loads(line), path, number)
        else:
            yield from (part for part in file.read().split(SEPARATOR) if part.strip())


def _inner(path: Path) -> str:
    """The suffix of what a file holds, compressed or not."""
    return Path(path.stem).suffix if path.suffix in OPENERS else path.suffix


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Refuse a file that is no text in one line."""
    try:
        yield
    except (ValueError, RecursionError, *DAMAGED) as error:
        raise DataError(f"{path} cannot be read as text ({error}). Give {MEANING}.") from None


def peek_file(path: Path) -> None:
    """Refuse a file that does not begin as text does."""
    with _readable(path), OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
        if _inner(path) == ".jsonl":
            line = next((line for line in file if line.strip()), '""')
            record(json.loads(line), path, 1)
        else:
            file.read(PEEKED)


def text_files(place: Path) -> list[Path]:
    """A file itself, or the text files in a folder and its subfolders, sorted by name; none of a data set in tables.

    A file in a folder counts if it has a text's or a jsonl file's ending, or if it begins as UTF-8 text does. Hidden
    files and empty ones do not count.
    """
    if place.is_file():
        return [place]
    if not place.is_dir() or tables(place):
        return []
    inner = ((path, path.relative_to(place).parts) for path in sorted(place.rglob("*")))
    seen = (path for path, parts in inner if not any(part.startswith(".") for part in parts))
    return [path for path in seen if path.is_file() and path.stat().st_size and _is_text(path)]


def tables(folder: Path) -> bool:
    """Whether a folder holds a data set in tables, which the datasets package reads."""
    return any(next(folder.rglob(pattern), None) for pattern in ("*.parquet", "*.arrow"))


def _is_text(path: Path) -> bool:
    if _inner(path) in (".txt", ".jsonl"):
        return True
    with _readable(path), path.open("rb") as file:
        begun = file.read(PEEKED)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(begun)
    except UnicodeDecodeError:
        return False
    return b"\0" not in begun


class Paired(str):
    """A text with the text that is wanted for it, such as its translation."""

    __slots__ = ("target",)
    target: str


def record(item: Any, path: Path, number: int) -> str:
    """The text of a row, with its target where it has one."""
    text = item.get("text") if isinstance(item, dict) else item
    if not isinstance(text, str):
        raise DataError(f'{path}, line {number}: no "text" field; every line must be {{"text": "..."}} or a string.')
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{path}, line {number}: the text holds half a character (a lone surrogate).") from None
    target = item.get("target") if isinstance(item, dict) else None
    if target is None:
        return text
    if not isinstance(target, str):
        raise DataError(f'{path}, line {number}: "target" must be a string, the text that is wanted for "text".')
    pair = Paired(text)
    pair.target = target
    return pair
