"""Shrink what a head computes: kept rotary pairs, projection after rotary, value directions."""

from __future__ import annotations

import torch

from headwise.cuts._heads import Tensors, rows_of
from headwise.linalg import balanced, solved, value_basis
from headwise.types import LayerShape


def pair_columns(pairs: tuple[tuple[int, ...], ...], width: int) -> torch.Tensor:
    """Coordinates (head, kept) of the kept pairs in a head of `width`: coordinate j pairs with j + width / 2."""
    first = torch.tensor(pairs)
    return torch.cat((first, first + width // 2), dim=1)


def keep_pairs(tensors: Tensors, shape: LayerShape, pairs: tuple[tuple[int, ...], ...]) -> Tensors:
    """A layer with only the named rotary pairs of each key/value head, for its queries and its key."""
    out, columns = dict(tensors), pair_columns(pairs, shape.qk_width)
    for name, heads in (("q", shape.query_heads), ("k", shape.kv_heads)):
        chosen = columns.repeat_interleave(heads // shape.kv_heads, dim=0)
        for key, rows in rows_of(tensors, name, heads).items():
            out[key] = torch.stack([row[index] for row, index in zip(rows, chosen, strict=True)]).flatten(0, 1)
    for key in ("q_down", "k_down"):
        if key in tensors:
            out[key] = torch.stack([down[index] for down, index in zip(tensors[key], columns, strict=True)])
    all_pairs = torch.arange(shape.qk_width // 2, device=next(iter(tensors.values())).device)
    before = tensors.get("pairs", all_pairs.repeat(shape.kv_heads, 1))
    out["pairs"] = torch.gather(before, 1, torch.tensor(pairs, device=before.device))
    return out


def project(tensors: Tensors, gram_q: torch.Tensor, gram_k: torch.Tensor, qk_dim: int) -> Tensors:
    """A layer with queries and keys projected to their `qk_dim` best directions after rotary."""
    p_q, p_k, _ = balanced(gram_q, gram_k)
    like = tensors["q.weight"]
    out = dict(tensors)
    for key, down in (("q_down", p_q), ("k_down", p_k)):
        down = down[..., :qk_dim]
        if key in tensors:  # projected before: one product, not two
            down = tensors[key].double() @ down.to(tensors[key].device)
        out[key] = down.to(like).contiguous()
    return out


def fold(tensors: Tensors, gram_q: torch.Tensor, gram_k: torch.Tensor, qk_dim: int) -> Tensors:
    """A layer with that projection inside its weights: for queries and keys that no position turns."""
    p_q, p_k, _ = balanced(gram_q, gram_k)
    out, groups = dict(tensors), len(p_q)
    for name, down in (("q", p_q), ("k", p_k)):
        down = down[..., :qk_dim]
        heads = len(tensors[f"{name}.weight"]) // down.shape[1]
        down = down.repeat_interleave(heads // groups, dim=0)
        for key, rows in rows_of(tensors, name, heads).items():
            out[key] = _through(down, rows)
    return out


def _through(down: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Weights (heads, rows, inputs) or biases (heads, rows) seen through every head's `down`, heads in one again."""
    flat = rows if rows.dim() == 3 else rows.unsqueeze(-1)
    cut = (down.mT.to(flat.device) @ flat.double()).to(flat)
    return (cut if rows.dim() == 3 else cut.squeeze(-1)).flatten(0, 1).contiguous()


def cut_values(tensors: Tensors, shape: LayerShape, gram_z: torch.Tensor, v_dim: int) -> Tensors:
    """A layer with `v_dim` value directions per head; every head's output projection is refitted to them."""
    if shape.pooled > 1:
        return _cut_rows(tensors, shape, gram_z, v_dim)
    out, like = dict(tensors), tensors["o.weight"]
    p = value_basis(gram_z, like, shape.kv_heads)[0][..., :v_dim]
    for key, rows in rows_of(tensors, "v", shape.kv_heads).items():
        out[key] = _through(p, rows)
    old = like.view(len(like), shape.query_heads, shape.v_dim).double().permute(1, 2, 0)
    new = _read_out(gram_z.to(p), p.repeat_interleave(shape.query_heads // shape.kv_heads, dim=0), old)
    out["o.weight"] = new.permute(2, 0, 1).flatten(1).to(like).contiguous()
    return out


def _cut_rows(tensors: Tensors, shape: LayerShape, gram_z: torch.Tensor, v_dim: int) -> Tensors:
    """`cut_values` of pooled heads: directions of a whole row, and the way back to each head's own values."""
    out, like, heads = dict(tensors), tensors["o.weight"], shape.query_heads
    key_heads = shape.kv_heads * shape.pooled
    up = tensors["v_up"].double() if "v_up" in tensors else places(shape, like.device)
    own = like.view(len(like), heads, shape.out_dim).double()
    seen = torch.einsum("hvo,dho->dhv", up.repeat_interleave(heads // key_heads, dim=0), own).flatten(1)
    p = value_basis(gram_z, seen, shape.kv_heads)[0][..., :v_dim]
    for key, rows in rows_of(tensors, "v", shape.kv_heads).items():
        out[key] = _through(p, rows)
    gram = gram_z.to(p).view(key_heads, -1, *gram_z.shape[1:]).sum(1)
    out["v_up"] = _read_out(gram, p.repeat_interleave(shape.pooled, dim=0), up).to(like).contiguous()
    return out


def places(shape: LayerShape, device: torch.device) -> torch.Tensor:
    """Where each head's own values lie in its row (heads, row, own), before anything was cut."""
    one = torch.eye(shape.v_width, dtype=torch.float64, device=device)
    return one.view(shape.v_width, shape.pooled, -1).transpose(0, 1).repeat(shape.kv_heads, 1, 1)


def _read_out(gram: torch.Tensor, p: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """What stands for `old` (heads, before, outputs) when directions `p` of the inputs are left: least squares."""
    inner = p.mT @ gram @ p
    inner += 1e-9 * inner.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * torch.eye(p.shape[-1], device=p.device)
    return solved(inner, p.mT @ gram @ old)
