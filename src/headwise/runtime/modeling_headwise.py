"""Decoders whose layers have their own sizes. Needs transformers and torch only; lies beside every tailored model.

A layer may have its own number of query and key/value heads, its own query/key and value dimensions, its own kept
rotary pairs for every key/value head, a projection of queries and keys after rotary, and its own MLP width.
Written by Headwise (Apache-2.0). Shape suffixes: B batch, T tokens, H query heads, G key/value heads,
W width of queries and keys before projection, K after it, V width of values, P rotary pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    MistralModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs; coordinate j pairs with j + half. The order of operations is the stock one, to the last bit."""
    half = x.shape[-1] // 2
    return (x * cos) + (torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin)


class SoftmaxAttention(nn.Module):
    """Softmax attention by whatever kernel the configuration names. A module of its own, so that hooks can look in."""

    def __init__(self, stock: nn.Module, sharing: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = stock.config, stock.layer_idx, True
        self.scaling, self.attention_dropout = stock.scaling, stock.attention_dropout  # the scale stays the original's
        self.num_key_value_groups = sharing  # query heads that share one key/value head
        self.sliding_window = getattr(stock, "sliding_window", None)
        if stock.config.model_type.endswith("mistral"):  # stock Mistral keeps it in the configuration alone
            self.sliding_window = stock.config.sliding_window

    def forward(
        self, q_BHTK: torch.Tensor, k_BGTK: torch.Tensor, v_BGTV: torch.Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The heads' outputs (B, T, H, V) before the output projection, and the weights if the kernel gives them."""
        name = self.config._attn_implementation
        qk_dim, v_dim = q_BHTK.shape[-1], v_BGTV.shape[-1]
        if name == "sdpa" and q_BHTK.device.type == "cpu" and qk_dim != v_dim:  # no fused CPU kernel takes that
            if q_BHTK.shape[2] == 1 and not self.training:
                return self._one_token(q_BHTK, k_BGTK, v_BGTV, attention_mask), None
            # Zeros at the end of the smaller dimension change nothing.
            width = max(qk_dim, v_dim)
            q_BHTK, k_BGTK, v_BGTV = (nn.functional.pad(x, (0, width - x.shape[-1])) for x in (q_BHTK, k_BGTK, v_BGTV))
        z_BTHV, weights = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)(
            self,
            q_BHTK,
            k_BGTK,
            v_BGTV,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return z_BTHV[..., :v_dim], weights

    def _one_token(self, q_BHTK: torch.Tensor, k_BGTK: torch.Tensor, v_BGTV: torch.Tensor, mask: Any) -> torch.Tensor:
        """One new token against the cache, without repeating keys for the query heads that share them."""
        batch, groups = k_BGTK.shape[:2]
        logits = (q_BHTK.view(batch, groups, self.num_key_value_groups, -1) @ k_BGTK.mT) * self.scaling
        if mask is not None:  # (B, 1, 1, T): the same for all heads
            logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
        return (logits.softmax(-1) @ v_BGTV).view(batch, 1, groups * self.num_key_value_groups, -1)


class TailoredAttention(nn.Module):
    """Attention with rotary positions and its own sizes; a drop-in for the stock attention of a decoder layer.

    `stock` is the attention that it replaces, stock or tailored: everything but the sizes is taken from there.
    """

    def __init__(self, stock: nn.Module, sizes: dict[str, int]) -> None:
        super().__init__()
        self.layer_idx, self.head_dim = stock.layer_idx, stock.head_dim
        self.query_heads, self.kv_heads = sizes["query_heads"], sizes["kv_heads"]
        self.qk_width, self.qk_dim, self.v_dim = sizes["qk_width"], sizes["qk_dim"], sizes["v_dim"]
        hidden = stock.q_proj.in_features
        self.q_proj = nn.Linear(hidden, self.query_heads * self.qk_width, bias=stock.q_proj.bias is not None)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.qk_width, bias=stock.k_proj.bias is not None)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.v_dim, bias=stock.v_proj.bias is not None)
        self.o_proj = nn.Linear(self.query_heads * self.v_dim, hidden, bias=stock.o_proj.bias is not None)
        self.attend = SoftmaxAttention(getattr(stock, "attend", stock), self.query_heads // self.kv_heads)
        if self.qk_width < self.head_dim:
            self.register_buffer("pairs_GP", torch.zeros(self.kv_heads, self.qk_width // 2, dtype=torch.long))
        if self.qk_dim < self.qk_width:
            self.q_down_GWK = nn.Parameter(torch.zeros(self.kv_heads, self.qk_width, self.qk_dim))
            self.k_down_GWK = nn.Parameter(torch.zeros(self.kv_heads, self.qk_width, self.qk_dim))

    def heads(
        self, hidden: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys after rotary, before projection, and values."""
        rows = hidden.shape[:-1]
        q_BHTW = self.q_proj(hidden).view(*rows, self.query_heads, self.qk_width).transpose(1, 2)
        k_BGTW = self.k_proj(hidden).view(*rows, self.kv_heads, self.qk_width).transpose(1, 2)
        v_BGTV = self.v_proj(hidden).view(*rows, self.kv_heads, self.v_dim).transpose(1, 2)
        cos, sin = position_embeddings
        if self.qk_width == self.head_dim:
            cos_q = cos_k = cos.unsqueeze(1)
            sin_q = sin_k = sin.unsqueeze(1)
        else:
            cos_k, sin_k = (self._kept(table) for table in (cos, sin))
            cos_q, sin_q = (t.repeat_interleave(self.query_heads // self.kv_heads, dim=1) for t in (cos_k, sin_k))
        return _turn(q_BHTW, cos_q, sin_q), _turn(k_BGTW, cos_k, sin_k), v_BGTV

    def _kept(self, table_BTW: torch.Tensor) -> torch.Tensor:
        """The columns of the stock rotary table that each key/value head kept, twice (both halves of a pair)."""
        kept_BTGP = table_BTW[..., self.pairs_GP]
        return torch.cat((kept_BTGP, kept_BTGP), dim=-1).transpose(1, 2)

    def project(self, q_BHTW: torch.Tensor, k_BGTW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys as the softmax and the cache see them."""
        if self.qk_dim == self.qk_width:
            return q_BHTW, k_BGTW
        batch, heads, tokens, width = q_BHTW.shape
        grouped = q_BHTW.reshape(batch, self.kv_heads, heads // self.kv_heads * tokens, width)
        q_BHTK = (grouped @ self.q_down_GWK).view(batch, heads, tokens, self.qk_dim)
        return q_BHTK, k_BGTW @ self.k_down_GWK

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As the stock attention's."""
        q, k, v = self.heads(hidden_states, position_embeddings)
        q, k = self.project(q, k)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        z, weights = self.attend(q, k, v, attention_mask, **kwargs)
        return self.o_proj(z.flatten(2)), weights


def _tailor(model: nn.Module) -> None:
    """Give every layer the sizes that the configuration names. Runs before weights are loaded."""
    for layer, sizes in zip(model.layers, model.config.headwise["layers"], strict=True):
        layer.self_attn = TailoredAttention(layer.self_attn, sizes)
        mlp, width = layer.mlp, sizes["mlp_width"]
        if width != model.config.intermediate_size:
            bias = mlp.down_proj.bias is not None
            mlp.gate_proj = nn.Linear(model.config.hidden_size, width, bias=bias)
            mlp.up_proj = nn.Linear(model.config.hidden_size, width, bias=bias)
            mlp.down_proj = nn.Linear(width, model.config.hidden_size, bias=bias)
    recorded: Any = {"hidden_states": type(model.layers[0]), "attentions": TailoredAttention}
    model._can_record_outputs = recorded


class _Decoder:
    """Mixin of the bare decoders."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        _tailor(self)


class _DecoderWithHead:
    """Mixin of the decoders with a language-model head."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        _tailor(self.model)  # type: ignore[attr-defined]


class HeadwiseLlamaConfig(LlamaConfig):
    """Llama with sizes per layer: `headwise["layers"][i]` holds them."""

    model_type = "headwise_llama"
    headwise: dict[str, Any] | None = None


class HeadwiseLlamaModel(_Decoder, LlamaModel):
    """Llama without its head."""

    config_class = HeadwiseLlamaConfig


class HeadwiseLlamaForCausalLM(_DecoderWithHead, LlamaForCausalLM):
    """Llama with its head."""

    config_class = HeadwiseLlamaConfig


class HeadwiseMistralConfig(MistralConfig):
    """Mistral with sizes per layer."""

    model_type = "headwise_mistral"
    headwise: dict[str, Any] | None = None


class HeadwiseMistralModel(_Decoder, MistralModel):
    """Mistral without its head."""

    config_class = HeadwiseMistralConfig


class HeadwiseMistralForCausalLM(_DecoderWithHead, MistralForCausalLM):
    """Mistral with its head."""

    config_class = HeadwiseMistralConfig


class HeadwiseQwen2Config(Qwen2Config):
    """Qwen2 with sizes per layer."""

    model_type = "headwise_qwen2"
    headwise: dict[str, Any] | None = None


class HeadwiseQwen2Model(_Decoder, Qwen2Model):
    """Qwen2 without its head."""

    config_class = HeadwiseQwen2Config


class HeadwiseQwen2ForCausalLM(_DecoderWithHead, Qwen2ForCausalLM):
    """Qwen2 with its head."""

    config_class = HeadwiseQwen2Config


CLASSES: dict[str, tuple[Any, Any, Any]] = {  # stock model_type -> configuration, bare decoder, with head
    "llama": (HeadwiseLlamaConfig, HeadwiseLlamaModel, HeadwiseLlamaForCausalLM),
    "mistral": (HeadwiseMistralConfig, HeadwiseMistralModel, HeadwiseMistralForCausalLM),
    "qwen2": (HeadwiseQwen2Config, HeadwiseQwen2Model, HeadwiseQwen2ForCausalLM),
}
