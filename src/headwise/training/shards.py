"""Weights that processes share (FSDP2): every process keeps a part of each tensor.

Where a file or a finished model needs whole tensors, they are gathered one at a time. So all checkpoints have one
format, and any number of processes resumes from one, with shared weights or without. torch.distributed.checkpoint would
be a second format, and by default has a pickle among its files.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from headwise import processes


def spread(device: torch.device, layers: Iterable[nn.Module], rest: nn.Module | None = None) -> None:
    """Keep only this process's part of every layer, and of all else in `rest`; a layer is gathered while it computes.

    Layers are moved to the device one by one. Afterwards every process has to call each equally often.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (processes.count(),))
    for module in (*layers, *(() if rest is None else (rest,))):
        empty = {p for p in module.parameters() if not p.numel()}  # of an MLP or attention that was cut as a whole
        fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=empty)


def is_part(tensor: torch.Tensor) -> bool:
    """Whether other processes hold the rest of a tensor."""
    return hasattr(tensor, "full_tensor")


def own(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor, in the same memory."""
    found: torch.Tensor = tensor.to_local() if is_part(tensor) else tensor  # type: ignore[attr-defined]
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor gathered from all processes; all of them have to call this."""
    found: torch.Tensor = tensor.full_tensor() if is_part(tensor) else tensor  # type: ignore[attr-defined]
    return found


def joined(part: torch.Tensor, like: Any) -> torch.Tensor:
    """The whole tensor that is laid out as `like` is and of which this process holds `part`."""
    if not is_part(like):
        return part
    from torch.distributed.tensor import DTensor

    layout: Any = dict(run_check=False, shape=like.shape, stride=like.stride())
    return whole(DTensor.from_local(part.to(like.device), like.device_mesh, like.placements, **layout))


def laid_out(tensor: torch.Tensor, like: Any) -> torch.Tensor:
    """A whole tensor, which every process holds, on the device and in the layout of another one."""
    if not is_part(like):
        return tensor.to(like.device)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
