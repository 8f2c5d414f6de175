"""Tasks with one answer to a whole row, a text or an image: classes or a vector."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from headwise.data import DataRows, images
from headwise.families import family_of, widened
from headwise.tasks._task import Compared, Prepared, Task, divergence_of, random_for


class RowTask(Task):
    """Labels are random numbers, as many per row as the loss needs: no true label is needed."""

    @abstractmethod
    def drawn(self, random: torch.Generator) -> torch.Tensor:
        """The random label of one row (see `loss`)."""

    def prepare(self, ids: torch.Tensor, seed: int) -> Prepared:
        """Rows as they are, with their random labels."""
        labels = torch.stack([self.drawn(random_for(row, seed)) for row in ids]).to(ids.device)
        return Prepared(ids, labels, per_token=False, row=self.row_tokens)

    def terms(self, batch: Prepared) -> int:
        """Rows."""
        return len(batch.inputs)


@dataclass(frozen=True, slots=True)
class Classes(RowTask):
    """Class probabilities. No true label is needed: the source's own answers are to be kept."""

    kind: str = "one"  # label per row; "several", each present or not; or a "score"
    labels_per_row: int = 1

    agreement_name = "class_agreement"

    @classmethod
    def for_model(cls, config: Any, tokenizer: Any, where: str) -> Self:
        """What the head's outputs mean, by the configuration."""
        return cls(*kind_of(config))

    def drawn(self, random: torch.Generator) -> torch.Tensor:
        """Numbers in [0, 1), one for each answer."""
        return torch.rand(self.labels_per_row, generator=random)

    def answers(self, logits: torch.Tensor) -> torch.Tensor:
        """Log-probabilities (B, answers, choices) of the choices for every answer, or scores (B, scores)."""
        logits = widened(logits)
        if self.kind == "score":
            return logits
        choices = logits.unsqueeze(1) if self.kind == "one" else torch.stack((torch.zeros_like(logits), logits), -1)
        return choices.log_softmax(-1)

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Negative log-probability of an answer that the model itself would give, drawn by the row's random numbers.

        With answers drawn so, half the expected square of a first-order change is the KL that it causes (the Fisher
        information of the answers). A score stands for a normal distribution of width one around it; there a random
        sign has the same second moment as a drawn answer.
        """
        if self.kind == "score":
            return (outputs * ((labels < 0.5).to(outputs) * 2 - 1)).sum()
        shares = outputs.detach().exp().cumsum(-1)
        drawn = (labels.unsqueeze(-1) > shares[..., :-1]).sum(-1, keepdim=True)
        return -outputs.gather(-1, drawn).sum()

    def divergence(self, reference: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """KL, summed over a row's answers, in double precision: small values would be lost to rounding."""
        reference, found = reference.double(), found.double()
        if self.kind == "score":
            return (reference - found).square().sum(-1) / 2
        return divergence_of(reference, found).sum(-1).clamp_min(0)

    def compare(self, before: torch.Tensor, after: torch.Tensor, labels: torch.Tensor) -> Compared:
        """KL, and whether the best answers are equal."""
        same = None if self.kind == "score" else (before.argmax(-1) == after.argmax(-1)).double().mean(-1)
        return Compared(None, None, self.divergence(before, after), same)

    def right(self, outputs: torch.Tensor, truth: torch.Tensor) -> torch.Tensor | None:
        """Whether the best class is the right one, where a row has one class."""
        return outputs.argmax(-1).squeeze(1) == truth if self.kind == "one" else None


def kind_of(config: Any) -> tuple[str, int]:
    """What a head's outputs mean, and how many answers they are."""
    problem, labels = getattr(config, "problem_type", None), int(config.num_labels)
    if problem == "multi_label_classification":
        return "several", labels
    return ("score", labels) if problem == "regression" or labels == 1 else ("one", 1)


@dataclass(frozen=True, slots=True)
class Vectors(RowTask):
    """Unit vectors: the mean of a row's last stream, its first token, or what the model itself makes of it."""

    width: int  # of an embedding
    pooling: str = "mean"

    divergence_name = "1 - cosine"

    def drawn(self, random: torch.Generator) -> torch.Tensor:
        """Random signs."""
        return torch.randint(0, 2, (self.width,), generator=random) * 2.0 - 1.0

    def answers(self, logits: torch.Tensor) -> torch.Tensor:
        """Unit vectors (B, D)."""
        if logits.dim() > 2:  # (B, T, D): not pooled by the model itself
            logits = logits.mean(1) if self.pooling == "mean" else logits[:, 0]
        return nn.functional.normalize(widened(logits), dim=-1)

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Inner products `<u, e>` of unit embeddings `e` with vectors `u` of random signs, summed.

        When a change of the model moves an embedding by `d`, this moves by `<u, d>`. Signs are independent, so
        `E[u u'] = I` and `E <u, d>^2 = d' E[u u'] d = |d|^2`. Between unit vectors `|d|^2 = 2 - 2 cos`: half the
        squared change is, in expectation, 1 - cosine, just as half the squared score is a KL where there are labels.
        """
        return (outputs * labels).sum()

    def divergence(self, reference: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """1 - cosine, as half the squared distance: exact where both are nearly equal."""
        return (reference - found).square().sum(-1) / 2

    def compare(self, before: torch.Tensor, after: torch.Tensor, labels: torch.Tensor) -> Compared:
        """1 - cosine alone: embeddings have no right answer."""
        return Compared(None, None, self.divergence(before.double(), after.double()), None)


class ImageTask(Task):
    """A task whose rows are images, prepared by the model's own image processor."""

    @property
    def labels(self) -> Mapping[str, int]:
        """Names of the classes that a folder of images may be sorted by."""
        return {}

    def read(self, source: str, reader: Any, length: int, count: int, seed: int) -> DataRows:
        """Images of a source."""
        return images.read(source, reader, count, seed, self.labels)

    def block_tokens(self, length: int) -> int:
        """Tokens of an image, whatever the length of texts."""
        return self.row_tokens or 1


def tokens_of(config: Any, processor: Any) -> int:
    """Tokens that an image makes: patches, and those that a model puts before them."""
    family = family_of(config)
    rows = family.example(config, 1) if processor is None else images.blank(processor, config)
    return family.row_tokens(config, rows) or 1
