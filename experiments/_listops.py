"""ListOps: nested lists of digits under MIN, MAX, MED and SM (sum modulo ten), to be computed; made here, seeded.

Tokens 0 to 9 are digits; 10 to 13 open a list of the four operators, in this order.
"""

from __future__ import annotations

import random
import statistics
from contextlib import suppress
from typing import Any

import torch

from experiments._data import Examples

CLOSE, PAD, SYMBOLS = 14, 15, 16
NESTED = 0.3  # chance that an argument is a list itself
DEEPEST, MOST = 8, 7  # lists within lists; arguments of one


def value(operator: int, arguments: list[int]) -> int:
    """What a list comes to.

    >>> [value(operator, [3, 9, 4, 7]) for operator in range(4)]
    [3, 9, 5, 3]
    """
    if operator == 2:
        return int(statistics.median(arguments))
    return (min(arguments), max(arguments), 0, sum(arguments) % 10)[operator]


class TooLongError(Exception):
    """A list that has outgrown what is wanted; more of it is of no use."""


def tree(rng: random.Random, longest: int, depth: int = 0) -> tuple[list[int], int]:
    """A random list of at most so many tokens, and its value."""
    operator, arguments = rng.randrange(4), []
    tokens = [10 + operator]
    for _ in range(rng.randint(2, MOST)):
        if depth < DEEPEST and rng.random() < NESTED:
            inner, answer = tree(rng, longest - len(tokens) - 1, depth + 1)
            tokens += inner
        else:
            answer = rng.randrange(10)
            tokens.append(answer)
        arguments.append(answer)
        if len(tokens) >= longest:
            raise TooLongError
    return [*tokens, CLOSE], value(operator, arguments)


def read(tokens: list[int]) -> int:
    """The value of a list of tokens, computed from them alone."""
    stack: list[Any] = []
    for token in tokens:
        if token != CLOSE:
            stack.append(token)
            continue
        arguments: list[int] = []
        while stack[-1] < 10:
            arguments.append(stack.pop())
        stack[-1] = value(stack[-1] - 10, arguments)
    return int(stack[0])


def examples(count: int, shortest: int, longest: int, seed: int, device: torch.device) -> Examples:
    """So many lists of allowed lengths, padded to the longest."""
    rng = random.Random(seed)
    tokens, labels = torch.full((count, longest), PAD), torch.zeros(count, dtype=torch.long)
    for place in range(count):
        found: tuple[list[int], int] = ([], 0)
        while len(found[0]) < shortest:
            with suppress(TooLongError):
                found = tree(rng, longest)
        tokens[place, : len(found[0])] = torch.tensor(found[0])
        labels[place] = found[1]
    return Examples(*(part.to(device) for part in (tokens, tokens != PAD, labels)))
