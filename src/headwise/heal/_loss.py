"""The loss of distillation: how far the cut model's answers to some rows are from the source's.

A decoder's logits of a long batch are by far the largest tensor, so they are computed for some tokens at a time and
computed again in the backward pass (gradient checkpointing).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from headwise.errors import HeadwiseError
from headwise.families import Family, wide_answers
from headwise.tasks import Prepared, Task
from headwise.tasks.causal import Causal
from headwise.training import shards

AT_ONCE = {"cuda": 1 << 29, "cpu": 1 << 24}  # logits that are computed at once


class Batch(NamedTuple):
    """Rows of one length."""

    rows: Prepared
    weight: float = 1.0  # 0: read only because other processes have one batch more


class DistillationLoss(nn.Module):
    """The student, wrapped so that its forward pass is the loss; only so can DDP and FSDP see the backward pass.

    The source is held in a tuple, not as a submodule, so that nothing trains, moves or saves it.
    """

    def __init__(
        self, family: Family, task: Task, source: nn.Module, student: nn.Module, recompute: bool = False
    ) -> None:
        super().__init__()
        self.student, self.recompute = student, recompute
        self._fixed = (family, task, source)
        if recompute:
            if not getattr(student, "supports_gradient_checkpointing", False):
                raise HeadwiseError(f"{family.name} models have no gradient checkpointing; leave out recompute=1.")
            cast(Any, student).gradient_checkpointing_enable({"use_reentrant": False})

    def shard(self) -> None:
        """Keep only this process's part of both models; the source's layers are those of a copy.

        The source's embeddings and head stay whole: they are called outside of any layer.
        """
        family, task, source = self._fixed
        device = next(self.parameters()).device
        teacher = family.tailor(source, share="ends").requires_grad_(False)
        shards.spread(device, family.layers(teacher))
        self._fixed = (family, task, teacher.to(device))
        shards.spread(device, family.layers(self.student), self)

    def train(self, mode: bool = True) -> DistillationLoss:
        """Never uses dropout: the source has none, and its noise would hide what was lost.

        Layers with gradient checkpointing ask whether they are in training mode; their submodules stay in evaluation.
        """
        super().train(False)
        for layer in self._fixed[0].layers(self.student):
            layer.training = mode and self.recompute
        return self

    def forward(self, batches: Sequence[Batch], each: bool = False) -> torch.Tensor:
        """The sum over all rows of the divergence from the source; `each`: of every row (B,)."""
        if each:
            return torch.cat([self.divergence(batch.rows) for batch in batches])
        return torch.stack([self.divergence(batch.rows).sum() * batch.weight for batch in batches]).sum()

    def divergence(self, rows: Prepared) -> torch.Tensor:
        """The divergence of the student's answers from the source's, for every row (B,)."""
        family, task, source = self._fixed
        if isinstance(task, Causal):
            return self._causal(rows)
        with torch.no_grad():
            wanted = task.outputs(family, source, rows)
        return task.divergence(wanted, task.outputs(family, self.student, rows))

    def _causal(self, rows: Prepared) -> torch.Tensor:
        """KL divergence of next-token distributions, the mean over a row's tokens."""
        family, _, source = self._fixed
        with torch.no_grad():
            reference = family.last_stream(source, rows.inputs)
        stream = family.last_stream(self.student, rows.inputs)

        def divergence(stream: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                wanted = _log_probabilities(family, source, reference)
            found = _log_probabilities(family, self.student, stream)
            return nn.functional.kl_div(found, wanted, reduction="none", log_target=True).sum(-1)

        count, tokens = stream.shape[:2]
        size = max(1, AT_ONCE.get(stream.device.type, 1 << 28) // int(cast(Any, self.student).config.vocab_size))
        again = count * tokens > size and torch.is_grad_enabled()
        pieces = zip(*(whole.flatten(0, 1).split(size) for whole in (stream, reference)), strict=True)
        found = [
            checkpoint(divergence, a[None], b[None], use_reentrant=False, preserve_rng_state=False)
            if again
            else divergence(a[None], b[None])
            for a, b in pieces
        ]
        return torch.cat(found, 1).view(count, tokens).mean(1)


def _log_probabilities(family: Family, model: nn.Module, stream: torch.Tensor) -> torch.Tensor:
    """In single precision: bfloat16 rounds large logits by more than a small damage moves them."""
    with torch.autocast(stream.device.type, enabled=False), wide_answers(model):
        return family.logits(model, stream.to(cast(Any, model).dtype)).float().log_softmax(-1)
