"""T5: an encoder-decoder whose positions are a bias on the logits, by how far apart two tokens are.

Version 1.0 has a plain MLP and its output table is that of the words, scaled; version 1.1 has a gated MLP and an output
table of its own. Logits are not scaled. Heads have a dimension of their own choosing.
"""

from typing import Any

import torch
from torch import nn

from headwise.families._architecture import Architecture
from headwise.families._encoder_decoder import LAYER, EncoderDecoder
from headwise.families._family import Tensors


def _parts(own: int, attention: str, mlp: int | None = None) -> dict[str, str]:
    """Where a stock block keeps the parts of one of our layers, by the numbers of its sublayers."""
    parts = {"attention": f"layer.{own}.{attention}", "attention_norm": f"layer.{own}.layer_norm"}
    if mlp is None:
        return parts
    inside = f"layer.{mlp}.DenseReluDense"
    gate = {"gate_proj": f"{inside}.wi_0", "up_proj": f"{inside}.wi_1|{inside}.wi"}  # `wi` where there is no gate
    return {**parts, "mlp_norm": f"layer.{mlp}.layer_norm", **gate, "wo": f"{inside}.wo"}


class T5(EncoderDecoder):
    """T5 of both versions and what shares its code."""

    name = "t5"
    kinds = {
        "t5": Architecture(
            stem="T5",
            body_at="",
            layers="block",
            **LAYER,
            names={**{part: part for part in "qkvo"}, "head_dim": "key_value_proj_dim", "dropout": "dropout"},
            roles={
                "encoder": _parts(0, "SelfAttention", 1),
                "self": _parts(0, "SelfAttention"),
                "cross": _parts(1, "EncDecAttention", 2),
            },
            handed=(
                "position_bias", "encoder_hidden_states", "encoder_attention_mask", "encoder_decoder_position_bias",
            ),
            settings={"activation": "dense_act_fn", "dropout": "dropout_rate", "inner_dropout": "dropout_rate"},
            position_bias=True,
        )
    }  # fmt: skip
    summary = "T5, T5 v1.1, Flan-T5"
    counts = ("num_layers", "num_decoder_layers")
    memory = "encoder.final_layer_norm"
    small = dict(
        d_kv=16, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0, relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
    )  # fmt: skip

    def longest(self, config: Any) -> int:
        """Tokens that it was made for; relative positions have no limit."""
        return int(getattr(config, "n_positions", 512))

    def sizes(self, config: Any) -> dict[str, tuple[int, int, int]]:
        """Both stacks have layers of one size."""
        return dict.fromkeys(("encoder", "decoder"), (config.num_heads, config.d_kv, config.d_ff))

    def costs(self, config: Any) -> dict[str, Any]:
        """Norms without biases; beside the layers a last norm and a table of positions for each stack."""
        tables = config.relative_attention_num_buckets * config.num_heads
        noted = getattr(config, "headwise", None) or {}
        return dict(
            tied_embeddings=not noted.get("own_head", not config.scale_decoder_outputs),
            mlp_matrices=3 if config.is_gated_act else 2,
            layer_norms=2 * config.d_model,
            other_parameters=2 * (config.d_model + tables),
        )

    def noted(self, like: nn.Module) -> dict[str, Any]:
        """Whether the output table is its own, which no configuration says."""
        return {"own_head": "lm_head.weight" not in like.all_tied_weights_keys}

    def apart(self, tensors: Tensors, config: Any) -> Tensors:
        """Under our names; tables of positions beside attention, and which of their columns are a layer's."""
        found = super().apart(tensors, config)
        stock = ".attention.relative_attention_bias."
        found = {name.replace(stock, ".positions.table."): tensor for name, tensor in found.items()}
        for index, layer in enumerate(self.shape_of(config).layers):
            if layer.role != "cross":
                found[f"{self._prefix(config, index)}attention.heads_H"] = torch.arange(config.num_heads)
        return found

    def logits(self, model: nn.Module, stream: torch.Tensor) -> torch.Tensor:
        """Logits from the residual stream of the output after the last layer."""
        stream = model.decoder.final_layer_norm(stream)
        return model.lm_head(stream * model.model_dim**-0.5 if model.config.scale_decoder_outputs else stream)

    def tiny(self, model_type: str = "", head: str = "", own_head: bool = False, **changes: Any) -> nn.Module:
        """A tiny random stock model for tests, with an output table of its own if wanted."""
        model = super().tiny(model_type, head, **changes)
        if own_head:
            model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
            model.all_tied_weights_keys.pop("lm_head.weight")
        return model


FAMILY = T5()
