"""Second moments of what each layer computes: forward passes only, memory independent of the number of tokens."""

from __future__ import annotations

import torch
from torch import nn

from headwise import processes
from headwise.data import batches, places
from headwise.families import Family
from headwise.probes._products import Gram
from headwise.probes._watch import Track, silently, watching

NAME = "gram"
MEANING = "second moments of queries, keys, head outputs and MLP channels"


@torch.no_grad()
def collect(
    family: Family, model: nn.Module, tokens: torch.Tensor, mlp: bool, track: Track = silently
) -> list[dict[str, torch.Tensor]]:
    """Mean second moments per layer, summed over a batch in float32 and over batches in double precision.

    `gram_q` (group, K, K) sums over the queries of a group; `gram_k` is about the mean key of its sequence, because
    softmax ignores what is added to all keys; `power_k` (group, K) is not; `gram_z` (head, V, V); `gram_mlp` (M, M),
    which is large and needed less exactly, is in float32.
    """
    layers, row = family.blocks(model), family.row_tokens(model.config, tokens)
    size = min(4096, places(tokens, row) // processes.count())  # all have something to read
    sums: list[dict[str, torch.Tensor]] = [{} for _ in layers]
    wide: list[Gram] = [Gram() for _ in layers]

    def add(layer: int, **parts: torch.Tensor) -> None:
        for name, part in parts.items():
            total = sums[layer].setdefault(name, torch.zeros_like(part, dtype=torch.float64))
            total += part

    def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor) -> None:
        gram_q = _gram(q).unflatten(0, (k.shape[1], -1)).sum(1)
        gram_k, gram_z = _gram(k - k.mean(2, keepdim=True)), _gram(z.transpose(1, 2))
        add(layer, gram_q=gram_q, gram_k=gram_k, power_k=k.square().sum((0, 2)), gram_z=gram_z)

    def channels(layer: int, h: torch.Tensor) -> None:
        wide[layer].add(h.flatten(0, -2))  # some layers flatten rows before their MLP

    with watching(layers, attention, channels if mlp else None):
        for batch in track(processes.mine(batches(tokens, size, row), each=True), "second moments"):
            family.read(model, batch.to(model.device))
    count = places(tokens, row)
    found = [_shared(layer, count) for layer in sums]
    for moments, gram in zip(found, wide, strict=True):
        if gram.sum is not None:
            moments["gram_mlp"] = gram.total().div_(count)
    return found


def _shared(sums: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    """Means over what all processes read."""
    return {name: processes.total(sums[name]) / count for name in sorted(sums)}


def _gram(x_BHTK: torch.Tensor) -> torch.Tensor:
    """Moments of every head, first of every row: many small products keep a GPU busier than few long ones."""
    return (x_BHTK.mT @ x_BHTK).sum(0, dtype=torch.float64)
