"""Text as one long file of token numbers, made once and mapped into memory: rows are windows of it."""

import hashlib
import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headwise.data import documents, text_files
from headwise.errors import DataError, OutputError
from headwise.files.disk import explained, write_file
from headwise.files.json import is_number, read_object, regular
from headwise.types import write_atomically

AT_ONCE = 256  # texts handed to the tokenizer together
ON_DEVICE = 4 << 30  # bytes up to which a file is held on the accelerator


def token_file(source: str, tokenizer: Any, path: Path, seed: int = 0, between: bool = True) -> np.ndarray[Any, Any]:
    """The tokens of a source, mapped from `path`; tokenised into it unless that was done before.

    Every text begins with the tokenizer's first (or else last) special token if `between`, so that a model can tell
    where texts meet.
    """
    about, dtype = path.with_suffix(".json"), np.dtype(np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32)
    origin = {"source": source, "changed": _changed(source), "tokenizer": _print_of(tokenizer), "seed": seed}
    if about.exists():
        known = _known(about, path, dtype, len(tokenizer))
        if {name: known.get(name) for name in origin} != origin:
            raise OutputError(
                f"{source} or its tokenizer is not what {path} was made of; restore it, or choose another --out."
            )
    else:
        start = (tokenizer.bos_token_id, tokenizer.eos_token_id) if between else ()
        lead = [token for token in start if token is not None][:1]
        known = {**origin, **_write(documents(source, seed), tokenizer, path, dtype, lead)}
        write_atomically(about, json.dumps(known, indent=1) + "\n")
    if not known["tokens"]:
        about.unlink()
        raise DataError(f"{source} holds no text; give --data a file with some.")
    return np.memmap(path, dtype=dtype, mode="c", shape=(known["tokens"],))


def _known(about: Path, path: Path, dtype: np.dtype[Any], words: int) -> dict[str, Any]:
    """What is written beside a token file, once the file is known to hold that."""
    advice = f"delete {about} and run again"
    found = read_object(about, OutputError, advice)
    count, size = found.get("tokens"), regular(path, OutputError, advice)
    if not is_number(count) or size != count * dtype.itemsize:
        raise OutputError(f"{path} does not hold the tokens that {about.name} names; {advice}.")
    if count and int(np.memmap(path, dtype=dtype, mode="r").max()) >= words:
        raise OutputError(f"{path} holds tokens that the tokenizer does not know; {advice}.")
    return found


def _write(texts: Iterable[str], tokenizer: Any, path: Path, dtype: np.dtype[Any], lead: list[int]) -> dict[str, int]:
    """Tokenise into a file, whole or not at all."""
    counted, read, rest = 0, 0, iter(texts)

    def fill(new: Path) -> None:
        nonlocal counted, read
        with new.open("wb") as file:
            while some := list(islice(rest, AT_ONCE)):
                for ids in tokenizer(some, add_special_tokens=False, verbose=False)["input_ids"]:
                    file.write(np.array([*lead, *ids], dtype=dtype).tobytes())  # `tofile` hides a full disk
                    counted += len(lead) + len(ids)
                read += sum(len(text.encode()) for text in some)

    with explained(path):
        write_file(path, fill)
    return {"tokens": counted, "text_bytes": read}


def _changed(source: str) -> list[int]:
    """Sizes and times of files, so that a training never resumes on another text than it began with."""
    found = [file.stat() for file in text_files(Path(source))]
    return [number for stat in found for number in (stat.st_size, stat.st_mtime_ns)]


def _print_of(tokenizer: Any) -> str:
    words = json.dumps(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))
    return hashlib.sha256(words.encode()).hexdigest()


class TokenRows:
    """Windows of `width` tokens of a token file, as rows of a tensor; on the accelerator where there is room."""

    def __init__(self, tokens: np.ndarray[Any, Any], width: int, device: torch.device) -> None:
        self.count, self.device = len(tokens) // width, device
        self.mask = 0xFFFF if tokens.dtype == np.uint16 else 0xFFFFFFFF
        signed = tokens[: self.count * width].view(np.int16 if tokens.dtype == np.uint16 else np.int32)
        self.rows = torch.from_numpy(signed).view(self.count, width)  # torch can index signed numbers alone
        if device.type != "cpu" and tokens.nbytes <= ON_DEVICE:
            self.rows = self.rows.to(device)

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows by their numbers (B, width), on the device."""
        found = self.rows[rows.to(self.rows.device)]
        if found.device.type != self.device.type:
            found = found.pin_memory().to(self.device, non_blocking=True)
        return found.long() & self.mask
