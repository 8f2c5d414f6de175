"""Put the two factors of a product on one scale, which changes nothing that the model computes.

After a cut, values are whitened: every kept direction has the same variance, however small it was, and its output
weights are smaller in proportion. A step of Adam moves all weights of a tensor alike, so that such a direction would be
lost at once: fine-tuning and distillation would do harm at any learning rate. Quantisers suffer too, as weights of very
different sizes share a scale. All factors are powers of two, so that answers stay the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from headwise.families import Block


@torch.no_grad()
def balance(blocks: Iterable[Block]) -> None:
    """Give both factors of every value direction, and of every projected query and key direction, about one size.

    Tensors are replaced, not changed in place: other models may share them. What is coded needs a spread of one, which
    the gains of a coded layer restore.
    """
    for block in blocks:
        attention = block.attention
        if attention.pooled == 1 or attention.v_projects:
            _scale_values(block)
        if attention.projects:
            _scale_keys(block)


def _scale_keys(block: Block) -> None:
    """Multiply keys by a factor (G, K) and divide queries by it."""
    attention = block.attention
    q, k = attention.q_down_GWK, attention.k_down_GWK
    factor = _between(k.float().square().mean(1), q.float().square().mean(1)).to(q.dtype)
    k.data, q.data = k * factor[:, None], q / factor[:, None]
    if attention.coders is not None:
        attention.k_mean_GK.data = attention.k_mean_GK * factor
        attention.k_gain_GK = attention.k_gain_GK / factor


def _scale_values(block: Block) -> None:
    """Multiply values by a factor (G, V) and divide what reads them by it."""
    attention, weight, bias = block.attention, block.attention.v_proj.weight, block.attention.v_proj.bias
    reader = block.output.weight if attention.pooled == 1 else attention.v_up_NVO
    sizes = weight.float().square().mean(1).view(attention.kv_heads, attention.v_dim)
    factor = _between(sizes, _read(attention, reader.float().square())).to(weight.dtype)
    weight.data = weight * factor.view(-1, 1)
    if bias is not None:
        bias.data = bias * factor.flatten()
    if attention.pooled == 1:
        sharing = attention.query_heads // attention.kv_heads
        reader.data = reader / factor.repeat_interleave(sharing, 0).flatten()
    else:
        reader.data = reader / factor.repeat_interleave(attention.pooled, 0).unsqueeze(2)
    if attention.coders is not None:
        attention.v_gain_GV = attention.v_gain_GV / factor


def _read(attention: torch.nn.Module, squares: torch.Tensor) -> torch.Tensor:
    """The mean square (G, V) of the weights that read every value direction."""
    if attention.pooled == 1:
        return squares.view(len(squares), attention.kv_heads, -1, attention.v_dim).mean((0, 2))
    return squares.view(attention.kv_heads, attention.pooled, attention.v_dim, -1).mean((1, 3))


def _between(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """By which power of two to multiply the first factor and divide the second, so that their mean squares meet."""
    usual = (first > 0) & (second > 0)
    factor = torch.where(usual, (second / torch.where(usual, first, 1)).sqrt().sqrt(), 1.0)
    mantissa, _ = torch.frexp(factor)
    power = factor / mantissa  # the next power of two, exactly
    return torch.where(mantissa < 0.5**0.5, power / 2, power)
