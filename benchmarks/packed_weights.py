"""Weights in few bits on a CPU: what a model takes in memory and how long it takes, packed and unpacked.

    python benchmarks/packed_weights.py embedded stories15M/ SmolLM2.gguf --out benchmarks/results/packed-weights.json

Every matrix and the table of words get the same number of bits; nothing else is cut, and the cache has 16 bits or more.
Ways to load the folder: transformers with all weights unpacked (`dequantize=True`) in bfloat16 and in float32, and
packed in bfloat16; headwise.load with packed=True, and with optimise=True too, in float32. They take turns; a ratio is
a time over that of unpacked float32 next to it, given as the median with the quartiles. Memory is that of all tensors
of the model, after it has run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from cpu_decode import spread
from memory_parts import PROMPT, UNPACKED, packed_weights
from memory_resident import held
from provenance import commit, hardware
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import headwise
from headwise import families
from headwise.checks.exactness import stored_bytes
from headwise.cuts import save
from headwise.devices import timed
from headwise.files.disk import write_atomically
from headwise.stages.packing import packed_model
from headwise.types.weights import ENDS, FIELDS

BITS = (8, 4, 3)
STEPS = 12


def stock(dtype: torch.dtype, unpack: bool) -> Callable[[Path], Any]:
    """How transformers loads a folder."""
    more = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if unpack else {}
    return lambda folder: AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=True, **more)


WAYS: dict[str, Callable[[Path], Any]] = {
    UNPACKED: stock(torch.float32, True),
    "unpacked, bfloat16": stock(torch.bfloat16, True),
    "packed, bfloat16": stock(torch.bfloat16, False),
    "packed=True": lambda folder: headwise.load(folder, packed=True),
    "packed=True, optimise=True": lambda folder: headwise.load(folder, packed=True, optimise=True),
}


def packed_folder(model: str, bits: int, folder: Path) -> None:
    """A model with all matrices in so many bits, as a run would save it."""
    source, tokenizer = families.load(model)
    family = families.family_of(source.config)
    own = family.tailor(source)
    shape = family.shape_of(own.config)
    same = dict.fromkeys(FIELDS, bits)
    ends = dict.fromkeys(ENDS[: 1 if shape.tied_embeddings else 2], bits)
    target = replace(shape.with_layers(tuple(replace(layer, **same) for layer in shape.layers)), **ends)
    rows = torch.randint(3, source.config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0))
    rounded, packed = packed_model(family, own, target, rows, 0)
    save(family, rounded, tokenizer, folder, False, torch.bfloat16, None, packed)


@torch.inference_mode()
def times(model: Any, ids: torch.Tensor) -> tuple[float, float]:
    """Milliseconds per token of a prompt, and of a decode step."""
    out, prefill = timed(lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1), ids.device)

    def write() -> None:
        nonlocal out
        out = model(input_ids=ids[:, :1], past_key_values=out.past_key_values, use_cache=True)

    return prefill * 1e3 / ids.shape[1], timed(write, ids.device, STEPS)[1] * 1e3 / STEPS


def compare(folder: Path, repeats: int) -> list[dict[str, Any]]:
    """Every way to load a folder, in turns."""
    models = {name: load(folder).eval() for name, load in WAYS.items()}
    size = next(iter(models.values())).config.vocab_size
    ids = torch.randint(3, size, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for number in range(-1, repeats):
        for name in list(models)[:: 1 if number % 2 else -1]:
            one = times(models[name], ids)
            if number >= 0:  # the first warms up
                found[name].append(one)
    rows = []
    for name, model in models.items():
        row: dict[str, Any] = {"way": name, "memory": held((*model.parameters(), *model.buffers()))}
        for place, stage in enumerate(("prefill", "decode")):
            row[f"{stage}_ms"] = statistics.median(own[place] for own in found[name])
            pairs = zip(found[name], found[UNPACKED], strict=True)
            row[f"{stage}_ratio"] = spread([own[place] / base[place] for own, base in pairs])
        rows.append(row)
    return rows


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--bits", type=int, nargs="+", default=BITS)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(), "commit": commit(), "hardware": hardware(),
        "threads": asked.threads, "repeats": asked.repeats, "rows": rows,
    }  # fmt: skip
    for model in asked.models:
        for bits in asked.bits:
            with tempfile.TemporaryDirectory() as scratch:
                packed_folder(model, bits, Path(scratch, "model"))
                about = {"model": Path(model).stem, "bits": bits, "file": stored_bytes(Path(scratch, "model"))}
                rows += [about | row for row in compare(Path(scratch, "model"), asked.repeats)]
            if asked.out:
                write_atomically(asked.out, json.dumps(result, indent=1) + "\n")
    print("\n".join(packed_weights(result)))


if __name__ == "__main__":
    main()
