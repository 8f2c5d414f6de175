"""Keep some channels of a gated MLP and refit its down projection to make up for the others."""

from __future__ import annotations

import torch

from headwise.cuts._heads import Tensors
from headwise.linalg import ridge


def keep_channels(
    tensors: Tensors, channels: tuple[int, ...], gram: torch.Tensor | None, strength: float = 1e-3
) -> Tensors:
    """The same layer with only the named channels; with their second moments the down projection absorbs the rest."""
    out, kept = dict(tensors), list(channels)
    for name in ("gate", "up"):
        for kind in ("weight", "bias"):
            if f"{name}.{kind}" in tensors:
                out[f"{name}.{kind}"] = tensors[f"{name}.{kind}"][kept].contiguous()
    down = tensors["down.weight"]
    if gram is None:
        out["down.weight"] = down[:, kept].contiguous()
    else:
        moments = gram.to(down.device, torch.float64)
        target = moments[kept] @ down.mT.double()
        out["down.weight"] = ridge(moments[kept][:, kept], target, down[:, kept].mT, strength).mT.to(down).contiguous()
    return out
