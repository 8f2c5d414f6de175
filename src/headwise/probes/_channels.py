"""Which MLP channels go, where the down projection makes up for them.

A cut layer's down projection is solved anew from the channels that stay. So what a channel costs is not what it adds,
but what the others cannot add in its place: with the inverse P of the channels' second moments and the columns w of the
down projection, `|w|^2 / P_cc`; what it added is then spread over the columns that stay (optimal brain surgeon, as in
ZipLM, arXiv 2302.04089). Channels go in rounds, the cheapest few at once: nearly the order of one by one, in products
of matrices.
"""

from __future__ import annotations

import torch

from headwise.linalg import ridge_system

ROUNDS = 64
STRENGTH = 1e-3  # the ridge with which a cut solves


def channel_order(gram_MM: torch.Tensor, down_DM: torch.Tensor) -> tuple[int, ...]:
    """The channels, most needed first, from their second moments and the down projection."""
    try:
        gone = _removed(ridge_system(gram_MM.double(), STRENGTH), down_DM)
    except torch.OutOfMemoryError:  # the inverse of wide MLPs takes gigabytes
        gone = _removed(ridge_system(gram_MM.cpu().double(), STRENGTH), down_DM)
    return tuple(gone.flip(0).tolist())


def _removed(moment_MM: torch.Tensor, down_DM: torch.Tensor) -> torch.Tensor:
    """Channels in the order of their removal."""
    inverse, columns = torch.cholesky_inverse(torch.linalg.cholesky(moment_MM)), down_DM.detach().to(moment_MM)
    left, size = torch.arange(len(inverse), device=inverse.device), -(-len(inverse) // ROUNDS)
    order = []
    while len(left):
        cost = columns.square().sum(0) / inverse.diagonal()
        few = cost.topk(min(size, len(left)), largest=False).indices
        stay = torch.ones_like(left, dtype=torch.bool).index_fill(0, few, False)
        rows, others = inverse[few], inverse[few][:, stay]
        taken = torch.linalg.solve(rows[:, few], others)  # by the others, with a minus
        columns = columns[:, stay] - columns[:, few] @ taken
        inverse = inverse[stay][:, stay] - others.mT @ taken
        order.append(left[few])
        left = left[stay]
    return torch.cat(order)
