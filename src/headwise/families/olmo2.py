"""OLMo 2: norms come after attention and after the MLP, and queries and keys are normed over all heads together."""

from __future__ import annotations

from typing import Any

from torch import nn

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

    def norms(self, layer: nn.Module) -> dict[str, Any]:
        """After each part, none before."""
        return {"attention_scale": layer.post_attention_layernorm, "mlp_scale": layer.post_feedforward_layernorm}


FAMILY = Olmo2()
