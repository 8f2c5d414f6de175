"""The few shapes that the pictures are made of, and the scales that place them."""

import math
from typing import NamedTuple

from headwise.report._text import escape, small


class Scale(NamedTuple):
    """From values to coordinates. Values outside are moved to the nearest end, so zero lies on a logarithm's floor."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    shift: float = 0.0  # added to every value, so that a logarithm can begin at nothing

    def __call__(self, value: float) -> float:
        """The coordinate of a value."""
        inside = min(max(value + self.shift, self.low), self.high)
        if self.log:
            part = math.log(inside / self.low) / math.log(self.high / self.low)
        else:
            part = (inside - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self, most: int = 5) -> list[float]:
        """Round values inside the scale: decades, or multiples of 1, 2 or 5; none of them is an odd end of an axis."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            for steps in ((1,), (1, 3), (1, 2, 5), range(1, 10)):
                values = [float(f"{m}e{k}") for k in range(first, last + 1) for m in steps]
                inside = [v for v in values if self.low * (1 - 1e-9) <= v <= self.high * (1 + 1e-9)]
                if len(inside) > 1:
                    return inside[:: -(-len(inside) // most)]
        raw = (self.high - self.low) / most
        unit = 10.0 ** math.floor(math.log10(raw))
        step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= raw * 0.999)
        return [k * step for k in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)]


def xy(value: float) -> str:
    """A coordinate with one decimal and nothing superfluous."""
    return "0" if abs(value) < 0.05 else f"{value:.1f}".removesuffix(".0")


def svg(width: float, height: float, label: str, body: str, name: str = "", more: str = "") -> str:
    """A picture that says in words what it shows."""
    kind = (f' class="{name}"' if name else "") + more
    return f'<svg{kind} viewBox="0 0 {xy(width)} {xy(height)}" role="img" aria-label="{escape(label)}">{body}</svg>'


def rect(x: float, y: float, width: float, height: float, name: str) -> str:
    """A rectangle; a width below nothing is none."""
    return f'<rect class="{name}" x="{xy(x)}" y="{xy(y)}" width="{xy(max(0.0, width))}" height="{xy(height)}"/>'


def text(x: float, y: float, words: object, name: str = "t", anchor: str = "") -> str:
    """A line of text; anchor is nothing, middle or end."""
    where = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text class="{name}" x="{xy(x)}" y="{xy(y)}"{where}>{escape(words)}</text>'


def path(where: str, name: str) -> str:
    """A line drawn with SVG's own pen."""
    return f'<path class="{name}" d="{where}"/>'


def line(x1: float, y1: float, x2: float, y2: float, name: str) -> str:
    """A straight line."""
    return path(f"M{xy(x1)} {xy(y1)}L{xy(x2)} {xy(y2)}", name)


def polyline(points: list[tuple[float, float]], name: str) -> str:
    """A line through points."""
    return f'<polyline class="{name}" points="{" ".join(f"{xy(x)},{xy(y)}" for x, y in points)}"/>'


def circle(x: float, y: float, radius: float, name: str) -> str:
    """A dot or, with a hollow class, a ring."""
    return f'<circle class="{name}" cx="{xy(x)}" cy="{xy(y)}" r="{xy(radius)}"/>'


def diamond(x: float, y: float) -> str:
    """A square on its corner: the mark of what was chosen."""
    return path(f"M{xy(x)} {xy(y - 5)}l5 5l-5 5l-5 -5z", "k b")


def titled(title: object, body: str, layer: int | None = None, depth: float | None = None) -> str:
    """A group with a tooltip; with a layer it can be chosen, with a depth (0 to 1) its lines are coloured by it."""
    mark = "" if layer is None else f' data-layer="{layer}"'
    mark += "" if depth is None else f' style="--d:{100 * depth:.0f}"'
    return f"<g{mark}><title>{escape(title)}</title>{body}</g>"


def short_tick(value: float) -> str:
    """A tick of an axis in few letters, rounded.

    >>> short_tick(0.001), short_tick(2048.0), short_tick(0.0523098), short_tick(2.5e-5), short_tick(0.0)
    ('0.001', '2,048', '0.052', '0.000025', '0')
    """
    if 0 < abs(value) < 1e-2:
        return small(value, 2)
    if value == 0 or 1e-2 <= abs(value) < 1e5:
        return f"{float(f'{value:.2g}') if abs(value) < 10 else round(value):,}".removesuffix(".0")
    return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-").replace("e+0", "e")


def spread(wanted: list[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near those wanted, at least `gap` apart, so that labels do not lie on each other.

    >>> spread([10, 11, 50], 12, 0, 100)
    [10, 22, 50]
    """
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    placed = list(wanted)
    floor = low
    for index in order:
        placed[index] = max(placed[index], floor)
        floor = placed[index] + gap
    ceiling = high
    for index in reversed(order):
        placed[index] = min(placed[index], ceiling)
        ceiling = placed[index] - gap
    return placed
