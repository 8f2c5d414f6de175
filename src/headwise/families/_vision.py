"""What encoders of images share: patches in place of words, positions that are learned, nothing cached."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from headwise.families._architecture import IMAGE_CLASSIFIER
from headwise.families._config import grain_of
from headwise.families._encoder import Encoder
from headwise.families._family import Family
from headwise.families._rows import ImageReader
from headwise.types import LayerShape, ModelShape

IMAGES: dict[str, Any] = dict(vocab_size=0, tied_embeddings=True, cached=False)  # of every shape
HEADS = {IMAGE_CLASSIFIER: "ForImageClassification"}
LAYER: dict[str, Any] = dict(  # as ViT names its parts
    heads=HEADS, attention="attention", mlp_in=("mlp.fc1",), mlp_out="mlp.fc2", activation="mlp.activation_fn"
)
SMALL: dict[str, Any] = dict(
    image_size=16, patch_size=4, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
    initializer_range=0.1,
)  # fmt: skip


class Vision(ImageReader, Encoder):
    """A pre-norm encoder that reads an image as patches, with a class token before them."""

    images = True
    before_patches: ClassVar[int] = 1  # tokens
    norms = {"attention_norm": "layernorm_before", "mlp_norm": "layernorm_after"}
    small = SMALL

    def pooled(self, config: Any, out: Any) -> torch.Tensor:
        """The embedding of an image (B, D), out of what a model without a head puts out: its class token."""
        return out["last_hidden_state"][:, 0]

    def tower(self, config: Any) -> Any:
        """The configuration of what reads images."""
        return config

    def mlp_width(self, config: Any) -> int:
        """Of the stock layers."""
        return int(config.intermediate_size)

    def sizes(self, config: Any) -> tuple[int, int, int]:
        """Attention heads, MLP width, layers."""
        tower = self.tower(config)
        return tower.num_attention_heads, self.mlp_width(tower), tower.num_hidden_layers

    def layer_norms(self, config: Any) -> int:
        """Parameters of a layer that stay whatever is cut of it: two norms with biases."""
        return 4 * int(self.tower(config).hidden_size)

    def gated(self, config: Any) -> bool:
        """Whether the MLP has a gate."""
        return len(self.anatomy(config).mlp_in) > 1

    def shape_of(self, config: Any) -> ModelShape:
        """The shape of a stock or tailored configuration."""
        tower, head = self.tower(config), self.head(config) or IMAGE_CLASSIFIER
        heads, width, count = self.sizes(config)
        dim = int(getattr(tower, "head_dim", None) or tower.hidden_size // heads)
        return self.shape(
            config,
            (LayerShape(heads, heads, dim, dim, width, dim),) * count,
            grain_of(dim, width, pairs=False, folds=True),
            **IMAGES,
            hidden_size=tower.hidden_size,
            qkv_bias=bool(getattr(tower, "qkv_bias", True)),
            o_bias=True,
            mlp_bias=True,
            mlp_matrices=3 if self.gated(config) else 2,
            layer_norms=self.layer_norms(config),
            other_parameters=self.embedding_parameters(config) + self.head_parameters(config, head),
            row_tokens=self.longest(config),
        )

    def embedding_parameters(self, config: Any) -> int:
        """Patches with a bias, the tokens before them, positions, and the norm at the end."""
        tower = self.tower(config)
        patch = tower.num_channels * _pair(tower.patch_size)[0] * _pair(tower.patch_size)[1]
        return int(tower.hidden_size * (patch + 1 + self.before_patches + self.longest(config) + 2))

    def row_tokens(self, config: Any, rows: torch.Tensor) -> int:
        """Patches of an image, and the tokens before them."""
        high, wide = _pair(self.tower(config).patch_size)
        return self.before_patches + (rows.shape[-2] // high) * (rows.shape[-1] // wide)

    def longest(self, config: Any) -> int:
        """Tokens of an image of the size that the configuration names."""
        tower = self.tower(config)
        return self.row_tokens(config, torch.empty(_pair(tower.image_size), device="meta"))

    def example(self, config: Any, count: int = 2, length: int = 0) -> torch.Tensor:
        """Noise of the size that the configuration names."""
        tower = self.tower(config)
        draw = torch.Generator().manual_seed(0)
        return torch.rand(count, tower.num_channels, *_pair(tower.image_size), generator=draw) * 2 - 1

    def run(self, model: nn.Module, ids: torch.Tensor, stream: torch.Tensor | None = None) -> torch.Tensor:
        """What the model says about images: logits, or embeddings where it has no head."""
        if stream is not None:
            return Family.run(self, model, ids, stream)
        out = self.call(model, ids)
        return out["logits"] if "logits" in out else self.pooled(model.config, out)

    @torch.no_grad()
    def layer_contexts(self, model: nn.Module, ids: torch.Tensor) -> list[dict[str, Any]]:
        """The keyword arguments that the model hands each layer: the same for all images."""
        return Family.layer_contexts(self, model, ids)


def _pair(size: Any) -> tuple[int, int]:
    """Height and width, of which configurations may name one for both."""
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))
