"""Decoders with rotary positions, RMSNorm and a gated MLP: what Llama and its descendants have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from headwise.errors import ModelError
from headwise.families._config import grain_of
from headwise.families._decoder import Decoder
from headwise.types import LayerShape, ModelShape

SMALL: dict[str, Any] = dict(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, tie_word_embeddings=False, pad_token_id=0,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MOVING = ("dynamic", "longrope")  # rope types whose frequencies change with the length


class Rotary(Decoder):
    """Answers as Llama does; a family says where its models differ."""

    relative = True
    units = (*Decoder.units, "rank")
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    small: ClassVar[dict[str, Any]] = {}  # its tiny model, where not as `SMALL`; None: its stock default

    def head_dim(self, config: Any) -> int:
        """Of a stock head."""
        return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    def pairs(self, config: Any) -> bool:
        """Whether rotary pairs can be dropped: not if heads are normed, or if some coordinates do not turn."""
        return True

    def portable_cuts(self, config: Any) -> tuple[str, ...] | None:
        """What a portable plan may cut, or none for everything: dimensions where pairs go, at fixed speeds."""
        if self.pairs(config) and (getattr(config, "rope_parameters", None) or {}).get("rope_type") not in MOVING:
            return None
        return tuple(unit for unit in self.units if unit not in ("qk", "v", "rank"))

    def qkv_bias(self, config: Any) -> bool:
        """Whether queries, keys and values have biases."""
        return bool(getattr(config, "attention_bias", False))

    def layer_norms(self, config: Any) -> int:
        """Parameters of a layer that stay whatever is cut of it."""
        return 2 * int(config.hidden_size)

    def shape_of(self, config: Any) -> ModelShape:
        """The shape of a stock or tailored configuration."""
        head_dim = self.head_dim(config)
        grain = grain_of(head_dim, config.intermediate_size, pairs=self.pairs(config), folds=False)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        stock = LayerShape(heads, kv_heads, head_dim, head_dim, config.intermediate_size, head_dim)
        return self.shape(
            config,
            (stock,) * config.num_hidden_layers,
            replace(grain, portable=self.portable_cuts(config)),
            tied_embeddings=config.tie_word_embeddings,
            qkv_bias=self.qkv_bias(config),
            o_bias=bool(getattr(config, "attention_bias", False)),
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            layer_norms=self.layer_norms(config),
            other_parameters=config.hidden_size,
        )

    def logits(self, model: nn.Module, stream: torch.Tensor) -> torch.Tensor:
        """Logits from the residual stream after the last layer."""
        out: torch.Tensor = model.lm_head(model.model.norm(stream))
        return out

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

    def tiny_config(self, made: Any, kind: str, changes: dict[str, Any]) -> Any:
        """The configuration of a tiny model of a kind."""
        sizes = {name: size for name, size in {**SMALL, **self.small}.items() if size is not None}
        return made(**{**sizes, **changes})
