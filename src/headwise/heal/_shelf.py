"""Finished pieces of long work, kept in a folder: after a kill the same work finds them and goes on behind them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import nn

from headwise.errors import HeadwiseError
from headwise.files import tensors as stored
from headwise.files.json import parse_json
from headwise.types import write_atomically


class Place(NamedTuple):
    """Where one layer that was worked on is kept, and the mark that its file must bear."""

    path: Path | None
    mark: str

    def fetch(self, layer: nn.Module) -> dict[str, Any] | None:
        """Give a layer the weights it was left with, and return what was noted then; None if the work is to do."""
        if self.path is None:
            return None
        try:
            noted = stored.metadata(self.path)
            if noted.get("mark") != self.mark:
                return None
            weights, found = stored.read(self.path), parse_json(noted.get("found", ""), self.path)
            stored.require(weights, {name: t.shape for name, t in layer.state_dict().items()}, self.path, integers=True)
        except HeadwiseError:  # not there, or no file of ours
            return None
        layer.load_state_dict(weights, strict=False)
        return found if isinstance(found, dict) else None

    def put(self, layer: nn.Module, found: dict[str, Any]) -> None:
        """Keep a layer that is done, and what is to be known about it."""
        if self.path is not None:
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in layer.state_dict().items()}
            write_atomically(self.path, save(tensors, {"mark": self.mark, "found": json.dumps(found)}))


class Shelf:
    """Places for layers, in order. A file counts only for the same work on the same weights after the same pieces: its
    mark is drawn from all of these.
    """

    def __init__(self, folder: Path | None, name: str, asked: str, rows: torch.Tensor) -> None:
        self.folder, self.name, self.number = folder, name, 0
        self.mark = hashlib.sha256(f"{name} {asked}".encode())
        if folder is not None:
            self.mark.update(rows.cpu().contiguous().numpy().tobytes())

    def place(self, layer: nn.Module) -> Place:
        """The place of the next layer, as it is before the work."""
        self.number += 1
        if self.folder is None:
            return Place(None, "")
        for name, tensor in layer.state_dict().items():
            self.mark.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
        return Place(self.folder / f"{self.name}-{self.number}.safetensors", self.mark.hexdigest())
