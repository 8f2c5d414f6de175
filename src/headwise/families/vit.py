"""ViT: patches, a class token, pre-norm layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headwise.families._architecture import BARE, Architecture
from headwise.families._vision import LAYER, Vision


class ViT(Vision):
    """ViT, bare or with an image classifier."""

    name = "vit"
    kinds = {"vit": Architecture(stem="ViT", body_at="vit", **LAYER)}
    summary = "ViT, and DeiT without distillation"

    def head_parameters(self, config: Any, head: str) -> int:
        """The pooler of a bare model, or the classifier."""
        wide = config.pooler_output_size if head == BARE else config.num_labels
        return int(wide * (config.hidden_size + 1))

    def logits(self, model: nn.Module, stream: torch.Tensor) -> torch.Tensor:
        """What the classifier makes of the stream after the last layer; the class token without one."""
        found = self.body(model).layernorm(stream)
        return found[:, 0] if self.head(model.config) == BARE else model.classifier(found[:, 0])


FAMILY = ViT()
