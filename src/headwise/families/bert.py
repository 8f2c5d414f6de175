"""BERT, its smaller kin such as MiniLM, and RoBERTa: encoders with learned positions and post-norm layers."""

from typing import Any

import torch
from torch import nn

from headwise.families._architecture import BARE, CLASSIFIER, MASKED, Architecture
from headwise.families._encoder import HEADS, PostNorm

LAYER: dict[str, Any] = dict(
    heads=HEADS,
    layers="encoder.layer",
    attention="attention.self",
    output="attention.output.dense",
    names={
        "q": "query", "k": "key", "v": "value", "o": "", "head_dim": "attention_head_size", "dropout": "dropout.p",
    },
    mlp_in=("intermediate.dense",),
    mlp_out="output.dense",
    activation="intermediate.intermediate_act_fn",
)  # fmt: skip


class Bert(PostNorm):
    """BERT and RoBERTa, bare or with a masked-language or classification head."""

    name = "bert"
    kinds = {
        "bert": Architecture(stem="Bert", body_at="bert", **LAYER),
        "roberta": Architecture(stem="Roberta", body_at="roberta", **LAYER),
    }
    summary = "BERT, MiniLM, RoBERTa, and sentence embeddings made of them"

    norms = {"attention_end": "attention.output.LayerNorm", "mlp_end": "output.LayerNorm"}
    small = dict(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=128,
    )  # fmt: skip

    def longest(self, config: Any) -> int:
        """Tokens that a model takes at once: RoBERTa counts positions from behind that of padding."""
        taken = config.pad_token_id + 1 if self.kind(config) == "roberta" else 0
        return int(config.max_position_embeddings) - taken

    def embedding_parameters(self, config: Any) -> int:
        """Positions, token types and a norm."""
        return int(config.hidden_size * (config.max_position_embeddings + config.type_vocab_size + 2))

    def head_parameters(self, config: Any, head: str) -> int:
        """The pooler or the head's own layer, and what comes after it."""
        hidden, dense = config.hidden_size, config.hidden_size * (config.hidden_size + 1)
        if head == MASKED:
            return int(dense + 2 * hidden + (0 if config.tie_word_embeddings else config.vocab_size))
        return int(dense + (config.num_labels * (hidden + 1) if head == CLASSIFIER else 0))

    def logits(self, model: nn.Module, stream: torch.Tensor) -> torch.Tensor:
        """What the model's head makes of the stream after the last layer; the stream itself without one."""
        head, roberta = self.head(model.config), self.kind(model.config) == "roberta"
        if head == BARE:
            return stream
        if head == MASKED:
            return (model.lm_head if roberta else model.cls)(stream)
        return model.classifier(stream if roberta else model.dropout(model.bert.pooler(stream)))


FAMILY = Bert()
