"""Sentence embeddings: one vector per text, compared by its cosine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from headwise.errors import ModelError
from headwise.families import Family, companions
from headwise.tasks._task import Answers, Prepared, Task, random_for

POOLING = "1_Pooling/config.json"  # as sentence-transformers writes it
WAYS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"}


@dataclass(frozen=True, slots=True)
class Embedding(Task):
    """The mean of a text's last stream, or that of its first token, at length one."""

    width: int  # of an embedding
    pooling: str = "mean"

    name = "embedding"
    unit = "1 - cosine"
    divergence_name = "1 - cosine"

    @classmethod
    def for_model(cls, config: Any, tokenizer: Any, where: str) -> Self:
        """How tokens are pooled is said by the files that a sentence-transformers model brings; else by their mean."""
        file = companions(where).get(POOLING) if where else None
        if file is None:
            return cls(config.hidden_size)
        used = [mode for mode, on in json.loads(file.read_text()).items() if mode.startswith("pooling_mode_") and on]
        if len(used) != 1 or used[0] not in WAYS:
            raise ModelError(f"{where} pools its tokens by {', '.join(used)}; supported: {', '.join(WAYS)}.")
        return cls(config.hidden_size, WAYS[used[0]])

    def prepare(self, ids: torch.Tensor, seed: int) -> Prepared:
        """The label of a row is a vector of random signs (see `loss`)."""
        signs = [torch.randint(0, 2, (self.width,), generator=random_for(row, seed)) for row in ids]
        return Prepared(ids, torch.stack(signs).to(ids.device) * 2.0 - 1.0, per_token=False)

    def outputs(
        self, family: Family, model: nn.Module, batch: Prepared, stream: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Unit vectors (B, D)."""
        return self._pooled(family.run(model, batch.inputs, stream))

    def outputs_from(self, family: Family, model: nn.Module, stream: torch.Tensor, batch: Prepared) -> torch.Tensor:
        """The same from the stream after the last layer."""
        return self._pooled(family.logits(model, stream))

    def _pooled(self, stream_BTD: torch.Tensor) -> torch.Tensor:
        found = stream_BTD.mean(1) if self.pooling == "mean" else stream_BTD[:, 0]
        return nn.functional.normalize(found, dim=-1)

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Inner products `<u, e>` of unit embeddings `e` with vectors `u` of random signs, summed.

        When a change of the model moves an embedding by `d`, this moves by `<u, d>`. Signs are independent, so
        `E[u u'] = I` and `E <u, d>^2 = d' E[u u'] d = |d|^2`. Between unit vectors `|d|^2 = 2 - 2 cos`: half the
        squared change is, in expectation, 1 - cosine, just as half the squared score is a KL where there are labels.
        """
        return (outputs * labels).sum()

    def terms(self, batch: Prepared) -> int:
        """Texts."""
        return len(batch.inputs)

    def divergence(self, reference: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """1 - cosine, as half the squared distance: exact where both are nearly equal."""
        return (reference - found).square().sum(-1) / 2

    def compare(self, before: torch.Tensor, after: torch.Tensor, labels: torch.Tensor) -> Answers:
        """1 - cosine alone: embeddings have no right answer."""
        return Answers(None, None, self.divergence(before.double(), after.double()), None)


TASK = Embedding
