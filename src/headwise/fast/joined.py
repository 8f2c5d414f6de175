"""Weights of several projections side by side, so that one product computes all of them.

Joined weights are no copies: the projections' own weights become views of them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from headwise.fast.products import is_plain, linear


def subclass(base: type, **methods: Any) -> type:
    """A class with other methods that keeps its name: the name is written into configurations."""
    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(base)(base.__name__, (base,), {**methods, **names})


@torch.no_grad()
def joined(parts: list[Any]) -> torch.Tensor | None:
    """The weights of some projections, concatenated; from then on they are views of this memory."""
    weights = [part.weight for part in parts]
    first, columns = weights[0], weights[0].shape[1]
    if len({(w.dtype, w.device, w.shape[1]) for w in weights}) > 1:
        return None
    rows, adjacent, at = sum(len(weight) for weight in weights), True, first.data_ptr()
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        adjacent, at = adjacent and same and weight.is_contiguous() and weight.data_ptr() == at, at + weight.nbytes
    if adjacent:
        return first.detach().as_strided((rows, columns), (columns, 1), first.storage_offset())
    whole, low = torch.cat([weight.detach() for weight in weights]), 0
    for part in parts:
        high = low + len(part.weight)
        part.weight = nn.Parameter(whole[low:high], requires_grad=part.weight.requires_grad)
        low = high
    return whole


def still_joined(mlp: Any) -> bool:
    """Whether the joined weights of an MLP are still the parts' own, and no adapter was put around them."""
    own = is_plain(mlp.gate_proj) and is_plain(mlp.up_proj)
    return own and bool(mlp.joint.data_ptr() == mlp.gate_proj.weight.data_ptr())


@functools.cache
def fused_mlp(base: type) -> type:
    """The class of an MLP with one product for gate and up while a fast step runs."""
    inner: Any = base

    def forward(self: Any, x: torch.Tensor) -> Any:
        if self.switch.cache is None or not still_joined(self):
            return inner.forward(self, x)
        both = linear(x, self.joint)
        if self.silu and x.is_cuda and x.shape[1] == 1:
            from headwise.fast.small import silu_gate

            return self.down_proj(silu_gate(both))
        gate, up = both.chunk(2, -1)
        return self.down_proj(self.act_fn(gate) * up)

    return subclass(base, forward=forward)
