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
    """Give both factors of every value direction, and of every projected query and key direction, the same norm.

    What is coded needs a spread of one: coded layers get gains that restore it, until `settle` takes them out again.
    """
    for block in family.blocks(model):
        attention, keys, values = block.attention, None, None
        if attention.pooled == 1 or attention.v_projects:
            values = _scale_values(block, _value_factors(block))
        if attention.projects:
            q, k = attention.q_down_GWK, attention.k_down_GWK
            keys = _scale_keys(block, _between(k.square().mean(1), q.square().mean(1)))
        if attention.coders is not None:
            assert keys is not None and values is not None, "coded rows are projected"
            attention.gains = 1 / keys.unsqueeze(1), 1 / values.unsqueeze(1)


@torch.no_grad()
def settle(family: Family, model: nn.Module) -> None:
    """Put the gains of coded layers back into the weights."""
    for block in family.blocks(model):
        if block.attention.gains is not None:
            keys, values = (gain.squeeze(1) for gain in block.attention.gains)
            _scale_keys(block, keys)
            _scale_values(block, values)
            block.attention.gains = None


def _scale_keys(block: Block, factor: torch.Tensor) -> torch.Tensor:
    """Multiply keys by a factor (G, K) and divide queries by it."""
    attention = block.attention
    attention.k_down_GWK.mul_(factor[:, None])
    attention.q_down_GWK.div_(factor[:, None])
    if attention.coders is not None:
        attention.k_mean_GK.mul_(factor)
    return factor


def _scale_values(block: Block, factor: torch.Tensor) -> torch.Tensor:
    """Multiply values by a factor (G, V) and divide what reads them by it."""
    attention = block.attention
    groups, size = attention.kv_heads, attention.v_dim
    attention.v_proj.weight.view(groups, size, -1).mul_(factor[..., None])
    _readers(block).div_(factor[:, None, None])
    if attention.v_proj.bias is not None:
        attention.v_proj.bias.view(groups, size).mul_(factor)
    return factor


def _value_factors(block: Block) -> torch.Tensor:
    attention = block.attention
    values = attention.v_proj.weight.view(attention.kv_heads, attention.v_dim, -1)
    return _between(values.square().mean(-1), _readers(block).square().mean((1, 2)))


def _readers(block: Block) -> torch.Tensor:
    """The weights that read values, seen as (G, ..., V)."""
    attention, output = block.attention, block.output.weight
    if attention.pooled > 1:
        return attention.v_up_NVO.view(attention.kv_heads, attention.pooled, attention.v_dim, -1).transpose(2, 3)
    return output.view(len(output), attention.kv_heads, -1, attention.v_dim).transpose(0, 1)


def _between(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """By how much to multiply the first factor and divide the second, so that their mean squares become equal."""
    usual = (first > 0) & (second > 0)
    return torch.where(usual, (second / torch.where(usual, first, 1)).sqrt().sqrt(), 1.0)
