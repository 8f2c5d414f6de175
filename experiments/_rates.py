"""Learning rates by one rule for all models of an experiment.

Every model tries the same first rates with all its seeds; while the best of those tried is the lowest or the highest,
the next of the ladder is tried too. So no model is held back by where a list of rates happened to end. Every rate of a
model is a part of its own, so that a killed experiment resumes at the next rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch

from experiments import _points
from headwise.progress import Track

Found = dict[str, Any]  # of one model at one rate; `tried` is the held-out loss by which rates are compared
HOPELESS = 1e9  # nats
Attempt = Callable[[Sequence[float]], list[Found]]  # one training for several rates


class Ladder(NamedTuple):
    """Rates from low to high, and those that every model begins with."""

    rates: tuple[float, ...]
    first: tuple[float, ...]

    def following(self, tried: Mapping[float, float]) -> list[float]:
        """What to try next; nothing once the best rate has worse ones on both sides, or the ladder ends.

        >>> Ladder((1.0, 2.0, 3.0), (2.0, 3.0)).following({2.0: 0.5, 3.0: 0.6})
        [1.0]
        """
        if missing := [rate for rate in self.first if rate not in tried]:
            return missing
        place = self.rates.index(min(tried, key=lambda rate: tried[rate]))
        near = [self.rates[at] for at in (place - 1, place + 1) if 0 <= at < len(self.rates)]
        return [rate for rate in near if rate not in tried]


def key(name: str, rate: float) -> str:
    """The name of a part."""
    return f"{name}, rate {rate:g}"


def tried(name: str, ladder: Ladder, parts: Mapping[str, Any]) -> dict[float, float]:
    """Held-out losses of a model by rate, as far as they are known."""
    return {rate: parts[key(name, rate)]["tried"] for rate in ladder.rates if key(name, rate) in parts}


def search(
    attempts: Mapping[str, Attempt], ladder: Ladder, parts: MutableMapping[str, Any], track: Track, label: str
) -> list[str]:
    """Try the rates of all models, round by round, while time is left; the names of what was left out."""
    while True:
        wanted = {name: rates for name in attempts if (rates := ladder.following(tried(name, ladder, parts)))}
        if not wanted:
            return []

        def attempt(name: str, wanted: dict[str, list[float]] = wanted) -> None:
            for rate, found in zip(wanted[name], _found(attempts[name], wanted[name]), strict=True):
                parts[key(name, rate)] = found

        if left := _points.while_time(list(wanted), attempt, parts, track, label):
            return [key(name, rate) for name in left for rate in wanted[name]]


def _found(attempt: Attempt, rates: Sequence[float]) -> list[Found]:
    """What an attempt finds; a rate that leaves a model whose spectrum cannot be computed is as bad as any can be."""
    try:
        return attempt(rates)
    except torch.linalg.LinAlgError:
        return [{"tried": HOPELESS}] if len(rates) == 1 else [_found(attempt, [rate])[0] for rate in rates]


def best(name: str, ladder: Ladder, parts: Mapping[str, Any]) -> Found | None:
    """What a model's best rate found, with all rates that were tried; None if it was not trained.

    It is `settled` once no further rate is wanted: before that, another might be better still.
    """
    losses = tried(name, ladder, parts)
    if not losses or min(losses.values()) >= HOPELESS:
        return None
    rate = min(losses, key=lambda each: losses[each])
    found = {field: value for field, value in parts[key(name, rate)].items() if field != "tried"}
    rates = {str(each): loss for each, loss in losses.items()}
    return {**found, "rate": rate, "rates": rates, "settled": not ladder.following(losses)}
