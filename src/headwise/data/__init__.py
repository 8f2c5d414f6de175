"""Calibration and evaluation text from any source, cut into blocks; seeded.

Blocks are rows of one tensor. Decoders get rows of equal length. Encoders meet texts of any length and mind which, so
their rows differ in length, and shorter ones end in `NOTHING`; `batches` puts rows of equal length together. How many
tokens a row of something else than tokens makes, such as an image, is told as `row`. Where a place of a row holds more
than a token, such as sound, the rows are (count, length, numbers), and the first number is the place's mark: its token.
"""

from __future__ import annotations

import bz2
import gzip
import importlib.util
import json
import lzma
import random
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headwise.errors import DataError

NOTHING = -1  # where a row has ended
GIVEN, WRITTEN = -2, -3  # in rows of encoder-decoders before the target: one that was given, or that the model wrote
SHORTEST = 8  # block of an encoder's text
SEPARATOR = "<|endoftext|>"
PEEKED = 1 << 16  # characters of a text that are looked at before it is read
ARMFUL = 1 << 20  # characters to make tokens of at once
OPENERS: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
MEANING = (
    "a text or jsonl file (also .xz, .gz, .bz2), a datasets name (name:config:split), 'stdlib', 'self' or FILE+self"
)


class Rows(NamedTuple):
    """What was read, row by row, and the right answers where they are known: a class for every row, -1 for none."""

    rows: torch.Tensor
    truth: torch.Tensor | None = None

    def part(self, chosen: slice) -> Rows:
        """Some of the rows."""
        return Rows(self.rows[chosen], None if self.truth is None else self.truth[chosen])


def documents(source: str, seed: int = 0) -> Iterator[str]:
    """The texts of a source: a file, a `datasets` name, or `stdlib` (the source code of the running interpreter)."""
    path = Path(source)
    if source == "stdlib":
        yield from _stdlib(seed)
    elif path.is_file():
        yield from _file(path)
    elif path.suffix and not path.is_dir():
        raise DataError(f"{source} does not exist. Give {MEANING}.")
    else:
        yield from _dataset(source)


def peek(source: str) -> None:
    """Refuse a source that does not exist or does not begin as text does; data sets are not asked for."""
    path = Path(source)
    if source == "stdlib":
        next(_stdlib(0))
    elif path.is_file():
        with _readable(path), OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
            if _inner(path) == ".jsonl":
                line = next((line for line in file if line.strip()), '""')
                _record(json.loads(line), path, 1)
            else:
                file.read(PEEKED)
    elif path.suffix and not path.is_dir():
        raise DataError(f"{source} does not exist. Give {MEANING}.")
    elif importlib.util.find_spec("datasets") is None:
        raise _no_data_sets(source)


def _stdlib(seed: int) -> Iterator[str]:
    """Python source of the standard library in a seeded order; tests and data-like files are left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "encodings", "pydoc_data"}
    files = [p for p in sorted(root.rglob("*.py")) if not skip & set(p.relative_to(root).parts[:-1])]
    files = [p for p in files if 2_000 < p.stat().st_size < 300_000]
    if not files:
        raise DataError(
            f"no Python source in {root}: this interpreter has no standard library to read. Give --data FILE."
        )
    random.Random(seed).shuffle(files)
    for file in files:
        yield file.read_text(encoding="utf-8", errors="replace")


def _file(path: Path) -> Iterator[str]:
    with _readable(path), OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
        if _inner(path) == ".jsonl":
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _record(json.loads(line), path, number)
        else:
            yield from (part for part in file.read().split(SEPARATOR) if part.strip())


def _inner(path: Path) -> str:
    """The suffix of what a file holds, compressed or not."""
    return Path(path.stem).suffix if path.suffix in OPENERS else path.suffix


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Say in one line that a file is no text."""
    try:
        yield
    except (ValueError, RecursionError, EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        raise DataError(f"{path} cannot be read as text ({error}). Give {MEANING}.") from None


class Paired(str):
    """A text that comes with the one that is wanted for it, such as its translation."""

    __slots__ = ("target",)
    target: str


def _record(item: Any, path: Path, number: int) -> str:
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


def _no_data_sets(name: str) -> DataError:
    return DataError(f"'{name}' is not a file, and the datasets package is missing: pip install datasets.")


def _dataset(name: str) -> Iterator[str]:
    try:
        import datasets
    except ImportError:
        raise _no_data_sets(name) from None
    repo, config, split = (*name.split(":"), "", "")[:3]
    try:
        rows = datasets.load_dataset(repo, config or None, split=split or "train", streaming=True)
        for row in rows:
            yield _record(row, Path(name), 0)
    except DataError:
        raise
    except Exception as error:  # the hub's client raises many kinds; all mean the same to the user
        raise DataError(f"'{name}' is neither a file nor a data set that loads ({error}). Give {MEANING}.") from None


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
    for tokens in (found for some in _armfuls(texts) for found in _tokens(some, tokenizer)):
        pool += start + tokens
        at = 0
        while len(pool) - at >= length:
            lead = start if pool[at : at + 1] != start else []
            rows.append(lead + pool[at : at + length - len(lead)])
            at += length - len(lead)
            if count is not None and len(rows) == count:
                return torch.tensor(rows)
        pool = pool[at:]
    if not rows:
        raise DataError(f"{what} has {len(pool)} tokens, fewer than one block of {length}; give a longer text.")
    return torch.tensor(rows)


def _armfuls(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts, some at a time: tokenizers share them among the cores."""
    some: list[str] = []
    size = 0
    for text in texts:
        some.append(text)
        size += len(text)
        if size >= ARMFUL:
            yield some
            some, size = [], 0
    if some:
        yield some


def _tokens(texts: list[str], tokenizer: Any) -> list[list[int]]:
    found: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return found


def closed_lengths(length: int) -> tuple[int, ...]:
    """The lengths of an encoder's blocks: short texts are as many as long ones.

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
    """Token blocks (count, length) for encoders: rows of drawn lengths, between the tokens that open and close a text.

    Lengths matter because learned positions do: what lies behind the longest block is not calibrated at all.
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
    if not rows:
        raise DataError(f"{what} has {len(pool)} tokens, fewer than one block of {size}; give a longer text.")
    return torch.tensor(rows)


def marks_of(blocks: torch.Tensor) -> torch.Tensor:
    """The token of every place, or what else stands there: `NOTHING`, or the marker before a target."""
    return blocks if blocks.dim() == 2 else blocks[..., 0]


def lengths_of(blocks: torch.Tensor, row: int | None = None) -> torch.Tensor:
    """Tokens of every block."""
    return (marks_of(blocks) != NOTHING).sum(1) if row is None else torch.full((len(blocks),), row)


def count_tokens(blocks: torch.Tensor, row: int | None = None) -> int:
    """How many tokens blocks hold."""
    return int((marks_of(blocks) >= 0).sum()) if row is None else row * len(blocks)


def mean_length(blocks: torch.Tensor, row: int | None = None) -> int:
    """Tokens of a block."""
    return count_tokens(blocks, row) // len(blocks)


def places(blocks: torch.Tensor, row: int | None = None) -> int:
    """How many tokens blocks have room for."""
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
    tokens: torch.Tensor, measured: int, least: int, row: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """About `measured` tokens to measure options on, and others, twice as many, to heal each option on before."""

    def spread(rows: list[int], count: int) -> list[int]:
        return rows[:: max(1, len(rows) // count)][:count]

    length = mean_length(tokens, row)
    few = spread(list(range(len(tokens))), max(2, measured // length))
    rest = [row for row in range(len(tokens)) if row not in set(few)] or few
    return tokens[few], tokens[spread(rest, max(2, 2 * measured // length, least // length))]
