"""Turns the two parts of the corpus into arrays of tokens, in parallel over the processors."""

from __future__ import annotations

import lzma
import multiprocessing
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
GROUP_BYTES = 500_000
MAX_WORKERS = 16

_tokenizer: Tokenizer | None = None


@dataclass
class Part:
    """One part of the corpus: its tokens, every file preceded by the end marker, and the size of its text."""

    tokens: np.ndarray
    text_bytes: int


def _start(path: str) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = Tokenizer.from_file(path)


def _encode(texts: list[str]) -> np.ndarray:
    assert _tokenizer is not None
    end = _tokenizer.token_to_id(END_OF_TEXT)
    assert end is not None
    ids: list[int] = []
    for text in texts:
        ids.append(end)
        ids.extend(_tokenizer.encode(text).ids)
    return np.array(ids, dtype=np.uint16)


def _groups(texts: list[str]) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    size = 0
    for text in texts:
        if size > GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(text)
        size += len(text)
    return groups


def load_part(path: Path, tokenizer: Path, limit: int | None = None) -> Part:
    """Decompress and tokenise one part of the corpus, at most about `limit` characters of it."""
    with lzma.open(path, "rt", encoding="utf-8", newline="") as file:
        texts = [text for text in file.read(limit or -1).split(END_OF_TEXT) if text]
    workers = min(MAX_WORKERS, os.cpu_count() or 1)
    with multiprocessing.Pool(workers, _start, (str(tokenizer / "tokenizer.json"),)) as pool:
        arrays = pool.map(_encode, _groups(texts), chunksize=1)
    return Part(np.concatenate(arrays), sum(len(text.encode()) for text in texts))
