"""The one writer of HTML: a document that loads nothing, and the blocks that it is built from.

Whatever is called words, title or heading here is escaped here; a body is HTML already.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from headwise.report import _svg as svg
from headwise.report._judged import CLASSES
from headwise.report._tables import Table
from headwise.report._text import escape, for_script

SCRIPTS = ("theme", "select", "tables", "explore", "heat")  # in this order: later ones call earlier ones
NOSCRIPT = "Without JavaScript there is no slider and there are no heat maps; everything else is here."
NO_DATA: dict[str, Any] = {"layers": 0, "explorer": None, "heats": [], "facts": []}  # of a page without a plan


def document(title: str, header: str, bar: str, body: str, data: dict[str, Any]) -> str:
    """A page that loads nothing: style, script and data are in it. `data` is what the script takes."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy()}">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{asset('page.css')}</style></head>\n"
        f"<body>{bar}<header>{header}<noscript><p class=note>{NOSCRIPT}</p></noscript></header>\n<main>{body}"
        "<footer>Written by headwise. This page is one file and loads nothing.</footer></main>"
        '<div id="toast" class="toast" role="status"></div>\n'
        f'<script type="application/json" id="data">{for_script(data)}</script>\n'
        f"<script>{script()}</script></body></html>\n"
    )


@cache
def asset(name: str) -> str:
    """A file of style or script: a real file beside this one, put into the page whole."""
    return (files("headwise.report") / "assets" / name).read_text(encoding="utf-8")


@cache
def script() -> str:
    """One function, so that nothing leaks into the page's names; it takes its data from the page."""
    body = "\n".join(asset(f"{name}.js") for name in SCRIPTS)
    start = 'const data = JSON.parse(document.getElementById("data").textContent);'
    return f'(() => {{\n"use strict";\n{start}\n{body}}})();\n'


def policy() -> str:
    """Nothing may be fetched, and of all scripts only this one runs, whatever the data hold."""
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )


class Html(str):
    """HTML that only the page shows: pictures, and what holds them together."""


class Words(NamedTuple):
    """A paragraph."""

    text: str
    note: bool = False  # small and grey


class Heading(NamedTuple):
    """A heading inside a section."""

    text: str


class Items(NamedTuple):
    """A list with a dot before each item."""

    texts: tuple[str, ...]


class Code(NamedTuple):
    """Something to copy, or text that is shown as it is, under its name."""

    text: str
    language: str = ""
    name: str = ""
    page: bool = True  # else only the model card shows it


class Folded(NamedTuple):
    """A table to unfold."""

    heading: str
    table: Table


Block = Html | Words | Heading | Items | Code | Folded | Table


def block(of: Block) -> str:
    """A block as HTML."""
    match of:
        case Words():
            return f"<p{' class=note' if of.note else ''}>{prose(of.text)}</p>"
        case Heading():
            return f"<h3>{escape(of.text)}</h3>"
        case Items():
            return f"<ul>{''.join(f'<li>{prose(text)}</li>' for text in of.texts)}</ul>"
        case Code():
            named = paragraph(f"{of.name}:") if of.name else ""
            mark = ' class="copy"' if of.language else ""
            return f"{named}<pre{mark}><code>{escape(of.text)}</code></pre>" if of.page else ""
        case Folded():
            return details(of.heading, table(of.table))
        case Table():
            return table(of)
    return of


def prose(words: str) -> str:
    """Text in which `backticks` mark code, as documents write it."""
    return re.sub("`([^`\n]+)`", r"<code>\1</code>", escape(words))


def blocks(found: Iterable[Block]) -> str:
    """Blocks one under another."""
    return "".join(map(block, found))


class Meter(NamedTuple):
    """How full something is: a value and its interval as shares of a whole, and a limit."""

    value: float | None
    limit: float | None = None
    low: float | None = None
    high: float | None = None


class Card(NamedTuple):
    """One number of the first screen, with what it means."""

    label: str
    big: str
    lines: tuple[str, ...] = ()
    meter: Meter | None = None
    more: bool = False  # whether it grew


def cards(found: Iterable[Card]) -> str:
    """The numbers of the first screen."""
    drawn = (
        f'<div class="card{" more" * card.more}"><h2>{escape(card.label)}</h2><div class="big">{escape(card.big)}</div>'
        f"<p>{'<br>'.join(map(escape, card.lines))}</p>{_meter(card)}</div>"
        for card in found
    )
    return f'<div class="grid cards">{"".join(drawn)}</div>'


def _meter(card: Card) -> str:
    """A bar of what is left in front of what was, a dark line at the limit, a thin one for the interval."""
    meter = card.meter
    if meter is None or meter.value is None:
        return ""
    known = [value for value in meter if value is not None]
    scale = svg.Scale(0.0, max(1.0, *known), 0.0, 200.0)
    body = svg.rect(0, 2, scale(1.0), 8, "g") + svg.rect(0, 2, scale(meter.value), 8, "k")
    if meter.low is not None and meter.high is not None:
        body += svg.line(scale(meter.low), 6, scale(meter.high), 6, "w")
    if meter.limit is not None:
        body += svg.line(scale(meter.limit), 0, scale(meter.limit), 12, "limit")
    return svg.svg(202, 12, f"{card.label}: {card.big}", body)


def top(title: str, statuses: Iterable[str], lead: str) -> str:
    """The first lines: the name, what holds, and the answer."""
    pills = "".join(f'<p class="status{CLASSES.get(words[:1], "")}">{escape(words)}</p>' for words in statuses)
    return (
        f'<div class="top"><h1>{escape(title)}</h1>{pills}</div>'
        f'<p class="lead{CLASSES.get(lead[:1], "")}">{escape(lead)}</p>'
    )


def folded(name: str, heading: str, body: str) -> str:
    """A part of the page under `Advanced`, with its anchor."""
    return f'<details class="part" id="{name}"><summary><h3>{escape(heading)}</h3></summary>{body}</details>\n'


def bar(names: Iterable[tuple[str, str]], more: str = "") -> str:
    """Links that stay on the screen, behind a button where it is narrow, and the switch between light and dark."""
    links = "".join(f'<a href="#{name}">{escape(words)}</a>' for name, words in names)
    return (
        '<nav class="bar" aria-label="Sections"><div class="bar-inner">'
        '<button type="button" id="menu" aria-expanded="false" aria-controls="links" hidden>Menu</button>'
        f'<div class="links" id="links">{links}</div>{more}'
        '<button type="button" id="theme" hidden>Dark</button></div></nav>'
    )


def section(name: str, heading: str, body: str) -> str:
    """A part of the page with its heading and its anchor."""
    return f'<section id="{name}"><h2>{escape(heading)}</h2>{body}</section>\n'


def paragraph(words: str) -> str:
    """A paragraph of text."""
    return f"<p>{escape(words)}</p>"


def details(heading: str, body: str, is_open: bool = False, kind: str = "") -> str:
    """Something to unfold."""
    name = f' class="{kind}"' if kind else ""
    return f"<details{name}{' open' if is_open else ''}><summary>{escape(heading)}</summary>{body}</details>"


def figure(heading: str, picture: str, words: str = "") -> str:
    """A picture under its name."""
    below = f"<figcaption>{escape(words)}</figcaption>" if words else ""
    return f"<figure><h3>{escape(heading)}</h3>{picture}{below}</figure>"


def legend(keys: Sequence[tuple[str, str]]) -> str:
    """Swatches, by the name of their colour, and what they mean."""
    items = "".join(f'<li><i style="background:var(--{name})"></i>{escape(label)}</li>' for name, label in keys)
    return f'<ul class="legend">{items}</ul>'


def table(of: Table) -> str:
    """A table that scrolls on its own where it is too wide."""
    top = "".join(_head(head, _right(i, of)) for i, head in enumerate(of.heads))
    body = ""
    for index, row in enumerate(of.rows):
        texts = list(map(escape, row))
        if of.links and of.links[index]:
            texts[1] = f'<a href="{escape(of.links[index])}">{texts[1]}</a>'
        marks = (_right(i, of) or _mark(cell) for i, cell in enumerate(row))
        cells = "".join(f"<td{mark}>{text}</td>" for mark, text in zip(marks, texts, strict=True))
        mark = ' class="now"' if index == of.now else ""
        mark += f' data-layer="{escape(row[0])}"' if of.layers else ""
        body += f"<tr{mark}>{cells}</tr>"
    label = f' data-name="{escape(of.name)}"' if of.name else ""
    region = f' role="region" aria-label="{escape(of.name)}"' if of.name else ""
    pick = " pickable" if of.layers else ""
    return (
        f'<div class="scroll{pick}" tabindex="0"{region}><table{label}><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _head(words: str, right: str) -> str:
    return f'<th scope="col"{right}>{escape(words)}</th>' if words else f"<td{right}></td>"


def pickable(label: str, body: str) -> str:
    """A picture of layers that takes the focus: up and down choose a layer."""
    return f'<div class="pickable" tabindex="0" role="group" aria-label="{escape(label)}">{body}</div>'


def _right(column: int, of: Table) -> str:
    return ' class="num"' if column in of.numeric else ""


def _mark(cell: str) -> str:
    """Pass and fail are set apart by sign and word; colour only repeats them."""
    kind = {"✓ ": "pass", "✗ ": "fail", "! ": "unsure"}.get(cell[:2])
    return f' class="{kind}"' if kind and len(cell) < 20 else ""
