"""`headwise advise`: what the experiments say about a shape, line by line, and where they say nothing.

A line proposes a value. It rests on measured comparisons (`advice.json`, written by `headwise reproduce --render`) only
where the shape lies within what was measured and the comparison was decided; otherwise the value is usual practice and
the line says "no evidence here", with the nearest comparisons beside it. No torch: answers come at once.
"""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.errors import HeadwiseError
from headwise.files.json import read_object

KNOWN = Path(__file__).with_name("advice.json")
NOTHING = "no evidence here"
MEASURED, ARITHMETIC = "measured", "arithmetic"
HEAD = 64  # channels of a head in usual practice
REACH = 1.25  # a sweep speaks for sizes up to this factor outside what was measured
UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
DECIDED = {"shown": 1, "smaller than the margin": 1, "against": -1}


@dataclass(frozen=True, slots=True)
class Line:
    """One piece of advice."""

    topic: str
    advice: str
    basis: str  # measured, arithmetic, or "no evidence here"
    evidence: tuple[dict[str, Any], ...] = ()  # comparisons with intervals and source files, those that apply first


@dataclass(frozen=True, slots=True)
class Advice:
    """What was asked, and the lines."""

    asked: dict[str, Any]
    lines: tuple[Line, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def advise(
    width: int, layers: int, context: int = 1024, params: float | str | None = None, flops: float | str | None = None
) -> Advice:
    """Heads, head dimension, key/value heads, depth against width and where early layers end, for a decoder.

    `params` is a budget of parameters without embeddings, `flops` one of training FLOPs; both take texts such as 100M.

    >>> advise(768, 12, 1024).lines[0].topic
    'heads'
    """
    for name, value in (("width", width), ("layers", layers), ("context", context)):
        if value < 1:
            raise HeadwiseError(f"--{name} {value}: at least 1 is needed.")
    if width % 2:
        raise HeadwiseError(f"--width {width} is odd: positions turn in pairs; give an even width.")
    amounts = {name: None if v is None else amount(v, name) for name, v in (("params", params), ("flops", flops))}
    known = read_object(KNOWN, HeadwiseError, "install headwise again")
    shape = {"width": width, "layers": layers, "context": context}
    return Advice({**shape, **amounts}, (*_of_shape(known, shape), *_budget(shape, **amounts)))


def amount(text: float | str, name: str) -> float:
    """A number such as 100M or 2e18.

    >>> amount("100M", "params")
    100000000.0
    """
    match = re.fullmatch(r"([\d.]+(?:e[+-]?\d+)?)([KMGBTPE]?)", str(text).strip(), re.IGNORECASE)
    try:
        found = float(match.group(1)) * UNITS[match.group(2).upper()] if match else 0.0
    except ValueError:
        found = 0.0
    if found <= 0:
        raise HeadwiseError(f"--{name} {text}: give a number above zero, such as 100M or 2e18.")
    return found


def usual_heads(width: int) -> int:
    """Heads of about 64 channels that share the width evenly, each of an even dimension."""
    near = (dim for far in range(HEAD) for dim in (HEAD + far, HEAD - far) if dim > 0 and dim % 2 == 0)
    return width // next(dim for dim in near if width % dim == 0)  # at the latest 2, as the width is even


def _evidence(known: dict[str, Any], topic: str, shape: dict[str, int]) -> tuple[int, tuple[dict[str, Any], ...]]:
    """Which way the comparisons that apply speak (0: not at all), and all comparisons, those that apply first."""
    found = []
    for item in known[topic]["items"]:
        sizes = {key: item["measured"][key] for key in shape}
        inside = item["measured"]["kind"] == "text" and all(
            low / REACH <= shape[key] <= high * REACH for key, (low, high) in sizes.items()
        )
        found.append({**item, "inside": inside})
    found.sort(key=lambda item: (not item["inside"], item["outcome"] not in DECIDED))
    ways = {DECIDED[item["outcome"]] for item in found if item["inside"] and item["outcome"] in DECIDED}
    return (ways.pop() if len(ways) == 1 else 0), tuple(found)


def _of_shape(known: dict[str, Any], shape: dict[str, int]) -> list[Line]:
    """A line per question: what to do where nothing is decided, where the evidence is for it, and against it."""
    width, layers, heads = shape["width"], shape["layers"], usual_heads(shape["width"])
    dim, usual, practice = width // heads, f"{heads} heads", "(usual practice)"
    rows = (  # label, topic of the evidence, advice: undecided, for, against
        ("heads", "heads", f"{usual} {practice}", f"more than {usual}, each smaller", f"{usual}, not more"),
        ("head dimension", "heads", f"{dim} {practice}", f"below {dim}", f"{dim}, not less"),
        ("attention width", "wider_attention",
         f"equal to the width {practice}", "wider than the model", "no wider than the model"),
        ("key/value heads", "", f"{heads}, or fewer where the cache must be small {practice}", "", ""),
        ("depth against width", "width_for_depth",
         f"{layers} layers of width {width}, as given", "fewer and wider layers", "no fewer layers"),
        ("where early ends", "early",
         "no border known", f"before layer {layers // 2 + 1}", "no border: later ones saturate no more"),
        ("layers alike or not", "uneven_layers", f"layers alike {practice}", "layers that differ", "layers alike"),
    )  # fmt: skip
    found = []
    for label, topic, *advice in rows:
        way, evidence = _evidence(known, topic, shape) if topic else (0, ())
        found.append(Line(label, advice[way], MEASURED if way else NOTHING, evidence))
    return found


def _budget(shape: dict[str, int], params: float | None, flops: float | None) -> list[Line]:
    """What the shape costs, by formula: attention of 4 and an MLP of 8 width^2 per layer, embeddings not counted."""
    width, layers = shape["width"], shape["layers"]
    needs, lines = 12.0 * layers * width**2, []
    words = f"{needs / 1e6:,.1f}M parameters without embeddings"
    if params is not None:
        deeper, wider = int(params / (12 * width**2)), int((params / (12 * layers)) ** 0.5) // 64 * 64
        fits = f"fits {params / 1e6:,.1f}M" if needs <= params else f"is above {params / 1e6:,.1f}M"
        words += f": {fits}, which pays for {max(1, deeper)} layers of this width or {layers} of width {max(64, wider)}"
    lines.append(Line("parameters", words, ARITHMETIC))
    if flops is not None:
        tokens = flops / (6 * needs + 6 * layers * width * shape["context"])
        lines.append(Line("tokens", f"{tokens / 1e9:,.2f}G tokens, {tokens / needs:.1f} per parameter", ARITHMETIC))
    return lines


def command(
    width: Annotated[int, typer.Option(help="Hidden size.")],
    layers: Annotated[int, typer.Option(help="Layers.")],
    context: Annotated[int, typer.Option(help="Tokens of a text.")] = 1024,
    params: Annotated[str | None, typer.Option(help="Parameters without embeddings, such as 100M.")] = None,
    flops: Annotated[str | None, typer.Option(help="Training FLOPs, such as 2e18.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Print what the experiments show about a shape: heads, dimensions, depth, with intervals and sources."""
    found = advise(width, layers, context, params, flops)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
        return
    for line in found.lines:
        typer.echo(f"{line.topic}: {line.advice} [{line.basis}]")
        for item in line.evidence[:3]:
            typer.echo(f"    {_said(item)}")


def _said(item: dict[str, Any]) -> str:
    """A comparison in one line."""
    apart = "" if item["inside"] else "nearest: "
    unit = f" {item['unit']}" if item["unit"] else ""
    return (
        f"{apart}{item['what']} {item['gain']:+.3f} [{item['low']:+.3f}, {item['high']:+.3f}]{unit}, {item['outcome']} "
        f"({item['measured']['kind']}, width {_span(item['measured']['width'])}, {item['source']})"
    )


def _span(ends: list[int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"
