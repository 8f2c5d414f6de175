"""DeiT: as ViT, with a second token that learned from a teacher, and a classifier of its own for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from headwise.families._architecture import BARE, IMAGE_CLASSIFIER, Architecture
from headwise.families._vision import LAYER, Vision

TAUGHT = "deit_with_teacher"  # what we call models whose two classifiers answer together
DEIT = Architecture(stem="DeiT", body_at="deit", **LAYER)


class DeiT(Vision):
    """DeiT, bare or with one or both of its classifiers."""

    name = "deit"
    kinds = {"deit": DEIT, TAUGHT: replace(DEIT, heads={IMAGE_CLASSIFIER: "ForImageClassificationWithTeacher"})}
    summary = "DeiT, with and without its teacher's classifier"
    before_patches = 2

    def kind(self, config: Any) -> str:
        """By the head, as one stock model_type stands for both."""
        kind = super().kind(config)
        return TAUGHT if self.class_name(config).endswith("WithTeacher") else kind

    def head_parameters(self, config: Any, head: str) -> int:
        """The pooler of a bare model, or one or two classifiers."""
        wide = config.pooler_output_size if head == BARE else config.num_labels
        return int(wide * (config.hidden_size + 1) * (2 if self.kind(config) == TAUGHT and head != BARE else 1))

    def logits(self, model: nn.Module, stream: torch.Tensor) -> torch.Tensor:
        """What the classifiers make of the stream after the last layer; the class token without one."""
        found = self.body(model).layernorm(stream)
        if self.head(model.config) == BARE:
            return found[:, 0]
        if self.kind(model.config) == TAUGHT:
            return (model.cls_classifier(found[:, 0]) + model.distillation_classifier(found[:, 1])) / 2
        return model.classifier(found[:, 0])


FAMILY = DeiT()
