"""Continuations of one prompt by both models, side by side, with what differs marked."""

import re
from difflib import SequenceMatcher
from typing import NamedTuple

from headwise.report._text import escape
from headwise.types import Sample

PIECE = re.compile(r"\s+|\w+|[^\w\s]")


class Piece(NamedTuple):
    """Some text and whether both models wrote it."""

    text: str
    same: bool


def differences(before: str, after: str) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """Both texts in pieces, word by word."""
    ours, theirs = PIECE.findall(before), PIECE.findall(after)
    left, right = [], []
    for kind, a, b, c, d in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        left += [Piece("".join(ours[a:b]), kind == "equal")] if b > a else []
        right += [Piece("".join(theirs[c:d]), kind == "equal")] if d > c else []
    return tuple(left), tuple(right)


def in_common(before: str, after: str) -> str:
    """How long the texts agree, in words."""
    ours, theirs = before.split(), after.split()
    if ours == theirs:
        return "identical"
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return f"the first {same} of {len(ours)} words are the same" if same else "they differ from the first word"


def draw_sample(sample: Sample) -> str:
    """A prompt with both continuations, what differs marked."""
    left, right = differences(sample.before, sample.after)
    sides = _side("source", left, "del") + _side("cut model", right, "ins")
    head = f'<p class="note">prompt; {in_common(sample.before, sample.after)}</p>'
    head += f'<p class="text" dir="auto"><strong>{escape(sample.prompt.strip(chr(10)))}</strong></p>'
    return f'<div class="sample">{head}<div class="grid" style="--min:280px">{sides}</div></div>'


def _side(name: str, pieces: tuple[Piece, ...], tag: str) -> str:
    text = "".join(escape(p.text) if p.same or p.text.isspace() else f"<{tag}>{escape(p.text)}</{tag}>" for p in pieces)
    return f'<div><p class="note">{name}</p><p class="text" dir="auto">{text}</p></div>'
