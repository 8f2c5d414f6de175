"""Phi-3, Phi-3.5 and Phi-4-mini: as Llama, with queries, keys and values in one projection, and gate and up in one."""

from __future__ import annotations

from typing import Any

import torch

from headwise.families._family import Tensors
from headwise.families._rotary import Rotary

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class Phi3(Rotary):
    """What is fused is taken apart; pairs can be dropped where every coordinate turns."""

    name = "phi3"
    model_types = ("phi3",)
    summary = "Phi-3, Phi-3.5, Phi-4"
    small = {"hidden_size": 64, "head_dim": None, "initializer_range": 0.1}

    def pairs(self, config: Any) -> bool:
        """Not where some coordinates stand still (Phi-4-mini)."""
        return bool(config.rope_parameters.get("partial_rotary_factor", 1.0) == 1.0)

    def portable_cuts(self, config: Any) -> tuple[str, ...]:
        """Stock code derives what its tables must look like from the number of heads."""
        return ("mlp",)

    def together(self, tensors: Tensors, config: Any) -> Tensors:
        """What `apart` took apart, as stock code has it."""
        found = dict(tensors)
        for fused, parts in FUSED.items():
            for name in [name for name in found if name.endswith(f".{parts[0]}.weight")]:
                place = name.removesuffix(f"{parts[0]}.weight")
                found[f"{place}{fused}.weight"] = torch.cat([found.pop(f"{place}{part}.weight") for part in parts])
        return found

    def apart(self, tensors: Tensors, config: Any) -> Tensors:
        """A stock state dictionary with its fused tensors taken apart."""
        queries, keys = (
            heads * self.head_dim(config) for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        rows = {"qkv_proj": (queries, keys, keys), "gate_up_proj": (config.intermediate_size,) * 2}
        found: Tensors = {}
        for name, tensor in tensors.items():
            place, _, fused = name.removesuffix(".weight").rpartition(".")
            if fused not in FUSED:
                found[name] = tensor
                continue
            for part, piece in zip(FUSED[fused], tensor.split(rows[fused]), strict=True):
                found[f"{place}.{part}.weight"] = piece.clone()
        return found


FAMILY = Phi3()
