"""Quality at every length and retrieval at every distance, up to the context that will be served."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from headwise.checks import _lengths as lengths
from headwise.checks import _retrieval as retrieval
from headwise.families import Family
from headwise.progress import Track, silently
from headwise.types import LengthQuality, Retrieval
from headwise.types.verdict import LEAST_ROWS

Known = tuple[torch.Tensor, lengths.Tokens]  # rows, and how both models predict them


class Asked(NamedTuple):
    """What to read: rows by length and by distance; and sentences about lengths without enough text."""

    lengths: dict[int, torch.Tensor]
    distances: dict[int, retrieval.RepeatedRows]
    not_measured: tuple[str, ...]
    length: int  # of the rows that the model was calibrated on
    context: int

    def rows(self) -> dict[str, torch.Tensor]:
        """All rows, by a label of their measurement."""
        far = {_retrieving(distance): rows for distance, (rows, _) in self.distances.items()}
        return {_reading(size): rows for size, rows in self.lengths.items()} | far


def _reading(length: int) -> str:
    return f"quality at {length:,} tokens"


def _retrieving(distance: int) -> str:
    return f"retrieval at {distance:,} tokens"


class Found(NamedTuple):
    """The part of a verdict that is about lengths, with the same field names."""

    lengths: tuple[LengthQuality, ...] = ()
    retrieval: tuple[Retrieval, ...] = ()
    length: int = 0
    context: int = 0
    not_measured: tuple[str, ...] = ()


def rows_for(
    config: Any,
    tokenizer: Any,
    text: Any,
    length: int,
    context: int,
    eval_tokens: int,
    seed: int = 0,
    passages: int = retrieval.PASSAGES,
) -> Asked:
    """What to read for a certificate up to `context`. `text` has `tokens` and `start`; None: the model wrote it."""
    distances = retrieval.rows_by_distance(config, tokenizer, context, seed, passages)
    if text is None:
        words = [] if context <= length else [
            f"Quality beyond {length:,} tokens: the model wrote its own evaluation text, in rows of {length:,}; give "
            f"--eval FILE with at least {LEAST_ROWS * context:,} tokens."
        ]  # fmt: skip
        return Asked({}, distances, tuple(words), length, context)
    rows, short = lengths.rows_by_length(text.tokens, text.start, length, context, eval_tokens)
    return Asked(rows, distances, tuple(short), length, context)


def measure(
    family: Family,
    source: nn.Module,
    cut: nn.Module,
    asked: Asked,
    seed: int = 0,
    track: Track = silently,
    known: Known | None = None,
) -> Found:
    """Both models on all rows; `known` are rows that both have read already, and their predictions."""

    def predict(label: str, rows: torch.Tensor) -> lengths.Tokens | str:
        read = _equal_rows(rows, known[0]) if known is not None else 0
        again = lengths.Tokens(*(part[:read] for part in known[1])) if known is not None and read else None
        if again is not None and read == len(rows):
            return again
        found = lengths.predicted(family, (source, cut), rows[read:], track, label)
        return found if again is None or isinstance(found, str) else lengths.together([again, found])

    return gathered(asked, predict, seed)


def _equal_rows(rows: torch.Tensor, others: torch.Tensor) -> int:
    """How many rows at the beginning are those of the others."""
    if rows.shape[1:] != others.shape[1:]:
        return 0
    count = min(len(rows), len(others))
    same = (rows[:count] == others[:count].to(rows.device)).all(1)
    return int(same.long().cumprod(0).sum())


def gathered(asked: Asked, predict: Callable[[str, torch.Tensor], lengths.Tokens | str], seed: int = 0) -> Found:
    """The certificate. `predict(label, rows)` returns predictions, or the reason why there are none."""
    found = {label: predict(label, rows) for label, rows in asked.rows().items()}
    known = {label: tokens for label, tokens in found.items() if not isinstance(tokens, str)}
    left_out = [f"{label.capitalize()}: {why}." for label, why in found.items() if isinstance(why, str)]
    by_length = [
        lengths.summed_up(known[label], size, asked.length, seed)
        for size in asked.lengths
        if (label := _reading(size)) in known
    ]
    by_distance = [
        retrieval.summed_up(known[label], distance, rows.places, seed)
        for distance, rows in asked.distances.items()
        if (label := _retrieving(distance)) in known
    ]
    left_out = [*asked.not_measured, *left_out]
    return Found(tuple(by_length), tuple(by_distance), asked.length, asked.context, tuple(left_out))
