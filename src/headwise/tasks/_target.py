"""What tasks share in which a text is written to an input: rows with a target, and how it is drawn."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headwise.data import NOTHING, WRITTEN, marks_of
from headwise.errors import DataError
from headwise.families import Family
from headwise.tasks._task import Answers, Prepared, Task, divergence_of

IGNORED = -100  # label of a token that is only read


class Target(Task):
    """Every token of a target is predicted from the input and from those before it."""

    end: int | None  # the token that ends a target

    agreement_name = "next_token_agreement"
    perplexity = True
    generates = True
    refit_strength = 1e-2

    def prepare(self, ids: torch.Tensor, seed: int) -> Prepared:
        """The model reads rows without their last token; the label of a target's token is the one after it.

        The label of the marker before a target is the marker, which says where the target is from.
        """
        marks = marks_of(ids)
        place, last = torch.arange(ids.shape[1], device=ids.device), (marks != NOTHING).sum(1, keepdim=True) - 1
        written = (marks < NOTHING).cumsum(1) > 0  # the marker and all behind it
        after = torch.cat((marks[:, 1:], torch.full_like(marks[:, :1], NOTHING)), 1)
        labels = torch.where(written & (place < last), torch.where(marks < NOTHING, marks, after), IGNORED).long()
        ended = (place == last).view(*marks.shape, *(1 for _ in ids.shape[2:]))
        return Prepared(ids.masked_fill(ended, NOTHING), labels)

    def outputs(
        self, family: Family, model: nn.Module, batch: Prepared, stream: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Log-probabilities (B, T, V) of the tokens of the target."""
        return family.run(model, batch.inputs, stream).log_softmax(-1)

    def outputs_from(self, family: Family, model: nn.Module, stream: torch.Tensor, batch: Prepared) -> torch.Tensor:
        """The same from the stream after the last layer."""
        return family.logits(model, family.answering(stream, batch.inputs)).log_softmax(-1)

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Surprise at all tokens of the target."""
        target = labels[:, -outputs.shape[1] :]
        return nn.functional.nll_loss(outputs.flatten(0, 1), target.flatten(), reduction="sum", ignore_index=IGNORED)

    def terms(self, batch: Prepared) -> int:
        """Tokens of targets."""
        return int((batch.labels >= 0).sum())

    def divergence(self, reference: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """Mean KL over a target."""
        return divergence_of(reference, found).mean(-1)

    def compare(self, before: torch.Tensor, after: torch.Tensor, labels: torch.Tensor) -> Answers:
        """KL and equal best tokens; the loss where targets were given, as the model's own prove nothing."""
        same = (before.argmax(-1) == after.argmax(-1)).double().mean(1)
        kl = divergence_of(before.double(), after.double()).mean(1)
        if (labels == WRITTEN).any():
            return Answers(None, None, kl, same)
        target = labels[:, -before.shape[1] :].unsqueeze(-1)
        losses = [-found.gather(-1, target).squeeze(-1).double().mean(1) for found in (before, after)]
        return Answers(losses[0], losses[1], kl, same)

    def drawn(
        self, model: Any, told: dict[str, Any], begun: torch.Tensor, most: int, random: torch.Generator
    ) -> list[list[int]]:
        """Targets drawn token by token at temperature 1, from those that begin them to the one that ends them.

        `told` is what the model is told at every step, `most` how many tokens are drawn.
        """
        told, tokens = dict(told), begun
        open_ended = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
        for step in range(most):
            out = model(decoder_input_ids=tokens[:, -1:] if step else tokens, use_cache=True, **told)
            told["past_key_values"] = out.past_key_values
            chances = out.logits[:, -1].softmax(-1)
            if not chances.isfinite().all():
                raise DataError("the model's answers to this input are not numbers; check the input and the weights.")
            drawn = torch.multinomial(chances, 1, generator=random)
            tokens = torch.cat((tokens, drawn), 1)
            open_ended &= drawn[:, 0] != (NOTHING if self.end is None else self.end)
            if not open_ended.any():
                break
        return [self._ended(row, begun.shape[1]) for row in tokens.tolist()]

    def _ended(self, row: list[int], begun: int) -> list[int]:
        return row[: row.index(self.end, begun) + 1] if self.end in row[begun:] else row


def padded(rows: list[list[int]]) -> torch.Tensor:
    """Rows of one tensor, shorter ones ended."""
    width = max(map(len, rows))
    return torch.tensor([row + [NOTHING] * (width - len(row)) for row in rows])
