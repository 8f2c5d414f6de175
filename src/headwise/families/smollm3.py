"""SmolLM3: as Llama, with layers in between that have no positions at all."""

from __future__ import annotations

from typing import Any

from headwise.families._architecture import Architecture
from headwise.families._family import Tensors
from headwise.families._rotary import Rotary


class SmolLM3(Rotary):
    """Pairs can be dropped in every layer; where nothing turns, a pair is just two coordinates."""

    name = "smollm3"
    kinds = {"smollm3": Architecture(stem="SmolLM3")}
    summary = "SmolLM3"
    small = {
        "hidden_size": 64,
        "head_dim": None,
        "initializer_range": 0.1,
        "no_rope_layer_interval": 2,
        "use_sliding_window": True,
        "sliding_window": 6,
    }

    def put_layer(self, tensors: Tensors, index: int, layer: Tensors, config: Any) -> None:
        """Add the tensors of a layer to a state dictionary; one that turns nothing needs no list of pairs."""
        turns = bool(config.no_rope_layers[index])
        super().put_layer(tensors, index, {k: v for k, v in layer.items() if turns or k != "pairs"}, config)


FAMILY = SmolLM3()
