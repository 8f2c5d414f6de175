"""What encoders share: they read a whole text at once, keep no cache and come with several heads, or with none.

Which head a model has is said by `config.architectures`, in stock and tailored configurations alike.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import nn

from headwise.errors import ModelError
from headwise.families._architecture import BARE, CLASSIFIER, MASKED
from headwise.families._config import grain_of
from headwise.families._family import Family
from headwise.types import LayerShape, ModelShape

HEADS = {MASKED: "ForMaskedLM", CLASSIFIER: "ForSequenceClassification"}


class Encoder(Family):
    """A bidirectional model with post-norm layers and learned positions."""

    quiet: ClassVar[dict[str, Any]] = {}

    @abstractmethod
    def embedding_parameters(self, config: Any) -> int:
        """Parameters of the embeddings without the words themselves."""

    @abstractmethod
    def head_parameters(self, config: Any, head: str) -> int:
        """Parameters of a head without the output words; of the pooler too where there is one."""

    @abstractmethod
    def sizes(self, config: Any) -> tuple[int, int, int]:
        """Attention heads, MLP width, layers."""

    def shape_of(self, config: Any) -> ModelShape:
        """The shape of a stock or tailored configuration."""
        if getattr(config, "is_decoder", False):
            raise ModelError(f"{self.name} models that were made into decoders are not supported, only encoders.")
        hidden, head = config.hidden_size, self.head(config) or MASKED
        heads, width, count = self.sizes(config)
        dim = hidden // heads
        stock = LayerShape(heads, heads, dim, dim, width, dim)
        bias = config.vocab_size if head == MASKED else 0  # of the output words
        return self.shape(
            config,
            (stock,) * count,
            grain_of(dim, width, pairs=False, folds=True),
            tied_embeddings=head != MASKED or bool(config.tie_word_embeddings),
            qkv_bias=True,
            o_bias=True,
            mlp_bias=True,
            mlp_matrices=2,
            cached=False,
            layer_norms=4 * hidden,
            other_parameters=self.embedding_parameters(config) + bias + self.head_parameters(config, head),
        )

    def _prefix(self, config: Any, index: int) -> str:
        prefix = super()._prefix(config, index)
        return prefix.removeprefix(f"{self.anatomy(config).body_at}.") if self.head(config) == BARE else prefix

    def run(self, model: nn.Module, ids: torch.Tensor, stream: torch.Tensor | None = None) -> torch.Tensor:
        """What the model says about unpadded rows: logits, or the last stream where it has no head."""
        if stream is not None:
            return super().run(model, ids, stream)
        out = self.call(model, ids)
        found: torch.Tensor = out["logits"] if "logits" in out else out["last_hidden_state"]
        return found

    @torch.no_grad()
    def layer_contexts(self, model: nn.Module, ids: torch.Tensor) -> list[dict[str, Any]]:
        """The keyword arguments that the model hands each layer for unpadded rows of any length: they need no mask."""
        found = super().layer_contexts(model, self.unpadded(ids))
        return [{**context, "attention_mask": None} for context in found]
