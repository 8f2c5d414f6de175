"""Qwen3: as Llama, with a norm of every query and key head before rotary; some layers may have a sliding window."""

from headwise.families._architecture import Architecture
from headwise.families._rotary import Rotary


class Qwen3(Rotary):
    """Queries and keys are normed and rotated at full width and projected after."""

    name = "qwen3"
    kinds = {"qwen3": Architecture(stem="Qwen3", normed="head")}
    summary = "Qwen3 (dense)"
    small = {"initializer_range": 0.1, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}


FAMILY = Qwen3()
