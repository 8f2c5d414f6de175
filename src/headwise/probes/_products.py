"""Running second moments of wide rows, such as an MLP's channels, cheap beside the forward pass.

Only the half above the diagonal is computed, in panels that are added in place. Sums are in float32, or in double
precision where rows are. On CUDA rows of 16 bits are multiplied as they are and summed in float32, which is exact but
for the order of the sum. Factors of 32 bits are rounded to TF32 there: that acts as noise of 1e-7 of a channel's own
power, far below the ridge (1e-3) that every use of these moments adds.
"""

from __future__ import annotations

import torch

from headwise import processes
from headwise.linalg import fast_products

PANELS = 4  # 10 of 16 blocks are computed; more panels save little and are slow for being narrow
NARROW = 512  # columns that one product does as fast


class Gram:
    """The sum of `x x'` over rows."""

    def __init__(self) -> None:
        self.sum: torch.Tensor | None = None

    def add(self, x_NM: torch.Tensor) -> None:
        """Add the rows of a batch."""
        short = x_NM.is_cuda and x_NM.element_size() == 2
        x_NM = x_NM if short or x_NM.dtype == torch.float64 else x_NM.float()
        width = x_NM.shape[1]
        if self.sum is None:
            self.sum = x_NM.new_zeros(width, width, dtype=torch.float32 if short else x_NM.dtype)
        step = -(-width // PANELS) if width > NARROW else width
        with fast_products(x_NM.device):
            for start in range(0, width, step):
                columns = slice(start, start + step)
                if short:
                    self.sum[columns, start:] += torch.mm(x_NM[:, columns].mT, x_NM[:, start:], out_dtype=torch.float32)
                else:
                    self.sum[columns, start:].addmm_(x_NM[:, columns].mT, x_NM[:, start:])

    def total(self) -> torch.Tensor:
        """The whole symmetric matrix, over all processes; the sum is freed."""
        assert self.sum is not None, "rows were added"
        upper, self.sum = processes.total(self.sum).triu_(), None
        return upper + upper.triu(1).mT
