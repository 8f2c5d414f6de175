"""Quality by length: source and cut model read the same text in rows of growing length, up to the served context.

A cut that was calibrated on short rows may break on long ones, so a length that was not measured is not certified.
Logits are made for some positions at a time: those of a whole long row do not fit into memory.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from headwise import memory
from headwise.data import batches
from headwise.families import Family, wide_answers
from headwise.progress import Track
from headwise.types import LengthQuality
from headwise.types.verdict import LEAST_ROWS

MOST = 5  # lengths
GROWTH = 4  # from one to the next
RESAMPLES = 2000  # of a bootstrap interval
LOGITS = 2**25  # numbers of one model's logits that are held at a time


class Tokens(NamedTuple):
    """How both models predict every token of rows but the first: each tensor is (rows, length - 1)."""

    loss_before: torch.Tensor
    loss_after: torch.Tensor
    kl: torch.Tensor
    right_before: torch.Tensor  # 1 where the best token is the right one
    right_after: torch.Tensor
    same: torch.Tensor  # 1 where the best tokens are equal


def interval(values: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95% bootstrap interval of the mean.

    >>> interval(np.ones(8))
    (1.0, 1.0)
    """
    draws = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile(values[draws].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def lengths_for(length: int, context: int) -> tuple[int, ...]:
    """The lengths to measure: the calibrated one, then times four, up to the context.

    >>> lengths_for(512, 8192), lengths_for(128, 1024), lengths_for(512, 256)
    ((512, 2048, 8192), (128, 512, 1024), (256,))
    """
    first = min(length, context)
    steps = max(1, min(MOST - 1, math.ceil(math.log(context / first, GROWTH) - 1e-9)))
    growth = max(GROWTH, (context / first) ** (1 / steps))
    found = [min(context, round(first * growth**step)) for step in range(steps + 1)]
    return tuple(dict.fromkeys(found))


def tokens_for(length: int, context: int, eval_tokens: int) -> int:
    """How much text to read: for all longer lengths together as much as the evaluation, but at least two rows each.

    >>> tokens_for(512, 8192, 32768), tokens_for(512, 32768, 32768)
    (16384, 65536)
    """
    longer = max(1, len(lengths_for(length, context)) - 1)
    return max(LEAST_ROWS, eval_tokens // longer // context) * context


def joined(rows: torch.Tensor, start: int | None) -> torch.Tensor:
    """Consecutive rows as one text (N); `start`, the token that begins every row, is kept once."""
    if start is None or not bool((rows[:, 0] == start).all()):
        return rows.flatten()
    return torch.cat((rows[0, :1], rows[:, 1:].flatten()))


def rows_of(text: torch.Tensor, length: int, context: int, tokens: int, start: int | None) -> torch.Tensor:
    """The first `tokens` of a text in rows of a length, each beginning with `start` if the text does.

    All lengths read the same text: as much as fills whole rows of the context, or all where it is too short for one.
    """
    lead = text[:1] if start is not None and len(text) and int(text[0]) == start else text[:0]
    body, size = text[len(lead) :], length - len(lead)
    whole = min(tokens, len(body)) // (context - len(lead)) * (context - len(lead)) or len(body)
    count = whole // size
    return torch.cat((lead.expand(count, -1), body[: count * size].view(count, size)), 1)


def rows_by_length(
    text: torch.Tensor, start: int | None, length: int, context: int, eval_tokens: int
) -> tuple[dict[int, torch.Tensor], list[str]]:
    """Rows of every length for which there is text, and sentences about those for which there is too little."""
    tokens = tokens_for(length, context, eval_tokens)
    rows = {size: rows_of(text, size, context, tokens, start) for size in lengths_for(length, context)}
    short = [size for size, found in rows.items() if len(found) < LEAST_ROWS]
    words = [
        f"Quality at {size:,} tokens: the evaluation text has {len(text):,} tokens, {LEAST_ROWS * size:,} are needed; "
        "give a longer --eval FILE."
        for size in short
    ]
    return {size: found for size, found in rows.items() if len(found)}, words


@torch.no_grad()
def last_stream(family: Family, model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The residual stream after the last layer (rows, length, hidden): what `family.logits` turns into logits."""
    return family.last_stream(model, ids.to(model.device))


@torch.no_grad()
def predictions(
    family: Family, models: tuple[nn.Module, nn.Module], streams: tuple[torch.Tensor, torch.Tensor], ids: torch.Tensor
) -> Tokens:
    """How both models predict rows of tokens, from their last streams, some positions at a time."""
    flat = [stream[:, :-1].flatten(0, 1) for stream in streams]
    target = ids[:, 1:].flatten().to(flat[0].device)
    at_once = max(16, LOGITS // int(models[0].config.vocab_size))
    parts = []
    for start in range(0, len(target), at_once):
        before, after = (
            _log_probabilities(family, model, stream[None, start : start + at_once])[0]
            for model, stream in zip(models, flat, strict=True)
        )
        wanted = target[start : start + at_once, None]
        losses = [-found.gather(-1, wanted)[:, 0] for found in (before, after)]
        best = [found.argmax(-1) for found in (before, after)]
        agree = [best[0] == wanted[:, 0], best[1] == wanted[:, 0], best[0] == best[1]]
        kl = (before.exp() * (before - after)).sum(-1)
        parts.append(torch.stack([*losses, kl, *(found.float() for found in agree)]).double().cpu())
    return Tokens(*torch.cat(parts, 1).view(len(Tokens._fields), *ids[:, 1:].shape))


def _log_probabilities(family: Family, model: nn.Module, stream: torch.Tensor) -> torch.Tensor:
    with wide_answers(model):
        return family.logits(model, stream).float().log_softmax(-1)


def summed_up(found: Tokens, length: int, block: int, seed: int) -> LengthQuality:
    """Means over all tokens, with intervals over blocks of about `block` tokens.

    Rows of the full context are few. Blocks are equally many at every length, so intervals are comparable.
    """
    change = _by_block(found.loss_after - found.loss_before, block)
    kl = _by_block(found.kl, block)
    low, high = interval(change, seed)
    kl_low, kl_high = interval(kl, seed)
    before, after = float(found.loss_before.mean()), float(found.loss_after.mean())
    rows = len(found.kl)
    return LengthQuality(
        length, rows, before, after, after - before, low, high, float(found.kl.mean()), kl_low, kl_high
    )


def _by_block(values: torch.Tensor, block: int) -> np.ndarray:
    """Means of blocks of a row, all of nearly one size (rows x blocks)."""
    count = max(1, round(values.shape[1] / block))
    return torch.stack([part.mean(1) for part in values.tensor_split(count, 1)], 1).flatten().numpy()


def bytes_needed(family: Family, config: Any, length: int) -> int:
    """Memory of one row beside the model: the streams of the widest layer, logits of some positions, a mask where
    windows need one, and attention weights where no fused kernel avoids them.
    """
    shape = family.shape_of(config)
    widest = max(4 * shape.hidden_size + shape.mlp_matrices * layer.mlp_width for layer in shape.layers)
    needed = 4 * length * 2 * widest + 12 * LOGITS
    eager = config._attn_implementation != "sdpa" or getattr(config, "attn_logit_softcapping", None) is not None
    windows = getattr(config, "sliding_window", None) is not None
    heads = max(layer.query_heads for layer in shape.layers)
    return needed + length**2 * (12 * heads if eager else 5 if windows else 0)


def too_large(family: Family, configs: Sequence[Any], length: int, device: torch.device | str) -> str:
    """Why a row of this length does not fit into memory; empty if it does."""
    needed, free = max(bytes_needed(family, config, length) for config in configs), memory.available_bytes(device)
    if needed <= memory.SHARE * free:
        return ""
    return f"it takes {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} are free"


def predicted(
    family: Family, models: tuple[nn.Module, nn.Module], rows: torch.Tensor, track: Track, label: str
) -> Tokens | str:
    """How both models predict rows of one length, or why they cannot on this machine."""
    device = models[0].device
    if reason := too_large(family, [model.config for model in models], rows.shape[1], device):
        return reason
    parts = []
    try:
        for part in track(batches(rows, 4096), label):
            before, after = (last_stream(family, model, part) for model in models)
            parts.append(predictions(family, models, (before, after), part))
    except torch.cuda.OutOfMemoryError:
        return f"out of memory on {device}"
    return together(parts)


def together(parts: list[Tokens]) -> Tokens:
    """The predictions of several batches of rows."""
    return Tokens(*(torch.cat(column) for column in zip(*parts, strict=True)))
