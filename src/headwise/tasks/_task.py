"""What a task must say, so that probes price units and checks measure quality in the task's own terms."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import nn

from headwise.data import Rows, closed_blocks, closed_lengths, documents, rows_by_length
from headwise.families import Family

Track = Callable[[Sequence[Any], str], Iterable[Any]]  # wraps a loop to show its progress


class Prepared(NamedTuple):
    """Rows as a model reads them, and what its answers are held against: labels of tokens, or of whole rows."""

    inputs: torch.Tensor
    labels: torch.Tensor
    per_token: bool = True
    row: int | None = None  # tokens of a row where rows are not tokens
    truth: torch.Tensor | None = None  # the right answer to every row, where they are known

    def with_truth(self, truth: torch.Tensor | None) -> Prepared:
        """The same with right answers."""
        return self._replace(truth=truth)

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
        """The same on a device."""
        truth = None if self.truth is None else self.truth.to(device)
        return self._replace(inputs=self.inputs.to(device), labels=self.labels.to(device), truth=truth)


class Answers(NamedTuple):
    """Both models' answers compared, one value per row; None where a task has no such thing."""

    loss_before: torch.Tensor | None
    loss_after: torch.Tensor | None
    divergence: torch.Tensor
    agreement: torch.Tensor | None  # share of equal best answers


class Task(ABC):
    """How a model is used. Its answers are log-probabilities or unit vectors, the first axis being rows."""

    name: ClassVar[str]
    unit: ClassVar[str]  # of damage
    divergence_name: ClassVar[str] = "KL"
    agreement_name: ClassVar[str] = ""  # of the share of equal best answers, in verdicts
    perplexity: ClassVar[bool] = False  # whether exp(loss) is one
    generates: ClassVar[bool] = False  # whether the model writes text
    row_tokens: int | None = None  # tokens of a row where rows are not tokens
    has_past: ClassVar[bool] = False  # whether every layer sees the tokens before one, and no others
    refit_strength: ClassVar[float] = 1.0  # of the ridge that holds refitted weights near those that a cut left

    @classmethod
    @abstractmethod
    def for_model(cls, config: Any, tokenizer: Any, where: str) -> Self:
        """The task as a model with this configuration does it; `where` is the hub id or folder that it came from."""

    @abstractmethod
    def prepare(self, ids: torch.Tensor, seed: int) -> Prepared:
        """Inputs and labels of blocks of text. A row comes out the same whatever rows are beside it."""

    @abstractmethod
    def outputs(
        self, family: Family, model: nn.Module, batch: Prepared, stream: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The model's answers, with `stream` in place of what its embeddings give the first layer."""

    @abstractmethod
    def outputs_from(self, family: Family, model: nn.Module, stream: torch.Tensor, batch: Prepared) -> torch.Tensor:
        """The same from the stream after the last layer."""

    @abstractmethod
    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """A sum whose square's expectation prices a unit: half of it is the divergence that its removal causes."""

    @abstractmethod
    def terms(self, batch: Prepared) -> int:
        """How many answers the loss sums up, so that damage is per answer."""

    @abstractmethod
    def divergence(self, reference: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """How far the answers are from the source's, per row."""

    def compare(self, before: torch.Tensor, after: torch.Tensor, labels: torch.Tensor) -> Answers:
        """The answers of the source and of the reshaped model."""
        return Answers(None, None, self.divergence(before, after), None)

    def right(self, outputs: torch.Tensor, truth: torch.Tensor) -> torch.Tensor | None:
        """Whether the best answers are the right ones (B), where a task has such a thing."""
        return None

    def read(self, source: str, reader: Any, length: int, count: int, seed: int) -> Rows:
        """Rows of a source as `data` names it, by the tokenizer or whatever else reads for the model."""
        return Rows(self.blocks(documents(source, seed), reader, length, count, source))

    def blocks(
        self, texts: Iterable[str], tokenizer: Any, length: int, count: int | None = None, what: str = "the text"
    ) -> torch.Tensor:
        """Text as token blocks of up to `length`, each between the tokens that encoders put around a text."""
        return closed_blocks(texts, tokenizer, length, count, what)

    def complete(self, model: nn.Module, rows: torch.Tensor, seed: int, track: Track) -> torch.Tensor:
        """Blocks with whatever only the model can add to them."""
        return rows

    def block_tokens(self, length: int) -> int:
        """How many tokens such blocks hold on average."""
        lengths = closed_lengths(length)
        return sum(lengths) // len(lengths)


def divergence_of(reference: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """KL of log-probabilities along the last axis."""
    return (reference.exp() * (reference - found)).sum(-1)


def random_for(row: torch.Tensor, seed: int) -> torch.Generator:
    """A source of random numbers that belongs to one row of tokens."""
    return torch.Generator().manual_seed(zlib.crc32(row.cpu().numpy().tobytes(), seed))
