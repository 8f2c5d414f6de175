"""DINOv2: as ViT, with what attention and MLP put out scaled channel by channel; the largest has a gated MLP."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from headwise.families._architecture import BARE, Architecture
from headwise.families._vision import LAYER, Vision

GATED = "dinov2_swiglu"  # what we call models with a gated MLP
DINO = Architecture(
    stem="Dinov2",
    body_at="dinov2",
    **{**LAYER, "layers": "encoder.layer", "activation": "mlp.activation_fn|mlp.activation"},
    names={  # second alternatives: transformers before 5.20
        "q": "q_proj|attention.query", "k": "k_proj|attention.key", "v": "v_proj|attention.value",
        "o": "o_proj|output.dense", "config": "config|attention.config",
        "hidden": "config.hidden_size|attention.config.hidden_size", "is_causal": "is_causal|attention.is_causal",
        "head_dim": "head_dim|attention.attention_head_size", "scaling": "scaling|attention.scaling",
        "dropout": "attention_dropout|attention.dropout_prob",
    },
)  # fmt: skip
SWIGLU: dict[str, Any] = dict(
    mlp_in=("mlp.gate_proj", "mlp.up_proj"),
    mlp_out="mlp.down_proj",
    activation="mlp.act_fn",
    fused_mlp={"at": "mlp", "inner": "weights_in", "down": "weights_out"},
)


class DINOv2(Vision):
    """DINOv2, bare or with an image classifier, with a plain or a gated MLP."""

    name = "dinov2"
    kinds = {"dinov2": DINO, GATED: replace(DINO, **SWIGLU)}
    summary = "DINOv2 (small to giant)"
    norms = {
        "attention_norm": "norm1", "mlp_norm": "norm2", "attention_scale": "layer_scale1", "mlp_scale": "layer_scale2",
    }  # fmt: skip
    stream_norms = 6  # two norms with biases and two scales
    small = dict(intermediate_size=None, mlp_ratio=2, use_mask_token=False)

    def kind(self, config: Any) -> str:
        """By the MLP, as one stock model_type stands for both."""
        return GATED if config.use_swiglu_ffn else "dinov2"

    def mlp_width(self, config: Any) -> int:
        """A gated MLP has two thirds of the width, rounded up to eights."""
        width = int(config.hidden_size * config.mlp_ratio)
        return (int(width * 2 / 3) + 7) // 8 * 8 if config.use_swiglu_ffn else width

    def embedding_parameters(self, config: Any) -> int:
        """A token that masks others may be there too."""
        return super().embedding_parameters(config) + config.hidden_size * bool(config.use_mask_token)

    def head_parameters(self, config: Any, head: str) -> int:
        """The classifier reads the class token and the mean of all others."""
        return 0 if head == BARE else int(config.num_labels * (2 * config.hidden_size + 1))

    def norms_of(self, layer: nn.Module) -> dict[str, Any]:
        """Scales are factors of channels."""
        return {**super().norms_of(layer), "by_channel": True}

    def tiny_config(self, made: Any, kind: str, changes: dict[str, Any]) -> Any:
        """The configuration of a tiny model of a kind."""
        return super().tiny_config(made, kind, {"use_swiglu_ffn": kind == GATED, **changes})

    def classified(self, model: nn.Module, found: torch.Tensor) -> torch.Tensor:
        """Logits of classes by the class token and the mean of all others."""
        return model.classifier(torch.cat((found[:, 0], found[:, 1:].mean(1)), 1))


FAMILY = DINOv2()
