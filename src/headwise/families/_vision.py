"""What encoders of images share: patches in place of words, positions that are learned, nothing cached."""

from typing import Any, ClassVar

import torch
from torch import nn

from headwise.families._architecture import BARE, IMAGE_CLASSIFIER
from headwise.families._encoder import Encoder
from headwise.families._rows import ImageReader

IMAGES: dict[str, Any] = dict(vocab_size=0, tied_embeddings=True, cached=False)  # of every shape
HEADS = {IMAGE_CLASSIFIER: "ForImageClassification"}
LAYER: dict[str, Any] = dict(  # as ViT names its parts
    heads=HEADS, attention="attention", mlp_in=("mlp.fc1",), mlp_out="mlp.fc2", activation="mlp.activation_fn"
)


class Vision(ImageReader, Encoder):
    """A pre-norm encoder that reads an image as patches, with a class token before them."""

    images = True
    before_patches: ClassVar[int] = 1  # tokens
    stream_norms: ClassVar[int] = 4  # parameters of norms and scales in a layer, for every channel of the stream
    norms = {"attention_norm": "layernorm_before", "mlp_norm": "layernorm_after"}
    usual = dict(
        image_size=16, patch_size=4, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        initializer_range=0.1,
    )  # fmt: skip

    def pooled(self, model: nn.Module, out: Any) -> torch.Tensor:
        """The embedding of an image (B, D), out of what a model without a head puts out: its class token."""
        return out["last_hidden_state"][:, 0]

    def costs(self, config: Any) -> dict[str, Any]:
        """Biases, of queries, keys and values where the configuration wants them."""
        tower, head = self.tower(config), self.head(config) or IMAGE_CLASSIFIER
        return IMAGES | dict(
            hidden_size=tower.hidden_size,
            qkv_bias=bool(getattr(tower, "qkv_bias", True)),
            o_bias=True,
            mlp_bias=True,
            mlp_matrices=1 + len(self.anatomy(config).mlp_in),
            layer_norms=self.stream_norms * int(tower.hidden_size),
            other_parameters=self.embedding_parameters(config) + self.head_parameters(config, head),
            row_tokens=self.longest(config),
        )

    def embedding_parameters(self, config: Any) -> int:
        """Patches with a bias, the tokens before them, positions, and the norm at the end."""
        tower = self.tower(config)
        patch = tower.num_channels * _pair(tower.patch_size)[0] * _pair(tower.patch_size)[1]
        return int(tower.hidden_size * (patch + 1 + self.before_patches + self.longest(config) + 2))

    def head_parameters(self, config: Any, head: str) -> int:
        """The pooler of a bare model, or the classifier."""
        wide = config.pooler_output_size if head == BARE else config.num_labels
        return int(wide * (config.hidden_size + 1))

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

    def logits(self, model: nn.Module, stream: torch.Tensor) -> torch.Tensor:
        """What the classifier makes of the stream after the last layer; the class token without one."""
        found = self.body(model).layernorm(stream)
        return found[:, 0] if self.head(model.config) == BARE else self.classified(model, found)

    def classified(self, model: nn.Module, found: torch.Tensor) -> torch.Tensor:
        """Logits of classes from the normed stream: by the class token."""
        return model.classifier(found[:, 0])


def _pair(size: Any) -> tuple[int, int]:
    """Height and width, of which configurations may name one for both."""
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))
