"""Weights `rho` over lags: how much of the target comes from 1, 2, 3, ... tokens ago.

The papers leave `rho` free. Here every profile sums to one, so that an error of 1 means "as bad as reading nothing" for
tokens of norm 1; a list of numbers is taken as it is.
"""

from pathlib import Path

import numpy as np

from headwise.errors import HeadwiseError
from headwise.research.theory.bound import Floats
from headwise.types import Readings

READING = "lags.contribution"  # the kind of reading that holds measured weights; its lag 0 is the token itself
MOST_LAGS = 16_384  # which take seconds
KNOWN = "uniform, geometric:RATIO, power:EXPONENT, numbers such as 0.5,0.3,0.2, or FILE.json:LAYER"


def uniform(n: int) -> Floats:
    """Equal weights for lags 1 to n: an n-gram."""
    return _normalised(np.ones(_lags(n)))


def geometric(n: int, ratio: float) -> Floats:
    """Every lag weighs `ratio` times the one before."""
    if not 0 < ratio <= 1:
        raise HeadwiseError(f"a geometric profile needs a ratio above 0 and at most 1, not {ratio}; try geometric:0.5.")
    return _normalised(ratio ** np.arange(_lags(n), dtype=np.float64))


def power(n: int, exponent: float) -> Floats:
    """Lag m weighs `m ** -exponent`."""
    if not 0 <= exponent < np.inf:
        raise HeadwiseError(f"a power profile needs an exponent of 0 or more, not {exponent}; try power:1.5.")
    return _normalised(np.arange(1, _lags(n) + 1, dtype=np.float64) ** -exponent)


def parse(text: str, lags: int | None = None) -> Floats:
    """The weights that a person typed. `lags` is needed for named profiles and cuts a measured one short.

    >>> parse("geometric:0.5", lags=2).round(3).tolist()
    [0.667, 0.333]
    """
    name, _, rest = text.strip().rpartition(":")
    if name in ("geometric", "power"):
        number = _numbers(rest, text)
        if len(number) != 1:
            raise HeadwiseError(f"'{text}' needs one number, such as geometric:0.5 or power:1.5.")
        return (geometric if name == "geometric" else power)(_needed(lags, text), number[0])
    if name.endswith(".json"):
        return measured(Path(name), rest, lags)
    if rest == "uniform":
        return uniform(_needed(lags, text))
    if rest.endswith(".json"):
        raise HeadwiseError(f"{rest} holds one row per layer: say which, such as {rest}:0.")
    weights = np.array(_numbers(text, text))
    if lags is not None and lags != len(weights):
        raise HeadwiseError(f"{len(weights)} weights are given for {lags} lags; leave the number of lags away.")
    return weights


def measured(path: Path, layer: str, lags: int | None = None) -> Floats:
    """What a probe found in one layer of a model: contributions of lags 1, 2, ..., scaled to sum to one."""
    reading = Readings.read(path).curve(READING)
    if reading is None:
        raise HeadwiseError(f"{path} holds no reading of kind {READING}; probe the lags of the model first.")
    if not layer.isdecimal() or int(layer) >= len(reading.values):
        raise HeadwiseError(f"{path} has no layer '{layer}'; its layers are 0 to {len(reading.values) - 1}.")
    row = dict(zip(reading.ticks[int(layer)], reading.values[int(layer)], strict=True))
    values = [row[lag] for lag in sorted(row) if lag > 0]
    if sorted(lag for lag in row if lag > 0) != list(range(1, len(values) + 1)):
        raise HeadwiseError(f"layer {layer} of {path} was not measured at every lag from 1 on; probe again.")
    return _normalised(np.abs(np.array(values[: len(values) if lags is None else _lags(lags)])))


def _lags(n: int) -> int:
    if n < 1:
        raise HeadwiseError(f"{n} lags were given; a profile has at least one.")
    if n > MOST_LAGS:
        raise HeadwiseError(f"{n:,} lags were given; a profile has at most {MOST_LAGS:,}.")
    return n


def _needed(lags: int | None, text: str) -> int:
    if lags is None:
        raise HeadwiseError(f"'{text}' does not say how many lags there are; give their number too, such as --lags 8.")
    return lags


def _numbers(text: str, whole: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise HeadwiseError(f"'{whole}' is no profile of lags. Known: {KNOWN}.") from None


def _normalised(weights: Floats) -> Floats:
    total = float(weights.sum())
    if not (len(weights) and np.isfinite(total) and total > 0):
        raise HeadwiseError("these weights of lags sum to nothing; at least one lag must count.")
    return weights / total
