"""BART: an encoder-decoder with learned positions and norms after the sums.

Queries and keys are not rotated, so that their projection is folded into the weights.
"""

from typing import Any

import torch
from torch import nn

from headwise.families._architecture import Architecture
from headwise.families._config import BIASES
from headwise.families._encoder_decoder import BART, EncoderDecoder

UNUSED_POSITIONS = 2  # at the start of a table of positions


class Bart(EncoderDecoder):
    """BART and what shares its code."""

    name = "bart"
    kinds = {"bart": Architecture(stem="Bart", post_norm=True, **BART)}
    summary = "BART, DistilBART"
    counts = ("encoder_layers", "decoder_layers")
    small = dict(
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, max_position_embeddings=128, dropout=0.0, init_std=0.1, forced_eos_token_id=None,
    )  # fmt: skip

    def costs(self, config: Any) -> dict[str, Any]:
        """Biases everywhere; beside the layers a table of positions and a norm for each stack.

        Where word embeddings are not tied, each stack has its own beside the common table.
        """
        hidden, tables = config.d_model, 0 if config.tie_word_embeddings else 2
        positions = 2 * (config.max_position_embeddings + UNUSED_POSITIONS + 2)
        return BIASES | dict(
            tied_embeddings=bool(config.tie_word_embeddings),
            mlp_matrices=2,
            layer_norms=4 * hidden,
            other_parameters=hidden * (positions + tables * config.vocab_size),
        )

    def logits(self, model: nn.Module, stream: torch.Tensor) -> torch.Tensor:
        """Logits from the residual stream of the output after the last layer."""
        return model.lm_head(stream) + model.final_logits_bias


FAMILY = Bart()
