"""Gemma 1, 2 and 3 (text): scaled embeddings; from 2 on norms before and after each part, and sliding windows.

Gemma 2 caps attention logits and final logits softly; Gemma 3 norms every query and key head, and turns layers with a
sliding window by another table than the others.
"""

from typing import Any

import torch
from torch import nn

from headwise.families._architecture import Architecture
from headwise.families._rotary import Rotary

SANDWICH = {
    "attention_norm": "input_layernorm", "attention_scale": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm", "mlp_scale": "post_feedforward_layernorm",
}  # fmt: skip


class Gemma(Rotary):
    """Norms multiply by one plus their weight, and attention has a scale of its own: both are stock code's to do."""

    name = "gemma"
    kinds = {
        "gemma": Architecture(stem="Gemma"),
        "gemma2": Architecture(stem="Gemma2", names={"softcap": "attn_logit_softcapping"}, stream_norms=4),
        "gemma3_text": Architecture(
            stem="Gemma3", bare="TextModel", config="Gemma3TextConfig", normed="head", stream_norms=4
        ),
    }
    summary = "Gemma 1, 2 and 3 (text)"
    small = {"tie_word_embeddings": True, "initializer_range": 0.1}

    def norms_of(self, layer: nn.Module) -> dict[str, Any]:
        """Before and after each part, but for the first Gemma."""
        norms = SANDWICH if hasattr(layer, "pre_feedforward_layernorm") else self.norms
        return {place: getattr(layer, name) for place, name in norms.items()}

    def logits(self, model: nn.Module, stream: torch.Tensor) -> torch.Tensor:
        """Logits from the residual stream after the last layer."""
        out = super().logits(model, stream)
        cap = getattr(model.config, "final_logit_softcapping", None)
        return out if cap is None else torch.tanh(out / cap) * cap

    def tiny_config(self, made: Any, kind: str, changes: dict[str, Any]) -> Any:
        """The configuration of a tiny model of a kind; where there are windows, every other layer has one."""
        windows = {} if kind in ("", "gemma") else {"sliding_window": 6, "sliding_window_pattern": 2}
        return super().tiny_config(made, kind, {**windows, **changes})


FAMILY = Gemma()
