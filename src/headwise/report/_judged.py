"""The verdict in words, and damage by length as plain data: what was proved, up to which length, within which limit."""

from __future__ import annotations

import math
from typing import NamedTuple

from headwise.report._text import listing, number
from headwise.types import Verdict
from headwise.types.verdict import BEYOND, FAILED, LEAST_ROWS, PARTLY, RETRIEVAL_LOSS, VERIFIED, WITHIN

SIGNS = {VERIFIED: "✓", PARTLY: "!", FAILED: "✗"}
CLASSES = {VERIFIED: "", PARTLY: " unsure", FAILED: " bad"}  # of the status, beside its word
Rows = tuple[tuple[str, ...], ...]


class Step(NamedTuple):
    """Change of perplexity at one length, in percent, with its interval."""

    length: int
    change: float
    low: float
    high: float
    rows: int


class ByLength(NamedTuple):
    """Change of perplexity over length, and what it is held against."""

    steps: tuple[Step, ...]
    limit: float
    limit_text: str
    calibrated: int  # tokens of the rows that the model was calibrated on


def by_length(verdict: Verdict) -> ByLength | None:
    """The curve over length; None where fewer than two lengths were measured."""
    known = [q for q in verdict.lengths if all(map(math.isfinite, (q.damage, q.low, q.high)))]
    steps = [Step(q.length, _change(q.damage), _change(q.low), _change(q.high), q.rows) for q in known]
    if len(steps) < 2:
        return None
    return ByLength(tuple(steps), _change(verdict.limit), verdict.max_loss, verdict.length)


def _change(damage: float) -> float:
    """Nats as a change of perplexity in percent, within what can be drawn."""
    return 100 * math.expm1(min(damage, 20.0))


def has_perplexity(verdict: Verdict) -> bool:
    """Whether damage can be told as a change of perplexity."""
    return "perplexity_after" in verdict.quality


def status(verdict: Verdict) -> str:
    """A sign and a word."""
    return f"{SIGNS[verdict.state]} {verdict.state}"


def headline(verdict: Verdict) -> str:
    """Sizes, quality with its interval, length and limit: the certificate in two or three sentences."""
    sentences = [_sizes(verdict), _quality(verdict)]
    if verdict.context > verdict.verified_up_to:
        sentences.append(
            f"Verified up to {verdict.verified_up_to:,} of {verdict.context:,} tokens: longer texts were not measured."
        )
    if lost := [found.distance for found in verdict.retrieval if found.lost]:
        sentences.append(f"It retrieves clearly less than the source at {listing([f'{d:,}' for d in lost])} tokens.")
    return " ".join(sentences)


def _sizes(verdict: Verdict) -> str:
    failed = [check.name for check in verdict.checks if not check.passed]
    if not verdict.checks:
        return "Not verified: no checks were made."
    if failed:
        return f"{len(failed)} of {len(verdict.checks)} checks FAILED ({', '.join(failed)})."
    count = "its one check" if len(verdict.checks) == 1 else f"all {len(verdict.checks)} checks"
    return f"Sizes verified: {count} passed."


def _quality(verdict: Verdict) -> str:
    worst = verdict.worst
    if worst is None:
        return "Quality was not measured."
    _, damage, low, high = worst
    words = f"Quality: {amount(verdict, damage)} ({ends(verdict, low, high)})"
    if verdict.verified_up_to:
        words += f" up to {verdict.verified_up_to:,} tokens"
    if not verdict.max_loss:
        return f"{words}, not judged against a limit: an earlier version measured it; run headwise verify again."
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
    name = "loss" if "loss_after" in verdict.quality else "KL to the source"
    return f"{damage:+.3g} nats of {name}" if name == "loss" else f"{damage:.3g} nats of {name}"


def ends(verdict: Verdict, low: float, high: float) -> str:
    """The interval in the same unit."""
    if not has_perplexity(verdict):
        return f"{low:.3g} to {high:.3g}"
    return f"{percent(low).removesuffix('%').lstrip('+')} to {percent(high).removesuffix('%').lstrip('+')}"


def percent(damage: float) -> str:
    """Nats as a change of perplexity.

    >>> percent(0.0188), percent(-0.001), percent(3.0)
    ('+1.9%', '−0.1%', '+1,909%')
    """
    change = _change(damage)
    text = f"{change:+,.1f}%" if abs(change) < 100 else f"{change:+,.0f}%"
    return text.replace("-", "−")


def length_rows(verdict: Verdict) -> Rows:
    """Length, damage, interval, KL, rows, against the limit: one line per length."""
    found = []
    for q in verdict.lengths:
        change = (
            (percent(q.damage), f"{percent(q.low)} to {percent(q.high)}") if has_perplexity(verdict) else ("–", "–")
        )
        counted = f"{q.rows}" if q.rows >= LEAST_ROWS else f"{q.rows}, too few to certify"
        nats = f"{number(q.damage, 3)} ({number(q.low, 3)} to {number(q.high, 3)})"
        found.append((f"{q.length:,}", *change, nats, number(q.kl, 3), counted, _against(verdict, q.low, q.high)))
    return tuple(found)


LENGTH_HEADS = ("tokens", "perplexity", "95% interval", "nats per token", "KL", "rows", "against the limit")


def _against(verdict: Verdict, low: float, high: float) -> str:
    if not verdict.max_loss:
        return "–"
    return "✓ within" if high <= verdict.limit else "✗ BEYOND" if low > verdict.limit else "! uncertain"


def retrieval_rows(verdict: Verdict) -> Rows:
    """Distance, accuracy of both models, the change with its interval, loss, and what that means."""
    found = []
    for r in verdict.retrieval:
        change = 100 * (r.accuracy_after - r.accuracy_before)
        interval = f"{100 * r.accuracy_change_low:+.1f} to {100 * r.accuracy_change_high:+.1f}"
        words = "! clearly less" if r.lost else f"✓ within {100 * RETRIEVAL_LOSS:.0f} points"
        words = words if r.possible else "the source does not retrieve at this distance"
        losses = f"{number(r.loss_before, 3)} → {number(r.loss_after, 3)}"
        cells = (f"{r.accuracy_before:.1%}", f"{r.accuracy_after:.1%}", f"{change:+.1f} points ({interval})", losses)
        found.append((f"{r.distance:,}", *cells, words))
    return tuple(found)


RETRIEVAL_HEADS = ("distance", "source", "cut model", "change (95% interval)", "loss", "in words")
RETRIEVAL_WORDS = (
    "A passage of 32 random tokens comes again so many tokens later; the share of its tokens, but for the first, that "
    "each model predicts the second time. It needs no data."
)


def not_measured(verdict: Verdict) -> tuple[str, ...]:
    """What the certificate does not cover, and why."""
    found = list(verdict.not_measured)
    if not verdict.max_loss:
        found.append("Quality by length, retrieval and a limit of quality: an earlier version made this verdict.")
    if not verdict.speed and not any(words.startswith("Speed") for words in found):
        found.append("Speed.")
    return tuple(found)
