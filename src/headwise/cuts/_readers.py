"""Portable models in readers that do not know their rotary frequencies: these are told, or refuse the folder.

A portable model with fewer rotary pairs has their frequencies as factors of a longrope table. transformers before 5
looks for that table under another name. llama.cpp's converter drops it for Llama models and would write a file that
runs and answers wrongly; it stops at a tensor that it does not know, which all others pass over by its name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FILE = "model-rotary.safetensors"
TENSOR = "model.rotary_emb.inv_freq_of_kept_pairs"  # begins as the name that transformers and vLLM pass over
INDEX = "model.safetensors.index.json"


def warn_readers(folder: Path, config: Any) -> None:
    """Write into a portable model's folder what keeps other readers from misreading it."""
    table = getattr(config, "rope_parameters", None) or {}
    if table.get("rope_type") != "longrope":
        return
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"rope_scaling": table, "rope_theta": table["rope_theta"]}  # where transformers 4 looks
    (folder / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    save_file({TENSOR: torch.tensor(table["short_factor"])}, folder / FILE, metadata={"format": "pt"})
    if (folder / INDEX).exists():
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][TENSOR] = FILE
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
