"""Turn cached keys and values into coefficients that are coded in few bits: a change of basis, folded into the weights.

With a basis `B` of the rows, `x = mean + B c`: keys are cached as coefficients `c`, and queries are multiplied with `B`
in their place. Softmax ignores the mean of the keys; the mean of the values goes into the output's bias.
"""

from __future__ import annotations

import torch

from headwise.cuts._dims import places
from headwise.cuts._heads import Tensors, rows_of
from headwise.types import LayerShape

Moments = dict[str, torch.Tensor]


def code(tensors: Tensors, shape: LayerShape, target: LayerShape, moments: Moments) -> Tensors:
    """A layer whose keys and values are the coefficients that the target's codes are for."""
    return _code_values(_code_keys(tensors, target.qk_dim, moments), shape, target.v_dim, moments)


def _code_keys(tensors: Tensors, count: int, moments: Moments) -> Tensors:
    basis, like = moments["k_basis"], tensors["q.weight"]
    inverse = torch.linalg.inv(basis).mT  # its columns give the coefficients
    mean = (moments["k_mean"].unsqueeze(1) @ inverse[..., :count]).squeeze(1)
    out = dict(tensors) | {"k_mean": mean.to(like).contiguous(), "k_gain": torch.ones_like(mean).to(like)}
    for key, down in (("q_down", basis), ("k_down", inverse)):
        down = down[..., :count]
        if key in tensors:  # projected before: one product, not two
            down = tensors[key].double() @ down.to(tensors[key].device)
        out[key] = down.to(like).contiguous()
    return out


def _code_values(tensors: Tensors, shape: LayerShape, count: int, moments: Moments) -> Tensors:
    out, like, heads = dict(tensors), tensors["o.weight"], shape.query_heads
    basis, mean = (moments[name].to(like.device) for name in ("v_basis", "v_mean"))
    down = torch.linalg.inv(basis)[:, :count]
    rows = rows_of(tensors, "v", shape.kv_heads)
    bias = rows["v.bias"].double() if "v.bias" in rows else torch.zeros_like(mean)
    out["v.weight"] = (down @ rows["v.weight"].double()).flatten(0, 1).to(like).contiguous()
    out["v_gain"] = torch.ones(shape.kv_heads, count).to(like)
    out["v.bias"] = (down @ (bias - mean).unsqueeze(-1)).flatten().to(like).contiguous()
    own = like.view(len(like), heads, -1).double()
    per_row = heads // shape.kv_heads
    if shape.pooled > 1:
        up = tensors["v_up"].double() if "v_up" in tensors else places(shape, like.device)
        back = basis[..., :count].repeat_interleave(shape.pooled, dim=0)
        out["v_up"] = (back.mT @ up).to(like).contiguous()
        given = (mean.repeat_interleave(shape.pooled, dim=0).unsqueeze(1) @ up).squeeze(1)
        given = given.repeat_interleave(per_row // shape.pooled, dim=0)
    else:
        back, given = (x.repeat_interleave(per_row, dim=0) for x in (basis[..., :count], mean))
        out["o.weight"] = torch.einsum("dhv,hvc->dhc", own, back).flatten(1).to(like).contiguous()
    added = torch.einsum("dho,ho->d", own, given)
    out["o.bias"] = (added + tensors["o.bias"].double() if "o.bias" in tensors else added).to(like)
    return out
