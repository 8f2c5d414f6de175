"""ModernBERT: rotary positions, attention to all tokens or to near ones by turns, a gated MLP, pre-norm layers.

Both kinds of layer have rotary tables of their own. What stock code fuses (queries with keys and values, gate with up)
is taken apart. The first layer has no norm before its attention, as the embeddings end in one, so it has to stay.
"""

from typing import Any

import torch
from torch import nn

from headwise.families._architecture import BARE, CLASSIFIER, MASKED, Architecture
from headwise.families._encoder import HEADS, Encoder


class ModernBert(Encoder):
    """ModernBERT, bare or with a masked-language or classification head."""

    name = "modernbert"
    kinds = {
        "modernbert": Architecture(
            stem="ModernBert",
            heads=HEADS,
            attention="attn",
            names={**dict.fromkeys("qkv", "Wqkv"), "o": "Wo", "scaling": "", "resid_dropout": "out_drop"},
            fused_mlp={"at": "mlp", "inner": "Wi", "down": "Wo", "act": "act", "drop": "drop"},
        )
    }
    summary = "ModernBERT, and sentence embeddings made of it"
    keeps_first = True
    relative = True
    folds = False
    norms = {"attention_norm": "attn_norm", "mlp_norm": "mlp_norm"}
    small = dict(  # with windows that are narrower than the texts of the tests
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=128, local_attention=8, initializer_range=0.1, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, cls_token_id=1, sep_token_id=2,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    )  # fmt: skip

    def pairs(self, config: Any) -> bool:
        """Rotary pairs can be dropped."""
        return True

    def _norm(self, config: Any) -> int:
        """Parameters of a norm."""
        return int(config.hidden_size) * (2 if config.norm_bias else 1)

    def embedding_parameters(self, config: Any) -> int:
        """A norm after the words and one at the end, less that which the first layer does not have."""
        return self._norm(config)

    def head_parameters(self, config: Any, head: str) -> int:
        """A dense layer with a norm, and what comes after it; a bare model has neither."""
        if head == BARE:
            return 0
        dense = config.hidden_size * (config.hidden_size + bool(config.classifier_bias)) + self._norm(config)
        if head == CLASSIFIER:
            return int(dense + config.num_labels * (config.hidden_size + 1))
        return int(dense - (0 if config.decoder_bias else config.vocab_size))

    def costs(self, config: Any) -> dict[str, Any]:
        """Biases are optional, of norms too; the MLP is gated."""
        bias = bool(config.attention_bias)
        biases = dict(qkv_bias=bias, o_bias=bias, mlp_bias=bool(config.mlp_bias))
        return super().costs(config) | biases | dict(mlp_matrices=3, layer_norms=2 * self._norm(config))

    @torch.no_grad()
    def layer_contexts(self, model: nn.Module, ids: torch.Tensor) -> list[dict[str, Any]]:
        """The keyword arguments that the model hands each layer for rows as long as these; shorter ones use a part."""
        return super().layer_contexts(model, ids.clamp_min(0))

    def logits(self, model: nn.Module, stream: torch.Tensor) -> torch.Tensor:
        """What the model's head makes of the stream after the last layer; the normed stream without one."""
        head, found = self.head(model.config), self.body(model).final_norm(stream)
        if head == BARE:
            return found
        if head == MASKED:
            return model.decoder(model.head(found))
        pooled = found[:, 0] if model.config.classifier_pooling == "cls" else found.mean(1)
        return model.classifier(model.drop(model.head(pooled)))


FAMILY = ModernBert()
