"""Orders of heads and channels by the size of their weights, for pruning by magnitude."""

from __future__ import annotations

import torch

from headwise.types import LayerShape

Orders = dict[str, tuple[tuple[int, ...], ...]]


def weight_orders(tensors: dict[str, torch.Tensor], shape: LayerShape) -> Orders:
    """Which key/value heads, query heads of each and MLP channels to keep, largest first."""
    groups, heads = shape.kv_heads, shape.query_heads
    rows = {name: tensors[f"{name}.weight"].double().square().sum(1) for name in "qkv"}
    output = tensors["o.weight"].double().square().sum(0)
    queries = (rows["q"].view(heads, -1).sum(1) + output.view(heads, -1).sum(1)).view(groups, -1)
    whole = queries.sum(1) + rows["k"].view(groups, -1).sum(1) + rows["v"].view(groups, -1).sum(1)
    found = {"kv_heads_weight": _descending(whole[None]), "heads_weight": _descending(queries)}
    if shape.mlp_width:
        inner = [
            tensors[f"{name}.weight"].double().square().sum(1) for name in ("gate", "up") if f"{name}.weight" in tensors
        ]
        power = torch.stack([*inner, tensors["down.weight"].double().square().sum(0)]).sum(0)
        found["mlp_weight"] = _descending(power[None])
    return found


def _descending(power: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row.tolist()) for row in torch.argsort(power, dim=-1, descending=True, stable=True))
