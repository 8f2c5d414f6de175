"""Weights that stay in few bits in memory, in the format of compressed-tensors: a product unpacks what it needs.

Stock transformers unpacks all weights when a model first runs, so that it then takes as much memory as with 16 bits.
Needs torch only; lies beside every tailored model. Written by Headwise (Apache-2.0).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

AT_ONCE = 1 << 22  # numbers of a matrix that are unpacked at once
QUANTISER = ("forward", "quantization_scheme", "quantization_status", "quantization_enabled")  # what it left on modules


def unpacked(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Whole numbers (rows, columns) from words of 32 bits (rows, words), packed without gaps, the lowest bits first.

    Numbers are stored with half of their range added. The result is of a small integer type.
    """
    half, last = 1 << (bits - 1), (1 << bits) - 1
    flat = words.contiguous().view(torch.uint8)
    if bits == 8:
        return (flat ^ half).view(torch.int8)[:, :columns]
    each = 8 // bits if 8 % bits == 0 else 8  # numbers that fill whole bytes
    width, groups = each * bits // 8, -(-columns // each)
    if flat.shape[1] < groups * width:
        flat = functional.pad(flat, (0, groups * width - flat.shape[1]))
    group = flat[:, : groups * width].reshape(len(flat), groups, width)
    found = flat.new_empty(len(flat), groups, each)
    for number in range(each):
        at, shift = divmod(number * bits, 8)
        one = group[..., at] >> shift
        if shift + bits > 8:  # it lies in two bytes
            one |= group[..., at + 1] << (8 - shift)
        torch.bitwise_and(one, last, out=found[..., number])
    return found.view(torch.int8).flatten(1)[:, :columns] - half


class Unpacked(torch.Tensor):
    """Numbers of a matrix in few bits. Whoever would change them gets an error: the change would be lost."""

    # What is computed with them is an ordinary tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> Any:  # type: ignore[override]
        """Refused: adapters are merged through it."""
        raise RuntimeError(
            "weights in few bits cannot be changed, and no adapter can be merged into them; load the model with "
            "quantization_config=CompressedTensorsConfig(dequantize=True), or by headwise.load(..., packed=False)."
        )


class Packed(nn.Module):
    """A matrix in few bits. Its numbers are made anew whenever they are asked for, in the module's own precision."""

    weight_packed: torch.Tensor
    weight_scale: torch.Tensor
    like: torch.Tensor  # empty; as precise as the numbers are to be
    bits: int
    sizes: tuple[int, int]

    @property
    def weight(self) -> torch.Tensor:
        """The whole matrix, to be read."""
        return self.rows(slice(None)).as_subclass(Unpacked)

    def rows(self, those: Any) -> torch.Tensor:
        """Some rows of the matrix."""
        whole = unpacked(self.weight_packed[those], self.bits, self.sizes[1])
        scale = self.weight_scale[those].to(self.like.dtype).unsqueeze(-1)
        return (whole.to(self.like.dtype).view(*scale.shape[:2], -1) * scale).flatten(1)


class PackedLinear(Packed, nn.Linear):  # type: ignore[override]  # its weight is no parameter
    """A product with a matrix in few bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As that with the whole matrix, of which a part is unpacked at once."""
        each = max(1, AT_ONCE // self.sizes[1])
        parts = [
            functional.linear(x, self.rows(slice(low, low + each)).to(x.dtype)) for low in range(0, self.sizes[0], each)
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return out if self.bias is None else out + self.bias


class PackedEmbedding(Packed, nn.Embedding):  # type: ignore[override]
    """A table in few bits, of which the rows that are looked up are unpacked."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """As that of the whole table."""
        return self.rows(ids.flatten()).view(*ids.shape, -1)


KINDS: dict[type, type] = {nn.Linear: PackedLinear, nn.Embedding: PackedEmbedding}  # what can stay packed, as what


def keep_packed(model: Any) -> Any:
    """Let a model that transformers just loaded keep its weights in few bits; returns the model.

    Nothing changes where weights were unpacked on loading, as `CompressedTensorsConfig(dequantize=True)` asks for, or
    where accelerate moves them between devices.
    """
    waits = getattr(model, "ct_decompress_hook", None)  # for the first run, to unpack all
    found = {name: module for name, module in model.named_modules() if "weight_packed" in module._parameters}
    held = list(found.values())
    if waits is None or not all(type(module) in KINDS and not hasattr(module, "_hf_hook") for module in held):
        return model
    for name, module in found.items():
        _check(name, module)
    waits.remove()
    del model.ct_decompress_hook
    narrow: dict[int, torch.Tensor] = {}  # scales that two tables share stay one tensor
    for module in held:
        scale = module.weight_scale
        _hold(module, narrow.setdefault(scale.data_ptr(), _as_stored(scale.data)))
    return model


def loading(stock: Any) -> classmethod[Any, Any, Any]:
    """`from_pretrained` of a tailored class: weights in few bits stay so."""

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """As stock code's; packed weights are unpacked only where `CompressedTensorsConfig(dequantize=True)` asks."""
        found = stock.from_pretrained.__func__(cls, *args, **kwargs)
        keep_packed(found[0] if isinstance(found, tuple) else found)
        return found

    return classmethod(from_pretrained)


def _as_stored(scale: torch.Tensor) -> torch.Tensor:
    """Scales in 16 bits, if the model was loaded as more precise numbers and they are no more precise themselves."""
    found = scale.to(torch.bfloat16)
    return found if torch.equal(found.to(scale.dtype), scale) else scale


def _check(name: str, module: Any) -> None:
    """Refuse parts that do not fit together: what multiplies with them reads as far as they say."""
    bits, (rows, columns) = int(module.quantization_scheme.weights.num_bits), _sizes(module)
    words, scale = module.weight_packed, module.weight_scale
    whole = words.dtype == torch.int32 and tuple(words.shape) == (rows, -(-columns * bits // 32))
    shared = scale.dim() == 2 and len(scale) == rows and scale.shape[1] > 0 and columns % scale.shape[1] == 0
    if module.weight_shape.tolist() != [rows, columns] or not whole or not shared or not 1 <= bits <= 8:
        raise ValueError(f"the packed matrix {name} does not have the sizes that it says; fetch the model again")


def _sizes(module: Any) -> tuple[int, int]:
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    return module.num_embeddings, module.embedding_dim


def _hold(module: Any, scale: torch.Tensor) -> None:
    module.register_buffer("like", module.weight_scale.new_empty(0), persistent=False)
    del module.weight_scale  # as a buffer it is not taken for what the model computes in
    module.register_buffer("weight_scale", scale)
    module.bits = int(module.quantization_scheme.weights.num_bits)
    module.sizes = _sizes(module)
    for name in QUANTISER:
        module.__dict__.pop(name, None)
    module.__class__ = KINDS[type(module)]
