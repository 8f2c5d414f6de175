"""Measurements of a model, one probe per file.

A probe with `NEEDS_PAST` describes layers and prices nothing. The probe stage runs all of them by the one signature
`measure(family, model, tokens, seed, track)`, so adding one means adding a file. The others (`gram`, `sensitivity`,
`swap`, `depth`, `spectrum`) build on each other's results and are named in the stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise.progress import Track, silently
from headwise.registry import find, names
from headwise.types import Reading

if TYPE_CHECKING:
    import torch
    from torch import nn

    from headwise.families import Family


def describe(
    family: Family, model: nn.Module, tokens: torch.Tensor, seed: int, track: Track = silently, past: bool = False
) -> list[Reading]:
    """The readings of all probes that need a past (decoders only), or of those that do not."""
    every = reversed(names("headwise.probes"))  # the order that readings have always had in their file
    modules = [find("headwise.probes", name) for name in every]
    chosen = [module for module in modules if getattr(module, "NEEDS_PAST", None) is past]
    return [reading for module in chosen for reading in module.measure(family, model, tokens, seed, track)]
