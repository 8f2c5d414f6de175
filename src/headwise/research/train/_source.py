"""What a kind of training data must say."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

Draws = tuple[torch.Tensor, ...]  # random numbers of a step, the first axis being rows


class TrainingRows(ABC):
    """Rows to train on and held-out rows to evaluate on; on the device, or brought there by `take`."""

    train: Any
    held: Any
    train_rows: int
    eval_rows: int
    row_tokens: int  # what a row costs the model, at most
    mean_tokens: float | None = None  # the same on average, where that is less
    default_rows: int | None = None  # of one step, where that is not counted in tokens
    order_on_host: bool = False  # row numbers are needed on the host

    def draw(self, rows: int, generator: torch.Generator) -> Draws:
        """Random numbers for all rows of a step, equal in all processes."""
        return ()

    def eval_draws(self, rows: torch.Tensor) -> Draws:
        """The random numbers of held-out rows, the same every time."""
        return ()

    @abstractmethod
    def take(self, part: Any, rows: torch.Tensor, draws: Draws) -> Any:
        """Rows of `self.train` or `self.held` as the loss reads them, on the device."""

    def batch(self, rows: torch.Tensor, draws: Draws) -> Any:
        """Training rows."""
        return self.take(self.train, rows, draws)

    def eval_batch(self, rows: torch.Tensor) -> Any:
        """Held-out rows."""
        return self.take(self.held, rows, self.eval_draws(rows))

    @abstractmethod
    def scores(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """`loss`, and what else says how good answers are, of every row (B,)."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The mean loss of a batch."""
        return self.scores(model, batch)["loss"].mean()


def surprise(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean surprise of every row (B,) at its labels (B, T) or (B,)."""
    flat = nn.functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="none")
    return flat.view(len(labels), -1).mean(1)
