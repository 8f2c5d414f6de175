"""Watching a tailored model at work: hooks that are always removed."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
    with ExitStack() as hooks:
        for layer, block in enumerate(blocks):
            if attention is not None:
                block.attention.by_rows = True
                hooks.callback(setattr, block.attention, "by_rows", False)
                hook = block.attention.attend.register_forward_hook(
                    lambda _module, args, output, layer=layer: attention(layer, *args[:3], output[0])
                )
                hooks.enter_context(hook)
            if channels is not None and block.down is not None:
                hook = block.down.register_forward_pre_hook(lambda _module, args, layer=layer: channels(layer, args[0]))
                hooks.enter_context(hook)
        yield


def spaced(blocks: torch.Tensor, count: int) -> torch.Tensor:
    """At most `count` rows, evenly spaced, for probes that need only a few."""
    return blocks[:: max(1, len(blocks) // count)][:count]


def capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Logits as the softmax sees them where a model caps them."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap
