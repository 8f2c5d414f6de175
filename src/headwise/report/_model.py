"""The model as a picture that is also a table: layers down, heads across, what stays filled and what goes pale.

All heads of a layer have the same dimensions, so a layer is drawn with one dashed line per kind of bar: a dash is a
head, the line's width is the dimension. `assets/explore.js` redraws the same lines when the budget is moved.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from headwise.report._bits import WHOLE, is_coded, mean_bits, row_sizes
from headwise.report._svg import Scale
from headwise.report._text import escape, small
from headwise.types import GONE, LayerKeep, LayerShape, Plan, Sweep

GAP = 0.4  # between heads that do not share keys, in heads
MLP_SHARE = 96  # percent of its column that the widest MLP fills
DECADES = 6  # that bars of damage span at most
LEAST = -5  # power of ten of the least damage that is distinguished from none
DENSE = 34  # more layers: rows too low for text


class ModelRow(NamedTuple):
    """One layer before and after."""

    layer: int
    old: LayerShape
    new: LayerShape
    heads: tuple[int, ...]  # query heads that stay
    damage: float | None  # predicted
    bits: tuple[tuple[float, float], tuple[float, float]] | None = None  # of keys and values before and after, if coded

    def drawn(self, after: bool) -> tuple[float, float]:
        """Height of queries/keys and of values: their dimensions, or what is left of these at so many bits."""
        shape = self.new if after else self.old
        if self.bits is None:
            return shape.qk_dim, shape.v_dim
        (keys, values), rows = self.bits[after], row_sizes(self.old)
        return rows[0] * keys / WHOLE, rows[1] * values / WHOLE

    @property
    def group(self) -> int:
        """Query heads that share keys, in the source."""
        return max(1, self.old.queries_per_group)


def model_rows(
    plan: Plan, damages: Sequence[float | None] | None = None, sweep: Sweep | None = None
) -> tuple[ModelRow, ...]:
    """The rows of a plan's picture; `sweep` has what they may be redrawn with."""
    known = damages or (None,) * len(plan.keep)
    layers = zip(plan.source.layers, plan.target.layers, plan.keep, known, strict=True)
    rows = [ModelRow(i, old, new, kept_heads(new, keep), cost) for i, (old, new, keep, cost) in enumerate(layers)]
    if is_coded(plan, sweep):
        rows = [row._replace(bits=(mean_bits(row.old, row.old), mean_bits(row.old, row.new))) for row in rows]
    return tuple(rows)


def kept_heads(new: LayerShape, keep: LayerKeep) -> tuple[int, ...]:
    """Query heads that stay, by index; none of a layer that is gone."""
    return tuple(range(new.query_heads)) if keep.query_heads is None or new.gone else keep.query_heads


def dashes(heads: Sequence[int], group: int, start: float, height: float) -> str:
    """A line per run of neighbouring heads of a group, at half the height, so that a stroke as wide fills it.

    >>> dashes((0, 1, 3), 2, 0.08, 0.5)
    'M0.08 0.75h1.42M3.48 0.75h0.42'
    """
    path, y = "", _short(1 - height / 2)
    runs: list[list[int]] = []
    for head in heads:
        if runs and head == runs[-1][-1] + 1 and head % group:
            runs[-1].append(head)
        else:
            runs.append([head])
    for run in runs:
        path += f"M{_short(run[0] + GAP * (run[0] // group) * (group > 1) + start)} {y}h{_short(len(run) - 0.58)}"
    return path


def _short(value: float) -> str:
    """Three decimals at most, halves up, as the script rounds too."""
    return f"{math.floor(value * 1000 + 0.5) / 1000:.3f}".rstrip("0").rstrip(".")


def full_dim(rows: Sequence[ModelRow]) -> int:
    """The largest dimension of any head, which fills a row's height."""
    return max(1, *(max(*row_sizes(row.old)) for row in rows))


def full_mlp(rows: Sequence[ModelRow]) -> int:
    """The widest MLP."""
    return max(1, *(row.old.mlp_width for row in rows))


def damage_scale(values: Iterable[float | None]) -> tuple[float, float]:
    """Ends of the bars of damage, powers of ten: the same for every budget, so that bars can be compared.

    Measured damage may lie below zero by chance; it has no bar.

    >>> damage_scale([0.03, 2e-5, 0.0, None, -1e-6]), damage_scale([3e-7])
    ((1e-05, 0.1), (1e-05, 0.0001))
    """
    positive = [value for value in values if value and 0 < value < math.inf]
    high = math.ceil(math.log10(max(positive, default=1.0)) - 1e-9)
    low = math.floor(math.log10(min(positive, default=1.0)) + 1e-9)
    low = max(low, high - DECADES, LEAST)
    return float(f"1e{low}"), float(f"1e{max(high, low + 1)}")


def damage_text(damage: float) -> str:
    """A layer's damage in few letters, as the script writes it too.

    >>> damage_text(0.0), damage_text(0.123), damage_text(0.00004), damage_text(3e-7)
    ('0', '0.12', '0.00004', '<0.00001')
    """
    if 0 < damage < 10**LEAST:
        return f"<{10**LEAST:.{-LEAST}f}"
    return f"{damage:.2g}" if damage >= 1e-3 or damage <= 0 else small(damage, 1)


def model_keys(rows: Sequence[ModelRow], scale: tuple[float, float] | None = None) -> list[tuple[str, str]]:
    """The colours of the picture and what they mean."""
    coded = rows[0].bits is not None
    keys = [("qk", f"keys, height: bits of {WHOLE}" if coded else "query/key dim")]
    if any(row.new.qk_width > row.new.qk_dim and not row.new.gone for row in rows) and not coded:
        keys.append(("wide-qk", "computed, not cached"))
    keys += [
        ("v", "values" if coded else "value dim"),
        *([("mlp", "MLP width")] if full_mlp(rows) > 1 else []),
        ("ghost", "grey: no longer stored" if coded else "grey: removed"),
    ]
    if any(row.damage is not None for row in rows):
        low, high = (damage_text(end) for end in scale or damage_scale(row.damage for row in rows))
        keys.append(("dmg", f"predicted damage before healing, logarithmic from {low} to {high}"))
    return keys


def draw_model(rows: Sequence[ModelRow], interactive: bool = False, scale: tuple[float, float] | None = None) -> str:
    """The table. Interactive: with names for the script, which moves the budget and selects layers."""
    scale = scale or damage_scale(row.damage for row in rows)
    priced = any(row.damage is not None for row in rows)
    coded = rows[0].bits is not None
    heads = {name: name for name in ("layer", "before", "after", "heads", "qk", "v")}
    titles = {"qk": "query/key dimension per head", "v": "value dimension per head", "heads": "query heads"}
    if coded:
        heads |= {"qk": "k bits", "v": "v bits"}
        titles |= {"qk": "bits per number of cached keys, everything counted", "v": "and of cached values"}
    heads |= {"MLP": "MLP"} if full_mlp(rows) > 1 else {}
    heads |= {"damage": "damage"} if priced else {}
    top = "".join(_head(name, words, titles.get(name, "")) for name, words in heads.items())
    body = "".join(_row(row, rows, scale, priced) for row in rows)
    height = max(8.0, min(26.0, 430 / len(rows)))
    dense = " dense" if len(rows) > DENSE else ""
    mark = ' id="model"' if interactive else ""
    return (
        f'<table{mark} class="model{dense}" style="--row:{height:.1f}px">'
        f'<caption class="sr">Every layer of the model before and after: heads, {"bits" if coded else "dimensions"}, '
        "MLP width</caption>"
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    )


def _head(name: str, shown: str, title: str) -> str:
    number = " num" if name in ("heads", "qk", "v") else ""
    words = f' title="{title}"' if title else ""
    return f'<th scope="col" class="c-{name.lower()}{number}"{words}>{shown}</th>'


def _row(row: ModelRow, rows: Sequence[ModelRow], scale: tuple[float, float], priced: bool) -> str:
    full, widest = full_dim(rows), full_mlp(rows)
    old, new = row.old, row.new
    known = {"heads": (old.query_heads, new.query_heads), "qk": (old.qk_dim, new.qk_dim), "v": (old.v_dim, new.v_dim)}
    numbers = {name: (f"{a}", f"{b}") for name, (a, b) in known.items()}
    if row.bits is not None:
        numbers |= {name: (f"{a:g}", f"{b:.1f}") for name, a, b in zip(("qk", "v"), *row.bits, strict=True)}
    sizes = "".join(
        f'<td class="num n-{name}{"" if float(a) == float(b) else " cut"}">{b}<small>/{a}</small></td>'
        for name, (a, b) in numbers.items()
    )
    cells = f'<td class="pic c-before">{_heads(row, full, False)}</td><td class="pic c-after">{_heads(row, full, True)}'
    cells += f'<span class="gone">removed</span></td>{sizes}'
    if widest > 1:
        before, after = (MLP_SHARE * width / widest for width in (old.mlp_width, new.mlp_width))
        words = f"{new.mlp_width}/{old.mlp_width}"
        cells += f'<td class="c-mlp">{_bar(before, after, "mlp", words)}</td>'
    if priced:
        damage = row.damage or 0.0
        level = 100 * max(0.02, Scale(*scale, 0.0, 1.0, log=True)(damage)) if damage > 0 else 0.0
        cells += f'<td class="c-damage">{_bar(0, level, "dmg", "")}<span>{escape(damage_text(damage))}</span></td>'
    gone = ' class="removed"' if new.gone else ""
    return f'<tr data-layer="{row.layer}"{gone}><th scope="row">{row.layer}</th>{cells}</tr>'


def _bar(before: float, after: float, name: str, words: str) -> str:
    text = f'<span class="sr">{escape(words)}</span>' if words else ""
    ghost = f'<i class="bar g-{name}" style="width:{before:.1f}%"></i>' if before else ""
    return f'<span class="bars">{ghost}<i class="bar b-{name}" style="width:{after:.1f}%"></i>{text}</span>'


def _heads(row: ModelRow, full: int, after: bool) -> str:
    """The heads of a layer: pale what was, filled what stays; for the source everything is filled."""
    old = row.old
    width = old.query_heads + GAP * max(0, -(-old.query_heads // row.group) - 1) * (row.group > 1)
    every = tuple(range(old.query_heads))
    keys, values = row.drawn(after=False)
    lines = [("q", every, 0.08, keys / full), ("v", every, 0.5, values / full)]
    if after:
        new = row.new if not row.new.gone else GONE
        through = min(new.qk_width, old.qk_dim) if new.qk_width > new.qk_dim and row.bits is None else 0
        keys, values = row.drawn(after=True)
        lines = [(f"p{name}", heads, start, height) for name, heads, start, height in lines]
        lines += [("wide", row.heads, 0.08, through / full)]
        lines += [("q", row.heads, 0.08, keys / full), ("v", row.heads, 0.5, values / full)]
    paths = "".join(
        f'<path class="{name}" d="{dashes(heads, row.group, start, height)}" stroke-width="{_short(height)}"/>'
        for name, heads, start, height in lines
    )
    return (
        f'<svg class="heads" viewBox="0 0 {_short(max(width, 1))} 1" preserveAspectRatio="none" aria-hidden="true">'
        f"{paths}</svg>"
    )
