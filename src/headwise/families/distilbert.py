"""DistilBERT: BERT's layers under other names, without token types and pooler."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headwise.families._encoder import BARE, CLASSIFIER, MASKED, Encoder
from headwise.families._family import Block


class DistilBert(Encoder):
    """DistilBERT, bare or with a masked-language or classification head."""

    name = "distilbert"
    model_types = ("distilbert",)
    summary = "DistilBERT, and sentence embeddings made of it"
    renamed = {f".attention.{name}_lin.": f".attention.{name[0]}_proj." for name in ("q", "k", "v", "out")}

    def sizes(self, config: Any) -> tuple[int, int, int]:
        """Attention heads, MLP width, layers."""
        return config.n_heads, config.hidden_dim, config.n_layers

    def embedding_parameters(self, config: Any) -> int:
        """Positions and a norm."""
        return int(config.dim * (config.max_position_embeddings + 2))

    def head_parameters(self, config: Any, head: str) -> int:
        """A dense layer and what comes after it; a bare model has neither."""
        if head == BARE:
            return 0
        more = config.num_labels * (config.dim + 1) if head == CLASSIFIER else 2 * config.dim
        return int(config.dim * (config.dim + 1) + more)

    def block(self, layer: nn.Module) -> Block:
        """The parts of one layer of a tailored model."""
        return Block(
            attention=layer.attention,
            output=layer.attention.o_proj,
            inner=(layer.ffn.lin1,),
            down=layer.ffn.lin2,
            activation=layer.ffn.activation,
            attention_end=layer.sa_layer_norm,
            mlp_end=layer.output_layer_norm,
        )

    def logits(self, model: nn.Module, stream: torch.Tensor) -> torch.Tensor:
        """What the model's head makes of the stream after the last layer; the stream itself without one."""
        head = self.head(model.config)
        if head == BARE:
            return stream
        if head == MASKED:
            return model.vocab_projector(model.vocab_layer_norm(model.activation(model.vocab_transform(stream))))
        return model.classifier(model.dropout(model.pre_classifier(stream[:, 0]).relu()))

    def tiny_settings(self) -> dict[str, Any]:
        """The configuration of a tiny model."""
        return dict(vocab_size=97, dim=32, hidden_dim=64, n_layers=3, n_heads=4, max_position_embeddings=128)


FAMILY = DistilBert()
