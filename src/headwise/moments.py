"""Second moments of a model as a file of a run folder."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from headwise.cuts import Moments


def write_moments(path: Path, moments: list[Moments]) -> None:
    """Write what a probing found, whole or not at all."""
    flat = {f"{i}.{name}": t.float().cpu().contiguous() for i, layer in enumerate(moments) for name, t in layer.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    save_file(flat, temporary)
    temporary.replace(path)


def read_moments(path: Path, device: torch.device | str) -> list[Moments]:
    """The moments that a probing left behind, on a device."""
    out: dict[int, Moments] = {}
    for key, tensor in load_file(path).items():
        index, name = key.split(".", 1)
        wide = name == "gram_mlp"  # large, and made double where it is used
        out.setdefault(int(index), {})[name] = tensor.to(device, None if wide else torch.float64)
    return [out[i] for i in sorted(out)]
