"""CLIP's vision tower: alone, with the projection into the space that texts share, or with an image classifier."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from headwise.errors import ModelError
from headwise.families._architecture import BARE, Architecture
from headwise.families._family import Family
from headwise.families._vision import HEADS, Vision
from headwise.types import ModelShape

PROJECTED = "clip_vision_projected"  # what we call a tower with its projection
TOWER = Architecture(
    stem="CLIPVision",
    heads={},
    body_at="",
    layers="encoder.layers",
    names={"o": "out_proj", "scaling": "scale", "dropout": "dropout"},
    mlp_in=("mlp.fc1",),
    mlp_out="mlp.fc2",
    activation="mlp.activation_fn",
)
TEXT = dict(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)


class CLIP(Vision):
    """CLIPVisionModel, CLIPVisionModelWithProjection and CLIPForImageClassification."""

    name = "clip"
    kinds = {
        "clip_vision_model": TOWER,
        PROJECTED: replace(TOWER, body_at="vision_model", bare="ModelWithProjection"),
        "clip": replace(TOWER, body_at="vision_model", stem="CLIP", heads=HEADS, bare=""),
    }
    summary = "CLIP's vision tower: bare, projected, or as a classifier"
    norms = {"attention_norm": "layer_norm1", "mlp_norm": "layer_norm2"}
    small = {"projection_dim": 24, "initializer_factor": 3.0}

    def kind(self, config: Any) -> str:
        """By the class, as one stock model_type stands for a tower with and without its projection."""
        return PROJECTED if self.class_name(config).endswith("WithProjection") else super().kind(config)

    def tower(self, config: Any) -> Any:
        """A classifier's configuration holds that of its tower."""
        return getattr(config, "vision_config", config)

    def stock_loader(self, config: Any, auto: str) -> Any:
        """No Auto class knows a stock tower with its projection."""
        if config.model_type == "clip_vision_model" and self.kind(config) == PROJECTED:
            return self.kinds[PROJECTED].stock_classes()[BARE]
        return super().stock_loader(config, auto)

    def shape_of(self, config: Any) -> ModelShape:
        """The shape of a stock or tailored configuration; the text tower has none."""
        if self.class_name(config).endswith("CLIPModel"):
            raise ModelError(
                "CLIPModel has two towers, and only that for images can be reshaped. Save it alone first: "
                "CLIPVisionModelWithProjection.from_pretrained(MODEL).save_pretrained(FOLDER), its image processor too."
            )
        return super().shape_of(config)

    def embedding_parameters(self, config: Any) -> int:
        """A norm before the layers too, and no bias of patches."""
        return super().embedding_parameters(config) + int(self.tower(config).hidden_size)

    def head_parameters(self, config: Any, head: str) -> int:
        """The projection, the classifier, or nothing."""
        hidden = int(self.tower(config).hidden_size)
        if head != BARE:
            return int(config.num_labels) * (hidden + 1)
        return hidden * int(config.projection_dim) if self.kind(config) == PROJECTED else 0

    def embedding_width(self, config: Any) -> int:
        """Of the projection where there is one."""
        return int(config.projection_dim if self.kind(config) == PROJECTED else config.hidden_size)

    def _prefix(self, config: Any, index: int) -> str:
        return Family._prefix(self, config, index)  # a tower with its projection has no head, but a body

    def pooled(self, model: nn.Module, out: Any) -> torch.Tensor:
        """The projected image, or the class token as the tower pools it."""
        return out["image_embeds"] if self.kind(model.config) == PROJECTED else out["pooler_output"]

    def logits(self, model: nn.Module, stream: torch.Tensor) -> torch.Tensor:
        """What the classifier makes of the stream after the last layer, or the image's embedding without one."""
        if self.head(model.config) != BARE:
            return model.classifier(stream[:, 1:].mean(1))
        found = self.body(model).post_layernorm(stream[:, 0])
        return model.visual_projection(found) if self.kind(model.config) == PROJECTED else found

    def tiny_config(self, made: Any, kind: str, changes: dict[str, Any]) -> Any:
        """The configuration of a tiny model, with that of its tower inside where there is a classifier."""
        if "vision_config" not in made.sub_configs:
            return super().tiny_config(made, kind, changes)
        outer = {name: value for name, value in changes.items() if name == "num_labels"}
        inner = {name: value for name, value in changes.items() if name not in outer}
        return made(vision_config={**self.usual, **self.small, **inner}, text_config=TEXT, **outer)


FAMILY = CLIP()
