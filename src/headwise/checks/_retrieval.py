"""Retrieval without data: a passage of random tokens occurs twice, and the second copy is to be predicted.

Only attention over that distance can predict it. Perplexity hides this, because text is mostly predicted from its last
few hundred tokens.
"""

from typing import Any, NamedTuple

import torch

from headwise.checks._lengths import Tokens, interval
from headwise.data import start_of
from headwise.types import Retrieval

PASSAGE = 32  # tokens
SLOT = 2 * PASSAGE  # a passage, and as many random tokens behind it
SIDE_BY_SIDE = 8  # passages in one row, at most
PASSAGES = 16  # of every distance
NEAREST, GROWTH = 64, 4


class RepeatedRows(NamedTuple):
    """Rows of one distance, and where in each the second copies begin."""

    ids: torch.Tensor
    places: tuple[int, ...]


def distances_for(context: int) -> tuple[int, ...]:
    """Distances to measure: 64, 256, 1,024 and so on, and the farthest that the context has room for.

    >>> distances_for(8192), distances_for(1024), distances_for(64)
    ((64, 256, 1024, 4096, 7679), (64, 256, 511), ())
    """
    most = context - 1  # a row begins with a token of its own
    found = []
    distance = NEAREST
    while distance + SLOT * _in_a_row(distance) <= most:
        found.append(distance)
        distance *= GROWTH
    farthest = most - SLOT * SIDE_BY_SIDE
    return tuple(found) + ((farthest,) if found and farthest > 1.5 * found[-1] else ())


def _in_a_row(distance: int) -> int:
    return min(SIDE_BY_SIDE, distance // SLOT)


def vocabulary(config: Any, tokenizer: Any) -> torch.Tensor:
    """All tokens but the special ones."""
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
    return torch.tensor([token for token in range(min(config.vocab_size, len(tokenizer))) if token not in special])


def rows_for(
    distance: int, tokens: torch.Tensor, start: int | None, seed: int = 0, passages: int = PASSAGES
) -> RepeatedRows:
    """Rows of random `tokens` in which passages are repeated `distance` tokens later, after other random tokens."""
    count = _in_a_row(distance)
    draw = torch.Generator().manual_seed(seed + distance)
    shape = (-(-passages // count), distance + SLOT * count)
    ids = tokens[torch.randint(len(tokens), shape, generator=draw)]
    places = tuple(distance + SLOT * slot for slot in range(count))
    for place in places:
        ids[:, place : place + PASSAGE] = ids[:, place - distance : place - distance + PASSAGE]
    if start is None:
        return RepeatedRows(ids, places)
    lead = torch.full((len(ids), 1), start)
    return RepeatedRows(torch.cat((lead, ids), 1), tuple(place + 1 for place in places))


def rows_by_distance(
    config: Any, tokenizer: Any, context: int, seed: int = 0, passages: int = PASSAGES
) -> dict[int, RepeatedRows]:
    """Rows of every distance that a context has room for."""
    tokens, start = vocabulary(config, tokenizer), start_of(tokenizer)
    first = start[0] if start else None
    return {distance: rows_for(distance, tokens, first, seed, passages) for distance in distances_for(context)}


def summed_up(found: Tokens, distance: int, places: tuple[int, ...], seed: int = 0) -> Retrieval:
    """Accuracy and loss on second copies without their first token, which nothing predicts; intervals by passage."""
    kept = {  # column of predictions: the token at a place is predicted one before it
        name: torch.cat([column[:, place : place + PASSAGE - 1].mean(1) for place in places]).numpy()
        for name, column in found._asdict().items()
    }
    right, loss = ((kept[f"{name}_before"], kept[f"{name}_after"]) for name in ("right", "loss"))
    change, more = right[1] - right[0], loss[1] - loss[0]
    return Retrieval(
        distance, len(change), float(right[0].mean()), float(right[1].mean()), *interval(change, seed),
        float(loss[0].mean()), float(loss[1].mean()), *interval(more, seed),
    )  # fmt: skip
