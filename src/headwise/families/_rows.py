"""How rows reach a model: unpadded tokens, unless a family says otherwise."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn


class Reader:
    """What a family says about the rows that its models read."""

    quiet: ClassVar[dict[str, Any]] = {"use_cache": False}  # what a plain forward pass is told

    def row_tokens(self, config: Any, rows: torch.Tensor) -> int | None:
        """Tokens that a row makes where it does not consist of them: the patches of an image."""
        return None

    def unpadded(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of one length, without the places behind their end."""
        return rows[:, rows[0] >= 0]

    def call(self, model: nn.Module, rows: torch.Tensor) -> Any:
        """A forward pass of a model or of its body. Rows are unpadded tokens unless a family says otherwise."""
        return model(**self.arguments(rows), **self.quiet)

    def arguments(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rows as a model takes them, by name; what the model writes comes last."""
        return {"input_ids": rows}

    def answering(self, stream: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The tokens of the last stream that answers come from."""
        return stream

    def example(self, config: Any, count: int = 2, length: int = 20) -> torch.Tensor:
        """Rows that any model of the family reads, for tests."""
        return torch.arange(count * length).reshape(count, length) % 90 + 3

    def longer(self, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Rows with more tokens (B, T) at their end."""
        return torch.cat((rows, tokens), 1)

    def excerpt(self, rows: torch.Tensor, most: int) -> torch.Tensor:
        """The first row alone, with no more than so many tokens; a row may end early."""
        return self.unpadded(rows[:1])[:, :most]

    def prompt(self, row: torch.Tensor) -> tuple[torch.Tensor, int]:
        """What a model is given to write on from, of a row, and how many tokens come before what it wrote."""
        length = min(32, len(row) // 2)
        return row[None, :length], length

    def read_tokens(self, rows: torch.Tensor) -> int:
        """How many tokens of rows a model reads before it writes."""
        return rows.shape[1]

    def first_step(self, rows: torch.Tensor) -> dict[str, Any]:
        """How a model reads a text and begins to write."""
        return {"input_ids": rows, "logits_to_keep": 1}

    def next_step(self, token: torch.Tensor, out: Any) -> dict[str, Any]:
        """How it writes on, after `out`."""
        return {"input_ids": token}


class ImageReader(Reader):
    """The same for models of images."""

    def arguments(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Images by their name."""
        return {"pixel_values": rows}

    def excerpt(self, rows: torch.Tensor, most: int) -> torch.Tensor:
        """The first image, whole."""
        return rows[:1]

    def unpadded(self, rows: torch.Tensor) -> torch.Tensor:
        """Images have no end to be cut off."""
        return rows
