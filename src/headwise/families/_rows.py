"""How rows reach a model: unpadded tokens, unless a family says otherwise."""

import copy
from typing import Any, ClassVar, Self

import torch
from torch import nn


class Reader:
    """What a family says about the rows that its models read."""

    quiet: ClassVar[dict[str, Any]] = {"use_cache": False}  # arguments of a plain forward pass
    relative: ClassVar[bool] = False  # whether positions are rotary alone, so that a row may begin anywhere
    context = 0  # tokens of context over which rows begin; 0: every row begins at the first position
    seed = 0  # random seed of where rows begin

    def offset(self, context: int, seed: int = 0) -> Self:
        """This family with rows that begin at random positions of a context.

        Rotary attention sees differences of positions alone, so a model's answers stay the same. But queries and keys
        after rotary depend on the position: whatever is fitted to them must see all positions that will be served.
        A row's position follows from its tokens, so that every model and every stage reads it at the same place.
        """
        if not self.relative:
            return self
        found = copy.copy(self)
        found.context, found.seed = context, seed
        return found

    def row_length(self, length: int, served: int) -> int:
        """Tokens of a row of text: `length` where rows may begin anywhere, else all that is served."""
        return min(length, served) if self.relative else served

    def positions(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Where the tokens of rows stand, by name; nothing where every row begins at the first position."""
        room = self.context - rows.shape[1]
        if room <= 0:
            return {}
        start = _hashed(rows, self.seed) % (room + 1)
        return {"position_ids": start[:, None] + torch.arange(rows.shape[1], device=rows.device)}

    def row_tokens(self, config: Any, rows: torch.Tensor) -> int | None:
        """Tokens that a row makes where it does not consist of them: the patches of an image."""
        return None

    def unpadded(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of one length, without the places behind their end."""
        return rows[:, rows[0] >= 0]

    def call(self, model: nn.Module, rows: torch.Tensor) -> Any:
        """A forward pass of a model or of its body. Rows are unpadded tokens unless a family says otherwise."""
        return model(**self.arguments(rows), **self.positions(rows), **self.quiet)

    def arguments(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rows as a model takes them, by name; what the model writes comes last."""
        return {"input_ids": rows}

    def answering(self, stream: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The tokens of the last stream that answers come from."""
        return stream

    def example(self, config: Any, count: int = 2, length: int = 20) -> torch.Tensor:
        """Rows that any model of the family reads, whatever its tokenizer: few words, the first ones left out."""
        words = min(93, int(getattr(config, "vocab_size", None) or 93))
        first = min(3, words - 1)
        return torch.arange(count * length).reshape(count, length) % (words - first) + first

    def longer(self, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Rows with more tokens (B, T) at their end."""
        return torch.cat((rows, tokens), 1)

    def excerpt(self, rows: torch.Tensor, most: int) -> torch.Tensor:
        """The first row alone, with no more than so many tokens; a row may end early."""
        return self.unpadded(rows[:1])[:, :most]

    def prompt(self, row: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The prompt that a model is to continue, of a row, and how many tokens come before what it wrote."""
        length = min(32, len(row) // 2)
        return row[None, :length], length

    def read_tokens(self, rows: torch.Tensor) -> int:
        """How many tokens of rows a model reads before it writes."""
        return rows.shape[1]

    def first_step(self, rows: torch.Tensor) -> dict[str, Any]:
        """How a model reads a text and begins to write."""
        return {"input_ids": rows, "logits_to_keep": 1}

    def next_step(self, token: torch.Tensor, out: Any) -> dict[str, Any]:
        """How it writes the next token, after `out`."""
        return {"input_ids": token}


class ImageReader(Reader):
    """Rows of models that read images."""

    def row_length(self, length: int, served: int) -> int:
        """Images have the length that they have."""
        return min(length, served)

    def arguments(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Images by their name."""
        return {"pixel_values": rows}

    def excerpt(self, rows: torch.Tensor, most: int) -> torch.Tensor:
        """The first image, whole."""
        return rows[:1]

    def unpadded(self, rows: torch.Tensor) -> torch.Tensor:
        """Images have no end to be cut off."""
        return rows


def _hashed(rows_BT: torch.Tensor, seed: int) -> torch.Tensor:
    """A number below 2**31 for every row of tokens: the same on every device, and nothing waits for it."""
    place = torch.arange(1, rows_BT.shape[1] + 1, device=rows_BT.device)
    found = ((rows_BT + 1) * (place * 0x9E3779B1 + 2 * seed + 1)).sum(1)
    for shift in (29, 32):  # products wrap around
        found = (found ^ (found >> shift)) * 0x2545F4914F6CDD1D
    return (found >> 32) & 0x7FFFFFFF
