"""Write matrices in few bits: the files of a saved model in the format of compressed-tensors (`pack-quantized`).

Stock transformers loads such a folder where the package compressed-tensors is installed, and so does vLLM where all
packed matrices are of layers and have 4 or 8 bits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headwise.errors import HeadwiseError
from headwise.files import tensors
from headwise.linalg import Rounded

PARTS = ("weight_packed", "weight_scale", "weight_shape")  # of a matrix in few bits
INSTALL = "weights in few bits need the package compressed-tensors: pip install compressed-tensors"


def pack(folder: Path, packed: Mapping[str, Rounded], tied: Mapping[str, str]) -> None:
    """Replace matrices, by the names of their modules, in the files of a folder that was just saved.

    `tied` names the modules that share another's table: output -> table of words.
    """
    for file in sorted(folder.glob("*.safetensors")):
        _pack_file(file, packed)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        named = json.loads(index.read_text())
        named["weight_map"] = _renamed(named["weight_map"], packed)
        index.write_text(json.dumps(named, indent=2, sort_keys=True) + "\n")
    settings = json.loads((folder / "config.json").read_text())
    shared = {name: packed[table] for name, table in tied.items() if table in packed}
    settings["quantization_config"] = described({**packed, **shared})
    if shared:
        settings["headwise"]["packed_table"] = list(PARTS)
    (folder / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def _pack_file(file: Path, packed: Mapping[str, Rounded]) -> None:
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.read(file).items():
        new = packed.get(name.removesuffix(".weight"))
        found |= {name: tensor} if new is None else _parts(name.removesuffix("weight"), new)
    save_file(found, file, metadata={"format": "pt"})


def _parts(prefix: str, new: Rounded) -> dict[str, torch.Tensor]:
    try:
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    except ImportError:
        raise HeadwiseError(f"{INSTALL}.") from None
    whole = pack_to_int32(new.whole.cpu(), new.bits)
    sizes = torch.tensor(new.whole.shape)
    return dict(zip((prefix + part for part in PARTS), (whole, new.scale.cpu().contiguous(), sizes), strict=True))


def _renamed(places: Mapping[str, str], packed: Mapping[str, Rounded]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, place in places.items():
        prefix = name.removesuffix("weight")
        parts = [prefix + part for part in PARTS] if name.removesuffix(".weight") in packed else [name]
        found |= dict.fromkeys(parts, place)
    return found


def described(packed: Mapping[str, Rounded]) -> dict[str, Any]:
    """The configuration that tells transformers what is packed: one group of modules for every width and group size."""
    groups: dict[tuple[int, int | None], list[str]] = {}
    for name, new in packed.items():
        columns, scales = new.whole.shape[1], new.scale.shape[1]
        groups.setdefault((new.bits, None if scales == 1 else columns // scales), []).append(name)
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": [],
        "config_groups": {
            f"group_{number}": {"targets": sorted(names), "weights": _scheme(bits, size)}
            for number, ((bits, size), names) in enumerate(sorted(groups.items(), key=str))
        },
    }


def _scheme(bits: int, group: int | None) -> dict[str, Any]:
    strategy = "channel" if group is None else "group"
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, "group_size": group}
