"""Points of an experiment: run what time allows, and compare them with intervals."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from headwise.errors import HeadwiseError
from headwise.progress import Track
from headwise.report.plots import PALETTE

LEVEL = 0.95


class Mean(NamedTuple):
    """A mean over seeds and its 95% interval."""

    mean: float
    low: float
    high: float

    def spelled(self, digits: int = 3) -> str:
        return f"{self.mean:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"

    def signed(self, digits: int = 3) -> str:
        return f"{self.mean:+.{digits}f} [{self.low:+.{digits}f}, {self.high:+.{digits}f}]"


def mean(values: Sequence[float]) -> Mean:
    """Student's interval; a single value has none, so it reaches everywhere.

    >>> mean([1.0, 1.0, 1.0])
    Mean(mean=1.0, low=1.0, high=1.0)
    """
    array = np.asarray(values, dtype=float)
    middle = float(array.mean())
    if len(array) < 2:
        return Mean(middle, -math.inf, math.inf)
    reach = float(stats.t.ppf((1 + LEVEL) / 2, len(array) - 1) * array.std(ddof=1) / math.sqrt(len(array)))
    return Mean(middle, middle - reach, middle + reach)


def difference(values: Sequence[float], others: Sequence[float]) -> Mean:
    """Of two models seed by seed: the same seed had the same data in the same order."""
    return mean(np.subtract(values, others).tolist())


def timed(parts: Mapping[str, Any], timing: str, models: Mapping[str, dict[str, Any]], steps: int) -> None:
    """Give models the time of their training alone; what was not timed has none, once anything was."""
    for name, model in models.items() if timing in parts else ():
        model.pop("seconds", None)
        if name in parts[timing]:
            model["seconds"] = parts[timing][name] * steps


def faster(one: Mapping[str, Any], other: Mapping[str, Any], digits: int = 2) -> str:
    """How many times as fast `one` trains, where both were timed."""
    both = "seconds" in one and "seconds" in other
    return f", {other['seconds'] / one['seconds']:.{digits}f} times as fast" if both else ""


def work(
    jobs: dict[str, Callable[[], Any]],
    parts: MutableMapping[str, Any],
    track: Track,
    label: str,
    needed: Sequence[str] = (),
) -> list[str]:
    """Do what is not done yet, in order, while time is left; the names of what was left out.

    Without those `needed` nothing can be said: then there is no result, and the parts wait for more time.
    """

    def do(key: str) -> None:
        parts[key] = jobs[key]()

    left = while_time([key for key in jobs if key not in parts], do, parts, track, label)
    need([name for name in needed if name not in parts])
    return left


def while_time(
    names: Sequence[str], do: Callable[[str], None], parts: MutableMapping[str, Any], track: Track, label: str
) -> list[str]:
    """Do one after the other while time is left; the names of the others."""
    left, longest = [], float(getattr(parts, "longest", 0.0))
    for name in track(list(names), label):
        if seconds_left(parts) < longest / 2:
            left.append(name)
            continue
        start = time.perf_counter()
        do(name)
        longest = max(longest, time.perf_counter() - start)
        _forget()
    if hasattr(parts, "longest"):
        parts.longest = longest
    return left


def need(lost: Sequence[str]) -> None:
    """Refuse a result without what it rests on."""
    if lost:
        raise HeadwiseError(
            f"time was over before {', '.join(lost)} could be measured; what is done is kept: "
            "the same command resumes with more --minutes."
        )


def seconds_left(parts: MutableMapping[str, Any]) -> float:
    """Until the time that was given to the experiment is over."""
    return float(getattr(parts, "left", lambda: math.inf)())


def _forget() -> None:
    """Hand memory of captured graphs back, so that it does not add up over points."""
    import gc

    import torch

    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def left_out(result: dict[str, Any]) -> str:
    """A sentence on what time did not allow, for the end of a text."""
    names = result.get("left_out", [])
    if len(names) > 4:
        return f" {len(names)} parts were left out for lack of time, from {names[0]} to {names[-1]}."
    return f" Left out for lack of time: {', '.join(names)}." if names else ""


def whose_times(result: dict[str, Any]) -> str:
    """A sentence on times that are not shown, for the end of a text."""
    if not result.get("times_of_an_earlier_run"):
        return ""
    return " Times are not shown: they were copied into this result by hand, from an earlier run."


def edges(models: Mapping[str, dict[str, Any]]) -> str:
    """Sentences on models whose best rate was the lowest or highest tried, since others might have been better still,
    and on rates that a shorter training chose, since those need not be best for the whole one."""
    tried = {name: [float(rate) for rate in model["rates"]] for name, model in models.items() if model.get("rates")}
    ends = {name: (min(rates), max(rates)) for name, rates in tried.items() if len(rates) > 1}
    low = [name for name, (least, _) in ends.items() if float(models[name]["rate"]) == least]
    high = [name for name, (_, most) in ends.items() if float(models[name]["rate"]) == most]
    single = [name for name, rates in tried.items() if len(rates) == 1]
    told = (("at the lowest tried", low), ("at the highest", high), ("at the only one", single))
    words = [f"{len(names)} {where} ({'; '.join(names)})" for where, names in told if names]
    made = [models[name] for name in ends]
    short = any("settled" not in m or m.get("tuning_steps", m.get("steps")) != m.get("steps") for m in made)
    text = " Learning rates were chosen in a shorter training and need not be best for the whole one." if short else ""
    if not words:
        return text
    return (
        f" Of {len(tried)} models, best learning rates were {', '.join(words)}; others might be better for those.{text}"
    )


def rounded(value: Any, digits: int) -> Any:
    """Every number of a result to so many significant digits, which is more than its error allows."""
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def column(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [float(row[key]) for row in rows]


def correlation(x: Sequence[float], y: Sequence[float]) -> dict[str, float] | None:
    """Spearman's rank correlation and its chance under no relation; none for fewer than four different points."""
    if len(set(x)) < 4 or len(set(y)) < 4:
        return None
    found = stats.spearmanr(x, y)
    return {"rho": float(found.statistic), "p": float(found.pvalue), "points": len(x)}


def said(found: dict[str, float] | None) -> str:
    """A correlation in words."""
    return "too few points" if found is None else f"rank correlation {found['rho']:+.2f} (p = {found['p']:.2g})"


def bars(axes: Any, x: Sequence[float], means: Sequence[Mean], label: str, number: int, line: bool = True) -> None:
    """Means with their intervals."""
    middle = [m.mean for m in means]
    reach = [
        [m.mean - m.low if math.isfinite(m.low) else 0.0 for m in means],
        [m.high - m.mean if math.isfinite(m.high) else 0.0 for m in means],
    ]
    style: dict[str, Any] = dict(marker="osD^v"[number % 5], color=PALETTE[number % 7], markersize=4, capsize=2)
    axes.errorbar(x, middle, yerr=reach, label=label, linewidth=1.2, linestyle="-" if line else "", **style)


def losses(figure: Any, models: Mapping[str, Any], base: str, units: Mapping[str, tuple[float, str]]) -> None:
    """Loss over several prices side by side, where a model has them, with the base's as a line."""
    panels = figure.subplots(1, len(units), sharey=True)
    for axes, (key, (unit, label)) in zip(panels, units.items(), strict=True):
        for number, (name, model) in enumerate(models.items()):
            if key in model:
                bars(axes, [model[key] / unit], [mean(model["loss"])], name, number, line=False)
        axes.axhline(mean(models[base]["loss"]).mean, color=PALETTE[0], linewidth=0.6, linestyle=":")
        axes.set_xlabel(label)
    panels[0].set_ylabel("held-out loss (nats per token)")
    panels[0].legend(fontsize=6)
