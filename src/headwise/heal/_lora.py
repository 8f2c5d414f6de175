"""LoRA: low-rank changes of linear layers, for healing with little memory; merged into the weights at the end.

"LoRA: Low-Rank Adaptation of Large Language Models", Hu et al., 2021.
"""

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.utils import parametrize


class LowRank(nn.Module):
    """A low-rank change of a weight (outputs, inputs), at first zero."""

    def __init__(self, weight: torch.Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        down = torch.randn(rank, inputs, generator=generator) / math.sqrt(inputs)
        self.down_RI = nn.Parameter(down.to(weight))
        self.up_OR = nn.Parameter(weight.new_zeros(outputs, rank))
        self.size = float(weight.detach().float().square().mean().sqrt())

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The changed weight."""
        return weight + self.up_OR @ self.down_RI

    def full_size(self) -> float:
        """The size of `up_OR`'s entries at which the change is about as large as the weight."""
        rank, inputs = self.down_RI.shape
        return self.size * math.sqrt(inputs / rank)


def add(modules: Iterable[nn.Module], rank: int, seed: int = 0) -> int:
    """Give every linear layer in `modules` a change of this rank, freeze all else there, and count the layers."""
    generator, found = torch.Generator().manual_seed(seed), 0
    for module in modules:
        module.requires_grad_(False)
        for part in [part for part in module.modules() if isinstance(part, nn.Linear) and part.weight.numel()]:
            change = LowRank(part.weight, min(rank, *part.weight.shape), generator)
            parametrize.register_parametrization(part, "weight", change, unsafe=True)
            part.parametrizations.weight.original.requires_grad_(False)
            found += 1
    return found


def merge(model: nn.Module) -> None:
    """Add all changes to their weights; the model is an ordinary one again."""
    for part in list(model.modules()):
        if isinstance(part, nn.Linear) and parametrize.is_parametrized(part, "weight"):
            parametrize.remove_parametrizations(part, "weight", leave_parametrized=True)
