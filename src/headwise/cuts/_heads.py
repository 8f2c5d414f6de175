"""Keep some query heads and key/value heads. A tensor whose rows or columns belong to a head goes with it."""

from __future__ import annotations

import torch

Tensors = dict[str, torch.Tensor]


def rows_of(tensors: Tensors, name: str, heads: int) -> dict[str, torch.Tensor]:
    """Weight and bias of a projection, seen per head: (heads, rows per head, ...)."""
    found = {f"{name}.{kind}": tensors.get(f"{name}.{kind}") for kind in ("weight", "bias")}
    return {key: t.view(heads, -1, *t.shape[1:]) for key, t in found.items() if t is not None}


def keep_heads(
    tensors: Tensors,
    heads: tuple[int, int],
    query_heads: tuple[int, ...] | None,
    kv_heads: tuple[int, ...] | None,
) -> Tensors:
    """A layer with only the named heads; `heads` is how many query and key/value heads it had."""
    out = dict(tensors)
    for name, total, kept in (("q", heads[0], query_heads), ("k", heads[1], kv_heads), ("v", heads[1], kv_heads)):
        if kept is not None:
            for key, rows in rows_of(tensors, name, total).items():
                out[key] = rows[list(kept)].flatten(0, 1)
    if query_heads is not None:
        weight = tensors["o.weight"]
        out["o.weight"] = weight.view(len(weight), heads[0], -1)[:, list(query_heads)].flatten(1)
        if "columns" in tensors:  # of the stack's position bias
            out["columns"] = tensors["columns"][list(query_heads)]
    if kv_heads is not None:
        for key in ("q_down", "k_down", "pairs"):
            if key in tensors:
                out[key] = tensors[key][list(kv_heads)]
    return out
