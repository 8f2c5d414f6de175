"""Blocks that the page is built from. Whatever is called words or text here is escaped here."""

from __future__ import annotations

from collections.abc import Collection

from headwise.report._svg import rect, svg
from headwise.report._text import escape


def section(name: str, heading: str, body: str) -> str:
    """A part of the page with its heading and its anchor."""
    return f'<section id="{name}"><h2>{escape(heading)}</h2>{body}</section>\n'


def paragraph(words: str) -> str:
    """A paragraph of text."""
    return f"<p>{escape(words)}</p>"


def code(words: str) -> str:
    """A piece of code in a line."""
    return f"<code>{escape(words)}</code>"


def pre(words: str) -> str:
    """A block of code."""
    return f"<pre><code>{escape(words)}</code></pre>"


def details(heading: str, body: str, is_open: bool = False) -> str:
    """Something to unfold."""
    return f"<details{' open' if is_open else ''}><summary>{escape(heading)}</summary>{body}</details>"


def figure(heading: str, picture: str, words: str = "") -> str:
    """A picture under its name."""
    below = f"<figcaption>{escape(words)}</figcaption>" if words else ""
    return f"<figure><h3>{escape(heading)}</h3>{picture}{below}</figure>"


def legend(keys: list[tuple[str, str]]) -> str:
    """Swatches and what they mean."""
    items = "".join(f"<li>{svg(14, 14, label, rect(0, 0, 14, 14, name))}{escape(label)}</li>" for name, label in keys)
    return f'<ul class="legend">{items}</ul>'


def missing(words: str, command: str) -> str:
    """What is not there, and what makes it."""
    return f'<p class="note">{escape(words)}. This makes it, with the run folder for DIR:</p>{pre(command)}'


def table(heads: tuple[str, ...], rows: tuple[tuple[str, ...], ...], numeric: Collection[int], now: int = -1) -> str:
    """A table that scrolls on its own where it is too wide; columns in `numeric` are flush right, row `now` is bold."""
    top = "".join(f'<th scope="col"{_right(i, numeric)}>{escape(head)}</th>' for i, head in enumerate(heads))
    body = ""
    for index, row in enumerate(rows):
        cells = "".join(f"<td{_right(i, numeric) or _mark(cell)}>{escape(cell)}</td>" for i, cell in enumerate(row))
        body += f'<tr class="now">{cells}</tr>' if index == now else f"<tr>{cells}</tr>"
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _right(column: int, numeric: Collection[int]) -> str:
    return ' class="num"' if column in numeric else ""


def _mark(cell: str) -> str:
    """Pass and fail are set apart by sign and word; colour only repeats them."""
    return (
        ' class="pass"' if cell in ("✓ pass", "✓ met") else ' class="fail"' if cell in ("✗ FAIL", "✗ NOT MET") else ""
    )
