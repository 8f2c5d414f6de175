"""Next-token prediction: decoders that write text."""

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import nn

from headwise.data import blocks_of
from headwise.tasks._task import Compared, Prepared, Task, compared_by_token, divergence_of


class Causal(Task):
    """Every token is predicted from those before it."""

    name = "causal"
    unit = "nats per token"
    agreement_name = "next_token_agreement"
    perplexity = True
    generates = True
    has_past = True
    refit_strength = 1e-2

    @classmethod
    def for_model(cls, config: Any, tokenizer: Any, where: str) -> Self:
        """The task is the same for all models."""
        return cls()

    def prepare(self, ids: torch.Tensor, seed: int) -> Prepared:
        """The text is its own label."""
        return Prepared(ids, ids)

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Negative log-probability of all tokens but the first."""
        return nn.functional.nll_loss(outputs[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")

    def terms(self, batch: Prepared) -> int:
        """Tokens."""
        return batch.inputs.numel()

    def compare(self, before: torch.Tensor, after: torch.Tensor, labels: torch.Tensor) -> Compared:
        """Loss, KL and equal best tokens at every position whose next token is known."""
        before, after = before[:, :-1], after[:, :-1]
        return compared_by_token(before, after, divergence_of(before, after), labels[:, 1:].unsqueeze(-1))

    def blocks(
        self, texts: Iterable[str], tokenizer: Any, length: int, count: int | None = None, what: str = "the text"
    ) -> torch.Tensor:
        """Text cut at any token, as decoders read it."""
        return blocks_of(texts, tokenizer, length, count, what)

    def block_tokens(self, length: int) -> int:
        """All blocks are full."""
        return length


MEANING = "next-token prediction: decoders that write text"
AUTO = "AutoModelForCausalLM"
TASK = Causal
