"""`headwise theory`: the papers' formulas at the command line. Tables, --json, --plot."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.errors import HeadwiseError, OutputError, ShapeError

if TYPE_CHECKING:
    from headwise.research.theory.allocation import Allocation
    from headwise.research.theory.bound import Floats, Group, Term

app = typer.Typer(
    help="The papers' formulas: error bound, best groups of heads, softmax saturation, conditioning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

SATURATES = (
    "The Jacobian's norm falls like 1/L once e^2c/L is below 1/2. A head's output does not follow it: errors aligned "
    "with the values stay as they are, independent ones fall like 1/sqrt(L)."
)
DIGITS = 19  # a number with as many or more is no size of anything
Dim = Annotated[int, typer.Option(help="Budget D: the sum over all heads of their dimensions.")]
TokenDim = Annotated[int, typer.Option(help="Dimension d of a token.")]
Rho = Annotated[
    str | None, typer.Option(help="Weights of lags: uniform, geometric:0.5, power:1.5, 0.5,0.3,0.2, readings.json:3.")
]
Lags = Annotated[int | None, typer.Option(help="Number of lags.")]
Ngram = Annotated[int | None, typer.Option(help="Short for --rho uniform --lags N.")]
Norm = Annotated[float, typer.Option(help="Largest norm B of a token.")]
Eps = Annotated[float, typer.Option(help="Slack of the dimension term.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Plot = Annotated[Path | None, typer.Option(help="Draw the result into this .svg or .png file.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")]
Draws = Annotated[int, typer.Option(help="Number of random draws of a simulation; 0: formulas only.")]
Seed = Annotated[int, typer.Option(help="Random seed.")]


class _Output:
    """Where an answer goes: standard output, as a table with sentences or as JSON, and maybe a drawing in a file."""

    def __init__(self, as_json: bool, plot: Path | None, overwrite: bool) -> None:
        self.as_json, self.plot = as_json, plot
        if plot is None:
            return
        from headwise.report.plots import check_suffix

        check_suffix(plot)  # what cannot be written is refused before anything is computed
        if plot.exists() and not overwrite:
            raise OutputError(f"{plot} exists; choose another name or add --overwrite.")

    def show(self, found: Any, rows: Sequence[dict[str, Any]], title: str, *sentences: str) -> None:
        """The answer as JSON, or rows as a table with a column per key, and what follows from it in words."""
        if self.as_json:
            typer.echo(json.dumps(found, indent=1, allow_nan=False))
            return
        from rich.console import Console
        from rich.table import Table

        table = Table(*(name.replace("_", " ") for name in rows[0]), title=title)
        for row in rows:
            table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
        Console().print(table)
        for sentence in filter(None, sentences):
            typer.echo(sentence)

    def draw(self, what: str, *data: Any) -> None:
        """The drawing of the answer: terms, a curve or lines, as `report.plots` draws them."""
        if self.plot is None:
            return
        from headwise.report import plots

        figure = plots.new_figure()
        getattr(plots, f"draw_{what}")(figure, *data)
        plots.save(figure, self.plot)
        typer.echo(f"drawn: {self.plot}", err=self.as_json)


@app.command()
def bound(
    token_dim: TokenDim,
    dim: Annotated[int | None, typer.Option(help="Budget D: shows the curve over the number of heads.")] = None,
    groups: Annotated[int, typer.Option(help="Equal groups on the curve.")] = 1,
    group: Annotated[list[str] | None, typer.Option(help="HEADSxDIM of lag 1, 2, ...; repeatable.")] = None,
    rho: Rho = None,
    lags: Lags = None,
    ngram: Ngram = None,
    norm: Norm = 1.0,
    eps: Eps = 0.0,
    as_json: Json = False,
    plot: Plot = None,
    overwrite: Overwrite = False,
) -> None:
    """The error bound: of given groups lag by lag, or of a budget over the number of heads."""
    out = _Output(as_json, plot, overwrite)
    if (dim is None) == (not group):
        raise HeadwiseError("say what to bound: --dim 128 for the curve over heads, or --group 8x16 once per lag.")
    if group:
        given = [_group(text) for text in group]
        _show_groups(out, _weights(rho, lags, ngram, len(given)), given, token_dim, norm, eps)
    elif dim is not None:
        _show_curve(out, _weights(rho, lags, ngram, groups), dim, token_dim, groups, norm, eps)


@app.command()
def allocate(
    dim: Dim,
    token_dim: TokenDim,
    rho: Rho = None,
    lags: Lags = None,
    ngram: Ngram = None,
    norm: Norm = 1.0,
    eps: Eps = 0.0,
    at_most: Annotated[bool, typer.Option("--at-most", help="Spend at most the budget, not all of it.")] = False,
    head_step: Annotated[int, typer.Option(help="Head counts are multiples of this.")] = 1,
    dim_step: Annotated[int, typer.Option(help="Head dimensions are multiples of this.")] = 1,
    any_lags: Annotated[bool, typer.Option("--any-lags", help="Serve any lags, not only the first ones.")] = False,
    as_json: Json = False,
    plot: Plot = None,
    overwrite: Overwrite = False,
) -> None:
    """The groups of heads with the least bound for a budget: proven, not searched."""
    from headwise.research.theory.allocation import allocate as solve
    from headwise.research.theory.bound import terms

    out, weights = _Output(as_json, plot, overwrite), _weights(rho, lags, ngram, None)
    best = solve(weights, dim, token_dim, norm, eps, not at_most, head_step, dim_step, any_lags)
    rows = terms(weights, best.groups, token_dim, norm, eps, best.lags)
    title, words = f"least bound for D = {dim}, tokens of dimension {token_dim}", _sentence(best)
    found = {"spent": best.spent, "dim": dim, **_terms_json(rows, best.error), "sentence": words}
    _show_terms(out, found, rows, title, words, _warning(best.groups, best.lags))


@app.command()
def saturation(
    logit_bound: Annotated[float, typer.Option(help="All logits lie in [-c, c]; give c.")],
    lengths: Annotated[str, typer.Option(help="Numbers of keys L.")] = "4,16,64,256,1024",
    logit_error: Annotated[float, typer.Option(help="Each logit is wrong by at most this.")] = 0.1,
    norm: Annotated[float, typer.Option(help="Norm of a value, at most.")] = 1.0,
    draws: Draws = 0,
    seed: Seed = 0,
    as_json: Json = False,
    plot: Plot = None,
    overwrite: Overwrite = False,
) -> None:
    """How the softmax Jacobian's norm falls with length, and whether a head's error does."""
    from headwise.research.theory.saturation import fit_slope, head_error, norm_bound, simulate

    out = _Output(as_json, plot, overwrite)
    found: list[dict[str, float]] = []
    for length in _integers(lengths, "--lengths"):
        row = {"length": length, "norm_bound": norm_bound(length, logit_bound)}
        if draws:
            row["simulated_norm"], row["standard_error"] = simulate(length, logit_bound, draws, seed)
        for name, aligned in (("head_error_aligned", True), ("head_error_independent", False)):
            row[name] = head_error(length, logit_bound, logit_error, norm, aligned)
        found.append(row)
    known, fitted = [row for row in found if row["length"] > 1], ""
    if draws and len({row["length"] for row in known}) > 2:
        slope, error = fit_slope([row["length"] for row in known], [row["simulated_norm"] for row in known])
        fitted = f"simulated: norm ~ L^{slope:.3f} (standard error {error:.3f})"
    title = f"softmax over logits within {logit_bound:g}, each wrong by at most {logit_error:g}"
    _show_lines(out, found, title, ("length", "keys L", "norm or error"), found, SATURATES, fitted)


@app.command()
def conditioning(
    tokens: Annotated[int, typer.Option(help="Number N of tokens.")],
    head_dim: Annotated[int, typer.Option(help="Dimension of a head.")],
    heads: Annotated[str, typer.Option(help="Numbers of heads.")] = "1,2,4,8,16,32",
    draws: Draws = 0,
    seed: Seed = 0,
    as_json: Json = False,
    plot: Plot = None,
    overwrite: Overwrite = False,
) -> None:
    """The condition number of many Gaussian heads side by side: it falls towards 1 as heads are added."""
    from headwise.research.theory.conditioning import gaussian, simulate

    out = _Output(as_json, plot, overwrite)
    found: list[dict[str, float]] = []
    for count in _integers(heads, "--heads"):
        row = {"heads": count, "width": count * head_dim, "condition": gaussian(tokens, count, head_dim)}
        if draws:
            row["simulated"], row["standard_error"] = simulate(tokens, count, head_dim, draws, seed)
        found.append(row)
    known, words = [row for row in found if math.isfinite(row["condition"])], ""
    if len(known) < len(found):
        words = f"infinite up to a width of {tokens}: {tokens} tokens need more columns than that."
    title = f"{tokens} tokens, heads of dimension {head_dim}"
    _show_lines(out, found, title, ("heads", "heads", "condition number"), known, words)


def _show_lines(
    out: _Output,
    found: list[dict[str, float]],
    title: str,
    axes: tuple[str, str, str],
    drawn: list[dict[str, float]],
    *sentences: str,
) -> None:
    """A table of all rows, and a line per column of those that can be drawn, with error bars where one is simulated.

    `axes`: the column along which lines are drawn, and what both axes are called. In JSON, infinite numbers are null.
    """
    finite = [{name: v if math.isfinite(v) else None for name, v in row.items()} for row in found]
    out.show(finite, found, title, *sentences)
    if out.plot is not None and not drawn:
        raise HeadwiseError("every condition number is infinite, so there is nothing to draw; try more heads.")
    columns = {name: [row[name] for row in drawn] for name in found[0]}
    errors, x = columns.pop("standard_error", None), columns.pop(axes[0])
    columns.pop("width", None)
    bars = {} if errors is None else {name: errors for name in columns if name.startswith("simulated")}
    out.draw("lines", x, columns, *axes[1:], bars)


def _show_terms(out: _Output, found: Any, rows: Sequence[Term], title: str, *sentences: str) -> None:
    """The bound lag by lag, with what serves each lag."""
    names = {"dimension term": "head too small", "heads term": "too few heads", "unserved": "not served"}
    parts = [(row.dimension, row.heads, row.unserved) for row in rows]
    table = []
    for row, three in zip(rows, parts, strict=True):
        sizes = row.group._asdict() if row.group else {"heads": "-", "dim": "-"}
        numbers = dict(zip((*names, "sum"), (*three, row.total), strict=True))
        table.append({"lag": row.lag, **sizes, **{name: f"{number:.4f}" for name, number in numbers.items()}})
    out.show(found, table, title, *sentences)
    labels = [f"{row.group.heads}x{row.group.dim}" if row.group else "-" for row in rows]
    stacked = dict(zip(names.values(), map(list, zip(*parts, strict=True)), strict=True))
    out.draw("terms", [row.lag for row in rows], stacked, labels)


def _weights(rho: str | None, lags: int | None, ngram: int | None, default: int | None) -> Floats:
    """The weights of lags from the three ways to give them; uniform over `default` lags if none is used."""
    from headwise.research.theory import profiles

    if ngram is not None:
        if rho is not None or lags is not None:
            raise HeadwiseError("--ngram already says the weights and the lags; leave --rho and --lags away.")
        return profiles.uniform(ngram)
    if rho is None and lags is None and default is None:
        raise HeadwiseError("say what to read: --ngram 4, or --rho 0.5,0.3,0.2, or --rho geometric:0.5 --lags 8.")
    listed = rho is not None and ("," in rho or ".json" in rho)  # says its own number of lags
    return profiles.parse(rho or "uniform", default if lags is None and not listed else lags)


def _group(text: str) -> Group:
    from headwise.research.theory.bound import Group

    heads, _, dim = text.lower().partition("x")
    if not all(part.isdecimal() and len(part) < DIGITS for part in (heads, dim)):
        raise ShapeError(f"'{text}' is no group; give heads x dimension, such as --group 8x16.")
    return Group(int(heads), int(dim))


def _integers(text: str, option: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < DIGITS and int(part) > 0 for part in parts):
        raise HeadwiseError(f"'{text}' is no list of whole numbers above 0; try {option} 4,16,64.")
    return [int(part) for part in parts]


def _show_groups(out: _Output, weights: Floats, groups: list[Group], token_dim: int, norm: float, eps: float) -> None:
    from headwise.research.theory.bound import terms

    rows = terms(weights, groups, token_dim, norm, eps)
    total = math.fsum(row.total for row in rows)
    found = {"dim": sum(heads * dim for heads, dim in groups), **_terms_json(rows, total)}
    title = f"bound for tokens of dimension {token_dim}"
    _show_terms(out, found, rows, title, f"error at most {total:.4g}", _warning(groups))


def _show_curve(out: _Output, weights: Floats, dim: int, token_dim: int, groups: int, norm: float, eps: float) -> None:
    from headwise.research.theory.allocation import best_point, curve_over_heads

    curve = curve_over_heads(weights, dim, token_dim, groups, norm, eps)
    best, points = best_point(curve), [point._asdict() for point in curve]
    words = f"least at {best.heads_per_group} heads of dimension {best.head_dim} per group: {best.error:.4g}"
    found = {"dim": dim, "groups": groups, "best": best._asdict(), "curve": points}
    out.show(found, points, f"bound over heads, D = {dim}, {groups} group(s) alike", words)
    out.draw("curve", [p.heads_per_group for p in curve], [p.error for p in curve], curve.index(best), "per group")


def _sentence(best: Allocation) -> str:
    """The answer in words."""
    if not best.groups:
        return f"no group is worth its price: serving no lag is best, error at most {best.error:.4g}."
    heads = _between([group.heads for group in best.groups])
    dims = _between([group.dim for group in best.groups])
    count = "1 group" if len(best.groups) == 1 else f"{len(best.groups)} groups"
    return (
        f"{count} of {heads} heads of dimension {dims}: {best.heads} heads in all, "
        f"{best.spent} of {best.dim} spent, error at most {best.error:.4g}."
    )


def _warning(groups: Sequence[Group], lags: Sequence[int] | None = None) -> str:
    from headwise.research.theory.bound import below_lag

    if not (short := below_lag(groups, lags)):
        return ""
    which = ("lag " if len(short) == 1 else "lags ") + ", ".join(map(str, short))
    return f"fewer heads than the lag at {which}: heads with a linear position bias cannot keep the bound there."


def _between(values: list[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _terms_json(rows: Sequence[Term], error: float) -> dict[str, Any]:
    served = [{"lag": row.lag, **row.group._asdict()} for row in rows if row.group]
    lags = [{"lag": r.lag, "dimension": r.dimension, "heads": r.heads, "unserved": r.unserved} for r in rows]
    return {"error": error, "heads": sum(group["heads"] for group in served), "groups": served, "terms": lags}
