"""Questions that the papers left open, and when an answer counts as one."""

from __future__ import annotations

import math
from typing import Any

from experiments._judge import (
    ANSWERED,
    OPEN,
    OURS,
    REVIEW,
    SUMMARY,
    UNDECIDED,
    VOID,
    Claim,
    Contest,
    Found,
    Judged,
    Results,
    Strip,
    better,
    edges_of,
    outcomes,
    reasons,
    sampled,
    settled_by,
    strip_of,
)

RATIO = 1.25  # damages within a quarter of each other are equal
NATS = 0.01


def _answer(contests: list[Contest], number: str, strip: Strip, more: str = "", unit: str = " nats") -> Judged:
    """Answered if every contest is decided, whichever way."""
    words = outcomes(contests)
    undecided = not words or UNDECIDED in words or VOID in words
    why = reasons(contests, 3, unit) + more
    return Judged(OPEN if undecided else ANSWERED, number, strip, why, settle=settled_by(contests))


def q1(found: Found, _: Results) -> Judged:
    """Whether plans for two lengths do different damage."""
    first, last = (found["plans"][str(length)] for length in (found["lengths"][0], found["lengths"][-1]))
    errors = [(plan["measured_high"] - plan["measured_low"]) / 3.92 for plan in (first, last)]
    gain = first["measured"] - last["measured"]
    contest = Contest(
        "the plan for the longest context below that for the shortest", gain, math.hypot(*errors), 1e9, NATS
    )
    words = f"plan for {found['lengths'][-1]:,} tokens against that for {found['lengths'][0]:,}: "
    return _answer([contest], f"{words}{contest.interval.signed()} nats less damage", strip_of(contest))


def q2(found: Found, _: Results) -> Judged:
    """Damage on unfamiliar text beyond that on clean text."""
    contests = []
    for model in found["models"].values():
        for row in model["rows"]:
            if row["text"] == "unfamiliar":
                error = (row["extra_high"] - row["extra_low"]) / 3.92
                contests.append(Contest(f"{model['label']}, {row['budget']}: extra", row["extra"], error, 1e9, NATS))
    worst = max(contests, key=lambda contest: contest.gain)
    return _answer(contests, f"{worst.what} damage {worst.interval.signed()} nats on unfamiliar text", strip_of(worst))


def q3(found: Found, _: Results) -> Judged:
    """The ratio of damages with norms and without."""
    from experiments.q3_qknorm import ratio

    middle, low, high = ratio(found)
    decided = low > 1 or high < 1 or (low > 1 / RATIO and high < RATIO)
    why = "Answered once the interval leaves out 1, or lies within a quarter of it."
    number = f"damage with norms {middle:.2f} [{low:.2f}, {high:.2f}] times that without"
    runs = sum(row["kind"] == "with norms" for row in found["rows"])
    settle = "measure larger damages"
    if min(low, middle) > 0:
        reach, gap = math.log(high / low) / 2, abs(math.log(middle))
        needed = math.ceil(runs * (reach / max(gap, math.log(RATIO) - gap)) ** 2)  # errors fall as the root of seeds
        settle = f"take about {max(needed, runs + 1)} seeds instead of {runs}"
    return Judged(ANSWERED if decided else OPEN, number, Strip(middle, low, high, 1.0), why, settle=settle)


def q4(found: Found, _: Results) -> Judged:
    """Designs with 30% fewer parameters against the uniform model of 12 layers."""
    models, contests = found["models"], []
    base = models["baseline"]
    for name, model in models.items():
        if name != "baseline" and model["parameters"] <= 0.7 * base["parameters"]:
            gains = [b - a for a, b in zip(model["loss"], base["loss"], strict=False)]
            contests.append(sampled(name, gains, NATS, True, edges_of(models, "baseline", name)))
    best = max(contests, key=lambda contest: contest.gain)
    more = " A plain narrower model does as well as any design." * any(c.what.startswith("uniform") for c in contests)
    return _answer(contests, f"{best.what}: {better(best.interval, 'nats')} than the baseline", strip_of(best), more)


def q5(found: Found, _: Results) -> Judged:
    """Every head dimension against 64, with and without QK-norm."""
    from experiments.q5_headdim import contests

    made = contests(found)
    if not made:
        return Judged(OPEN, "no two dimensions were trained", None, "Nothing to compare.", settle="more time")
    smallest = made[0]
    return _answer(made, f"{smallest.what} {better(smallest.interval, 'nats')}", strip_of(smallest))


def q6(found: Found, _: Results) -> Judged:
    """Layers that differ against layers alike, trained from scratch."""
    from experiments.q6_scratch import contests

    made: list[Any] = contests(found)
    return _answer(made, f"{made[0].what} {better(made[0].interval, 'nats')}", strip_of(made[0]))


DECIDED = "Answered once every comparison is decided, either way, after Holm's correction; margin {} nats."
CLAIMS = {
    "q1_length": Claim("Should the allocation adapt to the length of the sequence?", SUMMARY, DECIDED.format(NATS), q1),
    "q2_robustness": Claim(
        "Are reduced models as robust to distribution shift as their sources?", SUMMARY, DECIDED.format(NATS), q2
    ),
    "q3_qknorm": Claim(
        "Does a quarter of the keys cost more where queries and keys are normed?",
        OURS,
        "Answered once the interval of the ratio leaves out 1 or lies within a quarter of it.",
        q3,
    ),
    "q4_design": Claim(
        "Does a design with 30% fewer parameters reach the loss of a uniform model of 12 layers?",
        OURS,
        DECIDED.format(NATS),
        q4,
    ),
    "q5_headdim": Claim(
        "Which head dimension is best at a fixed width on text, with and without norms of queries and keys?",
        f"{OURS}; a public replication saw many tiny heads lose",
        DECIDED.format(NATS),
        q5,
    ),
    "q6_scratch": Claim(
        "Do layers that differ train to a better loss than layers alike, at equal FLOPs?",
        f"{REVIEW}; the first paper proposes it",
        DECIDED.format(NATS),
        q6,
    ),
}
