"""Phi-3, Phi-3.5 and Phi-4-mini: as Llama, with queries, keys and values in one projection, and gate and up in one."""

from collections.abc import Sequence
from typing import Any

import torch

from headwise.families._architecture import Architecture
from headwise.families._rotary import Rotary


class Phi3(Rotary):
    """Fused projections are taken apart; pairs can be dropped where every coordinate turns."""

    name = "phi3"
    kinds = {
        "phi3": Architecture(
            stem="Phi3",
            names={**dict.fromkeys("qkv", "qkv_proj"), "sliding_window": "config.sliding_window"},
            fused_mlp={"at": "mlp", "inner": "gate_up_proj", "down": "down_proj", "act": "activation_fn"},
        )
    }
    summary = "Phi-3, Phi-3.5, Phi-4"
    small = {"hidden_size": 64, "head_dim": None, "initializer_range": 0.1}

    def pairs(self, config: Any) -> bool:
        """Not where some coordinates do not turn (Phi-4-mini)."""
        return bool(config.rope_parameters.get("partial_rotary_factor", 1.0) == 1.0)

    def portable_cuts(self, config: Any) -> tuple[str, ...]:
        """Stock code derives what its tables must look like from the number of heads."""
        return ("mlp",)

    def split(self, tensor: torch.Tensor, ours: tuple[str, ...], config: Any) -> Sequence[torch.Tensor]:
        """The parts of a fused tensor; there may be fewer keys and values than queries."""
        if len(ours) == 2:  # gate and up
            return super().split(tensor, ours, config)
        layer = self.stock_layer(config)
        return tensor.split([heads * layer.qk_dim for heads in (layer.query_heads, layer.kv_heads, layer.kv_heads)])


FAMILY = Phi3()
