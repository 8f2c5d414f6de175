"""docs/DESIGN_RULES.md: what the results say that a designer of models should do. Written by code, number by number.

A rule is stated only where comparisons are shown after Holm's correction; whatever is void or undecided is listed as
such. `headwise reproduce --render` writes the page beside the evidence, `--check` compares it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments import _advice, b2_conditioning
from experiments._judge import AGAINST, SHOWN, SMALL, UNDECIDED, VOID
from experiments._points import difference, mean, said

INTRO = (
    "What the experiments in [EVIDENCE.md](EVIDENCE.md) say to someone who designs a model. `headwise reproduce "
    "--render` writes this page from `experiments/results/`; `headwise advise` answers from the same numbers for your "
    "own shape. Models are small and were trained for seconds to minutes: try your own shapes with `headwise search`."
    "\n\n"
    "A gain is positive where the statement holds. Intervals are 95%. Whether a statement holds is decided after "
    "Holm's correction over all comparisons of its question. *Void*: a check on the comparison failed, for example "
    "because the best learning rate was the highest or lowest that was tried, so that it decides nothing."
)
WORDS = {SHOWN: "yes", SMALL: "yes, by less than the margin", AGAINST: "no", UNDECIDED: "undecided", VOID: "void"}


def page(entries: Mapping[str, Any]) -> str:
    """The whole page, from experiments with results."""
    results = {name: entry.found for name, entry in entries.items()}
    items = _advice.judged_items(results)
    lines = ["# Design rules", "", INTRO]
    for topic in _advice.TOPICS:
        lines += ["", f"## {topic.question}", "", _rule(topic, items[topic.name])]
        if items[topic.name]:
            lines += ["", "| comparison | gain | margin | holds? | source |", "| --- | --- | --- | --- | --- |"]
            lines += [_row(item, word) for item, word in items[topic.name]]
    lines += ["", "## Is conditioning a goal?", "", conditioning(results.get("b2_conditioning"))]
    lines += [
        "",
        "## How many key/value heads?",
        "",
        "No evidence here: no model was trained with several numbers of them.",
    ]
    return "\n".join(lines) + "\n"


def _row(item: _advice.Item, word: str) -> str:
    contest = item.contest
    why = f": {'; '.join(contest.failed)}" if contest.failed else ""
    numbers = f"{contest.interval.signed(3)} {item.unit}".rstrip()
    source = item.source.partition("_")[0].upper()
    return f"| {contest.what} | {numbers} | {contest.margin:.2g} | {WORDS[word]}{why} | {source} |"


def _rule(topic: _advice.Topic, found: Sequence[tuple[_advice.Item, str]]) -> str:
    """One sentence: what is shown, by kind of data, and nothing beyond."""
    if not found:
        return f"No evidence here: nothing was measured on whether {topic.statement}."
    told = []
    for kind in dict.fromkeys(item.where.kind for item, _ in found):
        words = [word for item, word in found if item.where.kind == kind]
        good, bad = sum(word in (SHOWN, SMALL) for word in words), words.count(AGAINST)
        open_ = len(words) - good - bad
        rest = f", {open_} {'decides' if open_ == 1 else 'decide'} nothing" if open_ else ""
        if not good + bad:
            told.append(f"on {kind}, no rule: no comparison decides whether {topic.statement} ({open_} made)")
        elif not bad:
            told.append(f"on {kind}, {topic.statement}: {good} of {len(words)} comparisons show it{rest}")
        elif not good:
            against = f"{bad} of {len(words)} comparisons are against the statement that {topic.statement}"
            told.append(f"on {kind}, the evidence says no: {against}{rest}")
        else:
            both = f"{good} of {len(words)} comparisons show that {topic.statement}, {bad} show the opposite"
            told.append(f"on {kind}, no rule: {both}{rest}")
    text = "; ".join(told) + "."
    return text[0].upper() + text[1:]


def conditioning(found: Mapping[str, Any] | None) -> str:
    """What the condition number is worth as an aim: whether it predicts accuracy."""
    if found is None:
        return "No evidence here."
    result = dict(found)
    within = b2_conditioning.within(result, "after", "accuracy")
    words = f"No design strategy aims at it. Among models of equal heads it has a {said(within)} with test accuracy"
    rows = result["grown"]
    if len(rows) > 1:
        gain = difference(rows[-1]["accuracy"], rows[0]["accuracy"])
        numbers = [mean(b2_conditioning.number(row, "after")).mean for row in (rows[0], rows[-1])]
        words += (
            f"; but from {rows[0]['heads']} to {rows[-1]['heads']} heads of one dimension it improves from "
            f"{numbers[0]:,.2g} to {numbers[1]:,.2g} while accuracy changes by {gain.signed(3)}. Heads, parameters and "
            "learning rates change with it in all of these: nothing here isolates it"
        )
    if told := b2_conditioning.by_initialisation(result):
        words += f". {told}"
    return words + "."
