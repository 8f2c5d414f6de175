"""Checkpoints: everything a run needs to go on, as safetensors and JSON, each folder whole or not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from headwise.cuts import write_folder
from headwise.errors import OutputError
from headwise.keeping.disk import recover, remove
from headwise.train import shards
from headwise.train.loop import Point, State
from headwise.types import VERSION

OPTIMISER, MORE = "optimiser.safetensors", "more.safetensors"
KEPT = 2  # newest checkpoints; older ones are deleted


def save(
    folder: Path, model: nn.Module, state: State, more: dict[str, torch.Tensor] | None = None, writes: bool = True
) -> None:
    """Write a checkpoint of the run and delete all but the newest ones. `model` is the bare one, not as wrapped.

    Random numbers need no place: every step seeds its own. `more` are tensors that a run wants back (see `kept_in`).
    Where processes share the weights all of them have to save, and one of them writes.
    """

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        found = shards.whole(tensor)
        return found.cpu().contiguous() if writes else found.new_empty(0)

    weights, tensors = {name: kept(tensor) for name, tensor in _whole(model).items()}, {"sums": kept(state.sums)}
    for name, parameter in model.named_parameters():
        for part, tensor in state.optimiser.state.get(parameter, {}).items():
            tensors[f"{name}/{part}"] = kept(tensor)
    if not writes:
        return
    facts = {
        "version": VERSION,
        "step": state.step,
        "summed": state.summed,
        "seconds": state.seconds,
        "curve": [point._asdict() for point in state.curve],
    }

    def write(target: Path) -> None:
        files = {"model.safetensors": weights, OPTIMISER: tensors, **({MORE: more} if more else {})}
        for name, found in files.items():
            save_file(found, target / name)
        (target / "state.json").write_text(json.dumps(facts) + "\n")

    recover(folder)
    write_folder(folder / f"step-{state.step:08d}", write)
    for old in all_in(folder)[:-KEPT]:
        remove(old)


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, tied ones once, and buffers that belong to the model."""
    kept = set(model.state_dict())
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach() for name, tensor in found.items() if name in kept}


def all_in(folder: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def kept_in(folder: Path) -> dict[str, torch.Tensor]:
    """What else the newest checkpoint was given to keep."""
    path = all_in(folder)[-1] / MORE
    return load_file(path) if path.exists() else {}


def restore(folder: Path, model: nn.Module, state: State) -> bool:
    """Bring a run to its newest checkpoint, if there is one."""
    found = all_in(folder)
    if not found:
        return False
    newest = found[-1]
    try:
        facts: dict[str, Any] = json.loads((newest / "state.json").read_text())
        weights, tensors = load_file(newest / "model.safetensors"), load_file(newest / OPTIMISER)
    except (OSError, ValueError, SafetensorError) as error:
        raise OutputError(
            f"{newest} is damaged ({error}); delete it, and the run goes on from the one before."
        ) from None
    with torch.no_grad():
        for name, tensor in _whole(model).items():
            tensor.copy_(shards.laid_out(weights[name], tensor))
    for name, parameter in model.named_parameters():
        parts = [key for key in tensors if key.startswith(f"{name}/")]
        if parts:  # the count of steps stays where AdamW keeps it: on the device only if fused
            state.optimiser.state[parameter] = {
                key.removeprefix(f"{name}/"): _beside(tensors[key], parameter) for key in parts
            }
    state.sums.copy_(tensors["sums"])
    state.step, state.summed, state.seconds = facts["step"], facts["summed"], facts["seconds"]
    state.curve[:] = [Point(**point) for point in facts["curve"]]
    return True


def _beside(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if tensor.dim() > 0:
        return shards.laid_out(tensor, parameter)
    return tensor.to(parameter.device) if parameter.device.type == "cuda" else tensor
