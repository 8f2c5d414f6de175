"""Second moments of a model as a file of a run folder."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from headwise.cuts import Moments
from headwise.errors import PlanError
from headwise.files import tensors
from headwise.files.disk import write_file
from headwise.types import LayerShape

AGAIN = "delete it and probe again"


def write_moments(path: Path, moments: list[Moments]) -> None:
    """Write what a probing found, whole or not at all."""
    flat = {f"{i}.{name}": t.float().cpu().contiguous() for i, layer in enumerate(moments) for name, t in layer.items()}
    write_file(path, lambda new: save_file(flat, new))


def as_stored(moments: list[Moments], device: torch.device | str) -> list[Moments]:
    """Moments as `read_moments` would give them back: a probing that is resumed computes with the same numbers."""
    return [{name: _wide(name, tensor.float(), device) for name, tensor in layer.items()} for layer in moments]


def _wide(name: str, tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """In double precision, but for what is large: that is made double where it is used."""
    return tensor.to(device, None if name == "gram_mlp" or name.startswith(("w_", "g_")) else torch.float64)


def read_moments(path: Path, device: torch.device | str, layers: Sequence[LayerShape]) -> list[Moments]:
    """The moments that a probing of these layers left behind, on a device."""
    out: list[Moments] = [{} for _ in layers]
    for key, tensor in tensors.read(path, advice=AGAIN).items():
        index, _, name = key.partition(".")
        if not index.isdecimal() or not name or int(index) >= len(layers):
            raise PlanError(f"{path} holds {key[:80]!r}, which is no moment of {len(layers)} layers; {AGAIN}.")
        out[int(index)][name] = tensor
    return [
        checked(found, layer, path, index, device) for index, (found, layer) in enumerate(zip(out, layers, strict=True))
    ]


def read_layer(path: Path, layer: LayerShape, index: int, device: str = "cpu") -> Moments:
    """The moments of one layer of a streamed model."""
    found = checked(tensors.read(path, advice=AGAIN), layer, path, index, device)
    return {name: tensor.double() for name, tensor in found.items()}


def checked(found: Moments, layer: LayerShape, path: Path, index: int, device: torch.device | str) -> Moments:
    """The moments of one layer, once they are known to be complete, of its sizes and finite."""
    sizes = {name: tuple(tensor.shape) for name, tensor in found.items()}  # of others, only that they are finite
    key, value, coded = layer.qk_dim, layer.v_dim, any(name.startswith(("k_", "v_")) for name in found)
    if layer.query_heads and coded:
        for part, size in (("k", key), ("v", value)):
            each = {"basis": (size, size), "mean": (size,), "price": (size,), "near": ()}
            sizes |= {f"{part}_{name}": (layer.kv_heads, *shape) for name, shape in each.items()}
    bits = coded or any(name.startswith("w_") for name in found)
    if layer.query_heads and not (bits and not any(name.startswith("gram_") for name in found)):  # bits need no others
        sizes |= dict.fromkeys(("gram_q", "gram_k"), (layer.kv_heads, key, key))
        sizes["gram_z"] = (layer.query_heads, value, value)
    if "gram_mlp" in found:
        sizes["gram_mlp"] = (layer.mlp_width, layer.mlp_width)
    tensors.require(found, sizes, path, advice=f"it is of layer {index}; {AGAIN}")
    return {name: _wide(name, tensor, device) for name, tensor in found.items()}
