"""Products in single precision on a CPU: of few rows in C, of many by oneDNN.

Few rows wait for the matrix to be read, which C does with all threads. Of many, oneDNN makes better use of wide
registers than the library that torch asks for single precision; torch itself reaches it in compiled code only.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from headwise.fast.native_build import library, runs

MANY = 64  # rows, at least, for which oneDNN is asked
FEW = 4  # at most, that are multiplied with matrices in C: for more of them torch is faster


def times(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """Rows (..., columns) times a matrix (rows, columns), if there is a way that is faster than torch's usual one."""
    alike = x.dtype == matrix.dtype == torch.float32 and x.is_cpu and x.shape[-1] == matrix.shape[1]
    if not alike or not x.is_contiguous() or not matrix.is_contiguous():
        return None
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return None
    count = x.numel() // matrix.shape[1]
    if count >= MANY and _onednn() is not None:
        found: torch.Tensor = _onednn()(x, matrix, bias, "none", [], "")
        return found
    if not 0 < count <= FEW or not runs():
        return None
    out = x.new_empty((*x.shape[:-1], len(matrix)))
    where = x.data_ptr(), matrix.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr()
    library().headwise_linear(*where, count, *matrix.shape, torch.get_num_threads())
    return out


def linear(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Rows times a matrix, in the fastest way."""
    found = times(x, matrix, bias) if x.is_cpu else None
    return functional.linear(x, matrix, bias) if found is None else found


@functools.cache
def _onednn() -> Any:
    """Its product, if this torch has it and it says the same."""
    try:
        product = torch.ops.mkldnn._linear_pointwise
        x = torch.arange(32.0).view(4, 8)
        same = torch.equal(product(x, x, None, "none", [], ""), x @ x.mT)
    except (AttributeError, RuntimeError):  # torch says of this operation that it may change
        return None
    return product if same else None


class Linear(nn.Linear):
    """A product that takes the fastest way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As that of its base class."""
        return linear(x, self.weight, self.bias)


def is_plain(part: Any) -> bool:
    """Whether a module is a product and nothing else: no adapter was put in its place."""
    return type(part) in (nn.Linear, Linear)
