"""The last step of a fit whose plan stores weights in few bits: round every matrix of the model as it will be saved.

The prices that the plan went by are of the same rounding. Moments are read anew, on the model that was cut. A refit
changes the matrices that write into the residual stream: the others are rounded before it, so that it makes good what
they are off too, and these after it.
"""

from collections.abc import Container
from typing import Any

import torch
from torch import nn

from headwise.checks.exactness import uncoded
from headwise.cuts.balance import balance
from headwise.families import Family
from headwise.linalg import Rounded
from headwise.probes import weights
from headwise.progress import Track, silently
from headwise.types import ModelShape
from headwise.types.weights import ENDS, FIELDS, WHOLE

REFITTED = ("w_o", "w_down")
ALL = (*FIELDS, *ENDS)
BEFORE_REFIT = tuple(name for name in ALL if name not in REFITTED)
TOKENS = 16_384  # calibration tokens that moments of inputs and gradients are read on


def packed_model(
    family: Family,
    model: nn.Module,
    target: ModelShape,
    rows: torch.Tensor,
    seed: int,
    track: Track = silently,
    fields: Container[str] = ALL,
    balanced: bool = False,
) -> tuple[nn.Module, dict[str, Rounded]]:
    """A copy of a model with matrices of the target's widths, and these by the names of their modules.

    `target` is the plan's: layers that are gone are skipped. `fields` names the matrices that are rounded now. What is
    not rounded both models hold together. `balanced`: factors have one scale already.
    """
    own: Any = family.tailor(model, share="all")
    if not balanced:
        balance(family.blocks(own))
    with uncoded(own):
        moments = weights.collect(family, own, rows, seed, track)
    found: dict[str, Rounded] = {}
    names = {module: name for name, module in own.named_modules()}
    layers = [layer for layer in target.layers if not layer.gone]
    for index, layer in enumerate(track(layers, "rounding weights")):
        for matrix, module in weights.modules(family, own, index).items():
            bits = getattr(layer, f"w_{matrix}")
            if bits != WHOLE and f"w_{matrix}" in fields:
                found[names[module]] = weights.round_matrix(module, moments[index][f"w_{weights.INPUTS[matrix]}"], bits)
    metrics = weights.table_metric(moments[0], target.tied_embeddings)
    for end in (end for end in ENDS if end in fields and getattr(target, end) != WHOLE):
        module = weights.table_of(own, end)
        found[names[module]] = weights.round_matrix(module, metrics[end], getattr(target, end))
    own.tie_weights()
    own.config.headwise |= {end: getattr(target, end) for end in ENDS if getattr(target, end) != WHOLE}
    return own, found
