"""What encoders share: they read a whole text at once, keep no cache and come with several heads, or with none.

Which head a model has is said by `config.architectures`, in stock and tailored configurations alike.
"""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import nn

from headwise.errors import ModelError
from headwise.families._architecture import BARE, CLASSIFIER, MASKED
from headwise.families._config import BIASES
from headwise.families._family import Family
from headwise.types import ModelShape

HEADS = {MASKED: "ForMaskedLM", CLASSIFIER: "ForSequenceClassification"}


class Encoder(Family):
    """A bidirectional model."""

    quiet: ClassVar[dict[str, Any]] = {}

    @abstractmethod
    def embedding_parameters(self, config: Any) -> int:
        """Parameters of the embeddings without the words themselves."""

    @abstractmethod
    def head_parameters(self, config: Any, head: str) -> int:
        """Parameters of a head without the output words; of the pooler too where there is one."""

    def shape_of(self, config: Any) -> ModelShape:
        """The shape of a configuration, if it is one of an encoder."""
        if getattr(config, "is_decoder", False):
            raise ModelError(f"{self.name} models that were made into decoders are not supported, only encoders.")
        return super().shape_of(config)

    def costs(self, config: Any) -> dict[str, Any]:
        """Biases everywhere, and two norms in a layer; output words have a bias of their own."""
        head = self.head(config) or MASKED
        words = config.vocab_size if head == MASKED else 0
        return BIASES | dict(
            tied_embeddings=head != MASKED or bool(config.tie_word_embeddings),
            mlp_matrices=2,
            cached=False,
            layer_norms=4 * config.hidden_size,
            other_parameters=self.embedding_parameters(config) + words + self.head_parameters(config, head),
        )

    def _prefix(self, config: Any, index: int) -> str:
        prefix = super()._prefix(config, index)
        return prefix.removeprefix(f"{self.anatomy(config).body_at}.") if self.head(config) == BARE else prefix


class PostNorm(Encoder):
    """An encoder of texts with post-norm layers and learned positions."""

    @torch.no_grad()
    def layer_contexts(self, model: nn.Module, ids: torch.Tensor) -> list[dict[str, Any]]:
        """The keyword arguments that the model hands each layer for unpadded rows of any length: they need no mask."""
        found = super().layer_contexts(model, self.unpadded(ids))
        return [{**context, "attention_mask": None} for context in found]
