"""Calibration and evaluation text from any source, cut into blocks of tokens.

Blocks are rows of one tensor. Decoders get rows of equal length. For encoders the length of a text matters, so their
rows differ in length, and shorter ones end in `NOTHING`; `batches` puts rows of equal length together. A row that does
not consist of tokens, such as an image, makes `row` tokens. Where a place of a row holds more than a token, such as
sound, rows are (count, length, numbers), and the first number is the place's mark: its token.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from headwise.data.files import MEANING, peek_file, record, tables, texts_of
from headwise.data.files import OPENERS as OPENERS
from headwise.data.files import Paired as Paired
from headwise.data.files import text_files as text_files
from headwise.errors import DataError

Item = TypeVar("Item")

NOTHING = -1  # behind the end of a row
GIVEN, WRITTEN = -2, -3  # before the target of an encoder-decoder: it was given, or written by the model
SHORTEST = 8  # block of an encoder's text
AT_ONCE = 1 << 16, 1 << 20  # characters that are tokenized at once: at first, and at most
NOT_READ = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "encodings", "pydoc_data"}


class DataRows(NamedTuple):
    """Rows that were read, and their classes where any is known: one per row, -1 where it is not known."""

    rows: torch.Tensor
    truth: torch.Tensor | None = None

    def part(self, chosen: slice) -> DataRows:
        """Some of the rows."""
        return DataRows(self.rows[chosen], None if self.truth is None else self.truth[chosen])


def documents(source: str, seed: int = 0) -> Iterator[str]:
    """The texts of a source: a file, the text files of a folder in the order of their names, a `datasets` name, or
    `stdlib` (the source code of the running interpreter).
    """
    path = Path(source)
    if source == "stdlib":
        yield from _stdlib(seed)
    elif files := text_files(path):
        for file in files:
            yield from texts_of(file)
    elif path.suffix and not path.is_dir():
        raise DataError(f"{source} does not exist. Give {MEANING}.")
    else:
        yield from from_dataset(source, "file", MEANING, lambda rows: (record(row, Path(source), 0) for row in rows))


def peek(source: str) -> None:
    """Refuse a source that does not exist or does not begin as text does; data sets are not loaded."""
    path = Path(source)
    if source == "stdlib":
        next(_stdlib(0))
    elif files := text_files(path):
        peek_file(files[0])
    elif path.is_dir() and not tables(path):
        raise DataError(f"the folder {source} holds no text file. Give {MEANING}.")
    elif path.suffix and not path.is_dir():
        raise DataError(f"{source} does not exist. Give {MEANING}.")
    elif importlib.util.find_spec("datasets") is None:
        raise _no_datasets(source, "file")


def _stdlib(seed: int) -> Iterator[str]:
    """Python source of the standard library in random order; tests and data-like files are left out."""
    files = list(_stdlib_files())
    if not files:
        raise DataError(
            f"no Python source in {sysconfig.get_paths()['stdlib']}: this interpreter has no standard library to read. "
            "Give --data FILE."
        )
    random.Random(seed).shuffle(files)
    for file in files:
        yield file.read_text(encoding="utf-8", errors="replace")


@cache
def _stdlib_files() -> tuple[Path, ...]:
    found: list[Path] = []
    for folder, inner, names in os.walk(sysconfig.get_paths()["stdlib"]):
        inner[:] = [name for name in inner if name not in NOT_READ]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return tuple(file for file in sorted(found) if 2_000 < file.stat().st_size < 300_000)


def _no_datasets(name: str, place: str) -> DataError:
    return DataError(f"'{name}' is not a {place}, and the datasets package is missing: pip install datasets.")


def from_dataset(name: str, place: str, meaning: str, made: Callable[[Any], Iterable[Item]]) -> Iterator[Item]:
    """What `made` makes of the rows of a data set (name:config:split); `place` and `meaning` are for errors."""
    try:
        import datasets
    except ImportError:
        raise _no_datasets(name, place) from None
    repo, config, split = (*name.split(":"), "", "")[:3]
    try:
        yield from made(datasets.load_dataset(repo, config or None, split=split or "train", streaming=True))
    except DataError:
        raise
    except Exception as error:  # the hub's client raises many kinds; all mean the same to the user
        raise DataError(f"'{name}' is neither a {place} nor a data set that loads ({error}). Give {meaning}.") from None


def start_of(tokenizer: Any) -> list[int]:
    """The token that a tokenizer begins every text with, if there is one."""
    start = tokenizer("", add_special_tokens=True)["input_ids"][:1]
    return [token for token in start if token == tokenizer.bos_token_id]


def blocks_of(
    texts: Iterable[str], tokenizer: Any, length: int, count: int | None = None, what: str = "the text"
) -> torch.Tensor:
    """Token blocks (count, length). If the tokenizer begins texts with a token, every block begins with it too."""
    start = start_of(tokenizer)
    rows: list[list[int]] = []
    pool: list[int] = []
    for tokens in _tokenized(texts, tokenizer):
        pool += start + tokens
        at = 0
        while len(pool) - at >= length:
            lead = start if pool[at : at + 1] != start else []
            rows.append(lead + pool[at : at + length - len(lead)])
            at += length - len(lead)
            if count is not None and len(rows) == count:
                return torch.tensor(rows)
        pool = pool[at:]
    return _as_tensor(rows, pool, length, what)


def _tokenized(texts: Iterable[str], tokenizer: Any) -> Iterator[list[int]]:
    """The tokens of every text. Many texts are tokenized at once, more each time: cores share them, few are wasted."""
    some: list[str] = []
    size, (wanted, most) = 0, AT_ONCE
    for text in chain(texts, (None,)):
        if text is not None:
            some.append(text)
            size += len(text)
        if some and (text is None or size >= wanted):
            yield from tokenizer(some, add_special_tokens=False, verbose=False)["input_ids"]
            some, size, wanted = [], 0, min(2 * wanted, most)


def closed_lengths(length: int) -> tuple[int, ...]:
    """The lengths of an encoder's blocks, each equally frequent.

    >>> closed_lengths(64)
    (8, 16, 32, 64)
    """
    found = [length]
    while found[-1] >= 2 * SHORTEST:
        found.append(found[-1] // 2)
    return tuple(reversed(found))


def closed_blocks(
    texts: Iterable[str], tokenizer: Any, length: int, count: int | None = None, what: str = "the text"
) -> torch.Tensor:
    """Token blocks (count, length) for encoders: rows of random lengths, between the tokens that open and close a text.

    Positions behind the longest block would not be calibrated at all, so lengths up to `length` occur.
    """
    ends = tokenizer("", add_special_tokens=True)["input_ids"]
    half = 0 if ends == [tokenizer.eos_token_id] else (len(ends) + 1) // 2
    lengths, draw = closed_lengths(length), random.Random(0)
    rows: list[list[int]] = []
    pool: list[int] = []
    size = draw.choice(lengths)
    for text in texts:
        pool += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        while len(pool) >= size - len(ends) and (count is None or len(rows) < count):
            row = [*ends[:half], *pool[: size - len(ends)], *ends[half:]]
            rows.append(row + [NOTHING] * (length - size))
            pool, size = pool[size - len(ends) :], draw.choice(lengths)
        if count is not None and len(rows) == count:
            break
    return _as_tensor(rows, pool, size, what)


def _as_tensor(rows: list[list[int]], left: list[int], length: int, what: str) -> torch.Tensor:
    if not rows:
        raise DataError(f"{what} has {len(left)} tokens, fewer than one block of {length}; give a longer text.")
    return torch.tensor(rows)


def marks_of(blocks: torch.Tensor) -> torch.Tensor:
    """The mark of every place: a token, `NOTHING`, or the marker before a target."""
    return blocks if blocks.dim() == 2 else blocks[..., 0]


def lengths_of(blocks: torch.Tensor, row: int | None = None) -> torch.Tensor:
    """Tokens of every block."""
    return (marks_of(blocks) != NOTHING).sum(1) if row is None else torch.full((len(blocks),), row)


def count_tokens(blocks: torch.Tensor, row: int | None = None) -> int:
    """The number of tokens in blocks."""
    return int((marks_of(blocks) >= 0).sum()) if row is None else row * len(blocks)


def mean_length(blocks: torch.Tensor, row: int | None = None) -> int:
    """Mean tokens of a block."""
    return count_tokens(blocks, row) // len(blocks)


def places(blocks: torch.Tensor, row: int | None = None) -> int:
    """The number of places in blocks, filled or not."""
    return len(blocks) * (blocks.shape[1] if row is None else row)


def rows_by_length(blocks: torch.Tensor, tokens: int, row: int | None = None) -> list[tuple[torch.Tensor, int]]:
    """Batches of about `tokens` tokens: the rows of each, and their length, which they share.

    Rows that hold two texts share the lengths of both.
    """
    lengths = lengths_of(blocks, row)
    first = (marks_of(blocks) < NOTHING).int().argmax(1) if row is None else torch.zeros_like(lengths)
    return [
        (rows, length)
        for length, input_length in torch.stack((lengths, first), 1).unique(dim=0).tolist()
        for rows in torch.nonzero((lengths == length) & (first == input_length))
        .flatten()
        .split(max(1, tokens // length))
    ]


def batches(blocks: torch.Tensor, tokens: int = 4096, row: int | None = None) -> list[torch.Tensor]:
    """Rows in batches of about `tokens` tokens, each of one length."""
    parts = rows_by_length(blocks, tokens, row)
    return [blocks[rows, :length] if row is None else blocks[rows] for rows, length in parts]


def measured_and_others(
    tokens: torch.Tensor, measured: int, least: int, row: int | None = None, joined: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """About `measured` tokens to measure options on, and twice as many others to heal each option on first.

    The former are read in rows that are as long as `joined` of the given ones, which follow each other.
    """

    def spread(rows: list[int], count: int) -> list[int]:
        return rows[:: max(1, len(rows) // count)][:count]

    length = mean_length(tokens, row)
    joined = max(1, min(joined, len(tokens) // 2))
    starts = spread(list(range(0, len(tokens) - joined + 1, joined)), max(2, measured // (length * joined)))
    few = [start + more for start in starts for more in range(joined)]
    rest = [row for row in range(len(tokens)) if row not in set(few)] or few
    found = tokens[few].reshape(len(starts), -1) if joined > 1 else tokens[few]
    return found, tokens[spread(rest, max(2, 2 * measured // length, least // length))]
