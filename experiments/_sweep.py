"""Compares the points of a sweep over heads: which is best, how surely, and whether the curve turns at both ends.

Errors of one point differ by factors rather than by amounts, so they are averaged in the logarithm (geometric means),
and intervals come from resampling seeds. Points are resampled together: a seed is the same target for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments._judge import (
    CONFIRMED,
    INCONCLUSIVE,
    PARTLY,
    REFUTED,
    SHOWN,
    SMALL,
    Contest,
    at_edge,
    outcomes,
    sampled,
    seeds_needed,
)
from headwise.report.plots import PALETTE

DRAWS = 10_000
PLATEAU = math.log(1.10)  # errors within 10% of each other are equal: the bound says factors of 2 to 5
ENDS = (0.025, 0.975)  # of intervals
Floats = NDArray[np.float64]


def compare(rows: Sequence[dict[str, Any]], field: str = "error") -> dict[str, Any]:
    """Rows with `heads`, `dim` and one error per seed, in order of heads: means, intervals, chances to be best."""
    logs = [np.log(np.asarray(row[field], dtype=float)) for row in rows]
    draws = np.stack([_resampled(log) for log in logs])  # (points, draws)
    best = int(np.argmin([log.mean() for log in logs]))
    chances = np.bincount(draws.argmin(0), minlength=len(rows)) / DRAWS
    points = []
    for index, (row, log) in enumerate(zip(rows, logs, strict=True)):
        low, high = np.exp(np.quantile(draws[index], ENDS))
        ratio_low, ratio_high = np.exp(np.quantile(draws[index] - draws[best], ENDS))
        points.append(
            {
                "heads": row["heads"],
                "dim": row["dim"],
                "error": float(np.exp(log.mean())),
                "low": float(low),
                "high": float(high),
                "chance_best": float(chances[index]),
                "ratio": float(np.exp(log.mean() - logs[best].mean())),  # to the best point
                "ratio_low": float(ratio_low),
                "ratio_high": float(ratio_high),
                "among_best": bool(index == best or ratio_low <= 1),
            }
        )
    return {"best": rows[best]["heads"], "seeds": len(logs[0]), "points": points}


def ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """Mean error of one point over that of another, with its interval; seeds that only one of them has are left out."""
    high, low = (
        np.log(np.asarray(errors, dtype=float)) for errors in zip(*zip(above, below, strict=False), strict=True)
    )
    ends = np.exp(np.quantile(_resampled(high) - _resampled(low), ENDS))
    return {"ratio": float(np.exp(high.mean() - low.mean())), "ratio_low": float(ends[0]), "ratio_high": float(ends[1])}


def _resampled(values: Floats) -> Floats:
    """Means of so many new samples of the seeds, the same samples for all values of one length."""
    picks = np.random.default_rng(0).integers(len(values), size=(DRAWS, len(values)))
    return values[picks].mean(1)


def swept(rows: Sequence[Mapping[str, Any]], expected: int) -> tuple[str, str, Contest, str]:
    """Verdict on "errors are least at `expected` heads": words, the number, its contest, the reasons.

    Confirmed: every other number of heads is significantly worse. With conditions: both ends of the sweep are, and
    whatever is not is equal within the margin: a plateau. Refuted: one is better by the margin, or an end is equal.
    """
    ours = next(row for row in rows if row["heads"] == expected)
    failed = [f"{row['heads']} heads: {edge}" for row in rows if (edge := at_edge(row))]
    others = [row for row in rows if row["heads"] != expected]

    def contest(row: Mapping[str, Any], sign: float, equal: bool) -> Contest:
        logs = sign * (np.log(row["error"]) - np.log(ours["error"]))
        return sampled(f"{row['heads']} heads", logs.tolist(), PLATEAU, equal, failed)

    worse = outcomes([contest(row, 1, False) for row in others])  # than expected, by anything
    better = outcomes([contest(row, -1, False) for row in others])  # than expected
    no_worse = outcomes([contest(row, 1, True) for row in others])  # for the expected: loses at most the margin
    no_better = outcomes([contest(row, -1, True) for row in others])
    lost = [word in (SHOWN, SMALL) for word in worse]
    level = [a == SHOWN and b == SHOWN for a, b in zip(no_worse, no_better, strict=True)]
    ends = [place for place, row in enumerate(others) if row["heads"] in (rows[0]["heads"], rows[-1]["heads"])]
    rival = min(others, key=lambda row: float(np.log(row["error"]).mean()))
    shown = contest(rival, 1, False)
    ratio = np.exp(np.array(shown.interval))
    number = f"{rival['heads']} heads {ratio[0]:.2f} [{ratio[1]:.2f}, {ratio[2]:.2f}] times the error of {expected}"
    equals = [str(row["heads"]) for row, same, less in zip(others, level, lost, strict=True) if same and not less]
    below = [str(row["heads"]) for row, less in zip(others, lost, strict=True) if less]
    why = f"Worse than {expected} heads: {', '.join(below) or 'none'}. Equal within 10%: {', '.join(equals) or 'none'}."
    if failed:
        return INCONCLUSIVE, number, shown, f"Void: {'; '.join(failed)}."
    if all(lost):
        return CONFIRMED, number, shown, why
    if SHOWN in better or any(level[place] and not lost[place] for place in ends):
        return REFUTED, number, shown, why
    plateau = all(lost[place] for place in ends) and all(a or b for a, b in zip(lost, level, strict=True))
    return (PARTLY if plateau else INCONCLUSIVE), number, shown, why


def seeds_for(rows: Sequence[Mapping[str, Any]], expected: int) -> str:
    """What would decide `swept`: rates where a best one is at the edge, and seeds for what is neither worse nor equal.

    A point is settled as soon as it is shown to be worse, or equal, whichever takes fewer seeds.
    """
    ours = next(row for row in rows if row["heads"] == expected)
    edges = [f"{row['heads']} heads" for row in rows if at_edge(row)]
    steps = [f"try learning rates beyond those tried for {', '.join(edges)}"] if edges else []
    needed, others = 0, [row for row in rows if row is not ours]
    for row in others:
        logs = np.log(row["error"]) - np.log(ours["error"])
        worse = sampled("", logs.tolist(), 0.0)  # against a border of 0 it is decided either way
        equal = [sampled("", (sign * logs).tolist(), PLATEAU, True) for sign in (1, -1)]
        ways = [[worse] * len(others)] + ([[one] * len(others) for one in equal] if abs(logs.mean()) < PLATEAU else [])
        counts = [seeds_needed(way) for way in ways]
        needed = max(needed, min(counts[0], max(counts[1:], default=counts[0])))
    if needed:
        steps.append(f"take about {needed:,} seeds instead of {len(ours['error'])}")
    return ", ".join(steps)


def at(compared: dict[str, Any], heads: int) -> dict[str, Any]:
    """The point with so many heads."""
    return next(point for point in compared["points"] if point["heads"] == heads)


def among_best(compared: dict[str, Any]) -> list[int]:
    """Head counts that are not significantly worse than the best."""
    return [point["heads"] for point in compared["points"] if point["among_best"]]


def spelled(point: dict[str, Any]) -> str:
    """An error with its interval."""
    return f"{point['error']:.3g} [{point['low']:.3g}, {point['high']:.3g}]"


def times(point: dict[str, Any]) -> str:
    """How much worse than the best, with its interval."""
    return f"{point['ratio']:.2f} [{point['ratio_low']:.2f}, {point['ratio_high']:.2f}]"


def plot(axes: Any, compared: dict[str, Any], label: str, number: int) -> None:
    """A curve over heads with its intervals."""
    points = compared["points"]
    middle = [point["error"] for point in points]
    reach = [
        [max(0.0, p["error"] - p["low"]) for p in points],
        [max(0.0, p["high"] - p["error"]) for p in points],
    ]
    style = dict(marker="osD^v"[number % 5], color=PALETTE[number], markersize=4, capsize=2, linewidth=1.2)
    axes.errorbar([p["heads"] for p in points], middle, yerr=reach, label=label, **style)


def over_heads(axes: Any, heads: Sequence[int], expected: int) -> None:
    """Axes over the number of heads, theory's best marked."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(heads), [str(count) for count in heads])
    axes.axvline(expected, color="#888888", linestyle=":", linewidth=1, zorder=0)
    axes.set_xlabel("heads")
