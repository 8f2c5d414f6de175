"""Masked-token prediction: what BERT and its kin were trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from headwise.data import NOTHING
from headwise.errors import ModelError
from headwise.families import Family
from headwise.tasks._task import Answers, Prepared, Task, divergence_of, random_for

SHARE = 0.15  # of the tokens that are hidden
IGNORED = -100  # label of a token that is not


@dataclass(frozen=True, slots=True)
class Masked(Task):
    """Some tokens are hidden and predicted from all the others."""

    mask: int  # the token that hides another
    kept: tuple[int, ...]  # tokens that are never hidden: those at the ends of a text

    name = "masked"
    unit = "nats per masked token"
    agreement_name = "masked_token_agreement"

    @classmethod
    def for_model(cls, config: Any, tokenizer: Any, where: str) -> Self:
        """Which tokens hide and close a text is known to the tokenizer."""
        mask = tokenizer.mask_token_id
        if mask is None:
            raise ModelError(f"the tokenizer of {where or 'this model'} has no mask token, which masked text needs.")
        ends = (tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id)
        return cls(mask, tuple(token for token in ends if token is not None))

    def prepare(self, ids: torch.Tensor, seed: int) -> Prepared:
        """As many tokens hidden in all rows of one length, so that the answers of a batch form a block."""
        order = torch.stack([torch.rand(ids.shape[1], generator=random_for(row, seed)) for row in ids]).to(ids.device)
        order[torch.isin(ids, torch.tensor((*self.kept, NOTHING), device=ids.device))] = -1
        rank = order.argsort(1, descending=True).argsort(1)
        count = ((ids != NOTHING).sum(1, keepdim=True) * SHARE).round().clamp_min(1)
        hidden = rank < count
        return Prepared(ids.masked_fill(hidden, self.mask), ids.masked_fill(~hidden, IGNORED))

    def outputs(
        self, family: Family, model: nn.Module, batch: Prepared, stream: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Log-probabilities of the hidden tokens (B, hidden, V)."""
        return _hidden(family.run(model, batch.inputs, stream), batch).log_softmax(-1)

    def outputs_from(self, family: Family, model: nn.Module, stream: torch.Tensor, batch: Prepared) -> torch.Tensor:
        """The same from the stream after the last layer, of which the head needs the hidden tokens only."""
        return family.logits(model, _hidden(stream, batch)).log_softmax(-1)

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Surprise at the hidden tokens."""
        return nn.functional.nll_loss(outputs.flatten(0, 1), labels[labels != IGNORED], reduction="sum")

    def terms(self, batch: Prepared) -> int:
        """Hidden tokens."""
        return int((batch.labels != IGNORED).sum())

    def divergence(self, reference: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """Mean KL over the hidden tokens."""
        return divergence_of(reference, found).mean(-1)

    def compare(self, before: torch.Tensor, after: torch.Tensor, labels: torch.Tensor) -> Answers:
        """Loss, KL and equal best tokens where a token was hidden."""
        target = labels[labels != IGNORED].view(len(labels), -1, 1)
        found = (
            -before.gather(-1, target).squeeze(-1),
            -after.gather(-1, target).squeeze(-1),
            divergence_of(before, after),
            (before.argmax(-1) == after.argmax(-1)).float(),
        )
        return Answers(*(values.double().mean(1) for values in found))


def _hidden(values_BTX: torch.Tensor, batch: Prepared) -> torch.Tensor:
    """The values at hidden tokens (B, hidden, X)."""
    rows = values_BTX[batch.labels != IGNORED]
    return rows.view(len(values_BTX), -1, rows.shape[-1])


MEANING = "masked-token prediction: BERT and similar encoders"
AUTO = "AutoModelForMaskedLM"
TASK = Masked
