"""Qwen3: as Llama, with a norm of every query and key head before rotary; some layers may have a sliding window."""

from __future__ import annotations

from typing import Any

from headwise.families._architecture import Architecture
from headwise.families._rotary import Rotary


class Qwen3(Rotary):
    """Queries and keys are normed and rotated at full width and projected after."""

    name = "qwen3"
    kinds = {"qwen3": Architecture(stem="Qwen3")}
    summary = "Qwen3 (dense)"
    small = {"initializer_range": 0.1, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}

    def pairs(self, config: Any) -> bool:
        """No: the norm of a head is over all of its coordinates."""
        return False

    def layer_norms(self, config: Any) -> int:
        """Two on the stream, one of queries, one of keys."""
        return super().layer_norms(config) + 2 * self.head_dim(config)


FAMILY = Qwen3()
