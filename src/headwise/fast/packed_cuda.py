"""Products with weights in few bits on CUDA: of few rows with the packed numbers, of many after unpacking.

A decode step waits for weights to be read, and reads what is packed: in 16 bits for up to 16 texts, in float32 for one.
Many rows are multiplied by torch, with parts of a matrix that are unpacked one after the other, so that memory never
holds all of it in 16 bits. When a model is made fast, kernels are compared with plain code, which is used if they fail.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch.nn import functional

from headwise.fast.choice import small_kernels_run
from headwise.fast.joined import are_few, subclass
from headwise.runtime.packed_headwise import PackedEmbedding, PackedLinear

ROWS = 64  # of a matrix, with which kernels are tried
CLOSE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # by which they may be off
AT_ONCE = 1 << 24  # numbers of a matrix that are unpacked at once: enough for a product that fills a large GPU


def _rows(part: Any, those: Any) -> torch.Tensor | None:
    """Neighbouring rows of a matrix, if our kernel unpacks them."""
    if not isinstance(those, slice) or not part.weight_packed.is_cuda or torch.compiler.is_compiling():
        return None
    from headwise.fast.packed_rows import unpacked_rows

    words, scale = part.weight_packed[those], part.weight_scale[those]
    return unpacked_rows(words.contiguous(), scale.contiguous(), part.bits, part.sizes[1], part.like.dtype)


def _product(part: Any, x: torch.Tensor) -> torch.Tensor | None:
    """Rows times a matrix, if that is made here."""
    words, scale, columns = part.weight_packed, part.weight_scale, part.sizes[1]
    if not x.is_cuda or not words.is_cuda or x.shape[-1] != columns or torch.compiler.is_compiling():
        return None
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cuda") or not x.numel():
        return None
    if are_few(x) and words.is_contiguous() and scale.is_contiguous():
        from headwise.fast.packed_rows import few_times

        return few_times(x.reshape(-1, columns), words, scale, part.bits, part.bias).view(*x.shape[:-1], -1)
    each = max(1, AT_ONCE // columns)
    parts = (part.rows(slice(low, low + each)).to(x.dtype) for low in range(0, part.sizes[0], each))
    found = torch.cat([functional.linear(x, matrix) for matrix in parts], -1)
    return found if part.bias is None else found + part.bias


@functools.cache
def _kind(base: type) -> type:
    inner: Any = base

    def forward(self: Any, x: torch.Tensor) -> Any:
        found = _product(self, x) if base is PackedLinear else None
        return inner.forward(self, x) if found is None else found

    def rows(self: Any, those: Any) -> torch.Tensor:
        found = _rows(self, those)
        return inner.rows(self, those) if found is None else found

    return subclass(base, forward=forward, rows=rows, kernels=True)


def attach(model: Any) -> None:
    """Let a model on CUDA multiply with matrices in few bits as they are, where our kernels are right."""
    packed = [module for module in model.modules() if type(module) in (PackedLinear, PackedEmbedding)]
    if not packed or not packed[0].weight_packed.is_cuda or not small_kernels_run(model.device, model.dtype):
        return
    try:
        wrong = next((part for part in _kinds_of(packed) if not _right(part, model.dtype)), None)
    except Exception as error:  # what compiling may raise is not listed anywhere
        warnings.warn(f"kernels for packed weights cannot be built here ({error}); plain code is used.", stacklevel=3)
        return
    if wrong is not None:
        warnings.warn(f"kernels for {wrong.bits} bits compute something else here; plain code is used.", stacklevel=3)
        return
    for module in packed:
        module.__class__ = _kind(type(module))


def _kinds_of(packed: list[Any]) -> list[Any]:
    """A product of every kind for which kernels are built."""
    products = [part for part in packed if type(part) is PackedLinear]
    return list({(part.bits, part.sizes[1], part.weight_scale.shape[1]): part for part in products}.values())


@torch.no_grad()
def _right(part: Any, dtype: torch.dtype) -> bool:
    """Whether kernels multiply one row and several with a matrix as plain code does."""
    from headwise.fast.packed_rows import few_times, unpacked_rows

    words, scale, columns = part.weight_packed[:ROWS], part.weight_scale[:ROWS], part.sizes[1]
    whole = PackedLinear.rows(part, slice(ROWS)).double()
    pairs = [(unpacked_rows(words, scale, part.bits, columns, dtype), whole)]
    for count in (1, 3):
        x = torch.linspace(-1, 1, count * columns, device=words.device).sin().view(count, columns).to(dtype)
        if are_few(x):
            pairs.append((few_times(x, words, scale, part.bits), functional.linear(x.double(), whole)))
    return all(bool((found - want).norm() <= CLOSE[dtype] * want.norm()) for found, want in pairs)
