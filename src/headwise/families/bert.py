"""BERT, its smaller kin such as MiniLM, and RoBERTa: encoders with learned positions and post-norm layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headwise.families._encoder import BARE, CLASSIFIER, MASKED, Encoder
from headwise.families._family import Block


class Bert(Encoder):
    """BERT and RoBERTa, bare or with a masked-language or classification head."""

    name = "bert"
    model_types = ("bert", "roberta")
    summary = "BERT, MiniLM, RoBERTa, and sentence embeddings made of them"
    renamed = {f".self.{name}.": f".self.{name[0]}_proj." for name in ("query", "key", "value")}

    def sizes(self, config: Any) -> tuple[int, int, int]:
        """Attention heads, MLP width, layers."""
        return config.num_attention_heads, config.intermediate_size, config.num_hidden_layers

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

    def block(self, layer: nn.Module) -> Block:
        """The parts of one layer of a tailored model."""
        return Block(
            attention=layer.attention.self,
            output=layer.attention.output.dense,
            inner=(layer.intermediate.dense,),
            down=layer.output.dense,
            activation=layer.intermediate.intermediate_act_fn,
            attention_end=layer.attention.output.LayerNorm,
            mlp_end=layer.output.LayerNorm,
        )

    def logits(self, model: nn.Module, stream: torch.Tensor) -> torch.Tensor:
        """What the model's head makes of the stream after the last layer; the stream itself without one."""
        head = self.head(model.config)
        roberta = self.kind(model.config) == "roberta"
        if head == BARE:
            return stream
        if head == MASKED:
            return (model.lm_head if roberta else model.cls)(stream)
        return model.classifier(stream if roberta else model.dropout(model.bert.pooler(stream)))

    def tiny_settings(self) -> dict[str, Any]:
        """The configuration of a tiny model."""
        return dict(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=128,
        )


FAMILY = Bert()
