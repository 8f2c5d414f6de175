"""Which layer sizes are timed on a device, so that the times of all others can be interpolated.

Stacks of equal layers in a whole model are timed beside a stack of base layers, so that a machine that slows down slows
both. Attention and MLP are timed separately. Where there are too many combinations of attention sizes, a lattice of
them is timed; where a size lies off the line between its neighbours, more sizes are timed there, because times move in
steps. Of rows in bits a few codes are timed. At the end mixed stacks are predicted and timed: the table records the
error. Where heads are pooled, the base is a layer whose heads are not, and the source's layers are timed as its user
has them: shares are of their time.
"""

import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import prod

from headwise.latency.measuring import spread
from headwise.latency.stacks import Stack
from headwise.progress import Track, silently
from headwise.types import (
    CodeLattice,
    HeldOut,
    LatencyTable,
    Lattice,
    LayerShape,
    LayerTime,
    ModelShape,
    Workload,
    under_time,
)
from headwise.types.codes import MIXTURES
from headwise.types.latency import bracket

Clock = Callable[[Sequence[Stack]], list[list[float]]]  # milliseconds of models with these layers, once per repeat
Keep = Callable[[LatencyTable], None]

EVERY = 400  # up to so many combinations of attention sizes are all timed
MOST = 600  # points of a lattice otherwise
WIDTHS, MOST_WIDTHS = 20, 40  # MLP widths, likewise
TOLERANCE = 0.02  # of the base layer's time, by which a size may lie off the line
GROUP = 4  # stacks that take turns with the base
HELD_OUT = 6  # mixed stacks that are predicted and measured


def measure(
    clock: Clock,
    source: ModelShape,
    work: Workload,
    allow: Iterable[str],
    chain: int,
    device: str = "",
    facts: dict[str, str] | None = None,
    known: LatencyTable | None = None,
    keep: Keep = lambda table: None,
    track: Track = silently,
    runtime: str = "plain",
) -> LatencyTable:
    """The table of one workload. Times in `known` are not measured again; `keep` receives every intermediate table."""
    base, allowed = base_of(source.apart), frozenset(allow)
    start = LatencyTable(device, facts or {}, work, base, 0.0, (), chain=chain, runtime=runtime)
    times = Measurements(clock, start, known, keep, track)
    wanted = lattices(source, allowed)
    if sum(len(lattice.shapes(base)) for lattice in wanted) > EVERY:
        wanted = [_thinned(times, lattice, MOST // len(wanted)) for lattice in wanted]
    sizes = [shape for lattice in wanted for shape in lattice.shapes(base)]
    times.need([*before_pooling(source, base), *sizes], f"timing attention, {work}")
    widths = _widths(times, mlp_sizes(source, allowed))
    codes = tuple(code_lattices(source, allowed))
    for lattice in codes:
        _time_codes(times, lattice)
    table = replace(times.table(), lattices=tuple(wanted), mlp=widths, codes=codes)
    table = replace(table, held_out=(*times.checks, *_mixed(times, table, source)))
    keep(table)
    return table


def again(clock: Clock, table: LatencyTable, layers: Iterable[LayerShape], source: ModelShape) -> LatencyTable:
    """The table with these layers timed once more; times of the source's own sizes stay.

    Of many times a solver picks those that are too short by chance. A second timing is not picked, so it is unbiased.
    """
    base, left = table.base, {part for layer in source.apart.layers for part in parts(layer, table.base)}
    shapes = [part for layer in layers if not layer.gone for part in parts(layer, base) if part not in left]
    times = Measurements(clock, table, table)
    for shape in shapes:
        times.times.pop(shape, None)
    times.need(shapes, "")
    return times.table()


def parts(layer: LayerShape, base: LayerShape) -> tuple[LayerShape, LayerShape]:
    """What is timed of a layer: its attention beside the base's MLP, and its MLP beside the base's attention."""
    return replace(layer, mlp_width=base.mlp_width), replace(base, mlp_width=layer.mlp_width)


def base_of(source: ModelShape) -> LayerShape:
    """The layer that all others are measured beside: the largest of every size."""
    most = {n: max(getattr(layer, n) for layer in source.layers) for n in ("qk_dim", "v_dim", "mlp_width", "qk_width")}
    groups, sharing, pooled, wide = (
        max(getattr(x, n) for x in source.layers) for n in ("kv_heads", "queries_per_group", "pooled", "v_width")
    )
    return LayerShape(query_heads=groups * sharing, kv_heads=groups, **most, pooled=pooled, v_width=wide)


def before_pooling(source: ModelShape, base: LayerShape) -> list[LayerShape]:
    """The attention sizes that the source had before its heads were pooled; none where they were not."""
    had = source.apart
    return [] if had is source else [*dict.fromkeys(parts(layer, base)[0] for layer in had.layers if not layer.gone)]


def lattices(source: ModelShape, allow: frozenset[str]) -> list[Lattice]:
    """All attention sizes that a plan may choose: those of the source, and what `allow` adds."""
    layers, grain = [layer for layer in source.layers if not layer.gone], source.grain
    pooled, wide = max(layer.pooled for layer in layers), max(layer.v_width for layer in layers)
    kv = {layer.kv_heads for layer in layers}
    sharing = {layer.queries_per_group for layer in layers}
    kv = set(range(1, max(kv) + 1)) if "kv_heads" in allow else kv
    sharing = set(range(1, max(sharing) + 1)) if "heads" in allow else sharing
    v = {size for x in layers for size in (grain.v_sizes(x.v_dim) if "v" in allow else (x.v_dim,))}
    found = []
    for width in (0, *sorted({layer.qk_width for layer in layers})):
        qk = {x.qk_dim for x in layers if width in (0, x.qk_width) and x.projected == bool(width)}
        if "qk" in allow and not width and (grain.rotary or grain.folds):
            qk |= {size for x in layers for size in grain.qk_sizes(x.qk_width)}
        if "qk" in allow and width and grain.projectable and not grain.folds:
            qk |= set(grain.qk_sizes(width)[1:])
        if qk:
            axes = (tuple(sorted(axis)) for axis in (kv, sharing, qk, v))
            found.append(replace(Lattice(width, *axes), pooled=pooled, v_width=wide))
    return found


def code_lattices(source: ModelShape, allow: frozenset[str]) -> list[CodeLattice]:
    """The layers whose rows a plan may code."""
    if "bits" not in under_time(allow) or not source.codable:
        return []
    base = base_of(source.apart)
    layers = dict.fromkeys(parts(layer, base)[0] for layer in source.layers if layer.query_heads)
    return [CodeLattice(layer, tuple(sorted(MIXTURES))) for layer in layers]


def mlp_sizes(source: ModelShape, allow: frozenset[str]) -> list[int]:
    """All MLP widths that a plan may choose, rising."""
    own = {layer.mlp_width for layer in source.layers if not layer.gone}
    legal = {size for width in own for size in source.grain.mlp_sizes(width)} if "mlp" in allow else set()
    return sorted(own | legal)


class Measurements:
    """Times of layers, each measured once."""

    def __init__(
        self,
        clock: Clock,
        start: LatencyTable,
        known: LatencyTable | None,
        keep: Keep = lambda table: None,
        track: Track = silently,
    ) -> None:
        self.clock, self.start, self.base, self.chain = clock, start, start.base, start.chain
        self.keep, self.track = keep, track
        self.checks: list[HeldOut] = []
        self.rest = known.rest_ms if known else 0.0
        self.times = {time.shape: time for time in known.times} if known else {}
        if self.base not in self.times:
            self._begin()
        self.whole = self.rest + self.chain * self.times[self.base].ms

    def _begin(self) -> None:
        """The time of a base layer and of all but layers, from a short and a long stack."""
        few = max(1, self.chain // 4)
        if few == self.chain:
            self.rest, long = 0.0, self.clock([(self.base,) * few])[0]
        else:
            stacks = [(self.base,) * few, (self.base,) * self.chain]
            short, long = (once + again for once, again in zip(self.clock(stacks), self.clock(stacks), strict=True))
            low, high = statistics.median(short), statistics.median(long)
            self.rest = min(low, max(0.0, (low * self.chain - high * few) / (self.chain - few)))
        self._note(self.base, long)

    def _note(self, shape: LayerShape, times: Sequence[float]) -> None:
        """The time of a layer, from those of a stack of it."""
        self.times[shape] = LayerTime(shape, *spread([max(0.0, time - self.rest) / self.chain for time in times]))

    def need(self, shapes: Iterable[LayerShape], label: str) -> dict[LayerShape, float]:
        """Times of these layers, measured where they are not known."""
        wanted = list(dict.fromkeys(shapes))
        missing = [shape for shape in wanted if shape not in self.times]
        if hasattr(self.clock, "ahead"):
            self.clock.ahead(missing)
        groups = [missing[at : at + GROUP] for at in range(0, len(missing), GROUP)]
        for group in self.track(groups, label) if groups else ():
            for shape, times in zip(group, self.beside_base([(s,) * self.chain for s in group]), strict=True):
                self._note(shape, times)
            self.keep(self.table())
        return {shape: self.times[shape].ms for shape in wanted}

    def beside_base(self, stacks: Sequence[Stack]) -> list[list[float]]:
        """Times of stacks, each by its ratio to the base's stack in the same turn."""
        base, *others = self.clock([(self.base,) * self.chain, *stacks])
        return [[time / beside * self.whole for time, beside in zip(times, base, strict=True)] for times in others]

    def table(self) -> LatencyTable:
        """The table so far."""
        return replace(self.start, rest_ms=self.rest, times=tuple(self.times.values()))


def settle(
    times: Measurements,
    sizes: Sequence[int],
    ticks: Sequence[int],
    shape: Callable[[int], LayerShape],
    what: str,
    most: int,
) -> tuple[list[int], list[int]]:
    """Sizes to add to `ticks` so that all others lie on lines between them, and all sizes measured for that.

    The middle between two neighbours is measured; where it is off the line, both halves are refined.
    """
    settled, seen = set(ticks), set(ticks)
    spans = list(zip(ticks, ticks[1:], strict=False))
    allowed = TOLERANCE * times.times[times.base].ms
    while spans and len(settled) < most:
        middles = {span: _middle(sizes, span) for span in spans}
        wanted = [size for span, size in middles.items() if size is not None for size in (*span, size)]
        found = times.need(map(shape, wanted), f"timing {what}, {times.start.workload}")
        spans = []
        for (low, high), size in middles.items():
            if size is None:
                continue
            line = sum(part * found[shape(end)] for end, part in bracket((low, high), size) or ())
            off = abs(line - found[shape(size)]) > allowed
            times.checks.append(HeldOut(f"{what} {size}", line, found[shape(size)], off))
            seen.add(size)
            if off:
                settled.add(size)
                spans += [(low, size), (size, high)]
    return sorted(settled), sorted(seen)


def _middle(sizes: Sequence[int], span: tuple[int, int]) -> int | None:
    """The legal size nearest the middle of a span, if there is one inside."""
    inside = [size for size in sizes if span[0] < size < span[1]]
    return min(inside, key=lambda size: abs(size - sum(span) / 2), default=None)


def thin(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """At most `count` of them, evenly, with both ends.

    >>> thin((1, 2, 3, 4, 5), 3)
    (1, 3, 5)
    """
    if len(sizes) <= count:
        return tuple(sizes)
    return tuple(sizes[round(place * (len(sizes) - 1) / (count - 1))] for place in range(count))


def _thinned(times: Measurements, lattice: Lattice, most: int) -> Lattice:
    """A lattice of fewer sizes: each axis is refined alone, with the others at their largest."""
    axes = [thin(axis, 3) for axis in lattice.axes]
    names = ("kv_heads", "sharing", "qk_dim", "v_dim")
    for place, (axis, name) in enumerate(zip(lattice.axes, names, strict=True)):
        others = prod(len(other) for at, other in enumerate(axes) if at != place)

        def shape(size: int, place: int = place) -> LayerShape:
            sizes = [size if at == place else axis[-1] for at, axis in enumerate(lattice.axes)]
            return lattice.shape(times.base, *sizes)

        axes[place] = tuple(settle(times, axis, axes[place], shape, name, max(3, most // others))[0])
    return replace(lattice, **dict(zip(("kv_heads", "sharing", "qk", "v"), axes, strict=True)))


def _time_codes(times: Measurements, lattice: CodeLattice) -> None:
    """Time the layers of a lattice of codes, and note how far those between its ends lie off the line."""
    found = times.need(lattice.shapes(), f"timing rows in bits, {times.start.workload}")
    ends = replace(lattice, bits=(lattice.bits[0], lattice.bits[-1]))
    for mean in lattice.bits[1:-1]:
        middle = lattice.shape(mean, mean)
        line = max(0.0, sum(part * found[corner] for corner, part in ends.corners(middle)))
        times.checks.append(HeldOut(f"rows of {mean} bits a number", line, found[middle], refined=True))


def _widths(times: Measurements, sizes: Sequence[int]) -> tuple[int, ...]:
    """The measured MLP widths: all if they are few, else until lines between them are good."""

    def shape(width: int) -> LayerShape:
        return replace(times.base, mlp_width=width)

    if len(sizes) <= WIDTHS:
        times.need(map(shape, sizes), f"timing MLPs, {times.start.workload}")
        return tuple(sizes)
    ticks = thin(sizes, 9)
    times.need(map(shape, ticks), f"timing MLPs, {times.start.workload}")
    return tuple(settle(times, sizes, ticks, shape, "mlp_width", MOST_WIDTHS)[1])


def _mixed(times: Measurements, table: LatencyTable, source: ModelShape) -> list[HeldOut]:
    """Stacks of random layers, predicted and measured: do attention and MLPs, and layers, add up?"""
    draw, stacks = random.Random(0), []
    for _ in range(HELD_OUT):
        layers = []
        for _ in range(times.chain):
            place = draw.choice(range(len(table.lattices) + len(table.codes)))
            if place < len(table.lattices):
                lattice = table.lattices[place]
                shape = lattice.shape(times.base, *(draw.choice(axis) for axis in lattice.axes))
            else:
                shape = draw.choice(table.codes[place - len(table.lattices)].shapes())
            layers.append(replace(shape, mlp_width=draw.choice(table.mlp)))
        stacks.append(tuple(layers))
    measured = [times.beside_base([stack])[0] for stack in times.track(stacks, f"checking times, {table.workload}")]
    return [
        HeldOut(f"{times.chain} mixed layers", table.model_ms(source.with_layers(stack)), statistics.median(found))
        for stack, found in zip(stacks, measured, strict=True)
    ]
