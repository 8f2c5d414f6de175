"""How much memory there is, and ways to do with less: layers computed twice, and a model spread over what there is."""

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

HELD = 3  # times that a run holds a model's numbers: the source, the cut model, and another on the way
SHARE = 0.8  # of the memory that is free: what would take more does not fit


def available_bytes(device: torch.device | str = "cpu") -> int:
    """What can be used without swapping, within the limits of a container; of a GPU what is free, with what torch has
    reserved and does not use.

    A limit that this process set itself (`torch.cuda.set_per_process_memory_fraction`) holds too.
    """
    if torch.device(device).type == "cuda":
        index = torch.device(device).index
        index = torch.cuda.current_device() if index is None else index
        free, whole = torch.cuda.mem_get_info(index)
        reserved, held = torch.cuda.memory_reserved(index), torch.cuda.memory_allocated(index)
        allowed = torch.cuda.get_per_process_memory_fraction(index) * whole - held
        return max(0, min(int(free) + reserved - held, int(allowed)))
    found = [_known_to_system()]
    limit, used = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    try:
        if (text := limit.read_text().strip()) != "max":
            found.append(int(text) - int(used.read_text()))
    except (OSError, ValueError):  # no such limit
        pass
    return max(0, min(found))


def _known_to_system() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def emptied() -> None:
    """Give back what nothing uses any more, on all devices."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def fits(size: int, device: torch.device | str) -> bool:
    """Whether a run with a model of so many bytes fits on a device."""
    return HELD * size <= SHARE * available_bytes(device)


@contextmanager
def recomputing(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Layers keep their input alone and compute the rest again for the gradient, which comes out the same.

    Not for layers that are handed anything else with a gradient, such as an encoder's output. `train()` would switch
    transformers' own way on, and dropout with it.
    """

    def twice(own: Any) -> Any:
        @wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            stream = args[0] if args else kwargs.pop("hidden_states")
            rest = args[1:]
            return checkpoint(lambda x: own(x, *rest, **kwargs), stream, use_reentrant=True, preserve_rng_state=False)

        return forward

    before = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.forward = twice(layer.forward)
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            del layer.forward
            if own is not None:
                layer.forward = own


@contextmanager
def spread(model: Any) -> Iterator[torch.device]:
    """A model in host memory, for a while on all GPUs as far as it fits, by Accelerate's device map; the rest of it
    visits the first GPU part by part. Gives the device that inputs go to. Without a GPU the parts visit the CPU.
    """
    from accelerate import cpu_offload, dispatch_model, infer_auto_device_map
    from accelerate.hooks import remove_hook_from_submodules

    known = {module: set(module.__dict__) for module in model.modules()}
    if torch.cuda.is_available():
        device = torch.device("cuda", 0)
        limits: dict[Any, int] = {"cpu": available_bytes() + _bytes(model)}
        for index in range(torch.cuda.device_count()):
            limits[index] = available_bytes(f"cuda:{index}") // 2  # the other half is for activations
        places = infer_auto_device_map(model, limits, no_split_module_classes=list(model._no_split_modules or ()))
        dispatch_model(model, places, main_device=device, force_hooks=True)
    else:
        device = torch.device("cpu")
        cpu_offload(model, device)
    try:
        yield device
    finally:
        remove_hook_from_submodules(model)
        for module, names in known.items():  # what is left behind, such as other ways to call the same forward pass
            for name in set(module.__dict__) - names:
                delattr(module, name)
        model.to("cpu")
        model.tie_weights()


def _bytes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
