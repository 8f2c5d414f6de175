"""How a prompt is read whose rows are pooled or in bits. Lies beside every tailored model.

Written by Headwise (Apache-2.0). Shape suffixes: B batch, H heads, G rows per token, T tokens, K coefficients.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn


def at_once(attend: Any, q: torch.Tensor, rows: tuple[torch.Tensor, ...]) -> bool:
    """Whether all that is read are the rows of a prompt itself, on a CPU, without gradients and by a fused kernel."""
    if torch.compiler.is_compiling() or q.device.type != "cpu" or q.shape[2] != rows[0].shape[2]:
        return False
    sdpa = attend.config._attn_implementation == "sdpa" and attend.softcap is None and not attend.training
    return sdpa and not any(x.requires_grad for x in (q, *rows))


def read_prompt(
    q: torch.Tensor, coded: tuple[torch.Tensor, ...], near: tuple[torch.Tensor, ...], scaling: float, reach: int,
    block: int,
) -> torch.Tensor:  # fmt: skip
    """What all queries (B, H, T, K) of a prompt find (B, T, H, V): `reach` tokens in more bits, the others as coded.

    Near rows lie `block - 1` places behind their own, and coded rows are written over those that are near no more: so
    every block of queries reads coded places and then near ones as they lie, without a copy.
    """
    (texts, heads, tokens), groups, values = q.shape[:3], coded[0].shape[1], coded[1].shape[3]
    wide, blocks = max(q.shape[3], values), -(-tokens // block)  # the fused kernel takes equal widths
    rows = [nn.functional.pad(x, (0, wide - x.shape[3], block - 1, blocks * block - tokens)) for x in near]
    q = nn.functional.pad(q, (0, wide - q.shape[3], 0, blocks * block - tokens))
    q = q.view(texts, groups, -1, blocks, block, wide).movedim(3, 0).flatten(3, 4)  # by block, queries of all heads
    seen = [mask.repeat(q.shape[3] // block, 1) for mask in _seen(blocks, reach, block, q.dtype)]
    before, z = 0, []
    for number, own in enumerate(q):
        first, last, far = number * block, (number + 1) * block, (number + 1) * block - reach
        for row, x in zip(rows, coded, strict=True):
            new = x[:, :, before:far]
            row[:, :, before : before + new.shape[2], : x.shape[3]] = new
        mask, before = seen[int(number > 0)][:, (blocks - 1) * block - first :], far
        k, v = (row[:, :, : last + block - 1] for row in rows)
        z.append(nn.functional.scaled_dot_product_attention(own, k, v, attn_mask=mask, scale=scaling))
    found = torch.stack(z).view(blocks, texts, heads, block, wide)[..., :values]
    return found.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :tokens]


def _seen(blocks: int, reach: int, block: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks that are added: of the first block, which has no rows before its own, and of the others.

    Their columns end with those that the last block reads.
    """
    query = torch.arange(block).unsqueeze(1)
    place = torch.arange((blocks + 1) * block - 1) - blocks * block + reach
    seen = (place <= query - block) | ((place >= query) & (place < query + reach))
    both = (seen & ((place < 0) | (place >= reach - 1)), seen)
    first, others = (torch.zeros(x.shape, dtype=dtype).masked_fill_(~x, float("-inf")) for x in both)
    return first, others


def apart(rows: Any, bases: tuple[Any, Any], own: Any) -> Any:
    """Rows that heads share as every head has its own; `own` multiplies rows with a basis (G, K, W), if there is one.

    Where there are bases, gains go into these: they are smaller than rows.
    """
    if rows.gains is not None and all(basis is not None for basis in bases):
        bases = tuple(basis / gain.unsqueeze(2) for basis, gain in zip(bases, rows.gains, strict=True))
        rows = rows._replace(gains=None)
    return rows.plain().changed(*(functools.partial(own, basis=basis) for basis in bases))


def padding_of(mask: Any, like: torch.Tensor) -> torch.Tensor:
    """How many tokens come before the first of every text (B), by the mask that attention is given."""
    if not isinstance(mask, torch.Tensor) or mask.dim() not in (2, 4):
        return torch.zeros(like.shape[0], dtype=torch.long, device=like.device)
    seen = mask if mask.dim() == 2 else mask[:, 0, -1]  # the last token sees all that are not padding
    seen = seen if seen.dtype == torch.bool or mask.dim() == 2 else seen == 0
    return (seen.cumsum(1) == 0).sum(1).expand(like.shape[0])  # all, if all tokens so far are padding
