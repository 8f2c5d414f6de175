"""Second moments that a layer would have if its inputs were noise: what its weights alone can say."""

from __future__ import annotations

import torch

from headwise.cuts._heads import Tensors
from headwise.types import LayerShape


def weight_moments(tensors: Tensors, shape: LayerShape, rotary: bool) -> dict[str, torch.Tensor]:
    """Moments of queries, keys and head outputs for white inputs and any position; none of the MLP.

    Balanced truncation of them is the truncated SVD of `W_q' W_k`; positions turn both coordinates of a rotary pair
    into each other, so that only the strength of whole pairs is left to go by.
    """
    groups, heads = shape.kv_heads, shape.query_heads
    q = tensors["q.weight"].double().view(groups, heads // groups, shape.qk_width, -1)
    k, v = (tensors[f"{name}.weight"].double().view(groups, -1, tensors[f"{name}.weight"].shape[1]) for name in "kv")
    gram_q, gram_k = (q @ q.mT).sum(1), k @ k.mT
    if rotary:
        gram_q, gram_k = _turned(gram_q), _turned(gram_k)
    if "q_down" in tensors:
        gram_q, gram_k = (
            tensors[f"{name}_down"].double().mT @ gram @ tensors[f"{name}_down"].double()
            for name, gram in (("q", gram_q), ("k", gram_k))
        )
    return {"gram_q": gram_q, "gram_k": gram_k, "gram_z": (v @ v.mT).repeat_interleave(heads // groups, 0)}


def _turned(gram: torch.Tensor) -> torch.Tensor:
    """The mean over all turns of every pair (coordinate j pairs with j + half) by angles of its own."""
    power = gram.diagonal(dim1=-2, dim2=-1).unflatten(-1, (2, -1)).mean(-2)
    return torch.diag_embed(torch.cat((power, power), -1))
