"""GPT-NeoX and Pythia: queries, keys and values fused head by head, rotary positions on part of every head.

Attention and MLP read one stream (parallel) or one after the other. Only some coordinates of a head turn with the
position, so queries and keys are projected after that and never lose pairs.
"""

from collections.abc import Sequence
from typing import Any

import torch

from headwise.families._architecture import Architecture
from headwise.families._decoder import Plain


class GPTNeoX(Plain):
    """GPT-NeoX, Pythia and what shares their code."""

    name = "gpt_neox"
    kinds = {
        "gpt_neox": Architecture(
            stem="GPTNeoX",
            body_at="gpt_neox",
            attention="attention",
            names={**dict.fromkeys("qkv", "query_key_value"), "o": "dense", "head_dim": "head_size"},
            mlp_in=("mlp.dense_h_to_4h",),
            mlp_out="mlp.dense_4h_to_h",
            activation="mlp.act",
        )
    }
    summary = "Pythia, GPT-NeoX, Dolly, RedPajama-INCITE"
    folds = False
    relative = True
    norms = {
        "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
        "parallel": "use_parallel_residual",
    }  # fmt: skip
    ends = ("gpt_neox.final_layer_norm", "lm_head")
    small = dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=128, initializer_range=0.1,
    )  # fmt: skip

    def costs(self, config: Any) -> dict[str, Any]:
        """Biases of attention are optional; a last norm beside the layers."""
        bias, norm = bool(config.attention_bias), 2 * config.hidden_size
        biases = dict(qkv_bias=bias, o_bias=bias, mlp_bias=True)
        return super().costs(config) | biases | dict(layer_norms=2 * norm, other_parameters=norm)

    def split(self, tensor: torch.Tensor, ours: tuple[str, ...], config: Any) -> Sequence[torch.Tensor]:
        """Queries, keys and values: stock rows are those of a head's query, its key, its value, head by head."""
        heads = tensor.view(config.num_attention_heads, 3, -1, *tensor.shape[1:])
        return [heads[:, index].flatten(0, 1) for index in range(3)]

    def join(self, pieces: list[torch.Tensor], config: Any) -> torch.Tensor:
        """The opposite of `split`."""
        heads = [piece.view(config.num_attention_heads, -1, *piece.shape[1:]) for piece in pieces]
        return torch.stack(heads, 1).flatten(0, 2)


FAMILY = GPTNeoX()
