"""A checkpoint on disk: one or many safetensors files, of which a tensor or some of its rows are read at a time."""

from collections.abc import Iterator
from pathlib import Path

import torch

from headwise.errors import ModelError
from headwise.files import tensors
from headwise.files.json import read_object

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
AGAIN = "fetch it again"


class Checkpoint:
    """The tensors of a folder by name. Nothing is held: files are mapped while a tensor is copied out of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        headers = [tensors.header(file, ModelError, AGAIN) for file in files_of(folder)]
        self.entries = {name: entry for header in headers for name, entry in header.items()}

    def tensor(self, name: str, device: str = "cpu") -> torch.Tensor:
        """A copy of one tensor, on a device."""
        with tensors.opened(self.entries[name].file, ModelError, AGAIN) as file:
            found: torch.Tensor = file.get_tensor(name).to(device, copy=True)
            return found

    def rows(self, name: str, chosen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy of some rows of a table; of the rest nothing is read."""
        with tensors.opened(self.entries[name].file, ModelError, AGAIN) as file:
            found: torch.Tensor = file.get_tensor(name)[chosen].to(dtype)
            return found

    def slices(self, name: str, size: int) -> Iterator[torch.Tensor]:
        """The rows of a table, so many at a time."""
        for start in range(0, self.entries[name].shape[0], size):
            with tensors.opened(self.entries[name].file, ModelError, AGAIN) as file:
                yield file.get_slice(name)[start : start + size].clone()


def files_of(folder: Path) -> list[Path]:
    """The files of a checkpoint: those that its index names, or the one that there is."""
    files = [folder / name for name in _named(folder / INDEX)] if (folder / INDEX).is_file() else [folder / SINGLE]
    if lost := [file.name for file in files if not file.is_file()]:
        raise ModelError(
            f"{folder} holds no {lost[0]}; streaming reads safetensors only. Fetch the files again, or leave out "
            "--stream."
        )
    return files


def _named(index: Path) -> list[str]:
    """The files that an index names, all of them beside it."""
    found = read_object(index, ModelError, AGAIN).get("weight_map")
    names = list(found.values()) if isinstance(found, dict) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ModelError(f"{index} does not name the files that hold the weights; {AGAIN}.")
    return sorted(set(names))
