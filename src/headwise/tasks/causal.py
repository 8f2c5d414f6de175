"""Next-token prediction: decoders that write text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import nn

from headwise.data import blocks_of
from headwise.families import Family
from headwise.tasks._task import Answers, Prepared, Task, divergence_of


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

    def outputs(
        self, family: Family, model: nn.Module, batch: Prepared, stream: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Log-probabilities of the next token (B, T, V)."""
        return family.run(model, batch.inputs, stream).log_softmax(-1)

    def outputs_from(self, family: Family, model: nn.Module, stream: torch.Tensor, batch: Prepared) -> torch.Tensor:
        """The same from the stream after the last layer."""
        return family.logits(model, stream).log_softmax(-1)

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Surprise at all tokens but the first."""
        return nn.functional.nll_loss(outputs[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")

    def terms(self, batch: Prepared) -> int:
        """Tokens."""
        return batch.inputs.numel()

    def divergence(self, reference: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """Mean KL over all positions."""
        return divergence_of(reference, found).mean(-1)

    def compare(self, before: torch.Tensor, after: torch.Tensor, labels: torch.Tensor) -> Answers:
        """Loss, KL and equal best tokens where the text says what came next."""
        before, after, target = before[:, :-1], after[:, :-1], labels[:, 1:].unsqueeze(-1)
        found = (
            -before.gather(-1, target).squeeze(-1),
            -after.gather(-1, target).squeeze(-1),
            divergence_of(before, after),
            (before.argmax(-1) == after.argmax(-1)).float(),
        )
        return Answers(*(values.double().mean(1) for values in found))

    def blocks(
        self, texts: Iterable[str], tokenizer: Any, length: int, count: int | None = None, what: str = "the text"
    ) -> torch.Tensor:
        """Text cut anywhere, as decoders meet it."""
        return blocks_of(texts, tokenizer, length, count, what)

    def block_tokens(self, length: int) -> int:
        """All blocks are full."""
        return length


MEANING = "next-token prediction: decoders that write text"
AUTO = "AutoModelForCausalLM"
TASK = Causal
