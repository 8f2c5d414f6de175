"""Watching a tailored model at work: hooks that are always removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from headwise.data import batches as batches
from headwise.data import places as places


@contextmanager
def watching(
    blocks: list[Any],
    attention: Callable[..., None] | None = None,
    channels: Callable[[int, torch.Tensor], None] | None = None,
) -> Iterator[None]:
    """Call `attention(layer, q, k, v, z)` after every softmax and `channels(layer, h)` before every down projection.

    Keys and values are those of the cache: meanwhile pooled heads attend to whole rows.
    """
    hooks: list[Any] = []

    def see_attention(layer: int) -> Callable[..., None]:
        return lambda _module, args, output: attention(layer, *args[:3], output[0])  # type: ignore[misc]

    def see_channels(layer: int) -> Callable[..., None]:
        return lambda _module, args: channels(layer, args[0])  # type: ignore[misc]

    try:
        for layer, block in enumerate(blocks):
            if attention is not None:
                block.attention.by_rows = True
                hooks.append(block.attention.attend.register_forward_hook(see_attention(layer)))
            if channels is not None and block.down is not None:
                hooks.append(block.down.register_forward_pre_hook(see_channels(layer)))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for block in blocks:
            block.attention.by_rows = False


def spaced(blocks: torch.Tensor, count: int) -> torch.Tensor:
    """At most `count` rows, evenly spaced, for probes that need only a few."""
    return blocks[:: max(1, len(blocks) // count)][:count]


def capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Logits as the softmax sees them where a model caps them."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap
