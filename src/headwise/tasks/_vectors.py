"""One vector for a whole row, text or image, compared by its cosine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from headwise.families import Family
from headwise.tasks._task import Answers, Prepared, Task, random_for


@dataclass(frozen=True, slots=True)
class Vectors(Task):
    """The mean of a row's last stream, or its first token, or what a model itself makes of it, at length one."""

    width: int  # of an embedding
    pooling: str = "mean"

    divergence_name = "1 - cosine"

    def prepare(self, ids: torch.Tensor, seed: int) -> Prepared:
        """The label of a row is a vector of random signs (see `loss`)."""
        signs = [torch.randint(0, 2, (self.width,), generator=random_for(row, seed)) for row in ids]
        labels = torch.stack(signs).to(ids.device) * 2.0 - 1.0
        return Prepared(ids, labels, per_token=False, row=self.row_tokens)

    def outputs(
        self, family: Family, model: nn.Module, batch: Prepared, stream: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Unit vectors (B, D)."""
        return self._pooled(family.run(model, batch.inputs, stream))

    def outputs_from(self, family: Family, model: nn.Module, stream: torch.Tensor, batch: Prepared) -> torch.Tensor:
        """The same from the stream after the last layer."""
        return self._pooled(family.logits(model, stream))

    def _pooled(self, stream: torch.Tensor) -> torch.Tensor:
        if stream.dim() > 2:  # (B, T, D): not pooled by the model itself
            stream = stream.mean(1) if self.pooling == "mean" else stream[:, 0]
        return nn.functional.normalize(stream, dim=-1)

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Inner products `<u, e>` of unit embeddings `e` with vectors `u` of random signs, summed.

        When a change of the model moves an embedding by `d`, this moves by `<u, d>`. Signs are independent, so
        `E[u u'] = I` and `E <u, d>^2 = d' E[u u'] d = |d|^2`. Between unit vectors `|d|^2 = 2 - 2 cos`: half the
        squared change is, in expectation, 1 - cosine, just as half the squared score is a KL where there are labels.
        """
        return (outputs * labels).sum()

    def terms(self, batch: Prepared) -> int:
        """Rows."""
        return len(batch.inputs)

    def divergence(self, reference: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """1 - cosine, as half the squared distance: exact where both are nearly equal."""
        return (reference - found).square().sum(-1) / 2

    def compare(self, before: torch.Tensor, after: torch.Tensor, labels: torch.Tensor) -> Answers:
        """1 - cosine alone: embeddings have no right answer."""
        return Answers(None, None, self.divergence(before.double(), after.double()), None)
