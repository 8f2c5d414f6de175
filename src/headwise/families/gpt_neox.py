"""GPT-NeoX and Pythia: queries, keys and values fused head by head, rotary positions on part of every head.

Attention and MLP read one stream (parallel) or one after the other. Only some coordinates of a head turn with the
position, so queries and keys are projected after that and never lose pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headwise.families._family import Block, Tensors
from headwise.families._plain import Plain


class GPTNeoX(Plain):
    """GPT-NeoX, Pythia and what shares their code."""

    name = "gpt_neox"
    model_types = ("gpt_neox",)
    summary = "Pythia, GPT-NeoX, Dolly, RedPajama-INCITE"
    folds = False
    relative = True
    width_setting = "intermediate_size"
    small = dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.1,
    )

    def counts(self, config: Any) -> dict[str, Any]:
        """Biases of attention are optional; a last norm beside the layers."""
        bias, norm = bool(config.attention_bias), 2 * config.hidden_size
        return dict(qkv_bias=bias, o_bias=bias, mlp_bias=True, layer_norms=2 * norm, other_parameters=norm)

    def block(self, layer: nn.Module) -> Block:
        """The parts of one layer of a tailored model."""
        return Block(
            attention=layer.attention,
            output=layer.attention.o_proj,
            inner=(layer.mlp.dense_h_to_4h,),
            down=layer.mlp.dense_4h_to_h,
            activation=layer.mlp.act,
            attention_norm=layer.input_layernorm,
            mlp_norm=layer.post_attention_layernorm,
            parallel=layer.use_parallel_residual,
        )

    def apart(self, tensors: Tensors, config: Any) -> Tensors:
        """Queries, keys and values apart: stock rows are those of a head's query, its key, its value, head by head."""
        found: Tensors = {}
        for name, tensor in tensors.items():
            if ".query_key_value." not in name:
                found[name.replace(".attention.dense.", ".attention.o_proj.")] = tensor
                continue
            heads = tensor.view(config.num_attention_heads, 3, -1, *tensor.shape[1:])
            for index, ours in enumerate("qkv"):
                found[name.replace("query_key_value", f"{ours}_proj")] = heads[:, index].flatten(0, 1).contiguous()
        return found

    def together(self, tensors: Tensors, config: Any) -> Tensors:
        """What `apart` took apart, as stock code has it."""
        found: Tensors = {}
        for name, tensor in tensors.items():
            if ".attention.q_proj." in name:
                parts = [tensors[name.replace("q_proj", f"{ours}_proj")] for ours in "qkv"]
                heads = [part.view(config.num_attention_heads, -1, *part.shape[1:]) for part in parts]
                found[name.replace("q_proj", "query_key_value")] = torch.stack(heads, 1).flatten(0, 2)
            elif ".attention.k_proj." not in name and ".attention.v_proj." not in name:
                found[name.replace(".attention.o_proj.", ".attention.dense.")] = tensor
        return found

    def logits(self, model: nn.Module, stream: torch.Tensor) -> torch.Tensor:
        """Logits from the residual stream after the last layer."""
        out: torch.Tensor = model.lm_head(model.gpt_neox.final_layer_norm(stream))
        return out


FAMILY = GPTNeoX()
