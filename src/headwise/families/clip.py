"""CLIP's vision tower: alone, with the projection into the space that texts share, or with an image classifier."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headwise.errors import ModelError
from headwise.families._family import Block
from headwise.families._vision import SMALL, Vision
from headwise.runtime.modeling_headwise import BARE, stock_classes
from headwise.types import ModelShape

PROJECTED = "clip_vision_projected"  # what we call a tower with its projection
TEXT = dict(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)


class CLIP(Vision):
    """CLIPVisionModel, CLIPVisionModelWithProjection and CLIPForImageClassification."""

    name = "clip"
    model_types = ("clip_vision_model", PROJECTED, "clip")
    summary = "CLIP's vision tower: bare, projected, or as a classifier"

    def kind(self, config: Any) -> str:
        """By the class, as one stock model_type stands for a tower with and without its projection."""
        projected = (getattr(config, "architectures", None) or [""])[0].endswith("WithProjection")
        return PROJECTED if projected else super().kind(config)

    def tower(self, config: Any) -> Any:
        """A classifier's configuration holds that of its tower."""
        return getattr(config, "vision_config", config)

    def stock_loader(self, config: Any, auto: str) -> Any:
        """No Auto class knows a stock tower with its projection."""
        if config.model_type == "clip_vision_model" and self.kind(config) == PROJECTED:
            return stock_classes(PROJECTED)[BARE]
        return super().stock_loader(config, auto)

    def shape_of(self, config: Any) -> ModelShape:
        """The shape of a stock or tailored configuration; the text tower has none."""
        if (getattr(config, "architectures", None) or [""])[0].endswith("CLIPModel"):
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

    def body(self, model: nn.Module) -> nn.Module:
        """The tower."""
        return model.get_submodule("vision_model") if hasattr(model, "vision_model") else model

    def _prefix(self, config: Any, index: int) -> str:
        inside = "" if self.kind(config) == "clip_vision_model" else "vision_model."
        return f"{inside}{self.anatomy(config).layers}.{index}."

    def block(self, layer: nn.Module) -> Block:
        """The parts of one layer of a tailored model."""
        return Block(
            attention=layer.self_attn,
            output=layer.self_attn.o_proj,
            inner=(layer.mlp.fc1,),
            down=layer.mlp.fc2,
            activation=layer.mlp.activation_fn,
            attention_norm=layer.layer_norm1,
            mlp_norm=layer.layer_norm2,
        )

    renamed = {".self_attn.out_proj.": ".self_attn.o_proj."}

    def pooled(self, config: Any, out: Any) -> torch.Tensor:
        """The projected image, or the class token as the tower pools it."""
        return out["image_embeds"] if self.kind(config) == PROJECTED else out["pooler_output"]

    def logits(self, model: nn.Module, stream: torch.Tensor) -> torch.Tensor:
        """What the classifier makes of the stream after the last layer, or the image's embedding without one."""
        if self.head(model.config) != BARE:
            return model.classifier(stream[:, 1:].mean(1))
        found = self.body(model).post_layernorm(stream[:, 0])
        return model.visual_projection(found) if self.kind(model.config) == PROJECTED else found

    def tiny_config(self, made: Any, changes: dict[str, Any]) -> Any:
        """The configuration of a tiny model, with that of its tower inside where there is a classifier."""
        tower = {**SMALL, "intermediate_size": 64, "projection_dim": 24, "initializer_factor": 3.0}
        if "vision_config" not in made.sub_configs:
            return made(**{**tower, **changes})
        outer = {name: value for name, value in changes.items() if name == "num_labels"}
        inner = {name: value for name, value in changes.items() if name not in outer}
        return made(vision_config={**tower, **inner}, text_config=TEXT, **outer)


FAMILY = CLIP()
