"""DINOv2: as ViT, with what attention and MLP put out scaled channel by channel; the largest has a gated MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headwise.families._family import Block, Tensors
from headwise.families._vision import Vision
from headwise.runtime.modeling_headwise import BARE

GATED = "dinov2_swiglu"  # what we call models with a gated MLP


class DINOv2(Vision):
    """DINOv2, bare or with an image classifier, with a plain or a gated MLP."""

    name = "dinov2"
    model_types = ("dinov2", GATED)
    summary = "DINOv2 (small to giant)"
    renamed = {  # as transformers before 5.20 has it
        ".attention.attention.query.": ".attention.q_proj.",
        ".attention.attention.key.": ".attention.k_proj.",
        ".attention.attention.value.": ".attention.v_proj.",
        ".attention.output.dense.": ".attention.o_proj.",
        ".mlp.weights_out.": ".mlp.down_proj.",
    }
    small = {GATED: dict(use_swiglu_ffn=True)}

    def kind(self, config: Any) -> str:
        """By the MLP, as one stock model_type stands for both."""
        return GATED if config.use_swiglu_ffn else "dinov2"

    def mlp_width(self, config: Any) -> int:
        """A gated MLP has two thirds of the width, rounded up to eights."""
        width = int(config.hidden_size * config.mlp_ratio)
        return (int(width * 2 / 3) + 7) // 8 * 8 if config.use_swiglu_ffn else width

    def layer_norms(self, config: Any) -> int:
        """Two norms and two scales."""
        return 6 * int(config.hidden_size)

    def embedding_parameters(self, config: Any) -> int:
        """A token that masks others may be there too."""
        return super().embedding_parameters(config) + config.hidden_size * bool(config.use_mask_token)

    def head_parameters(self, config: Any, head: str) -> int:
        """The classifier reads the class token and the mean of all others."""
        return 0 if head == BARE else int(config.num_labels * (2 * config.hidden_size + 1))

    def apart(self, tensors: Tensors, config: Any) -> Tensors:
        """A stock state dictionary under the names of the tailored model, gate and up apart."""
        found = super().apart(tensors, config)
        for name in [name for name in found if ".mlp.weights_in." in name]:
            gate, up = found.pop(name).chunk(2)
            for part, ours in ((gate, "gate_proj"), (up, "up_proj")):
                found[name.replace("weights_in", ours)] = part.clone()
        return found

    def block(self, layer: nn.Module) -> Block:
        """The parts of one layer of a tailored model."""
        mlp = layer.mlp
        gated = hasattr(mlp, "gate_proj")
        return Block(
            attention=layer.attention,
            output=layer.attention.o_proj,
            inner=(mlp.gate_proj, mlp.up_proj) if gated else (mlp.fc1,),
            down=mlp.down_proj if gated else mlp.fc2,
            activation=mlp.act_fn if gated else getattr(mlp, "activation_fn", None) or mlp.activation,
            attention_norm=layer.norm1,
            mlp_norm=layer.norm2,
            attention_scale=layer.layer_scale1,
            mlp_scale=layer.layer_scale2,
            by_channel=True,
        )

    def logits(self, model: nn.Module, stream: torch.Tensor) -> torch.Tensor:
        """What the classifier makes of the stream after the last layer; the class token without one."""
        found = self.body(model).layernorm(stream)
        if self.head(model.config) == BARE:
            return found[:, 0]
        return model.classifier(torch.cat((found[:, 0], found[:, 1:].mean(1)), 1))

    def tiny_settings(self) -> dict[str, Any]:
        """The configuration of a tiny model."""
        return dict(mlp_ratio=2, use_mask_token=False)


FAMILY = DINOv2()
