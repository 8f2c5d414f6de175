"""Decoders with rotary positions, RMSNorm and a gated MLP: what Llama and its descendants have in common."""

from typing import Any

import torch
from torch import nn

from headwise.errors import ModelError
from headwise.families._decoder import Decoder

MOVING = ("dynamic", "longrope")  # rope types whose frequencies change with the length


class Rotary(Decoder):
    """Answers as Llama does; a family says where its models differ."""

    relative = True
    folds = False
    units = (*Decoder.units, "rank")
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    usual = dict(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, tie_word_embeddings=False, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip

    def pairs(self, config: Any) -> bool:
        """Whether rotary pairs can be dropped: not if heads are normed, or if some coordinates do not turn."""
        return not self.anatomy(config).normed

    def portable_cuts(self, config: Any) -> tuple[str, ...] | None:
        """Dimensions only where pairs go, at fixed speeds."""
        if self.pairs(config) and (getattr(config, "rope_parameters", None) or {}).get("rope_type") not in MOVING:
            return None
        return tuple(unit for unit in self.units if unit not in ("qk", "v", "rank"))

    def costs(self, config: Any) -> dict[str, Any]:
        """Biases are optional; norms of the stream in every layer, maybe of queries and keys, and one at the end."""
        anatomy, layer = self.anatomy(config), self.stock_layer(config)
        bias = bool(getattr(config, "attention_bias", False))
        normed = {"": 0, "head": 2, "all": layer.query_heads + layer.kv_heads}[anatomy.normed] * layer.qk_dim
        return dict(
            tied_embeddings=config.tie_word_embeddings,
            qkv_bias=bias or anatomy.qkv_bias,
            o_bias=bias,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            layer_norms=anatomy.stream_norms * config.hidden_size + normed,
            other_parameters=config.hidden_size,
        )

    def to_stock(self, model: nn.Module) -> nn.Module:
        """The ordinary architecture that computes the same as a portable tailored model: layers alike, one pair set.

        Stock code rotates the kept pairs when their frequencies are written as factors of a longrope table. Where it
        scales by the new head dimension, the queries make up for that.
        """
        layer, attention = self.shape_of(model.config).layers[0], self.blocks(model)[0].attention
        changes: dict[str, Any] = {
            "num_attention_heads": layer.query_heads,
            "num_key_value_heads": layer.kv_heads,
            "head_dim": layer.qk_dim,
            "intermediate_size": layer.mlp_width,
        }
        if layer.qk_dim < attention.head_dim:
            changes["rope_parameters"] = self._kept_frequencies(model, layer.qk_dim)
        tensors = {name: tensor for name, tensor in self.state_of(model).items() if not name.endswith("pairs_GP")}
        stock = self.stock_of(model, changes, tensors)
        scale = attention.attend.scaling / stock.model.layers[0].self_attn.scaling
        for name, parameter in stock.named_parameters():
            if ".q_proj." in name and scale != 1.0:
                parameter.data *= scale
        return stock

    def _kept_frequencies(self, model: nn.Module, width: int) -> dict[str, Any]:
        """A longrope table whose frequencies are exactly those of the kept pairs."""
        rotary = model.model.rotary_emb
        if rotary.rope_type in MOVING:
            raise ModelError(
                f"rope type '{rotary.rope_type}' changes its frequencies with the length, which a portable model "
                "cannot follow; leave out --portable."
            )
        turning = [block.attention for block in self.blocks(model) if block.attention.rotary]
        sets = {tuple(map(tuple, attention.pairs_GP.tolist())) for attention in turning}
        chosen = {pairs for groups in sets for pairs in groups}
        if len(chosen) != 1:
            raise ModelError(
                "heads kept different rotary pairs, which a portable model cannot; allocate with --portable."
            )
        theta = rotary.inv_freq.double()[list(chosen.pop())]
        base = float(model.config.rope_parameters["rope_theta"])
        factors = (base ** (-torch.arange(0, width, 2).double() / width) / theta.cpu()).tolist()
        return {
            "rope_type": "longrope",
            "rope_theta": base,
            "short_factor": factors,
            "long_factor": factors,
            "factor": 1.0,
            "attention_factor": float(rotary.attention_scaling),
            "original_max_position_embeddings": model.config.max_position_embeddings,
        }
