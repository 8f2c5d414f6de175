"""Answers about a whole row, text or image: one label, several, or a score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from headwise.families import Family
from headwise.tasks._task import Answers, Prepared, Task, divergence_of, random_for


@dataclass(frozen=True, slots=True)
class Classes(Task):
    """Class probabilities. No label is needed: the source's own answers are what is to be kept."""

    kind: str = "one"  # label per row; "several", each present or not; or a "score"
    answers: int = 1  # per row

    agreement_name = "class_agreement"

    @classmethod
    def for_model(cls, config: Any, tokenizer: Any, where: str) -> Self:
        """What the head's outputs mean, by the configuration."""
        return cls(*kind_of(config))

    def prepare(self, ids: torch.Tensor, seed: int) -> Prepared:
        """The labels of a row are random numbers in [0, 1), one for each answer (see `loss`)."""
        draws = [torch.rand(self.answers, generator=random_for(row, seed)) for row in ids]
        return Prepared(ids, torch.stack(draws).to(ids.device), per_token=False, row=self.row_tokens)

    def outputs(
        self, family: Family, model: nn.Module, batch: Prepared, stream: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Log-probabilities (B, answers, choices) of the choices for every answer, or scores (B, scores)."""
        return self._answers(family.run(model, batch.inputs, stream))

    def outputs_from(self, family: Family, model: nn.Module, stream: torch.Tensor, batch: Prepared) -> torch.Tensor:
        """The same from the stream after the last layer."""
        return self._answers(family.logits(model, stream))

    def _answers(self, logits: torch.Tensor) -> torch.Tensor:
        if self.kind == "score":
            return logits
        choices = logits.unsqueeze(1) if self.kind == "one" else torch.stack((torch.zeros_like(logits), logits), -1)
        return choices.log_softmax(-1)

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Surprise at an answer that the model itself would give, drawn by the row's random numbers.

        With answers drawn so, half the expected square of a first-order change is the KL that it causes (the Fisher
        information of the answers). A score stands for a normal distribution of width one around it; there a random
        sign has the same second moment as a drawn answer.
        """
        if self.kind == "score":
            return (outputs * ((labels < 0.5).to(outputs) * 2 - 1)).sum()
        shares = outputs.detach().exp().cumsum(-1)
        drawn = (labels.unsqueeze(-1) > shares[..., :-1]).sum(-1, keepdim=True)
        return -outputs.gather(-1, drawn).sum()

    def terms(self, batch: Prepared) -> int:
        """Rows."""
        return len(batch.inputs)

    def divergence(self, reference: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """KL, summed over a row's answers; small ones would drown in rounding."""
        reference, found = reference.double(), found.double()
        if self.kind == "score":
            return (reference - found).square().sum(-1) / 2
        return divergence_of(reference, found).sum(-1).clamp_min(0)

    def compare(self, before: torch.Tensor, after: torch.Tensor, labels: torch.Tensor) -> Answers:
        """KL, and whether the best answers are the same."""
        same = None
        if self.kind != "score":
            same = (before.argmax(-1) == after.argmax(-1)).double().mean(-1)
        return Answers(None, None, self.divergence(before, after), same)

    def right(self, outputs: torch.Tensor, truth: torch.Tensor) -> torch.Tensor | None:
        """Whether the best class is the right one, where a row has one class."""
        return outputs.argmax(-1).squeeze(1) == truth if self.kind == "one" else None


def kind_of(config: Any) -> tuple[str, int]:
    """What a head's outputs mean, and how many answers they are."""
    problem, labels = getattr(config, "problem_type", None), int(config.num_labels)
    if problem == "multi_label_classification":
        return "several", labels
    return ("score", labels) if problem == "regression" or labels == 1 else ("one", 1)
