"""The pages of evidence: a table that is read in five minutes, then a section per claim. Nothing here measures."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

REWRITE = "headwise reproduce --render"
INTRO = (
    "Two papers make claims about heads, depth and dimensions of Transformers. Here they are tested. The tables say "
    "what came out; a section for every claim follows. `headwise reproduce a1` tests A1 again, and so on. Every number "
    "comes from a file in `experiments/results/`, every verdict from a rule in `experiments/_claims_*.py`, and this "
    f"page from `{REWRITE}`."
)
WORDS = (
    "**Verdicts.** *Confirmed*, *refuted*: shown either way. *Confirmed with conditions*: part of it holds, and it is "
    "known which. *Inconclusive*: these data cannot decide, or a check on them failed; the section says what would. "
    "*Consistent*: arithmetic, nothing was measured that could have come out otherwise.",
    "**Rules.** A claim rests on comparisons, each with a margin. Two one-sided tests at 2.5%, one for the claim and "
    "one against it, are corrected by Holm over all comparisons of the claim. A comparison is void, whatever its "
    "p-value, if a model learned next to nothing, a task is at its majority class, or the best learning rate is the "
    "lowest or highest tried. The wordings of the claims are ours. Seeds that would settle a claim are computed from "
    "its means and spreads as they are; H200 hours from its step times, most of them on a GPU that was shared.",
    "**Pictures.** The number with its 95% interval; the dashed line is the border that decides. **Damage** is "
    "measured damage: the increase of the loss on held-out text, in nats per token.",
)
PAPERS = {
    "a": "Allocation of Parameters in Transformers (arXiv 2510.03784)",
    "b": "Leaner Transformers: More Heads, Less Depth (arXiv 2505.20802)",
    "q": "Open questions",
}
UNMEASURED = "not measured yet"
UNDECIDED = ("inconclusive", "open", UNMEASURED)  # in a verdict, on the whole or on a part
WIDE, HIGH, EDGE = 120, 22, 8  # of a small picture, in pixels


class Experiment(NamedTuple):
    """An experiment, with its committed result if there is one."""

    name: str
    module: Any
    claim: Any  # wording, source, rule
    result: dict[str, Any] | None
    found: dict[str, Any]  # what may be shown of it
    judged: Any  # verdict, number, reasons; None where nothing was measured
    made_by: str  # a sentence on the code that made it

    @property
    def verdict(self) -> str:
        return UNMEASURED if self.judged is None else str(self.judged.told)

    @property
    def word(self) -> str:
        """The verdict without those on parts."""
        return UNMEASURED if self.judged is None else str(self.judged.verdict)

    @property
    def settle(self) -> str:
        """What would decide what is open; empty where nothing is."""
        if self.judged is None:
            return f"`headwise reproduce {self.name}`"
        undecided = any(word in self.verdict for word in UNDECIDED)
        return str(self.judged.settle) if undecided else ""

    @property
    def heading(self) -> str:
        return f"{self.module.CLAIM}: {self.module.TITLE}"

    @property
    def figure(self) -> str:
        return f"evidence/{self.name}.svg"

    @property
    def strip(self) -> str:
        return f"evidence/{self.name}-strip.svg"

    @property
    def command(self) -> str:
        """What to type; a result whose experiment has another name by now is made by that one."""
        stored = str((self.result or {}).get("command", f"headwise reproduce {self.name}"))
        return stored.replace(str((self.result or {}).get("name", self.name)), self.name)


def page(found: Sequence[Experiment], rules_date: str) -> str:
    """The whole page: claims of the papers first, open questions in a table of their own."""
    lines = ["# Evidence", "", INTRO, "", _in_short(found), "", WORDS[0]]
    for letters, title in (("ab", "claim"), ("q", "open question")):
        lines += [
            "",
            f"| {title} | source | verdict | one number [95% interval] | |",
            "| --- | --- | --- | --- | --- |",
        ]
        lines += [_row(entry) for entry in found if entry.name[0] in letters]
    if open_ := [entry for entry in found if entry.settle]:
        lines += ["", "| still open | what would settle it |", "| --- | --- |"]
        lines += [f"| {_link(entry)} {entry.module.TITLE} | {_sentence(entry.settle)}. |" for entry in open_]
    lines += [line for words in WORDS[1:] for line in ("", words)]
    for letter, paper in PAPERS.items():
        lines += ["", f"## {paper}"]
        for entry in found:
            if entry.name.startswith(letter):
                lines += ["", *_section(entry, rules_date)]
    return "\n".join(lines) + "\n"


def _in_short(found: Sequence[Experiment]) -> str:
    """Which claims have which verdict, and which questions, undecided ones last."""
    told = []
    for letters, title in (("ab", "claims"), ("q", "questions")):
        mine = [entry for entry in found if entry.name[0] in letters]
        words = dict.fromkeys(entry.word for entry in sorted(mine, key=lambda entry: UNDECIDED.count(entry.word)))
        kinds = [f"{word}: {', '.join(_link(e) for e in mine if e.word == word)}" for word in words]
        told.append(f"**{len(mine)} {title}.** {'. '.join(_sentence(kind) for kind in kinds)}.")
    return "\n\n".join(told)


def _row(entry: Experiment) -> str:
    number, picture = "", ""
    if entry.judged is not None:
        number = entry.judged.number
        picture = f"![]({entry.strip})" if entry.judged.strip is not None else ""
    return f"| {_link(entry)} {entry.claim.says} | {entry.claim.source} | **{entry.verdict}** | {number} | {picture} |"


def _link(entry: Experiment) -> str:
    """A link to the section, as GitHub names it."""
    kept = [sign for sign in entry.heading.lower() if sign.isalnum() or sign in " -_"]
    return f"[{entry.module.CLAIM}](#{''.join(kept).replace(' ', '-')})"


def _section(entry: Experiment, rules_date: str) -> list[str]:
    head = [f"### {entry.heading}", "", f"> {entry.claim.says}", "", f"Source: {entry.claim.source}.", ""]
    head += [f"Rule: {entry.claim.rule}", ""]
    if (result := entry.result) is None:
        return [*head, f"{UNMEASURED.capitalize()}: run `headwise reproduce {entry.name}`."]
    judged = entry.judged
    settle = f" What would settle it: {entry.settle}." if entry.settle else ""
    after = " The rule was written after this result." if result["date"] < rules_date else ""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return [
        *head,
        f"**Verdict: {entry.verdict}.** {_sentence(judged.number)}. {_sentence(judged.because)}{settle}{after}",
        "",
        f"![{entry.heading}]({entry.figure})",
        "",
        f"<details><summary>All numbers of {entry.module.CLAIM}</summary>",
        "",
        entry.module.measured(entry.found),
        "",
        "</details>",
        "",
        f"`{entry.command}`: size {result['size']}, {result['seconds']:,.0f} s on {result['hardware']}, "
        f"{result['date']}; {versions}. {entry.made_by}",
    ]


def _sentence(words: str) -> str:
    """With a capital letter, but for names of models that have none."""
    return words if words.startswith(("embedded", "stories")) else words[:1].upper() + words[1:]


def strip_svg(value: float, low: float, high: float, border: float) -> str:
    """One number with its interval and the border that decides, as a small picture."""
    ends = [each for each in (value, low, high, border) if math.isfinite(each)]
    least, most = min(ends), max(ends)
    room = (most - least) or 1.0

    def at(number: float) -> float:
        place = (min(max(number, least), most) - least) / room
        return round(EDGE + place * (WIDE - 2 * EDGE), 1)

    middle = HIGH / 2
    ticks = "".join(
        f'<path d="M{at(end)} {middle - 3}v6" stroke="#0072b2"/>'
        for end in (low, high)
        if math.isfinite(end) and low < high
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDE}" height="{HIGH}" viewBox="0 0 {WIDE} {HIGH}">'
        f'<path d="M{at(border)} 1V{HIGH - 1}" stroke="#888888" stroke-dasharray="3 2"/>'
        f'<path d="M{at(low)} {middle}H{at(high)}" stroke="#0072b2" stroke-width="2"/>{ticks}'
        f'<circle cx="{at(value)}" cy="{middle}" r="3.5" fill="#0072b2"/></svg>\n'
    )
