"""Keep some channels of a gated MLP and refit its down projection to make up for the others."""

from __future__ import annotations

import torch

from headwise.cuts._heads import Tensors
from headwise.linalg import ridge_step


def keep_channels(
    tensors: Tensors, channels: tuple[int, ...], gram: torch.Tensor | None, strength: float = 1e-3
) -> Tensors:
    """A layer with only the named channels; with their second moments the down projection makes up for the others."""
    out, kept = dict(tensors), list(channels)
    for name in ("gate", "up"):
        for kind in ("weight", "bias"):
            if f"{name}.{kind}" in tensors:
                out[f"{name}.{kind}"] = tensors[f"{name}.{kind}"][kept].contiguous()
    down = tensors["down.weight"]
    out["down.weight"] = down[:, kept].contiguous()
    if gram is not None:
        lost = sorted(set(range(down.shape[1])) - set(kept))
        rows = gram.to(down.device)[kept].double()  # kept channels with all: those that are lost are what is missed
        step = ridge_step(rows[:, kept], rows[:, lost] @ down[:, lost].mT.double(), strength)
        out["down.weight"] += step.mT.to(down)
    return out
