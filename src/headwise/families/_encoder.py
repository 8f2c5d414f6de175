"""What encoders share: they read a whole text at once, keep no cache and come with several heads, or with none.

Which head a model has is said by `config.architectures`, in stock and tailored configurations alike.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import nn

from headwise.errors import ModelError
from headwise.families._config import element_bytes, grain_of, layers_of
from headwise.families._family import Family, Tensors, unsettled
from headwise.runtime.modeling_headwise import BARE, CLASSIFIER, MASKED, stock_classes
from headwise.types import LayerShape, ModelShape


class Encoder(Family):
    """A bidirectional model with post-norm layers and learned positions."""

    quiet: ClassVar[dict[str, Any]] = {}
    renamed: ClassVar[dict[str, str]]  # part of a stock tensor's name -> of the tailored model's

    @abstractmethod
    def embedding_parameters(self, config: Any) -> int:
        """Parameters of the embeddings without the words themselves."""

    @abstractmethod
    def head_parameters(self, config: Any, head: str) -> int:
        """Parameters of a head without the output words; of the pooler too where there is one."""

    @abstractmethod
    def sizes(self, config: Any) -> tuple[int, int, int]:
        """Attention heads, MLP width, layers."""

    def head(self, config: Any) -> str:
        """The Auto class of the model that a configuration belongs to."""
        name = (getattr(config, "architectures", None) or [""])[0]
        heads = self.anatomy(config).heads
        return next((auto for auto, end in heads.items() if name.endswith(end)), BARE if name.endswith("Model") else "")

    def shape_of(self, config: Any) -> ModelShape:
        """The shape of a stock or tailored configuration."""
        if getattr(config, "is_decoder", False):
            raise ModelError(f"{self.name} models that were made into decoders are not supported, only encoders.")
        hidden, head = config.hidden_size, self.head(config) or MASKED
        heads, width, count = self.sizes(config)
        dim = hidden // heads
        stock = LayerShape(heads, heads, dim, dim, width, dim)
        bias = config.vocab_size if head == MASKED else 0  # of the output words
        return ModelShape(
            family=self.name,
            hidden_size=hidden,
            vocab_size=config.vocab_size,
            tied_embeddings=head != MASKED or bool(config.tie_word_embeddings),
            layers=layers_of(config, stock, count),
            grain=grain_of(dim, width, pairs=False, folds=True),
            qkv_bias=True,
            o_bias=True,
            mlp_bias=True,
            mlp_matrices=2,
            cached=False,
            layer_norms=4 * hidden,
            other_parameters=self.embedding_parameters(config) + bias + self.head_parameters(config, head),
            element_bytes=element_bytes(config),
        )

    def apart(self, tensors: Tensors, config: Any) -> Tensors:
        """A stock state dictionary under the names of the tailored model."""
        found: Tensors = {}
        for name, tensor in tensors.items():
            for theirs, ours in self.renamed.items():
                name = name.replace(theirs, ours)
            found[name] = tensor
        return found

    def body(self, model: nn.Module) -> nn.Module:
        """The model without its head; a bare model is its own body."""
        return model if isinstance(model, stock_classes(self.kind(model.config))[BARE]) else super().body(model)

    def _prefix(self, config: Any, index: int) -> str:
        prefix = super()._prefix(config, index)
        return prefix.removeprefix(f"{self.anatomy(config).body_at}.") if self.head(config) == BARE else prefix

    def build(self, like: nn.Module, layers: tuple[LayerShape, ...], tensors: Tensors) -> nn.Module:
        """A tailored model with the head of `like`."""
        model = super().build(like, layers, tensors)
        model.config.architectures = [type(model).__name__]
        return model

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

    def tiny(self, model_type: str, head: str = MASKED, **changes: Any) -> nn.Module:
        """A tiny random stock model for tests, with any of the heads."""
        made = stock_classes(model_type)
        torch.manual_seed(0)
        model = made[head](made["AutoConfig"](**{**self.tiny_settings(), **changes}))
        model.config.architectures = [type(model).__name__]
        return unsettled(model)

    @abstractmethod
    def tiny_settings(self) -> dict[str, Any]:
        """The configuration of a tiny model."""


__all__ = ["BARE", "CLASSIFIER", "MASKED", "Encoder"]
