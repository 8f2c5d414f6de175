"""DistilBERT: BERT's layers under other names, without token types and pooler."""

from typing import Any

import torch
from torch import nn

from headwise.families._architecture import BARE, CLASSIFIER, MASKED, Architecture
from headwise.families._encoder import HEADS, PostNorm


class DistilBert(PostNorm):
    """DistilBERT, bare or with a masked-language or classification head."""

    name = "distilbert"
    kinds = {
        "distilbert": Architecture(
            stem="DistilBert",
            heads=HEADS,
            body_at="distilbert",
            layers="transformer.layer",
            attention="attention",
            names={
                "q": "q_lin", "k": "k_lin", "v": "v_lin", "o": "out_lin", "head_dim": "attention_head_size",
                "dropout": "dropout.p",
            },
            mlp_in=("ffn.lin1",),
            mlp_out="ffn.lin2",
            activation="ffn.activation",
        )
    }  # fmt: skip
    summary = "DistilBERT, and sentence embeddings made of it"
    width_setting = "hidden_dim"
    norms = {"attention_end": "sa_layer_norm", "mlp_end": "output_layer_norm"}
    small = dict(vocab_size=97, dim=32, hidden_dim=64, n_layers=3, n_heads=4, max_position_embeddings=128)

    def embedding_parameters(self, config: Any) -> int:
        """Positions and a norm."""
        return int(config.dim * (config.max_position_embeddings + 2))

    def head_parameters(self, config: Any, head: str) -> int:
        """A dense layer and what comes after it; a bare model has neither."""
        if head == BARE:
            return 0
        more = config.num_labels * (config.dim + 1) if head == CLASSIFIER else 2 * config.dim
        return int(config.dim * (config.dim + 1) + more)

    def logits(self, model: nn.Module, stream: torch.Tensor) -> torch.Tensor:
        """What the model's head makes of the stream after the last layer; the stream itself without one."""
        head = self.head(model.config)
        if head == BARE:
            return stream
        if head == MASKED:
            return model.vocab_projector(model.vocab_layer_norm(model.activation(model.vocab_transform(stream))))
        return model.classifier(model.dropout(model.pre_classifier(stream[:, 0]).relu()))


FAMILY = DistilBert()
