"""How many directions the heads really use, from the second moments: no further forward pass.

The effective rank of singular values s is `exp(entropy of s^2 / sum s^2)`: n equal directions count n, one alone 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from headwise.families import Family
from headwise.linalg import balanced, value_directions
from headwise.probes._layers import Row, reading
from headwise.types import Reading

NAME = "spectrum"
MEANING = "how many directions the heads use, from second moments"


def effective_rank(singular: torch.Tensor) -> torch.Tensor:
    """Over the last axis; between 1 and its length."""
    share = singular.square() / singular.square().sum(-1, keepdim=True).clamp_min(1e-300)
    return torch.special.entr(share).sum(-1).exp()


def energy_lost(singular: torch.Tensor, kept: int) -> torch.Tensor:
    """Share of the squared singular values (largest first) that goes when only the first `kept` stay."""
    squares = singular.square()
    return squares[..., kept:].sum(-1) / squares.sum(-1).clamp_min(1e-300)


def of_logits(moment: dict[str, torch.Tensor]) -> torch.Tensor:
    """Singular values of a layer's logits, per key/value head: what each query/key direction adds to them."""
    return balanced(moment["gram_q"], moment["gram_k"])[2]


def of_outputs(moment: dict[str, torch.Tensor], o_weight: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Singular values of a layer's head outputs as the output projection (D, heads * V) passes them on."""
    gram_z = moment["gram_z"]
    heads, width, _ = gram_z.shape
    o_HVD = o_weight.detach().to(gram_z).view(-1, heads, width).permute(1, 2, 0)
    gram, metric = (part.view(kv_heads, -1, width, width).sum(1) for part in (gram_z, o_HVD @ o_HVD.mT))
    return value_directions(gram, metric)[2]


def measure(
    family: Family, model: nn.Module, moments: list[dict[str, torch.Tensor]], tokens: int, seed: int
) -> list[Reading]:
    """Effective ranks per key/value head, and the energy lost by size, of logits and of head outputs."""
    model_shape = family.shape_of(model.config)
    shapes, grain = model_shape.layers, model_shape.grain
    blocks = family.blocks(model)
    logits = [of_logits(moment).cpu() for moment in moments]
    outputs = [
        of_outputs(moment, block.read_out(), shape.kv_heads).cpu()
        for moment, block, shape in zip(moments, blocks, shapes, strict=True)
    ]
    return [
        *_readings("logit", logits, "qk_dim", grain.qk_sizes, tokens, seed),
        *_readings("output", outputs, "v_dim", grain.v_sizes, tokens, seed),
    ]


def _readings(
    what: str,
    layers: list[torch.Tensor],
    axis: str,
    sizes_of: Callable[[int], tuple[int, ...]],
    tokens: int,
    seed: int,
) -> Iterator[Reading]:
    ranks: list[Row] = [(tuple(range(len(s))), tuple(effective_rank(s).tolist()), None) for s in layers]
    lost: list[Row] = []
    for s in layers:
        sizes = sizes_of(s.shape[-1])
        lost.append((sizes, tuple(float(energy_lost(s, size).mean()) for size in sizes), None))
    tables = (("rank", "kv_head", ranks, "directions"), ("energy_lost", axis, lost, "share"))
    for name, columns, rows, unit in tables:
        kind = f"{what}_{name}"
        yield reading(NAME, f"{NAME}.{kind}", columns, rows, unit, MEANINGS[kind], tokens, seed)


MEANINGS = {
    "logit_rank": (
        "How many query/key directions carry the logits of each key/value head: the effective rank of their spectrum."
        " Far below the full dimension, most of the key cache says little."
    ),
    "output_rank": (
        "How many value directions of each key/value head reach the layer's output: the effective rank after the output"
        " projection. Far below the full dimension, most of the value cache says little."
    ),
    "logit_energy_lost": (
        "Share of the squared logits that goes when only so many query/key directions stay, mean over key/value heads."
        " It is an error of the logits, not of the loss: the damage curves say what the model minds."
    ),
    "output_energy_lost": (
        "Share of the squared head outputs that goes when only so many value directions stay, mean over key/value"
        " heads. It is an error of the outputs, not of the loss: the damage curves say what the model minds."
    ),
}
