"""Figures in one style: made without a display, saved the same byte for byte, readable by the colour-blind.

Each function draws given data on a given figure; nothing is computed here. matplotlib is loaded on first use only.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.errors import HeadwiseError, OutputError
from headwise.types import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours: nearly everyone can tell them apart, in print too.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8A8A00", "#7A4E2D")
SUFFIXES = (".svg", ".png")
STYLE: dict[str, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "headwise",
}


def new_figure(width: float = 7.0, height: float = 4.0) -> Figure:
    """An empty figure of so many inches whose axes come in the house style."""
    matplotlib = _matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Base

    style = {**STYLE, "axes.prop_cycle": matplotlib.cycler(color=PALETTE)}

    class HouseFigure(Base):
        """Axes take their style when they are made, so it is set around that; no global setting is touched."""

        def add_subplot(self, *args: Any, **kwargs: Any) -> Any:
            with matplotlib.rc_context(style):
                return super().add_subplot(*args, **kwargs)

    figure = HouseFigure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write SVG or PNG by the suffix: the same figure gives the same bytes, and a reader never sees half a file."""
    content = encoded(figure, check_suffix(path))
    try:
        write_atomically(path, content)
    except OSError as error:
        raise OutputError(f"{path} cannot be written ({error.strerror}); choose another file.") from None


def encoded(figure: Figure, suffix: str) -> bytes:
    """A figure as SVG or PNG."""
    drawn = io.BytesIO()
    with _matplotlib().rc_context(STYLE):
        metadata = {"Date": None} if suffix == ".svg" else None
        figure.savefig(drawn, format=suffix[1:], dpi=160, metadata=metadata)
    return drawn.getvalue()


def check_suffix(path: Path) -> str:
    """The suffix in lower case, if it is one that can be written."""
    if (suffix := path.suffix.lower()) not in SUFFIXES:
        raise OutputError(f"'{path}' does not say what to draw; end its name in {' or '.join(SUFFIXES)}.")
    return suffix


def draw_terms(figure: Figure, lags: Sequence[int], parts: dict[str, Sequence[float]], labels: Sequence[str]) -> None:
    """What each lag adds to a bound, its parts stacked; above every bar what serves the lag."""
    axes = _axes(figure, "lag", "part of the bound")
    below = [0.0] * len(lags)
    for (name, values), colour in zip(parts.items(), PALETTE, strict=False):
        axes.bar(lags, values, bottom=below, label=name, color=colour)
        below = [bottom + value for bottom, value in zip(below, values, strict=True)]
    if len(lags) <= 20:
        for lag, top, label in zip(lags, below, labels, strict=True):
            axes.annotate(label, (lag, top), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=8)
        axes.set_xticks(list(lags))
    axes.margins(y=0.15)
    axes.legend(loc="best", frameon=False)


def draw_curve(figure: Figure, heads: Sequence[int], errors: Sequence[float], best: int, per: str) -> None:
    """A bound over the number of heads, its lowest point marked."""
    axes = _axes(figure, f"heads {per}", "bound on the error", heads)
    axes.plot(heads, errors, marker="o", color=PALETTE[0])
    axes.plot(heads[best], errors[best], marker="o", markersize=11, fillstyle="none", color=PALETTE[1], linestyle="")
    words, place = f"{heads[best]} heads: {errors[best]:.3g}", (heads[best], errors[best])
    axes.annotate(words, place, xytext=(0, -14), textcoords="offset points", ha="center")
    axes.margins(y=0.15)


def draw_lines(
    figure: Figure,
    x: Sequence[float],
    lines: dict[str, Sequence[float]],
    x_label: str,
    y_label: str,
    errors: dict[str, Sequence[float]] | None = None,
) -> None:
    """Several lines over a logarithmic axis, with error bars where known; y is logarithmic if values span much."""
    axes = _axes(figure, x_label, y_label, x)
    positive = [value for values in lines.values() for value in values if value > 0]
    if positive and max(positive) > 30 * min(positive):
        axes.set_yscale("log")
    for (name, values), colour in zip(lines.items(), PALETTE, strict=False):
        label, bars = name.replace("_", " "), (errors or {}).get(name)
        axes.errorbar(x, values, yerr=bars, label=label, marker="o", color=colour, capsize=3)
    axes.legend(loc="best", frameon=False)


def _axes(figure: Figure, x_label: str, y_label: str, doubling: Sequence[float] = ()) -> Axes:
    """Named axes; where x doubles from value to value, a logarithmic one with these values as ticks."""
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if doubling:
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(doubling), [f"{value:g}" for value in doubling])
        axes.minorticks_off()
    return axes


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise HeadwiseError('drawing needs matplotlib; type: pip install "headwise[plots]"') from None
    return matplotlib
