"""A model of a GGUF file, and texts, in pieces that are small enough for a machine that takes little at a time.

    python benchmarks/pieces.py pack model.gguf folder out --texts a.txt b.txt --most 32   # MiB of a piece, at most
    python benchmarks/pieces.py unpack out destination                                     # there

`folder` is what dequantise.py made of the file. Unpacking needs neither the package gguf nor much time: blocks of Q4_1
and Q8_0 are unpacked by numpy, and a digest says whether every number is that of `folder`. For models with the names
of Llama: others would need the names, and the order of rotary pairs, that transformers knows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import shutil
import tarfile
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

WEIGHTS, ABOUT = "model.safetensors", "about.json"
BLOCKS = {"Q4_1": 20, "Q8_0": 34}  # bytes of 32 numbers
NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def name_of(packed: str) -> str:
    """What transformers calls a tensor.

    >>> name_of("blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    *layer, part, end = packed.split(".")
    return ".".join([*(("model.layers", layer[1]) if layer else ()), NAMES[part], end])


def unpacked(data: bytes, kind: str, shape: list[int]) -> np.ndarray:
    """The numbers of a tensor in float32, as the package gguf unpacks them."""
    if kind == "F32":
        return np.frombuffer(data, np.float32).reshape(shape).copy()
    blocks = np.frombuffer(data, np.uint8).reshape(-1, BLOCKS[kind])
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == "Q8_0":
        return (scale * blocks[:, 2:].view(np.int8)).reshape(shape)
    least, codes = blocks[:, 2:4].copy().view(np.float16).astype(np.float32), blocks[:, 4:]
    return (scale * np.concatenate((codes & 15, codes >> 4), 1) + least).reshape(shape)


def tensors(data: bytes, about: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All weights by name, in bfloat16; rotary pairs lie as transformers has them."""
    found = {}
    for row in about["tensors"]:
        part = unpacked(data[row["start"] : row["end"]], row["kind"], row["shape"])
        heads = about["heads"].get(row["name"].split(".")[-2])
        if heads:
            part = part.reshape(heads, -1, 2, part.shape[1]).swapaxes(1, 2).reshape(part.shape)
        found[name_of(row["name"])] = torch.from_numpy(np.ascontiguousarray(part)).bfloat16().contiguous()
    return found


def digest(weights: dict[str, torch.Tensor]) -> str:
    """One for all numbers."""
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode() + weights[name].view(torch.int16).numpy().tobytes())
    return found.hexdigest()


def pack(file: Path, folder: Path, out: Path, texts: Iterable[Path], most: int) -> None:
    """Write the pieces: the tensors as they are in the file, and all else in one archive."""
    from gguf import GGUFReader

    config = json.loads((folder / "config.json").read_text())
    rows, parts, start = [], [], 0
    for tensor in GGUFReader(file).tensors:
        part = tensor.data.tobytes()
        shape = [int(size) for size in reversed(tensor.shape)]
        rows.append({"name": tensor.name, "kind": tensor.tensor_type.name, "shape": shape})
        rows[-1] |= {"start": start, "end": start + len(part)}
        parts.append(part)
        start += len(part)
    data = b"".join(parts)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    about = {"name": folder.name, "tensors": rows, "heads": heads, "digest": digest(load_file(folder / WEIGHTS))}
    if digest(tensors(data, about)) != about["digest"]:
        raise SystemExit(f"{file} does not unpack to the numbers of {folder}.")
    store = BytesIO()
    with tarfile.open(fileobj=store, mode="w") as archive:
        files = [path for path in folder.iterdir() if path.name != WEIGHTS]
        for path, where in [(path, folder.name) for path in files] + [(path, "texts") for path in texts]:
            archive.add(path, f"{where}/{path.name}")
        told = json.dumps(about).encode()
        entry = tarfile.TarInfo(ABOUT)
        entry.size = len(told)
        archive.addfile(entry, BytesIO(told))
    rest = lzma.compress(store.getvalue(), preset=6)
    whole = len(rest).to_bytes(8, "little") + rest + data
    out.mkdir(parents=True, exist_ok=True)
    count = -(-len(whole) // (most << 20))
    size = -(-len(whole) // count)
    for number in range(count):
        (out / f"piece-{number}.bin").write_bytes(whole[number * size : (number + 1) * size])
    print(f"{count} pieces of {size / 2**20:.1f} MiB in {out}")


def unpack(pieces: Path, destination: Path) -> None:
    """The model's folder and the texts; nothing where the numbers are not those that were packed."""
    whole = b"".join(path.read_bytes() for path in sorted(pieces.glob("piece-*.bin")))
    end = 8 + int.from_bytes(whole[:8], "little")
    unfinished = destination.with_name(f"{destination.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    with tarfile.open(fileobj=BytesIO(lzma.decompress(whole[8:end]))) as archive:
        archive.extractall(unfinished, filter="data")
    about = json.loads((unfinished / ABOUT).read_text())
    weights = tensors(whole[end:], about)
    if digest(weights) != about["digest"]:
        raise SystemExit(f"the pieces in {pieces} are not complete, or not those of one packing.")
    save_file(weights, unfinished / about["name"] / WEIGHTS, {"format": "pt"})
    unfinished.rename(destination)
    print(f"{about['name']} and its texts are in {destination}")


def main() -> None:
    """Pack or unpack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_subparsers(dest="way", required=True)
    way = ways.add_parser("pack")
    for name in ("file", "folder", "out"):
        way.add_argument(name, type=Path)
    way.add_argument("--texts", type=Path, nargs="*", default=[])
    way.add_argument("--most", type=int, default=32, help="MiB of a piece")
    way = ways.add_parser("unpack")
    way.add_argument("pieces", type=Path)
    way.add_argument("destination", type=Path)
    asked = parser.parse_args()
    if asked.way == "unpack":
        unpack(asked.pieces, asked.destination)
    else:
        pack(asked.file, asked.folder, asked.out, asked.texts, asked.most)


if __name__ == "__main__":
    main()
