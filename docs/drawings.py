"""Draws the pictures of docs/how-it-works.md into docs/pictures/: from formulas, or from committed results.

python docs/drawings.py          # write them
python docs/drawings.py --check  # exit 1 if they are not what this file draws
"""

from __future__ import annotations

import heapq
import json
import math
import sys
from html import escape
from pathlib import Path

DOCS = Path(__file__).parent
LENGTHS = DOCS.parent / "benchmarks" / "results" / "lengths-embedded-128.json"
BLUE, AMBER, GREY, INK = "#0b62a8", "#a86200", "#d9dce1", "#222"
LEFT = {0: 1.0, 1: 0.364, 2: 0.119, 3: 0.038, 4: 0.0117, 5: 0.0036, 6: 0.0011, 8: 0.0001}  # of a normal number, by bits


def text(x: float, y: float, words: str, anchor: str = "middle", **more: object) -> str:
    """Words at a place."""
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{extra}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, edge: str = "none") -> str:
    """A rectangle."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{edge}"/>'


def line(points: list[tuple[float, float]], colour: str = INK, arrow: bool = False) -> str:
    """A line through points."""
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    end = ' marker-end="url(#tip)"' if arrow else ""
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"{end}/>'


def picture(title: str, width: int, height: int, *parts: str) -> str:
    """An SVG file on a white ground, so that it can be read in dark pages too."""
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="14" fill="{INK}"><title>{escape(title)}</title>'
        f'<defs>{tip}<path d="M0 0L8 4L0 8z"/></marker></defs>{box(0, 0, width, height, "#fff")}'
        f"{''.join(parts)}</svg>\n"
    )


def stages() -> str:
    """The line of six stages, and the file that each leaves."""
    parts = [text(40, 50, "model"), line([(66, 46), (84, 46)], arrow=True)]
    files = ("readings.json", "plan.json", "model/", "heal.json", "verdict.json", "report.html")
    for place, (name, file) in enumerate(
        zip(("probe", "allocate", "reshape", "heal", "verify", "report"), files, strict=True)
    ):
        x = 86 + 112 * place
        parts += [box(x, 28, 88, 36, "#e8f1f8", BLUE), text(x + 44, 51, name, font_weight="bold")]
        parts += [line([(x + 44, 66), (x + 44, 86)], arrow=True), text(x + 44, 104, file, font_size=12)]
        if place:
            parts.append(line([(x - 22, 46), (x - 2, 46)], arrow=True))
    return picture("The six stages of a run and the file that each writes", 760, 120, *parts)


def projection() -> str:
    """Where queries, keys and values of a layer become narrower."""
    parts = []
    for row, (name, turned) in enumerate((("queries", True), ("keys", True), ("values", False))):
        y = 20 + 60 * row
        parts += [text(16, y + 24, name, "start", font_weight="bold"), box(90, y, 140, 36, "#e8f1f8", BLUE)]
        parts += [text(160, y + 23, "computed, d wide"), line([(232, y + 18), (256, y + 18)], arrow=turned)]
        if turned:
            parts += [box(258, y, 80, 36, "#fff", INK), text(298, y + 23, "rotary")]
            parts.append(line([(340, y + 18), (364, y + 18)], arrow=True))
        else:
            parts.append(line([(256, y + 18), (364, y + 18)], arrow=True))
        parts += [box(366, y, 140, 36, "#fdf3e3", AMBER), text(436, y + 23, f"times P_{name[0]}, d to r")]
        parts.append(line([(508, y + 18), (532, y + 18)], arrow=True))
        kept = "r wide, to the softmax" if name == "queries" else "r wide, cached"
        parts += [box(534, y, 176, 36, BLUE), text(622, y + 23, kept, fill="#fff")]
    parts.append(text(360, 222, "P_v is folded into the weights of values and output; P_q and P_k stay, after rotary."))
    return picture("Queries and keys are projected after rotary, values before they are cached", 726, 238, *parts)


def given(prices: list[float], bits: int) -> list[int]:
    """Bits for coefficients of these prices: each next bit goes where it saves most (greedy is optimal here)."""
    widths = sorted(LEFT)
    have = [0] * len(prices)

    def saving(index: int) -> float:
        now, then = widths[have[index]], widths[have[index] + 1]
        return prices[index] * (LEFT[now] - LEFT[then]) / (then - now)

    queue = [(-saving(index), index) for index in range(len(prices))]
    heapq.heapify(queue)
    spent = 0
    while queue:
        index = heapq.heappop(queue)[1]
        step = widths[have[index] + 1] - widths[have[index]]
        if spent + step > bits:
            continue
        have[index], spent = have[index] + 1, spent + step
        if have[index] + 1 < len(widths):
            heapq.heappush(queue, (-saving(index), index))
    return [widths[place] for place in have]


def bits() -> str:
    """Bits of 32 coefficients whose prices fall, at two bits a number, beside a rank cut of the same bytes."""
    prices = [math.exp(-index / 5) for index in range(32)]
    found, kept = given(prices, 64), 4  # 64 bits: four numbers of 16
    lost = sum(price * LEFT[width] for price, width in zip(prices, found, strict=True))
    cut = sum(prices[kept:])
    parts = [text(40, 26, "64 bits for 32 coefficients, most important first", "start", font_weight="bold")]
    for index, width in enumerate(found):
        x = 40 + 20 * index
        parts += [box(x, 176 - 16 * width, 16, 16 * width, BLUE), text(x + 8, 190, str(width), font_size=11)]
        if index < kept:
            parts.append(box(x, 212, 16, 28, AMBER))
        else:
            parts.append(box(x, 236, 16, 4, GREY))
    words = f"bits where they save most: an error of {lost / sum(prices):.1%} of all that could be lost"
    parts.append(text(680, 60, words, "end", fill=BLUE))
    words = f"a rank cut, {kept} coefficients of 16 bits: an error of {cut / sum(prices):.0%}"
    parts.append(text(680, 228, words, "end", fill=AMBER))
    return picture(
        "Bits go where they save most; a rank cut gives 16 bits to a few and none to others", 700, 250, *parts
    )


def lengths() -> str:
    """Damage by length with and without positions of the whole context, from a committed result."""
    result = json.loads(LENGTHS.read_text())
    ways = {"whole context": ("random positions", BLUE), "calibrated length": ("positions of short rows", AMBER)}
    points: dict[str, list[tuple[int, float]]] = {}
    for row in result["rows"]:
        if (row["pool"], row["budget"], row["heal"]) == ("all", "kv=75%", "none"):
            points[row["way"]] = [(one["length"], one["damage"]) for one in row["lengths"]]
    most = max(damage for one in points.values() for _, damage in one)
    parts = [text(70, 24, "increase of the loss, nats per token", "start", font_weight="bold")]
    parts += [line([(70, 40), (70, 220), (520, 220)]), text(295, 254, "tokens of the text")]
    for share in (0.0, 0.1, 0.2):
        parts.append(text(62, 224 - 170 * share / most, f"{share:g}", "end"))
    for way, found in points.items():
        places = [(90 + 410 * math.log2(length / 128) / 3, 220 - 170 * damage / most) for length, damage in found]
        parts.append(line(places, ways[way][1]))
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{ways[way][1]}"/>' for x, y in places]
        parts.append(text(places[-1][0] + 12, places[-1][1] + 5, ways[way][0], "start", fill=ways[way][1]))
    for length in (128, 512, 1024):
        parts.append(text(90 + 410 * math.log2(length / 128) / 3, 238, f"{length:,}"))
    return picture("A cut that was fitted to short rows fails on long ones", 720, 268, *parts)


DRAWN = {"stages.svg": stages, "projection.svg": projection, "bits.svg": bits, "lengths.svg": lengths}


def main() -> None:
    """Write or check every picture."""
    new = {DOCS / "pictures" / name: draw() for name, draw in DRAWN.items()}
    stale = [path.name for path, content in new.items() if not path.exists() or path.read_text() != content]
    if "--check" in sys.argv:
        sys.exit(f"stale: {', '.join(stale)}; run docs/drawings.py" if stale else 0)
    for path, content in new.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)


if __name__ == "__main__":
    main()
