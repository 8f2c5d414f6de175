"""Second moments of each layer's activations: forward passes only, memory independent of the number of tokens."""

from __future__ import annotations

import torch
from torch import nn

from headwise import processes
from headwise.data import batches, places
from headwise.families import Family, widened
from headwise.families._watch import watching
from headwise.probes._products import Gram
from headwise.progress import Track, silently

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
    size = processes.batch_tokens(4096, places(tokens, row))
    sums = Sums(len(layers))
    with watching(layers, sums.attention, sums.channels if mlp else None):
        for batch in track(processes.mine(batches(tokens, size, row), each=True), "second moments"):
            family.read(model, batch.to(model.device))
    return [sums.means(layer, places(tokens, row)) for layer in range(len(layers))]


class Sums:
    """Sums of second moments of some layers, for `watching`."""

    def __init__(self, count: int) -> None:
        self.layers: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
        self.wide = [Gram() for _ in range(count)]

    def _add(self, layer: int, **parts: torch.Tensor) -> None:
        for name, part in parts.items():
            total = self.layers[layer].setdefault(name, torch.zeros_like(part, dtype=torch.float64))
            total += part

    def attention(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor) -> None:
        """Queries, keys and head outputs of a batch."""
        q, k, z = widened(q), widened(k), widened(z)
        gram_q = _gram(q).unflatten(0, (k.shape[1], -1)).sum(1)
        gram_k, gram_z = _gram(k - k.mean(2, keepdim=True)), _gram(z.transpose(1, 2))
        self._add(layer, gram_q=gram_q, gram_k=gram_k, power_k=k.square().sum((0, 2)), gram_z=gram_z)

    def channels(self, layer: int, h: torch.Tensor) -> None:
        """MLP channels of a batch."""
        self.wide[layer].add(h.flatten(0, -2))  # some layers flatten rows before their MLP

    def means(self, layer: int, count: int) -> dict[str, torch.Tensor]:
        """Means of a layer over all processes; its sums are freed."""
        sums = self.layers[layer]
        found = {name: processes.total(sums.pop(name)) / count for name in sorted(sums)}
        if self.wide[layer].sum is not None:
            found["gram_mlp"] = self.wide[layer].total().div_(count)
        return found


def _gram(x_BHTK: torch.Tensor) -> torch.Tensor:
    """Moments of every head, row by row: many small products use a GPU better than few long ones."""
    return (x_BHTK.mT @ x_BHTK).sum(0, dtype=torch.float64)
