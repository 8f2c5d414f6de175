"""Does the saved model do what the plan says? Counted on the real object, reloaded in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from headwise import families, tensors
from headwise.cost import kv_bytes_per_token, parameters
from headwise.errors import PlanError
from headwise.runtime import foreign_code
from headwise.types import Check, ModelShape, Plan

PROOF_TOKENS = 64
TOLERANCE = 1e-4  # relative, in float32: the same weights on the same kind of kernel
RELOAD = """
import sys, torch, transformers
from safetensors.torch import load_file, save_file
folder, proof, out, remote, auto = sys.argv[1:]
auto = getattr(transformers, auto)
model = auto.from_pretrained(folder, dtype=torch.float32, trust_remote_code=remote == "yes").eval()
assert "headwise" not in sys.modules
with torch.no_grad():
    tensors = load_file(proof)
    found = model(**{name: tensor for name, tensor in tensors.items() if name != "logits"})
    save_file({"logits": (found["logits"] if "logits" in found else found[0]).contiguous()}, out)
"""


@torch.no_grad()
def write_proof(model: nn.Module, ids: torch.Tensor, path: Path) -> None:
    """Keep what the model in memory says to a few tokens, to be compared with what the reloaded model says.

    That is its logits, or the last stream of a model without a head. How to load it is written beside them.
    """
    family = families.family_of(model.config)
    ids = family.excerpt(family.unpadded(ids), PROOF_TOKENS)
    found = family.call(model, ids.to(model.device))
    logits = found["logits"] if "logits" in found else found[0]
    save_proof({**family.arguments(ids), "logits": logits.float()}, path, families.auto_class_of(model))


def save_proof(given: dict[str, torch.Tensor], path: Path, auto: str) -> None:
    """Keep what a model was given and its `logits`; `auto` names the class that loads it."""
    save_file({name: tensor.cpu().contiguous() for name, tensor in given.items()}, path, metadata={"auto": auto})


def reload_check(folder: Path, proof: Path, portable: bool) -> Check:
    """Load the folder in a new process, without headwise, and compare logits with those before saving."""
    name = "reloads in a fresh process without headwise"
    auto, before = _read_proof(proof)
    if not portable and (foreign := foreign_code(folder)):  # it would be run with trust
        return Check(name, False, f"{folder.name}/{foreign} is not the file Headwise wrote; it was not run", "loads")
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "logits.safetensors"
        environment = {**os.environ, "HF_MODULES_CACHE": scratch, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", RELOAD, str(folder), str(proof), str(out), "no" if portable else "yes", auto]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return Check(name, False, reason[:200], "loads")
        after = tensors.read(out)["logits"]
    if after.shape != before.shape:
        return Check(name, False, "answers of another size", "the same")
    error = float((after - before).abs().max() / before.abs().max())
    return Check(name, error <= TOLERANCE, f"relative difference {error:.1e}", f"at most {TOLERANCE:.0e}")


def _read_proof(proof: Path) -> tuple[str, torch.Tensor]:
    """The class that loads the model, and what it said before it was saved."""
    advice = "run headwise heal again"
    auto = tensors.metadata(proof, advice=advice).get("auto", "AutoModelForCausalLM")
    logits = tensors.read(proof, advice=advice).get("logits")
    if auto not in families.TASKS.values() or logits is None or not logits.is_floating_point():
        raise PlanError(f"{proof} does not hold what a model said; {advice}.")
    return auto, logits


@torch.no_grad()
def cache_bytes_per_token(model: nn.Module, element_bytes: int, length: int = 2) -> int:
    """Numbers that the model really keeps in its cache for a token, times the bytes of one when stored.

    A model that reads one text and writes another keeps them for a token of each.
    """
    family = families.family_of(model.config)
    if not family.shape_of(model.config).cached:
        return 0
    inputs = family.arguments(family.example(model.config, 1, length).to(model.device))
    cache = model(**inputs, use_cache=True).past_key_values
    parts = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    layers = [layer for part in (parts if parts[0] is not None else [cache]) for layer in part.layers]
    kept = [tensor for layer in layers if layer.keys is not None for tensor in (layer.keys, layer.values)]
    return int(sum(tensor.numel() // tensor.shape[-2] for tensor in kept) * element_bytes)


def sizes(model: nn.Module, source: ModelShape) -> dict[str, int]:
    """Parameters, and the cache of models that keep one: the source's by formula, the model's own as counted."""
    found = {
        "parameters_before": parameters(source),
        "parameters_after": sum(p.numel() for p in model.parameters()),
        "kv_bytes_per_token_before": kv_bytes_per_token(source),
        "kv_bytes_per_token_after": cache_bytes_per_token(model, source.element_bytes),
    }
    return found if source.cached else {name: size for name, size in found.items() if name.startswith("parameters")}


def count_checks(model: nn.Module, plan: Plan) -> list[Check]:
    """Parameters and cache of the real object against the plan's."""
    target = plan.target
    counted = sum(p.numel() for p in model.parameters())
    found = [equal("parameters as planned", counted, parameters(target))]
    if target.cached:
        cached = cache_bytes_per_token(model, target.element_bytes)
        found.append(equal("cache bytes per token as planned", cached, kv_bytes_per_token(target)))
    return [*found, *budget_checks(plan)]


def budget_checks(plan: Plan) -> list[Check]:
    """Every budget is met."""
    return [
        Check(
            f"budget {budget.text}",
            plan.spent[budget.key] <= budget.limit * (1 + 1e-9),
            f"{_said(plan.spent[budget.key])} {budget.unit}" + (" predicted" if budget.workload else ""),
            f"at most {_said(budget.limit)}",
        )
        for budget in plan.budgets
    ]


def _said(amount: float) -> str:
    """Whole numbers, but for what is counted in a few."""
    return f"{amount:,.0f}" if amount >= 1000 or amount == int(amount) else f"{amount:.4g}"


def equal(name: str, observed: int, expected: int) -> Check:
    """A count against what was planned."""
    return Check(name, observed == expected, f"{observed:,}", f"{expected:,}")
