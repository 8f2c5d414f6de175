"""A GGUF file as a folder of bfloat16 safetensors, so that several benchmarks need not unpack it each for itself.

    python benchmarks/dequantise.py model.gguf folder

The blocks are unpacked by the package gguf in as many processes as there are cores; transformers does the rest: names,
order of rotary pairs, configuration, tokenizer. It calls `gguf.dequantize` tensor by tensor in one process, which takes
most of the time of loading, and has no option for anything else. So for this one load that function is replaced by one
that looks tensors up which were unpacked beforehand by the same function of gguf: the numbers are the same to the bit.
Writing our own conversion instead would copy what transformers knows about GGUF files, and could differ from it.
"""

from __future__ import annotations

import json
import math
import mmap
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROWS = 2_048  # of a tensor, unpacked at a time
Key = tuple[tuple[int, ...], bytes]
packed: list[Any] = []  # tensors of the file, and where each is unpacked to; processes inherit both
unpacked: list[np.ndarray] = []


def key(data: np.ndarray) -> Key:
    """What tells a tensor from the others of its file."""
    return data.shape, data.ravel()[:1024].tobytes()


def unpack(task: tuple[int, int]) -> None:
    """Some rows of one tensor."""
    from gguf.quants import dequantize

    which, start = task
    tensor, rows = packed[which], slice(start, start + ROWS)
    unpacked[which][rows] = dequantize(tensor.data[rows], tensor.tensor_type)


def all_of(file: Path) -> dict[Key, np.ndarray]:
    """Every matrix in few bits, unpacked."""
    from gguf import GGMLQuantizationType, GGUFReader

    plain = (GGMLQuantizationType.F32, GGMLQuantizationType.F16)
    packed.extend(tensor for tensor in GGUFReader(file).tensors if tensor.tensor_type not in plain)
    for tensor in packed:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        shared = mmap.mmap(-1, 4 * math.prod(shape))  # seen by all processes
        unpacked.append(np.frombuffer(shared, dtype=np.float32).reshape(shape))
    tasks = [(which, start) for which, found in enumerate(unpacked) for start in range(0, len(found), ROWS)]
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        pool.map(unpack, tasks, chunksize=1)
    return {key(tensor.data): found for tensor, found in zip(packed, unpacked, strict=True)}


def main() -> None:
    """Unpack, load, save."""
    file, folder = Path(sys.argv[1]), Path(sys.argv[2])
    start = time.perf_counter()
    known = all_of(file)
    print(f"{len(known)} of {len(packed)} tensors unpacked after {time.perf_counter() - start:.1f} s", flush=True)
    import gguf
    import torch
    from safetensors.torch import save_file

    from headwise import families

    slow = gguf.dequantize
    gguf.dequantize = lambda data, kind: known[key(data)] if key(data) in known else slow(data, kind)
    model, tokenizer = families.load(str(file), dtype=torch.bfloat16)
    told = model.config.to_dict() | {"dtype": "bfloat16"}
    told.pop("quantization_config", None)  # it says that the weights are still in a GGUF file
    unfinished = folder.with_name(f"{folder.name}.part")
    unfinished.mkdir(parents=True)
    (unfinished / "config.json").write_text(json.dumps(told, indent=1, default=str))
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight")  # the file may not hold one tensor twice
    save_file(weights, unfinished / "model.safetensors", {"format": "pt"})
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)
    print(f"{folder}: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
