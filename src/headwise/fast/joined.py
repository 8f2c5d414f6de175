"""Weights of several projections side by side, so that one product computes all of them.

Joined weights are no copies: the projections' own weights become views of them. Weights in few bits are joined as
they are.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import nn

from headwise.fast.products import is_plain, linear
from headwise.runtime.packed_headwise import PackedLinear

FEW = 16  # rows that our kernels multiply with packed numbers, at most: of more, torch's product is quicker


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


class PackedJoint(NamedTuple):
    """Several matrices in few bits, one below the other."""

    words: torch.Tensor
    scale: torch.Tensor
    bits: int
    bias: torch.Tensor | None

    def belongs_to(self, parts: list[Any]) -> bool:
        """Whether these are still the parts' own numbers, and no adapter was put around them."""
        return all(map(has_kernels, parts)) and self.words.data_ptr() == parts[0].weight_packed.data_ptr()


@torch.no_grad()
def joined_packed(parts: list[Any]) -> PackedJoint | None:
    """Some packed matrices, concatenated if they are of one kind; from then on they are views of this memory."""
    if not all(map(has_kernels, parts)):
        return None
    kinds = {(part.bits, part.sizes[1], part.weight_scale.shape[1], part.bias is None) for part in parts}
    if len(kinds) > 1 or len({(part.weight_scale.dtype, part.weight_scale.device) for part in parts}) > 1:
        return None
    bias = None if parts[0].bias is None else torch.cat([part.bias.detach() for part in parts])
    words, scale = (torch.cat([getattr(part, name) for part in parts]) for name in ("weight_packed", "weight_scale"))
    low = 0
    for part in parts:
        here = slice(low, low := low + part.sizes[0])
        part.weight_packed, part.weight_scale = nn.Parameter(words[here], requires_grad=False), scale[here]
    return PackedJoint(words, scale, parts[0].bits, bias)


def has_kernels(part: Any) -> bool:
    """Whether a module is a product with a packed matrix that our kernels multiply with."""
    return isinstance(part, PackedLinear) and getattr(part, "kernels", False)


def is_known(part: Any) -> bool:
    """Whether a module is a product, packed or not, and nothing else."""
    return is_plain(part) or has_kernels(part)


def still_joined(mlp: Any) -> bool:
    """Whether the joined weights of an MLP are still the parts' own, and no adapter was put around them."""
    if isinstance(mlp.joint, PackedJoint):
        return mlp.joint.belongs_to([mlp.gate_proj, mlp.up_proj])
    own = is_plain(mlp.gate_proj) and is_plain(mlp.up_proj)
    return own and bool(mlp.joint.data_ptr() == mlp.gate_proj.weight.data_ptr())


def are_few(x: torch.Tensor) -> bool:
    """Whether our kernels multiply rows (..., columns) with packed numbers: several only where tensor cores do."""
    return 0 < x.numel() <= x.shape[-1] * (FEW if x.element_size() == 2 else 1)


def packed_times(x: torch.Tensor, joint: PackedJoint) -> torch.Tensor:
    """Few rows (..., columns) times joined matrices, where Triton runs."""
    from headwise.fast.packed_rows import few_times

    return few_times(x.reshape(-1, x.shape[-1]), *joint).view(*x.shape[:-1], -1)


def together(parts: list[Any], joint: PackedJoint | None, x: torch.Tensor) -> torch.Tensor:
    """Products of one row of every text side by side, some of them packed: joined where that is possible."""
    if joint is not None and are_few(x) and joint.belongs_to(parts):
        return packed_times(x, joint)
    return torch.cat([part(x) for part in parts], -1)


@functools.cache
def fused_mlp(base: type) -> type:
    """The class of an MLP with one product for gate and up while a fast step runs."""
    inner: Any = base

    def forward(self: Any, x: torch.Tensor) -> Any:
        if self.switch.cache is None or not still_joined(self):
            return inner.forward(self, x)
        if not isinstance(self.joint, PackedJoint):
            both = linear(x, self.joint)
        elif self.switch.cache.place is not None and are_few(x):
            both = packed_times(x, self.joint)
        else:
            return inner.forward(self, x)
        if self.silu and x.is_cuda and x.shape[1] == 1:
            from headwise.fast.small import silu_gate

            return self.down_proj(silu_gate(both))
        gate, up = both.chunk(2, -1)
        return self.down_proj(self.act_fn(gate) * up)

    return subclass(base, forward=forward)
