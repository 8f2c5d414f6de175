"""Checkpoints: everything a run needs to resume, as safetensors and JSON, each folder written whole or not at all."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from headwise import processes
from headwise.cuts import write_folder
from headwise.errors import HeadwiseError, OutputError, PlanError
from headwise.files import tensors as stored
from headwise.files.disk import recover, remove
from headwise.files.json import is_number, read_object
from headwise.training import shards
from headwise.training.loop import Point, State
from headwise.types import VERSION

OPTIMISER, MORE = "optimiser.safetensors", "more.safetensors"
KEPT = 2  # newest checkpoints; older ones are deleted
NUMBERS = ("step", "summed", "seconds")  # fields of a state that state.json holds, beside the curve


def save(folder: Path, model: nn.Module, state: State, more: dict[str, torch.Tensor] | None = None) -> None:
    """Write a checkpoint of the run and delete all but the newest ones. `model` is the bare model, not wrapped.

    Random numbers are not saved: every step seeds its own. `more` are further tensors of the run (see `kept_in`).
    Only the main process writes; where processes share the weights, all of them have to call this.
    """
    writes = processes.index() == 0

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        found = shards.whole(tensor)
        return found.cpu().contiguous() if writes else found.new_empty(0)

    weights, tensors = {name: kept(tensor) for name, tensor in _whole(model).items()}, {"sums": kept(state.sums)}
    for name, parameter in model.named_parameters():
        for part, tensor in state.optimiser.state.get(parameter, {}).items():
            tensors[f"{name}/{part}"] = kept(tensor)
    if not writes:
        return
    facts = {"version": VERSION, **{name: getattr(state, name) for name in NUMBERS}}
    facts["curve"] = [point._asdict() for point in state.curve]

    def write(target: Path) -> None:
        files = {"model.safetensors": weights, OPTIMISER: tensors, **({MORE: more} if more else {})}
        for name, found in files.items():
            save_file(found, target / name)
        (target / "state.json").write_text(json.dumps(facts) + "\n")

    recover(folder)
    write_folder(folder / f"step-{state.step:08d}", write)
    _delete_older(folder)


def _delete_older(folder: Path) -> None:
    """Delete all checkpoints but the newest."""
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
    """The further tensors of the newest checkpoint."""
    path = all_in(folder)[-1] / MORE
    return stored.read(path, error=OutputError, advice="delete its folder") if path.exists() else {}


def restore(folder: Path, model: nn.Module, state: State) -> bool:
    """Bring a run to its newest checkpoint; False if there is none."""
    found = all_in(folder)
    if not found:
        return False
    newest = found[-1]
    try:
        facts = _facts(newest / "state.json")
        weights, tensors = stored.read(newest / "model.safetensors"), stored.read(newest / OPTIMISER)
        _check(newest, model, weights, tensors)
    except HeadwiseError as error:
        raise OutputError(
            f"{newest} is damaged ({error}); delete it, and the run resumes from the one before."
        ) from None
    with torch.no_grad():
        for name, tensor in _whole(model).items():
            tensor.copy_(shards.laid_out(weights[name], tensor))
    for name, parameter in model.named_parameters():
        if own := {key: tensor for key, tensor in tensors.items() if key.startswith(f"{name}/")}:
            state.optimiser.state[parameter] = {
                key.removeprefix(f"{name}/"): _beside(tensor, parameter) for key, tensor in own.items()
            }
    state.sums.copy_(tensors["sums"])
    for name in NUMBERS:
        setattr(state, name, facts[name])
    state.curve[:] = facts["curve"]
    if processes.index() == 0:  # the process may have been killed after saving and before deleting
        _delete_older(folder)
    return True


def _facts(path: Path) -> dict[str, Any]:
    """Step, seconds and curve of a checkpoint."""
    found = read_object(path)
    if not all(is_number(found.get(name)) and found[name] >= 0 for name in NUMBERS):
        raise PlanError(f"{path} does not say at which step the run is.")
    try:
        curve = [Point(**point) for point in found["curve"]]
        values = [value for point in curve for value in (*point[:-1], *(point.evaluation or {}).values())]
        sound = all(isinstance(value, (int, float)) for value in values)  # a loss may have become infinite
    except (KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise PlanError(f"{path} does not hold the curve of the run.")
    return {**found, "curve": curve}


def _check(folder: Path, model: nn.Module, weights: stored.Tensors, tensors: stored.Tensors) -> None:
    """Refuse tensors that are missing or of other sizes than the model's."""
    own = {name: tensor.shape for name, tensor in _whole(model).items()}
    if lost := [name for name, shape in own.items() if name not in weights or weights[name].shape != shape]:
        raise PlanError(f"{folder.name} does not hold {lost[0]}, or holds it in another size.")
    sizes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for key, tensor in tensors.items():
        owner = key.rpartition("/")[0]
        if owner and tensor.dim() and tensor.shape != sizes.get(owner):
            raise PlanError(f"{folder.name} holds {key} in another size than the model's.")
    if "sums" not in tensors or tensors["sums"].shape != (2,):
        raise PlanError(f"{folder.name} does not hold the sums of the curve.")


def _beside(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Optimizer state on its parameter's device; AdamW keeps its count of steps on the device only if it is fused."""
    if tensor.dim() > 0:
        return shards.laid_out(tensor, parameter)
    return tensor.to(parameter.device) if parameter.device.type == "cuda" else tensor
