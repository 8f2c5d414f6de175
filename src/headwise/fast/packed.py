"""Products with weights in few bits on a CPU, in C: of few rows with the packed numbers, of many after unpacking.

A matrix in 4 bits is an eighth of that in single precision, and few rows wait for it to be read.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch.nn.functional import pad

from headwise.fast.joined import subclass
from headwise.fast.native_build import N, P, library
from headwise.fast.products import FEW
from headwise.runtime.packed_headwise import PackedLinear

EACH, BLOCK = 16, 32  # numbers that share a scale, at least; numbers that fill whole words


class NativePacked(ctypes.Structure):
    """`Packed` of packed.c."""

    _fields_ = [
        ("words", P),
        ("scale", P),
        *((name, N) for name in ("rows", "columns", "groups")),
        ("bits", ctypes.c_int32),
    ]


def _matrix(part: Any) -> NativePacked | None:
    """A matrix as C takes it, if it does."""
    words, scale = part.weight_packed, part.weight_scale
    here = all(x.is_cpu and x.is_contiguous() for x in (words, scale))
    (rows, columns), groups = part.sizes, scale.shape[1]
    if not here or scale.dtype != torch.bfloat16 or part.like.dtype != torch.float32:
        return None
    if groups > 1 and columns // groups % EACH:
        return None
    return NativePacked(words.data_ptr(), scale.data_ptr(), rows, columns, groups, part.bits)


def _few(part: Any, x: torch.Tensor) -> torch.Tensor | None:
    """The product of few rows, if it is made in C."""
    if not x.is_cpu or x.dtype != torch.float32 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    columns = part.sizes[1]
    count = x.numel() // columns
    if not 0 < count <= FEW or x.shape[-1] != columns or torch.is_autocast_enabled("cpu"):
        return None
    matrix = _matrix(part)
    if matrix is None:
        return None
    missing = (1 if count == 1 else FEW) - count
    rows = pad(x.reshape(count, columns), (0, -columns % BLOCK, 0, missing)).contiguous()
    out = x.new_empty(len(rows), part.sizes[0])
    where = rows.data_ptr(), out.data_ptr(), count, rows.shape[1]
    library().headwise_packed(ctypes.byref(matrix), *where, torch.get_num_threads())
    found = out[:count].view(*x.shape[:-1], -1)
    return found if part.bias is None else found + part.bias


@functools.cache
def _linear() -> type:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        found = _few(self, x)
        return PackedLinear.forward(self, x) if found is None else found

    def rows(self: Any, those: Any) -> torch.Tensor:
        matrix = _matrix(self) if isinstance(those, slice) and not torch.compiler.is_compiling() else None
        if matrix is None:
            return PackedLinear.rows(self, those)
        first, end, _ = those.indices(self.sizes[0])
        out = torch.empty(end - first, self.sizes[1])
        library().headwise_unpacked(ctypes.byref(matrix), first, end - first, out.data_ptr(), torch.get_num_threads())
        return out

    return subclass(PackedLinear, forward=forward, rows=rows)


def attach(model: Any) -> None:
    """Let every product with a matrix in few bits be made in C."""
    for module in model.modules():
        if type(module) is PackedLinear:
            module.__class__ = _linear()
