"""Made-up results of several random seeds."""

from __future__ import annotations

from typing import Any

INNER: dict[str, Any] = {"rate": 0.2, "rates": {"0.1": 1.0, "0.2": 0.5, "0.3": 1.0}}
EDGE: dict[str, Any] = {"rate": 0.1, "rates": {"0.1": 0.5, "0.2": 1.0, "0.3": 1.0}}


def near(value: float, seeds: int = 4) -> list[float]:
    """Seeds that hardly differ."""
    return [value + 0.0001 * (place % 3) for place in range(seeds)]


def wide(value: float) -> list[float]:
    """Seeds that differ so much that the mean's interval holds nearly everything."""
    return [value - 10.0, value, value + 9.0, value + 1.0]
