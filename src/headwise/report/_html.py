"""Blocks that the page is built from. Whatever is called words or text here is escaped here."""

from __future__ import annotations

from collections.abc import Collection

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


def details(heading: str, body: str, is_open: bool = False, kind: str = "") -> str:
    """Something to unfold."""
    name = f' class="{kind}"' if kind else ""
    return f"<details{name}{' open' if is_open else ''}><summary>{escape(heading)}</summary>{body}</details>"


def figure(heading: str, picture: str, words: str = "") -> str:
    """A picture under its name."""
    below = f"<figcaption>{escape(words)}</figcaption>" if words else ""
    return f"<figure><h3>{escape(heading)}</h3>{picture}{below}</figure>"


def legend(keys: list[tuple[str, str]]) -> str:
    """Swatches, by the name of their colour, and what they mean."""
    items = "".join(f'<li><i style="background:var(--{name})"></i>{escape(label)}</li>' for name, label in keys)
    return f'<ul class="legend">{items}</ul>'


def missing(words: str, command: str) -> str:
    """What is not there, and what makes it."""
    return f'<p class="note">{escape(words)}. This makes it, with the run folder for DIR:</p>{pre(command)}'


def table(
    heads: tuple[str, ...],
    rows: tuple[tuple[str, ...], ...],
    numeric: Collection[int],
    now: int = -1,
    name: str = "",
    layers: bool = False,
) -> str:
    """A table that scrolls on its own where it is too wide; columns in `numeric` are flush right, row `now` is bold.

    With a name it can be sorted and downloaded. `layers`: its first column names layers, which can be chosen.
    """
    top = "".join(_head(head, _right(i, numeric)) for i, head in enumerate(heads))
    body = ""
    for index, row in enumerate(rows):
        cells = "".join(f"<td{_right(i, numeric) or _mark(cell)}>{escape(cell)}</td>" for i, cell in enumerate(row))
        mark = ' class="now"' if index == now else ""
        mark += f' data-layer="{escape(row[0])}"' if layers else ""
        body += f"<tr{mark}>{cells}</tr>"
    label = f' data-name="{escape(name)}"' if name else ""
    region = f' role="region" aria-label="{escape(name)}"' if name else ""
    pick = " pickable" if layers else ""
    return (
        f'<div class="scroll{pick}" tabindex="0"{region}><table{label}><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _head(words: str, right: str) -> str:
    return f'<th scope="col"{right}>{escape(words)}</th>' if words else f"<td{right}></td>"


def pickable(label: str, body: str) -> str:
    """A picture of layers that takes the focus: up and down choose a layer."""
    return f'<div class="pickable" tabindex="0" role="group" aria-label="{escape(label)}">{body}</div>'


def _right(column: int, numeric: Collection[int]) -> str:
    return ' class="num"' if column in numeric else ""


def _mark(cell: str) -> str:
    """Pass and fail are set apart by sign and word; colour only repeats them."""
    kinds = {"✓ pass": "pass", "✓ met": "pass", "✓ within": "pass", "✓ within 10 points": "pass", "✓ verified": "pass"}
    kinds |= {"✗ FAIL": "fail", "✗ NOT MET": "fail", "✗ BEYOND": "fail", "✗ not verified": "fail"}
    kinds |= {"! uncertain": "unsure", "! clearly less": "unsure", "! partly verified": "unsure"}
    return f' class="{kinds[cell]}"' if cell in kinds else ""
