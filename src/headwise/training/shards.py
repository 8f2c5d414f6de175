"""Models whose weights are spread over the processes (FSDP2): every process keeps a part of each tensor.

Whole tensors are put together one at a time where a file or a finished model needs them. So checkpoints look the same
whoever writes them, and any number of processes goes on from one, sharing the weights or not; torch's own checkpoints
of such models are a second format, and by default with a pickle among their files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from headwise import processes


def spread(device: torch.device, layers: Iterable[nn.Module], rest: nn.Module | None = None) -> None:
    """Leave each process its part of every layer, and of all else in `rest`; a layer is whole while it computes.

    Layers are moved to the device one by one. From then on every process has to call each as often as the others do.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (processes.count(),))
    for module in (*layers, *(() if rest is None else (rest,))):
        empty = {parameter for parameter in module.parameters() if not parameter.numel()}  # of what a cut took whole
        fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=empty)


def is_part(tensor: torch.Tensor) -> bool:
    """Whether other processes have the rest of a tensor."""
    return hasattr(tensor, "full_tensor")


def own(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a tensor: the same memory."""
    found: torch.Tensor = tensor.to_local() if is_part(tensor) else tensor  # type: ignore[attr-defined]
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor put together from all processes' parts; all of them have to ask."""
    found: torch.Tensor = tensor.full_tensor() if is_part(tensor) else tensor  # type: ignore[attr-defined]
    return found


def joined(part: torch.Tensor, like: Any) -> torch.Tensor:
    """The whole tensor of which each process has what `own(like)` would be."""
    if not is_part(like):
        return part
    from torch.distributed.tensor import DTensor

    layout: Any = dict(run_check=False, shape=like.shape, stride=like.stride())
    return whole(DTensor.from_local(part.to(like.device), like.device_mesh, like.placements, **layout))


def laid_out(tensor: torch.Tensor, like: Any) -> torch.Tensor:
    """A whole tensor, which all processes have, on the device and in parts as another is."""
    if not is_part(like):
        return tensor.to(like.device)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
