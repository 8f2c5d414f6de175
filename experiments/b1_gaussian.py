"""B1: do more heads bring the condition number of their outputs, side by side, towards 1?

Theorem 3.2 is about N tokens whose head outputs are independent Gaussians: an N x D matrix with D = heads x dim. Its
condition number is simulated with heads added at a fixed dimension, against `(sqrt D + sqrt N) / (sqrt D - sqrt N)`.

Beside it stands what an architecture really does when heads are added at a fixed width: D stays, so does the number.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.progress import Track
from headwise.report.plots import PALETTE
from headwise.research.theory.conditioning import gaussian, simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLAIM = "B1"
TITLE = "Conditioning of Gaussian heads"

DIM, WIDTH = 64, 768
HEADS = {"tiny": (4, 16, 64), "small": (2, 4, 8, 16, 32, 64, 128), "full": (2, 4, 8, 16, 32, 64, 128, 256)}
TOKENS = {"tiny": (16, 64), "small": (16, 64, 197), "full": (16, 64, 197, 256)}
DRAWS = {"tiny": 8, "small": 20, "full": 320}
FAR, CLOSE = 16, 0.02  # D >= FAR N; allowed relative difference there
MANY = 64  # tokens from which a law of large numbers should hold
FIXED_HEADS = (3, 6, 12, 24, 48)


def run(size: str, device: str, assets: Path | None, track: Track) -> dict[str, Any]:
    """Simulate every number of tokens and heads that gives a full rank."""
    rows = []
    for tokens in track(TOKENS[size], "tokens"):
        for heads in HEADS[size]:
            if heads * DIM <= tokens:
                continue
            found = simulate(tokens, heads, DIM, DRAWS[size])
            formula = gaussian(tokens, heads, DIM)
            rows.append(
                {
                    "tokens": tokens,
                    "heads": heads,
                    "ratio": heads * DIM / tokens,  # D / N
                    "formula": formula,
                    "mean": found.mean,
                    "standard_error": found.standard_error,
                    "off": found.mean / formula - 1,
                }
            )
    fixed = [simulate(64, heads, WIDTH // heads, DRAWS[size]).mean for heads in FIXED_HEADS]
    return {"dim": DIM, "draws": DRAWS[size], "rows": rows, "width": WIDTH, "fixed_width": fixed, "seeds": [0]}


def _far(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if row["ratio"] >= FAR]


def _rises(result: dict[str, Any]) -> int:
    """How often adding heads made the number larger."""
    pairs = zip(result["rows"], result["rows"][1:], strict=False)
    return sum(a["tokens"] == b["tokens"] and b["mean"] > a["mean"] for a, b in pairs)


def measured(result: dict[str, Any]) -> str:
    """How far the formula is off, near and far from D = N, and what a fixed width does."""
    far, near = _far(result), [row for row in result["rows"] if row["ratio"] < FAR]
    worst = max(far, key=lambda row: abs(row["off"]))
    many = max(abs(row["off"]) for row in far if row["tokens"] >= MANY)
    tight = max(near, key=lambda row: abs(row["off"]))
    best = min(result["rows"], key=lambda row: row["mean"])
    fixed = ", ".join(f"{value:.2f}" for value in result["fixed_width"])
    return (
        f"{len(result['rows'])} points of {result['draws']} Gaussian matrices, heads of dimension {result['dim']}: "
        f"where D >= {FAR} N the mean is at most {abs(worst['off']):.1%} from the formula ({worst['tokens']} tokens, "
        f"{worst['heads']} heads: {worst['mean']:.3f} ± {1.96 * worst['standard_error']:.3f} against "
        f"{worst['formula']:.3f}), with {MANY} tokens or more {many:.1%}; closer to D = N it is up to "
        f"{abs(tight['off']):.0%} off. Adding heads raised it "
        f"{_rises(result)} times; the lowest is {best['mean']:.2f} ({best['tokens']} tokens, {best['heads']} heads). "
        f"The theorem adds columns. Heads that share a fixed width of {result['width']} add none, and the number "
        f"stays: {fixed} for {', '.join(map(str, FIXED_HEADS))} heads and 64 tokens."
    )


def draw(result: dict[str, Any], figure: Figure) -> None:
    """Simulated and predicted condition numbers over heads, a line per number of tokens."""
    axes = figure.subplots()
    for number, tokens in enumerate(sorted({row["tokens"] for row in result["rows"]})):
        rows = [row for row in result["rows"] if row["tokens"] == tokens]
        heads = [row["heads"] for row in rows]
        axes.plot(heads, [row["formula"] for row in rows], color=PALETTE[number], linestyle="--", linewidth=1)
        axes.errorbar(
            heads,
            [row["mean"] for row in rows],
            yerr=[1.96 * row["standard_error"] for row in rows],
            color=PALETTE[number],
            marker="osD^"[number % 4],
            linestyle="",
            markersize=4,
            capsize=2,
            label=f"{tokens} tokens",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel(f"heads of dimension {result['dim']}")
    axes.set_ylabel("condition number")
    axes.set_title("points: simulated; dashed: formula", fontsize=9)
    axes.legend(fontsize=8)
