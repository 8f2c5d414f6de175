"""What a task defines, so that probes price units and checks measure quality in the task's own terms."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import nn

from headwise.data import DataRows, closed_blocks, closed_lengths, documents, rows_by_length
from headwise.families import Family, wide_answers, widened
from headwise.progress import Track as Track


class Prepared(NamedTuple):
    """Rows as a model reads them, and the labels of their tokens or of whole rows."""

    inputs: torch.Tensor
    labels: torch.Tensor
    per_token: bool = True
    row: int | None = None  # tokens of a row that does not consist of tokens, such as an image
    truth: torch.Tensor | None = None  # the right answer to every row, where it is known

    def batches(self, tokens: int = 4096) -> list[Prepared]:
        """Rows in batches of about `tokens` tokens, each of one length."""
        return [
            self._replace(
                inputs=self.inputs[rows, :length] if self.row is None else self.inputs[rows],
                labels=self.labels[rows, :length] if self.per_token else self.labels[rows],
                truth=None if self.truth is None else self.truth[rows],
            )
            for rows, length in rows_by_length(self.inputs, tokens, self.row)
        ]

    def to(self, device: torch.device) -> Prepared:
        """A copy on a device."""
        truth = None if self.truth is None else self.truth.to(device)
        return self._replace(inputs=self.inputs.to(device), labels=self.labels.to(device), truth=truth)


class Compared(NamedTuple):
    """Both models' answers compared, one value per row; None where a task has no such value."""

    loss_before: torch.Tensor | None
    loss_after: torch.Tensor | None
    divergence: torch.Tensor
    agreement: torch.Tensor | None  # share of equal best answers


class Task(ABC):
    """How a model is used. Its answers are log-probabilities or unit vectors; the first axis is rows."""

    name: ClassVar[str]
    unit: ClassVar[str]  # of damage
    divergence_name: ClassVar[str] = "KL"
    agreement_name: ClassVar[str] = ""  # of the share of equal best answers, in verdicts
    perplexity: ClassVar[bool] = False  # whether exp(loss) is one
    generates: ClassVar[bool] = False  # whether the model writes text
    row_tokens: int | None = None  # tokens of a row that does not consist of tokens
    has_past: ClassVar[bool] = False  # whether every layer sees the tokens before one, and no others
    refit_strength: ClassVar[float] = 1.0  # of the ridge that holds refitted weights near those that a cut left

    @classmethod
    @abstractmethod
    def for_model(cls, config: Any, tokenizer: Any, where: str) -> Self:
        """The task for a model with this configuration; `where` is its hub id or folder."""

    @abstractmethod
    def prepare(self, ids: torch.Tensor, seed: int) -> Prepared:
        """Inputs and labels of blocks of text. A row does not depend on the rows beside it."""

    @abstractmethod
    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """A sum whose square's expectation prices a unit: half of it is the divergence that its removal causes."""

    @abstractmethod
    def terms(self, batch: Prepared) -> int:
        """How many answers the loss sums up, so that damage is per answer."""

    def outputs(
        self, family: Family, model: nn.Module, batch: Prepared, stream: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The model's answers; `stream` replaces the embeddings that the first layer reads."""
        with wide_answers(model):
            return self.answers(self.picked(family.run(model, batch.inputs, stream), batch))

    def outputs_from(self, family: Family, model: nn.Module, stream: torch.Tensor, batch: Prepared) -> torch.Tensor:
        """The model's answers from the residual stream after its last layer."""
        with wide_answers(model):
            picked = self.picked(family.answering(stream, batch.inputs), batch)
            return self.answers(family.logits(model, picked.to(next(model.parameters()).dtype)))

    def picked(self, values_BTX: torch.Tensor, batch: Prepared) -> torch.Tensor:
        """The positions that have an answer: here all."""
        return values_BTX

    def answers(self, logits: torch.Tensor) -> torch.Tensor:
        """Answers from the model's raw outputs: here log-probabilities along the last axis."""
        return widened(logits).log_softmax(-1)

    def divergence(self, reference: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """Distance of the answers from the source's, per row: here the mean KL over all positions."""
        return divergence_of(reference, found).mean(-1)

    def compare(self, before: torch.Tensor, after: torch.Tensor, labels: torch.Tensor) -> Compared:
        """The answers of the source and of the reshaped model."""
        return Compared(None, None, self.divergence(before, after), None)

    def right(self, outputs: torch.Tensor, truth: torch.Tensor) -> torch.Tensor | None:
        """Whether the best answers are the right ones (B); None where a task has no right answers."""
        return None

    def read(self, source: str, reader: Any, length: int, count: int, seed: int) -> DataRows:
        """Rows of a source, made by the model's tokenizer or processor."""
        return DataRows(self.blocks(documents(source, seed), reader, length, count, source))

    def blocks(
        self, texts: Iterable[str], tokenizer: Any, length: int, count: int | None = None, what: str = "the text"
    ) -> torch.Tensor:
        """Token blocks of up to `length`, each between the special tokens that encoders put around a text."""
        return closed_blocks(texts, tokenizer, length, count, what)

    def complete(self, model: nn.Module, rows: torch.Tensor, seed: int, track: Track) -> torch.Tensor:
        """Blocks with what only the model can add, such as the texts that it writes."""
        return rows

    def block_tokens(self, length: int) -> int:
        """The mean number of tokens of such blocks."""
        lengths = closed_lengths(length)
        return sum(lengths) // len(lengths)


def divergence_of(reference: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """KL of log-probabilities along the last axis."""
    return (reference.exp() * (reference - found)).sum(-1)


def compared_by_token(
    before: torch.Tensor, after: torch.Tensor, kl: torch.Tensor, target: torch.Tensor | None
) -> Compared:
    """Losses (where there is a target), KL and equal best tokens, each the mean of a row's tokens."""
    losses: list[torch.Tensor | None] = [None, None]
    if target is not None:
        losses = [-found.gather(-1, target).squeeze(-1).double().mean(1) for found in (before, after)]
    same = (before.argmax(-1) == after.argmax(-1)).double().mean(1)
    return Compared(losses[0], losses[1], kl.double().mean(1), same)


def random_for(row: torch.Tensor, seed: int) -> torch.Generator:
    """Random numbers that depend on one row of tokens and the seed alone."""
    return torch.Generator().manual_seed(zlib.crc32(row.cpu().numpy().tobytes(), seed))
