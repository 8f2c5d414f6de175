"""Second moments of what each layer computes: forward passes only, memory independent of the number of tokens."""

from __future__ import annotations

import torch
from torch import nn

from headwise import processes
from headwise.data import batches, places
from headwise.families import Family
from headwise.probes._watch import Track, silently, watching

NAME = "gram"
MEANING = "second moments of queries, keys, head outputs and MLP channels"


@torch.no_grad()
def collect(
    family: Family, model: nn.Module, tokens: torch.Tensor, mlp: bool, track: Track = silently
) -> list[dict[str, torch.Tensor]]:
    """Mean second moments per layer, in double precision.

    `gram_q` (group, K, K) sums over the queries of a group; `gram_k` is about the mean key of its sequence, because
    softmax ignores what is added to all keys; `power_k` (group, K) is not; `gram_z` (head, V, V); `gram_mlp` (M, M).
    """
    layers, row = family.blocks(model), family.row_tokens(model.config, tokens)
    size = min(4096, places(tokens, row) // processes.count())  # all have something to read
    sums = Sums(len(layers))
    with watching(layers, sums.attention, sums.channels if mlp else None):
        for batch in track(processes.mine(batches(tokens, size, row), each=True), "second moments"):
            family.run(model, batch.to(model.device))
    return [_shared(layer, places(tokens, row)) for layer in sums.layers]


class Sums:
    """Sums of second moments of some layers, for `watching`."""

    def __init__(self, count: int) -> None:
        self.layers: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]

    def _add(self, layer: int, **parts: torch.Tensor) -> None:
        for name, part in parts.items():
            total = self.layers[layer].setdefault(name, torch.zeros_like(part, dtype=torch.float64))
            total += part

    def attention(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor) -> None:
        """Queries, keys and head outputs of a batch."""
        q, k = _by_group(q, k.shape[1]), k.transpose(0, 1)
        centred = (k - k.mean(2, keepdim=True)).flatten(1, 2)
        z_HNV = z.permute(2, 0, 1, 3).flatten(1, 2)
        self._add(
            layer, gram_q=q.mT @ q, gram_k=centred.mT @ centred, power_k=k.square().sum((1, 2)), gram_z=z_HNV.mT @ z_HNV
        )

    def channels(self, layer: int, h: torch.Tensor) -> None:
        """MLP channels of a batch."""
        flat = h.flatten(0, -2)  # some layers flatten rows before their MLP
        self._add(layer, gram_mlp=flat.mT @ flat)


def _shared(sums: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    """Means over what all processes read."""
    return {name: processes.total(sums[name]) / count for name in sorted(sums)}


def _by_group(q_BHTK: torch.Tensor, groups: int) -> torch.Tensor:
    batch, heads, tokens, width = q_BHTK.shape
    return q_BHTK.reshape(batch, groups, -1, width).transpose(0, 1).flatten(1, 2)
