"""OPT: learned positions, separate projections, an MLP without a gate.

Norms before the parts, or after the sums as in OPT-350m; word embeddings of another width than the layers; with or
without biases. Queries and keys are not rotated, so that their projection is folded into the weights.
"""

from typing import Any

from torch import nn

from headwise.families._architecture import Architecture
from headwise.families._decoder import Plain

UNUSED_POSITIONS = 2  # at the start of the position table


class OPT(Plain):
    """OPT and what shares its code."""

    name = "opt"
    kinds = {
        "opt": Architecture(
            stem="OPT",
            layers="decoder.layers",
            names={"o": "out_proj", "dropout": "dropout"},
            mlp_in=("fc1",),
            mlp_out="fc2",
            activation="activation_fn",
            scales_queries=True,
        )
    }
    summary = "OPT, Galactica"
    width_setting = "ffn_dim"
    ends = ("model.decoder.final_layer_norm", "model.decoder.project_out", "lm_head")
    small = dict(
        hidden_size=64, ffn_dim=128, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=128,
        dropout=0.0, init_std=0.1,
    )  # fmt: skip

    def costs(self, config: Any) -> dict[str, Any]:
        """Biases and norms with weights or without; word embeddings may be narrower than the layers."""
        hidden, words, bias = config.hidden_size, config.word_embed_proj_dim, bool(config.enable_bias)
        norm = 2 * hidden if config.layer_norm_elementwise_affine else 0
        other = (config.max_position_embeddings + UNUSED_POSITIONS) * hidden
        if config.do_layer_norm_before and not config._remove_final_layer_norm:
            other += norm
        if words != hidden:  # `vocab_size` times `hidden_size` is counted elsewhere
            tables = 1 if config.tie_word_embeddings else 2
            other += tables * config.vocab_size * (words - hidden) + 2 * words * hidden
        biases = dict(qkv_bias=bias, o_bias=bias, mlp_bias=bias)
        return super().costs(config) | biases | dict(layer_norms=2 * norm, other_parameters=other)

    def norms_of(self, layer: nn.Module) -> dict[str, Any]:
        """Norms come before the parts or after the sums."""
        names = ("attention_norm", "mlp_norm") if layer.do_layer_norm_before else ("attention_end", "mlp_end")
        return dict(zip(names, (layer.self_attn_layer_norm, layer.final_layer_norm), strict=True))


FAMILY = OPT()
