"""GPT-2: learned positions, queries, keys and values fused in one transposed matrix, an MLP without a gate.

Queries and keys are not rotated, so that their projection is folded into the weights. Not supported: cross-attention
(`add_cross_attention`) and the upcast attention of mixed-precision training (`reorder_and_upcast_attn`).
"""

from typing import Any

from headwise.errors import ModelError
from headwise.families._architecture import CAUSAL, Architecture
from headwise.families._config import BIASES
from headwise.families._decoder import Plain
from headwise.families._family import Tensors
from headwise.types import ModelShape

REFUSED = {
    "add_cross_attention": "attention to an encoder",
    "reorder_and_upcast_attn": "attention in another precision and order",
}


class GPT2(Plain):
    """GPT-2 and what shares its code."""

    name = "gpt2"
    kinds = {
        "gpt2": Architecture(
            stem="GPT2",
            heads={CAUSAL: "LMHeadModel"},
            body_at="transformer",
            layers="h",
            attention="attn",
            names={
                **dict.fromkeys("qkv", "c_attn"), "o": "c_proj", "dropout": "attn_dropout.p",
                "resid_dropout": "resid_dropout",
            },
            mlp_in=("mlp.c_fc",),
            mlp_out="mlp.c_proj",
            activation="mlp.act",
        )
    }  # fmt: skip
    summary = "GPT-2, DistilGPT-2, DialoGPT"
    width_setting = "n_inner"
    norms = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}
    ends = ("transformer.ln_f", "lm_head")
    small = dict(
        n_embd=64, n_layer=3, n_head=4, n_positions=128, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        initializer_range=0.1,
    )  # fmt: skip

    def shape_of(self, config: Any) -> ModelShape:
        """The shape of a configuration, if it asks for nothing that is not supported."""
        for setting, meaning in REFUSED.items():
            if getattr(config, setting, False):
                raise ModelError(f"this gpt2 model has {setting} ({meaning}), which is not supported.")
        return super().shape_of(config)

    def mlp_width(self, config: Any) -> int:
        """Of the stock layers."""
        return int(4 * config.hidden_size if config.n_inner is None else config.n_inner)

    def costs(self, config: Any) -> dict[str, Any]:
        """Biases everywhere; a table of positions and a last norm beside the layers."""
        hidden, positions = config.hidden_size, config.max_position_embeddings
        return super().costs(config) | BIASES | dict(layer_norms=4 * hidden, other_parameters=(positions + 2) * hidden)

    def apart(self, tensors: Tensors, config: Any) -> Tensors:
        """A stock state dictionary under our names. Stock code keeps matrices as (inputs, outputs)."""
        return super().apart(_turned(tensors), config)

    def together(self, tensors: Tensors, config: Any) -> Tensors:
        """A tailored state dictionary under stock names, with matrices as (inputs, outputs)."""
        kept = config.headwise.get("kept", [])
        if config.scale_attn_by_inverse_layer_idx and kept != list(range(len(kept))):
            raise ModelError(
                "layers of this gpt2 model scale attention by their number, and some of them are gone: "
                "it has no stock form; leave out --portable."
            )
        return _turned(super().together(tensors, config))


def _turned(tensors: Tensors) -> Tensors:
    """The matrices of layers with their sides exchanged."""
    inside = {name: ".attn." in name or ".mlp." in name for name in tensors}
    return {
        name: tensor.mT.contiguous() if inside[name] and tensor.dim() == 2 else tensor
        for name, tensor in tensors.items()
    }


FAMILY = GPT2()
