"""A checkpoint on disk: one or many safetensors files, of which a tensor or some of its rows are read at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

from headwise.errors import ModelError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Entry(NamedTuple):
    """What a file's header says of a tensor."""

    file: Path
    shape: tuple[int, ...]
    bytes: int

    @property
    def numbers(self) -> int:
        """How many it holds."""
        return prod(self.shape)


class Checkpoint:
    """The tensors of a folder by name. Nothing is held: files are mapped while a tensor is copied out of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries = {name: entry for file in _files(folder) for name, entry in header(file)}

    def tensor(self, name: str) -> torch.Tensor:
        """A copy of one tensor."""
        with safe_open(self.entries[name].file, "pt") as file:
            found: torch.Tensor = file.get_tensor(name).clone()
            return found

    def rows(self, name: str, chosen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy of some rows of a table; of the rest nothing is read."""
        with safe_open(self.entries[name].file, "pt") as file:
            found: torch.Tensor = file.get_tensor(name)[chosen].to(dtype)
            return found

    def slices(self, name: str, size: int) -> Iterator[torch.Tensor]:
        """The rows of a table, so many at a time."""
        for start in range(0, self.entries[name].shape[0], size):
            with safe_open(self.entries[name].file, "pt") as file:
                yield file.get_slice(name)[start : start + size].clone()


def _files(folder: Path) -> list[Path]:
    """The files of a checkpoint: those that its index names, or the one that there is."""
    if (folder / INDEX).is_file():
        named = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        files = [folder / name for name in named if Path(name).name == name]
    else:
        files = [folder / SINGLE]
    if lost := [file.name for file in files if not file.is_file()]:
        raise ModelError(
            f"{folder} holds no {lost[0]}; streaming reads safetensors only. Fetch the files again, or leave out "
            "--stream."
        )
    return files


def header(file: Path) -> Iterator[tuple[str, Entry]]:
    """Names and sizes as the file's first bytes tell them."""
    try:
        with file.open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
            if length > min(file.stat().st_size, 100_000_000):
                raise ValueError("no header")
            entries = json.loads(raw.read(length))
        entries.pop("__metadata__", None)
        for name, found in entries.items():
            start, end = found["data_offsets"]
            yield name, Entry(file, tuple(found["shape"]), end - start)
    except (ValueError, KeyError, OSError) as error:
        raise ModelError(f"{file} is no safetensors file ({error}); fetch it again.") from None
