"""Put the two factors of a product on one scale, which changes nothing that the model computes.

After a cut, values are whitened: every kept direction has the same variance, however small it was, and its output
weights are smaller in proportion. A step of Adam moves all weights of a tensor alike, so that such a direction would be
lost at once, and distillation would do harm at any learning rate.
"""

from __future__ import annotations

import torch
from torch import nn

from headwise.families import Block, Family


@torch.no_grad()
def balance(family: Family, model: nn.Module) -> None:
    """Give both factors of every value direction, and of every projected query and key direction, the same norm."""
    for block in family.blocks(model):
        attention = block.attention
        if attention.coders is not None:  # whose scales are those that the codes are for
            continue
        if attention.pooled == 1 or attention.v_dim < attention.v_width:
            _balance_values(block)
        if attention.qk_dim < attention.qk_width:
            q, k = attention.q_down_GWK, attention.k_down_GWK
            factor = _between(q.square().mean(1), k.square().mean(1))
            q.mul_(factor[:, None])
            k.div_(factor[:, None])


def _balance_values(block: Block) -> None:
    attention, output = block.attention, block.output.weight
    groups, size = attention.kv_heads, attention.v_dim
    values = attention.v_proj.weight.view(groups, size, -1)
    if attention.pooled > 1:
        readers = attention.v_up_NVO.view(groups, attention.pooled, size, -1).transpose(2, 3)
    else:
        readers = output.view(len(output), groups, -1, size).transpose(0, 1)
    factor = _between(values.square().mean(-1), readers.square().mean((1, 2)))
    values.mul_(factor[..., None])
    readers.div_(factor[:, None, None])
    if attention.v_proj.bias is not None:
        attention.v_proj.bias.view(groups, size).mul_(factor)


def _between(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """By how much to multiply the first factor and divide the second, so that their mean squares become equal."""
    usual = (first > 0) & (second > 0)
    return torch.where(usual, (second / torch.where(usual, first, 1)).sqrt().sqrt(), 1.0)
