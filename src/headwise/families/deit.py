"""DeiT: as ViT, with a second token that learned from a teacher, and a classifier of its own for it."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from headwise.families._architecture import IMAGE_CLASSIFIER, Architecture
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
        return TAUGHT if self.class_name(config).endswith("WithTeacher") else super().kind(config)

    def head_parameters(self, config: Any, head: str) -> int:
        """The pooler of a bare model, or one or two classifiers."""
        return super().head_parameters(config, head) * (2 if self.kind(config) == TAUGHT else 1)

    def classified(self, model: nn.Module, found: torch.Tensor) -> torch.Tensor:
        """Logits of classes by the class token, or the mean of both classifiers, each by a token of its own."""
        if self.kind(model.config) != TAUGHT:
            return super().classified(model, found)
        return (model.cls_classifier(found[:, 0]) + model.distillation_classifier(found[:, 1])) / 2


FAMILY = DeiT()
