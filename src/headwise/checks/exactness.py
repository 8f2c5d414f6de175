"""Does the saved model do what the plan says? Counted on the real object, reloaded in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from headwise.cost import kv_bytes_per_token, parameters
from headwise.types import Check, Plan

TOLERANCE = 1e-4  # relative, in float32: the same weights on the same kind of kernel
RELOAD = """
import sys, torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
folder, proof, out, remote = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=remote == "yes").eval()
assert "headwise" not in sys.modules
with torch.no_grad():
    save_file({"logits": model(load_file(proof)["ids"]).logits.contiguous()}, out)
"""


@torch.no_grad()
def write_proof(model: nn.Module, ids: torch.Tensor, path: Path) -> None:
    """Keep the logits of the model in memory for a few tokens, to be compared with the reloaded model's."""
    logits = model(ids.to(model.device), use_cache=False).logits
    save_file({"ids": ids.cpu().contiguous(), "logits": logits.float().cpu().contiguous()}, path)


def reload_check(folder: Path, proof: Path, portable: bool) -> Check:
    """Load the folder in a new process, without headwise, and compare logits with those before saving."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "logits.safetensors"
        environment = {**os.environ, "HF_MODULES_CACHE": scratch, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", RELOAD, str(folder), str(proof), str(out), "no" if portable else "yes"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        name = "reloads in a fresh process without headwise"
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return Check(name, False, reason[:200], "loads")
        after, before = load_file(out)["logits"], load_file(proof)["logits"]
    error = float((after - before).abs().max() / before.abs().max())
    return Check(name, error <= TOLERANCE, f"relative difference {error:.1e}", f"at most {TOLERANCE:.0e}")


@torch.no_grad()
def cache_bytes_per_token(model: nn.Module, element_bytes: int, length: int = 2) -> int:
    """Numbers that the model really keeps in its cache for a token, times the bytes of one when stored."""
    ids = torch.ones((1, length), dtype=torch.long, device=model.device)
    cache = model(ids, use_cache=True).past_key_values
    numbers = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    return int(numbers // length * element_bytes)


def count_checks(model: nn.Module, plan: Plan) -> list[Check]:
    """Parameters and cache of the real object against the plan's."""
    target = plan.target
    counted = sum(p.numel() for p in model.parameters())
    cached = cache_bytes_per_token(model, target.element_bytes)
    return [
        _equal("parameters as planned", counted, parameters(target)),
        _equal("cache bytes per token as planned", cached, kv_bytes_per_token(target)),
        *budget_checks(plan),
    ]


def budget_checks(plan: Plan) -> list[Check]:
    """Every budget is met."""
    return [
        Check(
            f"budget {budget.text}",
            plan.spent[budget.name] <= budget.limit * (1 + 1e-9),
            f"{plan.spent[budget.name]:,.0f} {budget.unit}",
            f"at most {budget.limit:,.0f}",
        )
        for budget in plan.budgets
    ]


def _equal(name: str, observed: int, expected: int) -> Check:
    return Check(name, observed == expected, f"{observed:,}", f"{expected:,}")
