"""Masked-token prediction: what BERT and similar encoders were trained on."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from headwise.data import NOTHING
from headwise.errors import ModelError
from headwise.tasks._task import Compared, Prepared, Task, compared_by_token, divergence_of, random_for

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
        """The tokenizer knows which token hides others, and which close a text."""
        mask = tokenizer.mask_token_id
        if mask is None:
            raise ModelError(f"the tokenizer of {where or 'this model'} has no mask token, which masked text needs.")
        ends = (tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id)
        return cls(mask, tuple(token for token in ends if token is not None))

    def prepare(self, ids: torch.Tensor, seed: int) -> Prepared:
        """All rows of one length hide equally many tokens, so that the answers of a batch form a block."""
        order = torch.stack([torch.rand(ids.shape[1], generator=random_for(row, seed)) for row in ids]).to(ids.device)
        order[torch.isin(ids, torch.tensor((*self.kept, NOTHING), device=ids.device))] = -1
        rank = order.argsort(1, descending=True).argsort(1)
        count = ((ids != NOTHING).sum(1, keepdim=True) * SHARE).round().clamp_min(1)
        hidden = rank < count
        return Prepared(ids.masked_fill(hidden, self.mask), ids.masked_fill(~hidden, IGNORED))

    def picked(self, values_BTX: torch.Tensor, batch: Prepared) -> torch.Tensor:
        """The values at hidden tokens (B, hidden, X): the head needs no others."""
        rows = values_BTX[batch.labels != IGNORED]
        return rows.view(len(values_BTX), -1, rows.shape[-1])

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Negative log-probability of the hidden tokens."""
        return nn.functional.nll_loss(outputs.flatten(0, 1), labels[labels != IGNORED], reduction="sum")

    def terms(self, batch: Prepared) -> int:
        """Hidden tokens."""
        return int((batch.labels != IGNORED).sum())

    def compare(self, before: torch.Tensor, after: torch.Tensor, labels: torch.Tensor) -> Compared:
        """Loss, KL and equal best tokens where a token was hidden."""
        target = labels[labels != IGNORED].view(len(labels), -1, 1)
        return compared_by_token(before, after, divergence_of(before, after), target)


MEANING = "masked-token prediction: BERT and similar encoders"
AUTO = "AutoModelForMaskedLM"
TASK = Masked
