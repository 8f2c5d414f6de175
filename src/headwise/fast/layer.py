"""Decoder layers whose decode steps take few kernels: products with norms, gates and the residual stream in them.

For layers that add attention of a normed stream to the stream, then an MLP of the normed sum, as Llama's do. Whether
one does is found by running its own forward with simple functions in place of its parts.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from headwise.fast.choice import small_kernels_run
from headwise.fast.fused import Before, FusedAttention, Switch
from headwise.fast.joined import PackedJoint, is_known, still_joined, subclass
from headwise.runtime.packed_headwise import PackedLinear

PARTS = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")


def fuse_layers(model: Any, switch: Switch) -> None:
    """Let the layers of a model whose modules are fast take few kernels, where they are of the known kind."""
    modules: list[Any] = list(model.modules())
    for module in modules:
        if all(hasattr(module, part) for part in PARTS) and _known(module):
            module.switch, module.__class__ = switch, _thin_layer(type(module))
    head: Any = model.get_output_embeddings()
    plain = head is not None and head.__class__ is nn.Linear and head.weight.is_cuda
    if plain and small_kernels_run(head.weight.device, head.weight.dtype):
        vars(head)["switch"], head.__class__ = switch, _thin_linear(nn.Linear)


def _known(layer: Any) -> bool:
    """Whether a layer's modules are fast and it joins them as Llama does."""
    attention, mlp, norms = layer.self_attn, layer.mlp, (layer.input_layernorm, layer.post_attention_layernorm)
    fast = isinstance(attention, FusedAttention) and attention.placed and attention.resid_dropout is None
    fast = fast and is_known(getattr(attention, "o_proj", None))
    gated = getattr(mlp, "silu", False) and is_known(getattr(mlp, "down_proj", None))
    return bool(fast and gated and all(hasattr(norm, "kind") for norm in norms) and joins_as_llama(type(layer)))


@functools.cache
def joins_as_llama(kind: type) -> bool:
    """Whether a layer of this class gives h + mlp(norm(h)) for h = x + attention(norm(x)), and no more."""
    stub = SimpleNamespace(
        input_layernorm=lambda x: x + 3, self_attn=lambda hidden_states, **_: (hidden_states * 5, None),
        post_attention_layernorm=lambda x: x * 7, mlp=lambda x: x + 11, training=False,
    )  # fmt: skip
    x = torch.arange(4.0)
    h = x + (x + 3) * 5
    try:
        found = kind.forward(stub, x, attention_mask=None, position_embeddings=None)  # type: ignore[attr-defined]
    except Exception:  # another kind of layer asks for what the stub does not have
        return False
    return isinstance(found, torch.Tensor) and torch.equal(found, h + h * 7 + 11)


def _alone(switch: Switch, row: torch.Tensor) -> bool:
    """Whether a decode step of one text runs on a GPU."""
    cache = switch.cache
    return cache is not None and cache.place is not None and row.is_cuda and row.numel() == row.shape[-1]


@functools.cache
def _thin_linear(base: type) -> type:
    inner: Any = base

    def forward(self: Any, x: torch.Tensor) -> Any:
        if not _alone(self.switch, x):
            return inner.forward(self, x)
        from headwise.fast.thin import thin

        return thin(x, self.weight, self.bias)

    return subclass(base, forward=forward)


@functools.cache
def _thin_layer(base: type) -> type:
    inner: Any = base

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        attention, mlp = self.self_attn, self.mlp
        known = is_known(attention.o_proj) and is_known(mlp.down_proj) and still_joined(mlp)
        if args or not known or not _alone(self.switch, hidden_states) or not attention.direct():
            return inner.forward(self, hidden_states, *args, **kwargs)
        norms = self.input_layernorm, self.post_attention_layernorm
        first, second = (Before(norm.weight, *norm.kind) for norm in norms)
        z = attention.outputs(hidden_states, kwargs.get("position_embeddings"), first)
        h = _plus(hidden_states, attention.o_proj, z)
        return _plus(h, mlp.down_proj, _gated(mlp.joint, h, second))

    return subclass(base, forward=forward)


def _plus(add: torch.Tensor, part: Any, x: torch.Tensor) -> torch.Tensor:
    """The product of a row, added to the stream."""
    if isinstance(part, PackedLinear):
        from headwise.fast.packed_rows import one_times

        return one_times(x, part.weight_packed, part.weight_scale, part.bits, part.bias, add=add)
    from headwise.fast.thin import thin

    return thin(x, part.weight, part.bias, add=add)


def _gated(joint: Any, x: torch.Tensor, before: Before) -> torch.Tensor:
    """The products of a normed row with gate and up, one opening the other."""
    if isinstance(joint, PackedJoint):
        from headwise.fast.packed_rows import one_times
        from headwise.fast.small import rms_norm

        return one_times(rms_norm(x, *before), *joint, gated=True)
    from headwise.fast.thin import thin

    return thin(x, joint, before=before, gated=True)
