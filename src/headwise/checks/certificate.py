"""Quality at every length and retrieval at every distance, up to the context that will be served."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from headwise.checks import lengths, retrieval
from headwise.families import Family
from headwise.probes._watch import Track, silently
from headwise.types import LengthQuality, Retrieval


class Asked(NamedTuple):
    """What to read: rows by length and by distance; and in words what there is no text for."""

    lengths: dict[int, torch.Tensor]
    distances: dict[int, retrieval.Rows]
    not_measured: tuple[str, ...]
    length: int  # of the rows that the model was calibrated on
    context: int


class Found(NamedTuple):
    """What a verdict says about lengths, by the names that it has there."""

    lengths: tuple[LengthQuality, ...] = ()
    retrieval: tuple[Retrieval, ...] = ()
    length: int = 0
    context: int = 0
    not_measured: tuple[str, ...] = ()


def rows_for(
    config: Any, tokenizer: Any, text: Any, length: int, context: int, eval_tokens: int, seed: int = 0
) -> Asked:
    """What to read for a certificate up to `context`. `text` has `tokens` and `start`; None: the model wrote it."""
    distances = retrieval.rows_by_distance(config, tokenizer, context, seed)
    if text is None:
        words = [] if context <= length else [
            f"Quality beyond {length:,} tokens: the model wrote its own evaluation text, in rows of {length:,}; give "
            f"--eval FILE with at least {lengths.LEAST_ROWS * context:,} tokens."
        ]  # fmt: skip
        return Asked({}, distances, tuple(words), length, context)
    rows, short = lengths.rows_by_length(text.tokens, text.start, length, context, eval_tokens)
    return Asked(rows, distances, tuple(short), length, context)


def measure(
    family: Family, source: nn.Module, cut: nn.Module, asked: Asked, seed: int = 0, track: Track = silently
) -> Found:
    """Both models on all rows."""
    models = (source, cut)
    by_length, too_long = lengths.measure(family, models, asked.lengths, asked.length, seed, track)
    by_distance, too_far = retrieval.measure(family, models, asked.distances, seed, track)
    left_out = (*asked.not_measured, *too_long, *too_far)
    return Found(tuple(by_length), tuple(by_distance), asked.length, asked.context, left_out)
