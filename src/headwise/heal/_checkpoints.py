"""Trained layers, kept one by one in a folder: a killed healing resumes behind the last of them."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from headwise.errors import HeadwiseError
from headwise.files import tensors as stored
from headwise.files.json import parse_json
from headwise.types import write_atomically


class LayerCheckpoints:
    """The files of layers, in the order of training. Without a folder nothing is kept.

    Every file bears a fingerprint of the settings, the rows, and the weights of its layer and of those before it, so
    that a file of other work never counts.
    """

    def __init__(self, folder: Path | None, name: str, settings: str, rows: torch.Tensor) -> None:
        self.folder, self.name, self.number = folder, name, 0
        self.fingerprint = hashlib.sha256(f"{name} {settings}".encode())
        if folder is not None:
            self.fingerprint.update(rows.cpu().contiguous().numpy().tobytes())

    def load(self, layer: nn.Module) -> dict[str, Any] | None:
        """Give the next layer its trained weights and return the record saved with them; None: it is to be trained."""
        self.number += 1
        if self.folder is None:
            return None
        for name, tensor in layer.state_dict().items():
            self.fingerprint.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
        path = self._path(self.folder)
        try:
            noted = stored.metadata(path)
            if noted.get("mark") != self.fingerprint.hexdigest():
                return None
            weights, found = stored.read(path), parse_json(noted.get("found", ""), path)
            stored.require(weights, {name: t.shape for name, t in layer.state_dict().items()}, path, integers=True)
        except HeadwiseError:  # not there, or damaged
            return None
        layer.load_state_dict(weights, strict=False)
        return found if isinstance(found, dict) else None

    def save(self, layer: nn.Module, found: dict[str, Any]) -> None:
        """Keep the layer that `load` was called for last, now trained, and a record of its training."""
        if self.folder is not None:
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in layer.state_dict().items()}
            noted = {"mark": self.fingerprint.hexdigest(), "found": json.dumps(found)}
            write_atomically(self._path(self.folder), save(tensors, noted))

    def _path(self, folder: Path) -> Path:
        return folder / f"{self.name}-{self.number}.safetensors"
