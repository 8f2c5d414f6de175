"""Tasks in which a model reads an input and writes a text: rows with a target, and how targets are sampled."""

from typing import Any

import torch
from torch import nn

from headwise.data import NOTHING, WRITTEN, marks_of
from headwise.errors import DataError
from headwise.tasks._task import Compared, Prepared, Task, compared_by_token, divergence_of

IGNORED = -100  # label of a token that is only read


class Target(Task):
    """Every token of a target is predicted from the input and from the tokens before it."""

    end: int | None  # the token that ends a target

    agreement_name = "next_token_agreement"
    perplexity = True
    generates = True
    refit_strength = 1e-2

    def prepare(self, ids: torch.Tensor, seed: int) -> Prepared:
        """The model reads rows without their last token; the label of a target's token is the one after it.

        The label of the marker before a target is the marker itself: it tells whether the target was given or written.
        """
        marks = marks_of(ids)
        place, last = torch.arange(ids.shape[1], device=ids.device), (marks != NOTHING).sum(1, keepdim=True) - 1
        written = (marks < NOTHING).cumsum(1) > 0  # the marker and all behind it
        after = torch.cat((marks[:, 1:], torch.full_like(marks[:, :1], NOTHING)), 1)
        labels = torch.where(written & (place < last), torch.where(marks < NOTHING, marks, after), IGNORED).long()
        ended = (place == last).view(*marks.shape, *(1 for _ in ids.shape[2:]))
        return Prepared(ids.masked_fill(ended, NOTHING), labels)

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Negative log-probability of all tokens of the target."""
        target = labels[:, -outputs.shape[1] :]
        return nn.functional.nll_loss(outputs.flatten(0, 1), target.flatten(), reduction="sum", ignore_index=IGNORED)

    def terms(self, batch: Prepared) -> int:
        """Tokens of targets."""
        return int((batch.labels >= 0).sum())

    def compare(self, before: torch.Tensor, after: torch.Tensor, labels: torch.Tensor) -> Compared:
        """KL and equal best tokens; the loss only where targets were given, not where the model wrote them itself."""
        given = not (labels == WRITTEN).any()
        target = labels[:, -before.shape[1] :].unsqueeze(-1) if given else None
        return compared_by_token(before, after, divergence_of(before.double(), after.double()), target)

    def drawn(
        self, model: Any, given: dict[str, Any], begun: torch.Tensor, most: int, random: torch.Generator
    ) -> list[list[int]]:
        """Targets sampled at temperature 1, after the tokens `begun` and up to the end token, at most `most` more.

        `given` holds further arguments of every step.
        """
        given, tokens = dict(given), begun
        open_ended = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
        for step in range(most):
            out = model(decoder_input_ids=tokens[:, -1:] if step else tokens, use_cache=True, **given)
            given["past_key_values"] = out.past_key_values
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
    """Rows as one tensor; shorter ones are filled up with `NOTHING`."""
    width = max(map(len, rows))
    return torch.tensor([row + [NOTHING] * (width - len(row)) for row in rows])
