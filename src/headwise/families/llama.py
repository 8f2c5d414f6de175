"""Decoders with separate q, k, v and o projections, rotary positions, RMSNorm and a gated MLP.

Llama 2 and 3, SmolLM, Mistral, Qwen2: any head sharing, tied or untied embeddings, biases, every rope type.
"""

from headwise.families._architecture import Architecture
from headwise.families._rotary import Rotary


class Llama(Rotary):
    """Llama and what is built like it."""

    name = "llama"
    kinds = {
        "llama": Architecture(stem="Llama"),
        "mistral": Architecture(stem="Mistral", names={"sliding_window": "config.sliding_window"}),
        "qwen2": Architecture(stem="Qwen2", qkv_bias=True),
    }
    summary = "Llama 2/3, SmolLM, Mistral, Qwen2"


FAMILY = Llama()
