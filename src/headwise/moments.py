"""Second moments of a model as a file of a run folder."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from headwise.cuts import Moments
from headwise.keeping.disk import write_file


def write_moments(path: Path, moments: list[Moments]) -> None:
    """Write what a probing found, whole or not at all."""
    flat = {f"{i}.{name}": t.float().cpu().contiguous() for i, layer in enumerate(moments) for name, t in layer.items()}
    write_file(path, lambda new: save_file(flat, new))


def as_stored(moments: list[Moments], device: torch.device | str) -> list[Moments]:
    """Moments as `read_moments` would give them back: a probing that is resumed computes with the same numbers."""
    return [{name: _wide(name, tensor.float(), device) for name, tensor in layer.items()} for layer in moments]


def _wide(name: str, tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """In double precision, but for what is large: that is made double where it is used."""
    return tensor.to(device, None if name == "gram_mlp" else torch.float64)


def read_moments(path: Path, device: torch.device | str) -> list[Moments]:
    """The moments that a probing left behind, on a device."""
    out: dict[int, Moments] = {}
    for key, tensor in load_file(path).items():
        index, name = key.split(".", 1)
        out.setdefault(int(index), {})[name] = _wide(name, tensor, device)
    return [out[i] for i in sorted(out)]
