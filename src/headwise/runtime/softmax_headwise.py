"""Softmax attention in plain steps, and what a paged cache must be told. Lies beside every tailored model.

An engine such as vLLM owns the cache. It takes a few head sizes only, one for keys and values of a layer, and asks the
configuration for them. So rows are filled up with zeros there, which changes no answer, and their outputs are cut back.
Written by Headwise (Apache-2.0). Shape suffixes: B batch, T tokens, H query heads, G key/value heads, K width of
queries and keys, V width of values.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

PAGED = "vllm"  # the name of its attention
PAGED_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of heads in its cache


def paged_size(qk_dim: int, v_dim: int) -> int:
    """The head size at which a paged cache holds keys and values of these widths; 0 where it has none."""
    return next((size for size in PAGED_SIZES if size >= max(qk_dim, v_dim)), 0)


def paged(config: Any) -> bool:
    """Whether a model is built for an engine that owns the cache."""
    return getattr(config, "_attn_implementation", None) == PAGED


def refuse_paged(sizes: dict[str, Any]) -> None:
    """Refuse a layer whose cache the engine cannot hold."""
    if sizes.get("k_code"):
        raise ValueError(
            "the cache of this model is coded in bits, which vLLM cannot hold. Make a model for vLLM: add --serve vllm "
            "to the headwise run command that made it."
        )
    if not paged_size(sizes["qk_dim"], sizes["v_dim"]):
        raise ValueError(
            f"cached rows of this model have {max(sizes['qk_dim'], sizes['v_dim']):,} numbers, and vLLM takes at most "
            f"{PAGED_SIZES[-1]}. Make a model for vLLM: add --serve vllm to the headwise run command that made it."
        )


def tell_engine(config: Any) -> None:
    """Tell vLLM the sizes of every layer's cache, where it is there to ask. Others ask the layers themselves."""
    layers = (config.headwise or {}).get("layers") if "vllm" in sys.modules else None
    if not layers or any(layer.get("role") for layer in layers):
        return
    config.allow_global_per_layer_attribute_access = True
    config.per_layer_config = {
        index: {
            "head_dim": paged_size(layer["qk_dim"], layer["v_dim"]) or layer["qk_dim"],
            "qk_head_dim": layer["qk_dim"],  # says that keys and values differ: transformers' static cache asks
            "num_key_value_heads": layer["kv_heads"],
            "num_attention_heads": layer["query_heads"],
        }
        for index, layer in enumerate(layers)
    }


def filled(x: torch.Tensor, width: int) -> torch.Tensor:
    """Zeros after the last dimension up to a width."""
    missing = width - x.shape[-1]
    return nn.functional.pad(x, (0, missing)) if missing else x


def eager(
    module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention_mask: Any, scaling: float,
    dropout: float = 0.0, softcap: float | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Plain attention, in the stock order of operations to the last bit."""
    if module.num_key_value_groups > 1:
        k, v = (x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (k, v))
    weights = torch.matmul(q, k.transpose(2, 3)) * scaling
    if softcap is not None:
        weights = torch.tanh(weights / softcap) * softcap
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, v).transpose(1, 2).contiguous(), weights


def added(mask: Any, q: torch.Tensor, k: torch.Tensor, causal: bool) -> Any:
    """The mask that plain attention adds, for a mask made for sdpa: true where a key is seen, or None if causal."""
    if mask is None and causal and q.shape[2] > 1:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
