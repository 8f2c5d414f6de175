"""Sums and answers in float32, of a model whose weights have fewer bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def widened(x: torch.Tensor) -> torch.Tensor:
    """In float32 where it has fewer bits, else as it is."""
    return x.float() if x.element_size() < 4 else x


class _Wide(nn.Linear):
    """A linear layer that sums and answers in float32, whatever its weights have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As `nn.Linear`."""
        bias = None if self.bias is None else self.bias.float()
        if x.is_cuda and x.dtype == self.weight.dtype and not torch.is_grad_enabled():  # no copy of a large table
            found = torch.mm(x.flatten(0, -2), self.weight.mT, out_dtype=torch.float32).unflatten(0, x.shape[:-1])
            return found if bias is None else found + bias
        return nn.functional.linear(x.float(), self.weight.float(), bias)


@contextmanager
def wide_answers(model: Any) -> Iterator[None]:
    """Logits in float32, within a block: bfloat16 rounds large ones by more than a small damage moves them."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    if type(head) is not nn.Linear or head.weight.dtype in (torch.float32, torch.float64):
        yield
        return
    head.__class__ = _Wide
    try:
        yield
    finally:
        head.__class__ = nn.Linear
