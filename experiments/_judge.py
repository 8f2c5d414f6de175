"""How a verdict is reached: the same words, statistics and checks for every claim.

A claim is tested by contests. A contest has a gain (positive speaks for the claim), its standard error, and a margin:
the least gain worth speaking of, or the largest loss that counts as equal. Two one-sided tests are made, one for the
claim and one against it, each corrected by Holm over all contests of the claim. Noise passes neither, so that what the
data cannot decide stays open. A contest whose own checks fail (a model that learned next to nothing, a task at its
majority class, a learning rate at the edge of those tried) decides nothing, however small its p-value.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from experiments._points import Mean, mean

CONFIRMED, PARTLY, REFUTED, INCONCLUSIVE, CONSISTENT = VERDICTS = (
    "confirmed",
    "confirmed with conditions",
    "refuted",
    "inconclusive",
    "consistent",  # arithmetic: nothing was measured that could have come out otherwise
)
ANSWERED, OPEN = ANSWERS = ("answered", "open")  # of questions that the papers left open
LEVEL = 0.025  # of each one-sided test: that of a two-sided 95% interval
RULES_DATE = "2026-11-17"  # when these rules were written: results before it were not made for them
SHOWN, SMALL, AGAINST, UNDECIDED, VOID = "shown", "smaller than the margin", "against", "undecided", "void"
HARDLY = 0.7  # of the loss of knowing nothing: above it a model has hardly begun to learn
MANY = 1_000_000  # degrees of freedom from which an error is not one over seeds
NEAR_MAJORITY = 0.02  # of accuracy above always giving the most frequent answer


class Contest(NamedTuple):
    """One comparison that a claim rests on."""

    what: str
    gain: float  # positive: for the claim
    error: float  # standard error; infinite for a single value
    freedom: float  # degrees of freedom of the error; infinite: known well
    margin: float
    equal: bool = False  # the claim is "as good" rather than "better"
    failed: tuple[str, ...] = ()  # checks that failed, in words

    @property
    def interval(self) -> Mean:
        """The 95% interval, not corrected."""
        reach = self.error * float(stats.t.ppf(1 - LEVEL, self.freedom))
        return Mean(self.gain, self.gain - reach, self.gain + reach)

    def chance(self, border: float, above: bool) -> float:
        """The p-value of the gain not lying above (or below) a border."""
        if self.error == 0:
            return 0.0 if (self.gain > border) == above and self.gain != border else 1.0
        if not math.isfinite(self.error):
            return 1.0
        distance = (self.gain - border) / self.error
        return float(stats.t.sf(distance if above else -distance, self.freedom))

    @property
    def chance_for(self) -> float:
        """Of seeing this if the claim were false."""
        return self.chance(-self.margin if self.equal else 0.0, True)

    @property
    def chance_against(self) -> float:
        """Of seeing this if the gain were at least the margin (or the loss at most the margin)."""
        return self.chance(-self.margin if self.equal else self.margin, False)


def paired(
    what: str,
    values: Sequence[float],
    others: Sequence[float],
    margin: float,
    equal: bool = False,
    failed: Sequence[str] = (),
) -> Contest:
    """Of two models seed by seed; the same seed had the same data in the same order."""
    return sampled(what, np.subtract(values, others).tolist(), margin, equal, failed)


def sampled(
    what: str, gains: Sequence[float], margin: float, equal: bool = False, failed: Sequence[str] = ()
) -> Contest:
    """Of several independent gains."""
    array = np.asarray(gains, dtype=float)
    error = float(array.std(ddof=1) / math.sqrt(len(array))) if len(array) > 1 else math.inf
    return Contest(what, float(array.mean()), error, max(1, len(array) - 1), margin, equal, tuple(failed))


def holm(chances: Sequence[float], level: float = LEVEL) -> list[bool]:
    """Which of several p-values stand after Holm's correction.

    >>> holm([0.02, 0.001, 0.012], 0.025)
    [True, True, True]
    >>> holm([0.02, 0.01, 0.5], 0.025)
    [False, False, False]
    """
    order, stands = sorted(range(len(chances)), key=lambda place: chances[place]), [False] * len(chances)
    for rank, place in enumerate(order):
        if chances[place] > level / (len(chances) - rank):
            break
        stands[place] = True
    return stands


def outcomes(contests: Sequence[Contest]) -> list[str]:
    """What became of every contest: shown, smaller than the margin, against, undecided or void."""
    able = [contest for contest in contests if not contest.failed]
    up, down = holm([c.chance_for for c in able]), holm([c.chance_against for c in able])
    found = {}
    for contest, good, bad in zip(able, up, down, strict=True):
        both = SMALL if good and bad and not contest.equal else SHOWN
        found[id(contest)] = both if good else AGAINST if bad else UNDECIDED
    return [found.get(id(contest), VOID) for contest in contests]


def decide(contests: Sequence[Contest]) -> str:
    """The verdict on a claim all of whose contests should be shown.

    Confirmed: all are shown. With conditions: some are shown, and all others are decided (against, or smaller than the
    margin), so that the conditions are known. Refuted: none is shown and at least one is decided against.
    Inconclusive: anything else, among it every claim with a void contest that nothing else decides.
    """
    words = outcomes(contests)
    if words and all(word == SHOWN for word in words):
        return CONFIRMED
    if any(word in (SHOWN, SMALL) for word in words):
        return PARTLY if all(word in (SHOWN, SMALL, AGAINST) for word in words) else INCONCLUSIVE
    return REFUTED if AGAINST in words else INCONCLUSIVE


def better(gain: Mean, unit: str, digits: int = 3) -> str:
    """A gain in words: one below zero is worse by so much.

    >>> better(Mean(-0.05, -0.06, -0.04), "nats", 2)
    '0.05 [0.04, 0.06] nats worse'
    """
    if gain.mean >= 0:
        return f"{gain.spelled(digits)} {unit} better"
    return f"{Mean(-gain.mean, -gain.high, -gain.low).spelled(digits)} {unit} worse"


def seeds_needed(contests: Sequence[Contest]) -> int:
    """Seeds after which no contest is undecided, checks aside, if means and spreads stay; 0 if none is.

    Each has to pass Holm's strictest level then, so that the order among them does not matter.

    >>> seeds_needed([sampled("", [0.03, -0.01, 0.02], 0.01)])
    12
    """
    words = outcomes([contest._replace(failed=()) for contest in contests])
    level, needed = LEVEL / max(1, len(contests)), 0
    for contest, word in zip(contests, words, strict=True):
        if word != UNDECIDED or not 0 < contest.error < math.inf or contest.freedom >= MANY:
            continue

        def decided(seeds: int, one: Contest = contest) -> bool:
            error = one.error * math.sqrt((one.freedom + 1) / seeds)
            more = one._replace(error=error, freedom=seeds - 1)
            return min(more.chance_for, more.chance_against) <= level

        needed = max(needed, 2 + bisect.bisect_left(range(2, MANY), True, key=decided))
    return needed


def seeds_of(contests: Sequence[Contest]) -> int:
    """Seeds that contests have, 1 at least."""
    return max([1, *(int(c.freedom) + 1 for c in contests if math.isfinite(c.error) and c.freedom < MANY)])


def settled_by(contests: Sequence[Contest], *more: str) -> str:
    """What would decide contests that are open, in words: what to train, which checks to pass, how many seeds."""
    checks = " ".join(check for contest in contests for check in contest.failed)
    missing = "; ".join(contest.what for contest in contests if contest.failed and not math.isfinite(contest.error))
    steps = [f"train what is missing ({missing})"] if missing else []
    steps += ["try more learning rates until the best has worse ones on both sides"] * ("learning rate" in checks)
    steps += ["train on more tokens than a model has parameters"] * ("tokens per parameter" in checks and not more)
    steps += list(more)
    if needed := seeds_needed(contests):
        steps += [f"take about {needed:,} seeds instead of {seeds_of(contests)}"]
    return ", ".join(steps)


def hours(models: Mapping[str, Mapping[str, Any]], names: Sequence[str], seeds: int, times: float = 1.0) -> str:
    """H200 hours of so many seeds of some models, each trained `times` as long, at the pace of the run that is told."""
    trained = [models[name] for name in names if "step_seconds" in models.get(name, {})]
    seconds = sum(float(model["step_seconds"]) * int(model["steps"]) for model in trained) * seeds * times
    return f"about {seconds / 3600:.2g} H200 hours at the pace of this run"


class Strip(NamedTuple):
    """A small picture: one number with its interval beside the border that decides."""

    value: float
    low: float
    high: float
    border: float = 0.0


class Judged(NamedTuple):
    """A verdict with its reasons."""

    verdict: str
    number: str  # one number with its interval, in words
    strip: Strip | None
    because: str  # sentences
    parts: Mapping[str, str] = {}  # verdicts on halves of a claim, by what they are about
    settle: str = ""  # what would decide it, where it is inconclusive

    @property
    def told(self) -> str:
        """The verdict with those on its parts."""
        more = "; ".join(f"{what}: {word}" for what, word in self.parts.items())
        return f"{self.verdict} ({more})" if more else self.verdict


def reasons(contests: Sequence[Contest], digits: int = 3, unit: str = "") -> str:
    """What became of every contest, in sentences."""
    said = []
    for contest, word in zip(contests, outcomes(contests), strict=True):
        kind = "may lose" if contest.equal else "margin"
        why = f": {', '.join(contest.failed)}" if contest.failed else ""
        numbers = f" {contest.interval.signed(digits)}{unit} ({kind} {contest.margin:.2g}{unit})"
        said.append(f"{contest.what}{numbers if math.isfinite(contest.error) else ''}: {word}{why}.")
    return " ".join(said)


def strip_of(contest: Contest) -> Strip:
    """The picture of one contest."""
    return Strip(*contest.interval, border=-contest.margin if contest.equal else 0.0)


def at_edge(model: Mapping[str, Any]) -> str | None:
    """The check on learning rates: a sentence if the best was the lowest or highest tried, or the only one."""
    rates = sorted(float(rate) for rate in model.get("rates", ()))
    if not rates:
        return None
    if len(rates) < 3 or float(model["rate"]) in (rates[0], rates[-1]):
        return f"best learning rate {float(model['rate']):g} at the edge of {rates[0]:g} to {rates[-1]:g}"
    return None


def edges_of(models: Mapping[str, Mapping[str, Any]], *names: str) -> list[str]:
    """That check for several models."""
    found = {name: edge for name in names if name in models and (edge := at_edge(models[name]))}
    if len(found) > 2:
        return [f"{len(found)} of {len(set(names))} models have their best learning rate at the edge of those tried"]
    return [f"{name}: {edge}" for name, edge in found.items()]


def hardly_learned(loss: Sequence[float], nothing: float) -> list[str]:
    """The check on a loss that is near that of knowing nothing."""
    middle = mean(loss).mean
    return [f"a loss of {middle:.2f} where knowing nothing costs {nothing:.2f}"] if middle > HARDLY * nothing else []


def at_majority(accuracy: Sequence[float], majority: float, task: str) -> list[str]:
    """The check on a task whose score is that of always giving the most frequent answer."""
    middle = mean(accuracy).mean
    near = middle < majority + NEAR_MAJORITY
    return [f"{task} at {middle:.3f}, always the same answer gives {majority:.3f}"] if near else []


def short_of_tokens(tokens: float, parameters: float) -> list[str]:
    """The check on decoders that saw fewer tokens than they have parameters."""
    few = tokens < parameters
    return [f"{tokens / parameters:.2g} training tokens per parameter"] if few else []


Found = dict[str, Any]
Results = Mapping[str, Found]  # what every experiment found, by name
TEXT, TABLE, REVIEW, SUMMARY = "paper's text", "paper's figure or table", "review", "third-party summary"
SOURCES = (TEXT, TABLE, REVIEW, SUMMARY, OURS := "our question")


class Claim(NamedTuple):
    """What is judged: its wording (ours, since the papers' own is theirs), who says it, and the rule."""

    says: str
    source: str  # one or more of SOURCES, with what else is known of it
    rule: str  # margin and rule in words, for the page
    judge: Callable[[Found, Results], Judged]
