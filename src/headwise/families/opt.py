"""OPT: learned positions, separate projections, an MLP without a gate.

Norms before the parts, or after the sums as in OPT-350m; word embeddings of another width than the layers; with or
without biases. Queries and keys know no rotation, so that their projection is folded into the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headwise.families._family import Block, Tensors
from headwise.families._plain import Plain

UNUSED_POSITIONS = 2  # at the start of the position table


class OPT(Plain):
    """OPT and what shares its code."""

    name = "opt"
    model_types = ("opt",)
    summary = "OPT, Galactica"
    folds = True
    width_setting = "ffn_dim"
    small = dict(
        hidden_size=64,
        ffn_dim=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=128,
        dropout=0.0,
        init_std=0.1,
    )

    def counts(self, config: Any) -> dict[str, Any]:
        """Biases and norms with weights or without; word embeddings may be narrower than the layers."""
        hidden, words, bias = config.hidden_size, config.word_embed_proj_dim, bool(config.enable_bias)
        norm = 2 * hidden if config.layer_norm_elementwise_affine else 0
        other = (config.max_position_embeddings + UNUSED_POSITIONS) * hidden
        if config.do_layer_norm_before and not config._remove_final_layer_norm:
            other += norm
        if words != hidden:  # `vocab_size` times `hidden_size` is counted elsewhere
            tables = 1 if config.tie_word_embeddings else 2
            other += tables * config.vocab_size * (words - hidden) + 2 * words * hidden
        return dict(qkv_bias=bias, o_bias=bias, mlp_bias=bias, layer_norms=2 * norm, other_parameters=other)

    def block(self, layer: nn.Module) -> Block:
        """The parts of one layer of a tailored model; its norms come before the parts or after the sums."""
        names = ("attention_norm", "mlp_norm") if layer.do_layer_norm_before else ("attention_end", "mlp_end")
        norms = dict(zip(names, (layer.self_attn_layer_norm, layer.final_layer_norm), strict=True))
        return Block(
            attention=layer.self_attn,
            output=layer.self_attn.o_proj,
            inner=(layer.fc1,),
            down=layer.fc2,
            activation=layer.activation_fn,
            **norms,
        )

    def apart(self, tensors: Tensors, config: Any) -> Tensors:
        """The output projection under our name."""
        return {name.replace(".self_attn.out_proj.", ".self_attn.o_proj."): t for name, t in tensors.items()}

    def together(self, tensors: Tensors, config: Any) -> Tensors:
        """The output projection under its stock name."""
        return {name.replace(".self_attn.o_proj.", ".self_attn.out_proj."): t for name, t in tensors.items()}

    def logits(self, model: nn.Module, stream: torch.Tensor) -> torch.Tensor:
        """Logits from the residual stream after the last layer."""
        decoder = model.model.decoder
        for last in (decoder.final_layer_norm, decoder.project_out):
            stream = stream if last is None else last(stream)
        out: torch.Tensor = model.lm_head(stream)
        return out


FAMILY = OPT()
