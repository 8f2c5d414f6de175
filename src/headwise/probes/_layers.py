"""What probes share: a model run layer by layer on the same few tokens, and tables with one row per layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from headwise.families import Family
from headwise.tasks import Task
from headwise.tasks.causal import Causal
from headwise.types import Reading

Row = tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...] | None]  # ticks, values, standard errors


class LayerRunner:
    """Runs some layers of a model on a few tokens, and measures how far its answers are from the source's."""

    def __init__(
        self, family: Family, model: nn.Module, tokens: torch.Tensor, task: Task | None = None, seed: int = 0
    ) -> None:
        self.family, self.model, self.task = family, model, task or Causal()
        self.batches = self.task.prepare(tokens, seed).to(model.device).batches(2048)
        self.contexts = family.contexts(model, [batch.inputs for batch in self.batches])
        self.shapes = family.shape_of(model.config).layers
        self.reference: list[torch.Tensor] = []

    @torch.no_grad()
    def answers(
        self,
        batch: int,
        layers: Iterable[int],
        stream: torch.Tensor | None = None,
        seen: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Answers to a batch when only these layers run, on embeddings or another stream; `seen` collects streams."""
        inputs = self.batches[batch].inputs
        stream = self.family.embed(self.model, inputs) if stream is None else stream
        for index in layers:
            if seen is not None:
                seen.append(stream)
            stream = self.family.run_layer(self.model, index, stream, self.contexts[batch][index])
        return self.task.outputs_from(self.family, self.model, stream, self.batches[batch])

    @torch.no_grad()
    def divergence(self, answers: Callable[[int], torch.Tensor]) -> tuple[float, float]:
        """Mean divergence of answers, given by batch, from the source's, and its standard error over sequences."""
        rows = [self.task.divergence(before, answers(batch)) for batch, before in enumerate(self.reference)]
        values = torch.cat(rows).double()
        error = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        return float(values.mean().clamp_min(0)), error


def reading(
    probe: str, kind: str, axis: str, rows: Sequence[Row], unit: str, meaning: str, tokens: int, seed: int
) -> Reading:
    """A reading from one row per layer; standard errors are left out unless every row has them."""
    errors = tuple(row[2] for row in rows if row[2] is not None)
    return Reading(
        probe, kind, axis, tuple(row[0] for row in rows), tuple(row[1] for row in rows),
        errors if len(errors) == len(rows) else None, unit, meaning, tokens, seed,
    )  # fmt: skip
