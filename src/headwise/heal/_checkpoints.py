"""Trained layers, kept one by one in a folder: a killed healing resumes behind the last of them."""

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


class LayerCheckpoint(NamedTuple):
    """The file of one trained layer, and the fingerprint that it must bear to count."""

    path: Path | None
    fingerprint: str

    def load(self, layer: nn.Module) -> dict[str, Any] | None:
        """Set a layer to its trained weights and return the record saved with them; None if it is still to train."""
        if self.path is None:
            return None
        try:
            noted = stored.metadata(self.path)
            if noted.get("mark") != self.fingerprint:
                return None
            weights, found = stored.read(self.path), parse_json(noted.get("found", ""), self.path)
            stored.require(weights, {name: t.shape for name, t in layer.state_dict().items()}, self.path, integers=True)
        except HeadwiseError:  # not there, or damaged
            return None
        layer.load_state_dict(weights, strict=False)
        return found if isinstance(found, dict) else None

    def save(self, layer: nn.Module, found: dict[str, Any]) -> None:
        """Keep a trained layer and a record of its training."""
        if self.path is not None:
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in layer.state_dict().items()}
            write_atomically(self.path, save(tensors, {"mark": self.fingerprint, "found": json.dumps(found)}))


class LayerCheckpoints:
    """The files of layers, in the order of training. The fingerprint of a file covers the settings, the rows, and the
    weights of this layer and of those before it, so that a file of other work never counts. Without a folder nothing
    is kept.
    """

    def __init__(self, folder: Path | None, name: str, settings: str, rows: torch.Tensor) -> None:
        self.folder, self.name, self.number = folder, name, 0
        self.fingerprint = hashlib.sha256(f"{name} {settings}".encode())
        if folder is not None:
            self.fingerprint.update(rows.cpu().contiguous().numpy().tobytes())

    def next(self, layer: nn.Module) -> LayerCheckpoint:
        """The checkpoint of the next layer, which is given as it is before training."""
        self.number += 1
        if self.folder is None:
            return LayerCheckpoint(None, "")
        for name, tensor in layer.state_dict().items():
            self.fingerprint.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
        return LayerCheckpoint(self.folder / f"{self.name}-{self.number}.safetensors", self.fingerprint.hexdigest())
