"""A3: the curve of E_128 over the number of heads.

D = 128 is cut into H heads of dimension 128 / H: one group that reads tokens of dimension 16, or two groups that read
tokens of dimension 8. Every head count is tried, those that do not divide 128 with the dimension rounded down.
The control varies the token dimension, which is our choice, to see what the minimum depends on.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.research.theory import profiles
from headwise.research.theory.allocation import allocate, best_point, curve_over_heads
from headwise.research.theory.bound import Group, bound

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headwise.progress import Track

CLAIM = "A3"
TITLE = "The bound over the number of heads"
DIM = 128
FORMS = ((1, 16), (2, 8))  # groups, token dimension
NEAR = 8
TOKEN_DIMS = (4, 8, 16, 32, 64, 128)
SLACKS = (0.0, 0.1, 0.5)  # eps of the dimension term


def run(size: str, device: str, assets: Path | None, track: Track) -> dict[str, Any]:
    """Formulas only: the same for every size, with nothing drawn at random."""
    return {
        "seeds": [],
        "dim": DIM,
        "forms": [form(groups, token_dim) for groups, token_dim in track(FORMS, "curves")],
        "control": [form(1, token_dim) for token_dim in TOKEN_DIMS],
    }


def form(groups: int, token_dim: int) -> dict[str, Any]:
    """The curve of one form, its minimum, and what the solver finds when groups need not be alike."""
    rho = profiles.uniform(groups)
    curve = curve_over_heads(rho, DIM, token_dim, groups)
    share = DIM // groups
    fine = [bound(rho, [Group(heads, share // heads)] * groups, token_dim) for heads in range(1, share + 1)]
    lowest = [best_point(curve_over_heads(rho, DIM, token_dim, groups, eps=eps)).heads_per_group for eps in SLACKS]
    free = allocate(rho, DIM, token_dim)
    return {
        "groups": groups,
        "token_dim": token_dim,
        "heads": [point.heads_per_group for point in curve],
        "error": [point.error for point in curve],
        "every_head_count": fine,
        "best_heads": 1 + fine.index(min(fine)),
        "best_error": min(fine),
        "best_heads_by_eps": lowest,
        "solver": {"groups": [list(group) for group in free.groups], "error": free.error},
    }


def u_shaped(row: dict[str, Any]) -> bool:
    """Whether the curve falls to its minimum and rises after it."""
    low = row["error"].index(min(row["error"]))
    before, after = row["error"][: low + 1], row["error"][low:]
    return before == sorted(before, reverse=True) and after == sorted(after) and 0 < low < len(row["error"]) - 1


def measured(result: dict[str, Any]) -> str:
    """The numbers in words."""
    parts = []
    for row in result["forms"]:
        words = "one group" if row["groups"] == 1 else f"{row['groups']} groups"
        shape = "U-shaped" if u_shaped(row) else "not U-shaped"
        near = ", ".join(f"{h}: {e:.3f}" for h, e in zip(row["heads"], row["error"], strict=True) if 2 <= h <= 32)
        parts.append(
            f"{words}, d = {row['token_dim']}: {shape}, lowest at {row['best_heads']} heads per group ({near})"
        )
    rows = result["control"]
    fits = [row for row in rows if row["best_heads"] * row["token_dim"] == result["dim"] and row["best_error"] < 1]
    where = ", ".join(f"{row['best_heads']} for d = {row['token_dim']}" for row in fits)
    rest = ", ".join(f"d = {row['token_dim']}" for row in rows if row not in fits)
    lost = f"; no such minimum at {rest}" if rest else ""
    return (
        f"{'; '.join(parts)}. The minimum is where a head just holds a token, d_m = d, so it moves with the token "
        f"dimension (one group: {where}{lost}). Formulas, no noise."
    )


def draw(result: dict[str, Any], figure: Figure) -> None:
    """Both forms, every head count as a line and the equal divisions as points."""
    from headwise.report.plots import PALETTE

    axes = figure.subplots()
    for row, colour in zip(result["forms"], PALETTE, strict=False):
        label = f"{row['groups']} group{'s' if row['groups'] > 1 else ''}, d = {row['token_dim']}"
        fine = row["every_head_count"]
        axes.plot(range(1, len(fine) + 1), fine, color=colour, linewidth=0.8, alpha=0.6)
        axes.plot(row["heads"], row["error"], marker="o", linestyle="", color=colour, label=label)
    axes.axvline(NEAR, color="#999999", linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("heads per group")
    axes.set_ylabel(f"bound on the error, D = {result['dim']}")
    axes.legend()
