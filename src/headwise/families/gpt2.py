"""GPT-2: learned positions, queries, keys and values fused in one transposed matrix, an MLP without a gate.

Queries and keys know no rotation, so that their projection is folded into the weights. Not supported: cross-attention
(`add_cross_attention`) and the upcast attention of mixed-precision training (`reorder_and_upcast_attn`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headwise.errors import ModelError
from headwise.families._family import Block, Tensors
from headwise.families._plain import Plain
from headwise.types import ModelShape

REFUSED = {
    "add_cross_attention": "attention to an encoder",
    "reorder_and_upcast_attn": "attention in another precision and order",
}


class GPT2(Plain):
    """GPT-2 and what shares its code."""

    name = "gpt2"
    model_types = ("gpt2",)
    summary = "GPT-2, DistilGPT-2, DialoGPT"
    folds = True
    width_setting = "n_inner"
    small = dict(
        n_embd=64,
        n_layer=3,
        n_head=4,
        n_positions=128,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.1,
    )

    def shape_of(self, config: Any) -> ModelShape:
        """The shape of a stock or tailored configuration."""
        for setting, meaning in REFUSED.items():
            if getattr(config, setting, False):
                raise ModelError(f"this gpt2 model has {setting} ({meaning}), which is not supported.")
        return super().shape_of(config)

    def mlp_width(self, config: Any) -> int:
        """Of the stock layers."""
        return int(4 * config.hidden_size if config.n_inner is None else config.n_inner)

    def counts(self, config: Any) -> dict[str, Any]:
        """Biases everywhere; a table of positions and a last norm beside the layers."""
        hidden = config.hidden_size
        other = (config.max_position_embeddings + 2) * hidden
        return dict(qkv_bias=True, o_bias=True, mlp_bias=True, layer_norms=4 * hidden, other_parameters=other)

    def block(self, layer: nn.Module) -> Block:
        """The parts of one layer of a tailored model."""
        return Block(
            attention=layer.attn,
            output=layer.attn.o_proj,
            inner=(layer.mlp.c_fc,),
            down=layer.mlp.c_proj,
            activation=layer.mlp.act,
            attention_norm=layer.ln_1,
            mlp_norm=layer.ln_2,
        )

    def apart(self, tensors: Tensors, config: Any) -> Tensors:
        """Queries, keys and values apart, and every matrix turned: stock code keeps (inputs, outputs)."""
        found: Tensors = {}
        for name, tensor in tensors.items():
            if ".attn.c_attn." in name:
                for ours, part in zip("qkv", tensor.chunk(3, dim=-1), strict=True):
                    found[name.replace("c_attn", f"{ours}_proj")] = _turned(part)
            elif ".attn.c_proj." in name:
                found[name.replace("c_proj", "o_proj")] = _turned(tensor)
            else:
                found[name] = _turned(tensor) if ".mlp." in name else tensor
        return found

    def together(self, tensors: Tensors, config: Any) -> Tensors:
        """What `apart` took apart, as stock code has it."""
        kept = config.headwise.get("kept", [])
        if config.scale_attn_by_inverse_layer_idx and kept != list(range(len(kept))):
            raise ModelError(
                "layers of this gpt2 model scale attention by their number, and some of them are gone: "
                "it has no stock form; leave out --portable."
            )
        found: Tensors = {}
        for name, tensor in tensors.items():
            if ".attn.q_proj." in name:
                parts = [tensors[name.replace("q_proj", f"{ours}_proj")] for ours in "qkv"]
                found[name.replace("q_proj", "c_attn")] = torch.cat([_turned(part) for part in parts], dim=-1)
            elif ".attn.o_proj." in name:
                found[name.replace("o_proj", "c_proj")] = _turned(tensor)
            elif ".attn." not in name:
                found[name] = _turned(tensor) if ".mlp." in name else tensor
        return found

    def logits(self, model: nn.Module, stream: torch.Tensor) -> torch.Tensor:
        """Logits from the residual stream after the last layer."""
        out: torch.Tensor = model.lm_head(model.transformer.ln_f(stream))
        return out


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    """A matrix with its sides exchanged; a bias as it is."""
    return tensor.mT.contiguous() if tensor.dim() == 2 else tensor.contiguous()


FAMILY = GPT2()
