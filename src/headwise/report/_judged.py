"""The verdict in words: what was proved, up to which length, within which limit."""

import math

from headwise.report._text import listing, number
from headwise.types import Measure, Verdict
from headwise.types.verdict import BEYOND, FAILED, NOT_JUDGED, PARTLY, UNCERTAIN, VERIFIED, WITHIN

SIGNS = {VERIFIED: "✓", PARTLY: "!", FAILED: "✗"}
QUALITY = {WITHIN: "✓", UNCERTAIN: "!", BEYOND: "✗", NOT_JUDGED: "!"}  # signs of the quality alone
CLASSES = {"✓": " good", "!": " unsure", "✗": " bad"}  # of a status, by the sign before its words


def has_perplexity(verdict: Verdict) -> bool:
    """Whether damage can be given as a change of perplexity."""
    return "perplexity" in verdict.quality


def status(verdict: Verdict) -> str:
    """A sign and a word."""
    return f"{SIGNS[verdict.state]} {verdict.state}"


def statuses(verdict: Verdict | None) -> tuple[str, str]:
    """Sizes and quality apart, each with a sign: a model of the right size may be bad, and a good one too large."""
    if verdict is None:
        return "! sizes not verified yet", "! quality not measured yet"
    failed = sum(not check.passed for check in verdict.checks)
    counted = f"✗ sizes: {failed} of {len(verdict.checks)} checks FAILED" if failed else "✓ sizes verified"
    words = f"quality {verdict.quality_state}" if verdict.worst else "quality not measured"
    return counted if verdict.checks else "✗ sizes not verified", f"{QUALITY[verdict.quality_state]} {words}"


def advice(verdict: Verdict | None, unverified: str | None = None) -> tuple[str, str]:
    """Whether it may be used, for somebody who reads one sentence: a sign, and the sentence."""
    if verdict is None:
        return "!", f"Do not use it yet: {unverified or 'it has not been verified'}."
    if not verdict.sizes_verified:
        return "✗", "Do not use it: the saved model is not what was planned."
    if verdict.quality_state == BEYOND:
        return "✗", f"Do not use it as it is: it loses more quality than the limit of {verdict.max_loss} allows."
    if verdict.quality_state == NOT_JUDGED:
        return "!", "Not judged yet: no quality was measured against a limit."
    if verdict.quality_state == UNCERTAIN:
        return "!", f"Use it with care: the limit of {verdict.max_loss} lies inside the interval of the measurement."
    up_to = f" for texts of up to {verdict.verified_up_to:,} tokens" if verdict.verified_up_to else ""
    if (apart := _apart(verdict)) and (apart.low or 0.0) > verdict.limit:
        differ = f"perplexity is within the limit, but answers differ from the source's (KL {number(apart.value, 2)})"
        return "!", f"Use it with care{up_to}: {differ}."
    if any(found.lost for found in verdict.retrieval):
        return "!", f"Use it with care{up_to}: it finds less in long texts than the source does."
    if verdict.context > verdict.verified_up_to:
        return "!", f"Safe to use{up_to}; longer ones were not measured (it should serve {verdict.context:,})."
    return "✓", f"Safe to use{up_to}."


def _apart(verdict: Verdict) -> Measure | None:
    """The KL to the source, where there is a perplexity beside it: text may be as likely, and yet another."""
    both = verdict.quality.get("kl") if has_perplexity(verdict) else None
    return both.after if both else None


def headline(verdict: Verdict) -> str:
    """Sizes, quality with its interval, length and limit: the certificate in two or three sentences."""
    sentences = [sizes(verdict), quality(verdict)]
    if verdict.context > verdict.verified_up_to:
        sentences.append(
            f"Verified up to {verdict.verified_up_to:,} of {verdict.context:,} tokens: longer texts were not measured."
        )
    if lost := [found.distance for found in verdict.retrieval if found.lost]:
        sentences.append(f"It retrieves clearly less than the source at {listing([f'{d:,}' for d in lost])} tokens.")
    return " ".join(sentences)


def sizes(verdict: Verdict) -> str:
    """The checks in a sentence."""
    failed = [check.name for check in verdict.checks if not check.passed]
    if not verdict.checks:
        return "Not verified: no checks were made."
    if failed:
        return f"{len(failed)} of {len(verdict.checks)} checks FAILED ({', '.join(failed)})."
    count = "its one check" if len(verdict.checks) == 1 else f"all {len(verdict.checks)} checks"
    return f"Sizes verified: {count} passed."


def quality(verdict: Verdict) -> str:
    """What was measured, its interval and the limit, in a sentence."""
    worst = verdict.worst
    if worst is None:
        return "Quality was not measured."
    words = f"Measured quality: {amount(verdict, worst.value)} ({ends(verdict, worst)})"
    if verdict.verified_up_to:
        words += f" up to {verdict.verified_up_to:,} tokens"
    limit = f"the limit of {verdict.max_loss}"
    if verdict.quality_state == WITHIN:
        return f"{words}, within {limit}."
    return f"{words}, BEYOND {limit}." if verdict.quality_state == BEYOND else f"{words}: {limit} lies in the interval."


def amount(verdict: Verdict, damage: float) -> str:
    """Damage as a change of perplexity, or as the task counts it."""
    if not math.isfinite(damage):
        return "not a number"
    if has_perplexity(verdict):
        return f"{percent(damage)} perplexity"
    if "cosine" in verdict.quality:
        return f"{number(damage, 3)} lost of the cosine to the source"
    return f"{damage:+.3g} nats of loss" if "loss" in verdict.quality else f"{damage:.3g} nats of KL to the source"


def ends(verdict: Verdict, measure: Measure) -> str:
    """The interval in the same unit."""
    low, high = (math.nan if end is None else end for end in (measure.low, measure.high))
    if not has_perplexity(verdict):
        return f"{low:.3g} to {high:.3g}"
    return span(low, high)


def change(damage: float) -> float:
    """Nats as a change of perplexity in percent, within what can be drawn."""
    return 100 * math.expm1(min(damage, 20.0))


def percent(damage: float) -> str:
    """Nats as a change of perplexity, in words.

    >>> percent(0.0188), percent(-0.001), percent(0.0002), percent(3.0)
    ('+1.9%', '−0.10%', '+0.02%', '+1,909%')
    """
    found = change(damage)
    return _signed(found, 0 if abs(found) >= 100 else 1 if abs(found) >= 0.95 else 2)


def span(low: float, high: float) -> str:
    """Ends of an interval in nats as changes of perplexity, both with as many digits as the larger one needs.

    >>> span(-0.0003, 0.0014), span(0.02, 0.041)
    ('−0.03% to +0.14%', '+2.0% to +4.2%')
    """
    ends = change(low), change(high)
    most = max(map(abs, ends))
    digits = 0 if most >= 100 else 1 if most >= 0.95 else 2
    return " to ".join(_signed(end, digits) for end in ends)


def _signed(found: float, digits: int) -> str:
    return f"{round(found, digits) + 0.0:+,.{digits}f}%".replace("-", "−")


def not_measured(verdict: Verdict) -> tuple[str, ...]:
    """What the certificate does not cover, and why."""
    found = list(verdict.not_measured)
    if not verdict.speed and not any(words.startswith("Speed") for words in found):
        found.append("Speed.")
    return tuple(found)
