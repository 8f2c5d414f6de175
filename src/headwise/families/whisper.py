"""Whisper: reads a recording as a whole and writes what was said. An encoder-decoder with norms before its parts.

A recording is always the same number of tokens (30 seconds: 1,500), each made of two frames of its spectrogram by
convolutions that stay as they are. Positions are added to the streams of both stacks, so that the projection of queries
and keys is folded into the weights. Keys have no bias.
"""

from typing import Any

import torch
from torch import nn

from headwise.data import GIVEN, marks_of
from headwise.data.audio import FRAMES, features_of, sounding, with_tokens
from headwise.families._architecture import SPEECH, Architecture
from headwise.families._config import BIASES
from headwise.families._encoder_decoder import BART, EncoderDecoder, inputs_of
from headwise.families._family import Tensors
from headwise.types import LayerShape

HEADS = {SPEECH: "ForConditionalGeneration"}


class Whisper(EncoderDecoder):
    """Whisper and Distil-Whisper."""

    name = "whisper"
    kinds = {"whisper": Architecture(stem="Whisper", scales_queries=True, **{**BART, "heads": HEADS})}
    summary = "Whisper, Distil-Whisper"
    audio = True
    counts = ("encoder_layers", "decoder_layers")
    memory = "encoder.layer_norm"
    ends = ("model.decoder.layer_norm", "proj_out")
    small = dict(
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, num_mel_bins=6, max_source_positions=10, max_target_positions=64, init_std=0.1,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip

    def longest(self, config: Any) -> int:
        """Tokens that it writes at most."""
        return int(config.max_target_positions)

    def costs(self, config: Any) -> dict[str, Any]:
        """Biases everywhere but on keys; beside the layers two convolutions, and per stack positions and a norm."""
        hidden = config.d_model
        convolutions = 3 * (config.num_mel_bins + hidden) + 2
        positions = config.max_source_positions + config.max_target_positions
        return BIASES | dict(
            tied_embeddings=bool(config.tie_word_embeddings),
            k_bias=False,
            mlp_matrices=2,
            layer_norms=4 * hidden,
            other_parameters=hidden * (convolutions + positions + 4),
        )

    def build(self, like: nn.Module, layers: tuple[LayerShape, ...], tensors: Tensors) -> nn.Module:
        """As the others'. Heads that tell when a word was said are named by number: a model that lost some names none.

        Such a model refuses to give the time of every word; times of segments are tokens, and stay.
        """
        model = super().build(like, layers, tensors)

        def heads(of: tuple[LayerShape, ...]) -> list[int]:
            return [layer.query_heads for layer in of if layer.role in ("cross", "")]

        named = getattr(model.generation_config, "alignment_heads", None)
        if named is not None and heads(layers) != heads(self.shape_of(like.config).layers):
            del model.generation_config.alignment_heads
        return model

    # Rows: as `audio` packs them.

    def arguments(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Spectrograms and outputs of rows that share the lengths of both."""
        first = inputs_of(rows)
        written = marks_of(rows)[:, first + 1 :].long().contiguous()
        return {"input_features": features_of(rows[:, :first]), "decoder_input_ids": written}

    def example(self, config: Any, count: int = 2, length: int = 20) -> torch.Tensor:
        """Noise, and an output of that length."""
        frames = FRAMES * config.max_source_positions
        noise = torch.randn(count, config.num_mel_bins, frames, generator=torch.Generator().manual_seed(0))
        written = torch.arange(count * length).reshape(count, length) % 90 + 3
        written[:, 0] = config.decoder_start_token_id
        marker = torch.full((count, 1), GIVEN)
        return with_tokens(sounding(noise), torch.cat((marker, written), 1))

    def prompt(self, row: torch.Tensor) -> tuple[torch.Tensor, int]:
        """A recording; what a model writes comes without its beginning."""
        return features_of(row[None, : inputs_of(row[None])]), 0

    def longer(self, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Rows with more tokens at the end of the output."""
        return with_tokens(rows, tokens)

    def excerpt(self, rows: torch.Tensor, most: int) -> torch.Tensor:
        """The first recording, whole, with no more than so many tokens of its output."""
        row = self.unpadded(rows[:1])
        return row[:, : inputs_of(row) + 1 + most]


FAMILY = Whisper()
