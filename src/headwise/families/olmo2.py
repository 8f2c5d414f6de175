"""OLMo 2: norms come after attention and after the MLP, and queries and keys are normed over all heads together."""

from __future__ import annotations

from typing import Any

from torch import nn

from headwise.families._family import Block
from headwise.families._rotary import Rotary


class Olmo2(Rotary):
    """No head can go without changing the norm of the others, so heads stay."""

    name = "olmo2"
    model_types = ("olmo2",)
    summary = "OLMo 2"
    units = ("qk", "v", "mlp")
    small = {"hidden_size": 64, "head_dim": None, "initializer_range": 0.1}

    def pairs(self, config: Any) -> bool:
        """No: the norms are over all coordinates."""
        return False

    def layer_norms(self, config: Any) -> int:
        """Two on the stream, one of all queries, one of all keys."""
        heads = config.num_attention_heads + config.num_key_value_heads
        return super().layer_norms(config) + int(heads * self.head_dim(config))

    def block(self, layer: nn.Module) -> Block:
        """The parts of one layer of a tailored model."""
        return Block(
            attention=layer.self_attn,
            output=layer.self_attn.o_proj,
            inner=(layer.mlp.gate_proj, layer.mlp.up_proj),
            down=layer.mlp.down_proj,
            activation=layer.mlp.act_fn,
            attention_scale=layer.post_attention_layernorm,
            mlp_scale=layer.post_feedforward_layernorm,
        )


FAMILY = Olmo2()
