"""Memory that a saved model takes where headwise is not installed, against what its certificate says.

    headwise run embedded --budget memory=30%@1k,b8 --out runs/third
    python benchmarks/memory_resident.py runs/third --out benchmarks/results/resident-embedded.json

A fresh process loads the model with transformers and compressed-tensors alone and reads random texts, as many and as
long as the budget says. Counted are the bytes of all tensors that the model and its cache hold, and how much the
process grew (what it holds for itself, `RssAnon`), which includes what Python and the allocator keep. Weights are
counted before the first run, after it (stock transformers unpacks them then), and the cache after the last token: what
it holds, and with the room for 64 tokens to come that spares a copy at every token.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def grown() -> int:
    """Bytes that this process holds for itself."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def held(tensors: Any) -> int:
    """Bytes of tensors, each storage counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def inside(value: Any, seen: set[int]) -> list[Any]:
    """All tensors below an object: of a cache that keeps them in its own ways."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if id(value) in seen or isinstance(value, (str, bytes, int, float, type)):
        return []
    seen.add(id(value))
    parts = list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, (list, tuple)) else []
    parts += [part for name, part in getattr(value, "__dict__", {}).items() if name not in ("config", "layer_class")]
    return [tensor for part in parts for tensor in inside(part, seen)]


def measure(folder: str, texts: int, length: int) -> dict[str, Any]:
    """Load, read and count."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)  # whatever is imported for it is no part
    start = grown()
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16).eval()
    gc.collect()
    found: dict[str, Any] = {"weights": held((*model.parameters(), *model.buffers())), "grown": grown() - start}
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
        gc.collect()
        found["weights_after_first_run"] = held((*model.parameters(), *model.buffers()))
        torch.manual_seed(0)
        ids, cache = torch.randint(3, config.vocab_size - 1, (texts, length)), None
        for part in ids.split(256, 1):
            cache = model(part, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
        one = model(ids[:, -1:], past_key_values=cache, use_cache=True).past_key_values
    own = {t.data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept = [t for t in inside(one, set()) if t.data_ptr() not in own]
    found |= {"cache": sum(t.numel() * t.element_size() for t in kept), "cache_with_room": held(kept)}
    return found | {"tokens": length + 1, "texts": texts}


def main() -> None:
    """Measure in a process of its own, and write what it found beside what the run's files say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--python", default=sys.executable, help="of an environment without headwise")
    parser.add_argument("--child", type=int, nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print(json.dumps(measure(str(asked.run), *asked.child)))
        return
    from provenance import commit

    from headwise.checks import speed
    from headwise.cost import layer_text_bytes
    from headwise.files.disk import write_atomically
    from headwise.types import Plan

    plan = Plan.read(asked.run / "plan.json")
    (budget,) = plan.budgets
    length = budget.length - 1
    certified = json.loads((asked.run / "verdict.json").read_text())["size"]
    command = [asked.python, __file__, str(asked.run / "model"), "--child", str(budget.batch), str(length)]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    clean = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if not (Path(p) / "headwise").exists())}
    done = subprocess.run(command, env=clean, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    found = json.loads(done.stdout.splitlines()[-1])
    cache = budget.batch * sum(layer_text_bytes(plan.target, layer, budget.length) for layer in plan.target.layers)
    import torch

    row = {"model": plan.model.rpartition("/")[2], "budget": budget.text, **found, "certified": certified,
           "planned_cache": cache, "hardware": speed.machine(torch.device("cpu")), "commit": commit(),
           "date": time.strftime("%Y-%m-%d")}  # fmt: skip
    print(json.dumps(row, indent=1))
    if asked.out:
        write_atomically(asked.out, json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
