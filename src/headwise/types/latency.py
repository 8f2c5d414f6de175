"""How long a model takes on one device: the work that is timed, and a table of measured layers that prices others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import isfinite, prod

from headwise.errors import BudgetError
from headwise.types._record import Record
from headwise.types.codes import MIXTURES, mixture, read_bits
from headwise.types.shape import LayerShape, ModelShape

PHASES = ("decode", "prefill")
LENGTH = 2048  # tokens, unless a text names a length


@dataclass(frozen=True, slots=True)
class Workload(Record):
    """What is timed. decode: one more token for each of `batch` texts of `length`. prefill: reading such a batch."""

    phase: str = PHASES[0]
    length: int = LENGTH
    batch: int = 1

    def __post_init__(self) -> None:
        if self.phase not in PHASES or self.length < 1 or self.batch < 1:
            raise BudgetError(
                f"no work is called {self.phase[:20]!r} of length {self.length} and batch {self.batch}; write it like "
                "decode,32k,b8."
            )

    def __str__(self) -> str:
        long = f"{self.length // 1024}k" if self.length % 1024 == 0 else str(self.length)
        return f"{self.phase},{long},b{self.batch}"

    @classmethod
    def parse(cls, text: str, length: int = LENGTH) -> Workload:
        """Read `decode,32k,b8`: phase, length and batch in any order, each with a default.

        >>> Workload.parse("b8,32k")
        Workload(phase='decode', length=32768, batch=8)
        """
        found: dict[str, str | int] = {}
        for part in filter(None, (part.strip().lower() for part in text.split(","))):
            if part in PHASES:
                new: tuple[str, str | int] = ("phase", part)
            elif re.fullmatch(r"b[0-9]+", part):
                new = ("batch", int(part[1:]))
            elif re.fullmatch(r"[0-9]+(\.[0-9]+)?k?", part):
                new = ("length", int(float(part.rstrip("k")) * (1024 if part.endswith("k") else 1)))
            else:
                new = ("", part)
            if new[0] in ("", *found) or new[1] == 0:
                raise BudgetError(
                    f"'{part}' in '{text}' is no phase ({' or '.join(PHASES)}), length (32k) or batch (b8), or one too "
                    "many. Write it like decode,32k,b8."
                )
            found[new[0]] = new[1]
        return cls(**{"length": length, **found})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class LayerTime(Record):
    """The median time of one layer over repeats, and the least and most."""

    shape: LayerShape
    ms: float
    low: float
    high: float

    def __post_init__(self) -> None:
        _refuse_times(self.ms, self.low, self.high)


@dataclass(frozen=True, slots=True)
class HeldOut(Record):
    """Something that was predicted from the rest of the table, and then measured."""

    what: str
    predicted: float
    measured: float
    refined: bool = False  # whether more was measured there, so that the table does better now

    def __post_init__(self) -> None:
        _refuse_times(self.predicted, self.measured)

    @property
    def error(self) -> float:
        """Relative to what was measured."""
        return abs(self.predicted / self.measured - 1) if self.measured else 0.0


@dataclass(frozen=True, slots=True)
class Lattice(Record):
    """Sizes of attention of which every combination was measured; `width` 0: queries are computed at `qk` itself.

    Of pooled heads the sizes are those of rows, and `kv_heads` counts rows.
    """

    USUAL = ("pooled", "v_width")
    width: int
    kv_heads: tuple[int, ...]
    sharing: tuple[int, ...]  # query heads per key/value head
    qk: tuple[int, ...]
    v: tuple[int, ...]
    pooled: int = 1  # key/value heads to a row
    v_width: int = 0  # of a row's values before projection, where heads are pooled

    @property
    def axes(self) -> tuple[tuple[int, ...], ...]:
        """Sizes, in the order of `shape`'s arguments."""
        return self.kv_heads, self.sharing, self.qk, self.v

    def shape(self, base: LayerShape, kv_heads: int, sharing: int, qk: int, v: int) -> LayerShape:
        """The layer with these sizes and the MLP of `base`."""
        return replace(
            base, query_heads=kv_heads * sharing, kv_heads=kv_heads, qk_dim=qk, v_dim=v, qk_width=self.width or qk,
            pooled=self.pooled, v_width=self.v_width,
        )  # fmt: skip

    def shapes(self, base: LayerShape) -> list[LayerShape]:
        """Every combination."""
        return [self.shape(base, *sizes) for sizes in product(*self.axes)]


@dataclass(frozen=True, slots=True)
class CodeLattice(Record):
    """A layer whose rows were also measured in bits: keys of each of `bits` on average, with values of each.

    Codes are those that `mixture` makes. The time of another one depends on the bits that are read of it.
    """

    layer: LayerShape  # with the MLP of the base, not coded
    bits: tuple[int, ...]  # of a number on average, rising: some of MIXTURES

    def __post_init__(self) -> None:
        if not self.bits or set(self.bits) - set(MIXTURES) or sorted(set(self.bits)) != list(self.bits):
            raise BudgetError(f"no codes of {self.bits} bits are timed; measure again: headwise probe --latency.")

    def shape(self, keys: int, values: int) -> LayerShape:
        """The layer with codes of so many bits a number."""
        layer = self.layer
        return replace(layer, k_code=mixture(layer.qk_dim, keys), v_code=mixture(layer.v_dim, values))

    def shapes(self) -> list[LayerShape]:
        """Every combination."""
        return [self.shape(*both) for both in product(self.bits, repeat=2)]

    def fits(self, layer: LayerShape) -> bool:
        """Whether a coded layer with the MLP of the base is this one but for its codes."""
        return bool(layer.k_code and layer.v_code) and replace(layer, k_code=(), v_code=()) == self.layer

    def corners(self, layer: LayerShape) -> list[tuple[LayerShape, float]]:
        """The measured layers around one with other codes, and what each counts."""
        sides = ((layer.k_code, self.layer.qk_dim), (layer.v_code, self.layer.v_dim))
        ends = [along([read_bits(mixture(size, mean)) for mean in self.bits], read_bits(code)) for code, size in sides]
        return [(self.shape(self.bits[k], self.bits[v]), a * b) for (k, a), (v, b) in product(*ends)]


@dataclass(frozen=True)
class LatencyTable(Record):
    """Measured times of layers, and of the rest of the model, under one workload on one device.

    A layer's time is that of its attention beside the base's MLP, plus what its MLP changes beside the base's
    attention. Sizes between measured ones lie on the line between these. The base is a layer of the source as its user
    has it: where heads are pooled, the source's own layers were measured too, for shares of its time.
    """

    USUAL = ("codes",)

    device: str
    facts: dict[str, str]  # what else times depend on: dtype, versions, the model's fixed sizes
    workload: Workload
    base: LayerShape
    rest_ms: float  # embeddings, last norm and head
    times: tuple[LayerTime, ...]
    lattices: tuple[Lattice, ...] = ()
    mlp: tuple[int, ...] = ()  # measured widths, rising
    held_out: tuple[HeldOut, ...] = ()
    chain: int = 4  # layers in the stacks that were timed
    runtime: str = "plain"  # "fast": as `headwise.load(..., optimise=True)` runs models; "plain": as it does without
    captured: bool = False  # whether every timed step was the replay of a captured graph
    codes: tuple[CodeLattice, ...] = ()  # layers that were also measured with rows in bits

    def __post_init__(self) -> None:
        _refuse_times(self.rest_ms)

    @cached_property
    def _known(self) -> dict[LayerShape, float]:
        return {time.shape: time.ms for time in self.times}

    @cached_property
    def _priced(self) -> dict[LayerShape, float]:
        return {}

    def _ms(self, layer: LayerShape) -> float:
        if layer not in self._known:
            raise BudgetError(
                f"the table of {self.workload} does not hold a layer that it names; delete it and probe again."
            )
        return self._known[layer]

    @property
    def error(self) -> float:
        """The largest error of the checks that led to no further measurement."""
        return max((check.error for check in self.held_out if not check.refined), default=0.0)

    def model_ms(self, model: ModelShape) -> float:
        """The time of a whole model."""
        return self.rest_ms + sum(self.layer_ms(layer) for layer in model.layers)

    def layer_ms(self, layer: LayerShape) -> float:
        """The time of a layer; one outside the table is refused."""
        if layer.gone:
            return 0.0
        if layer not in self._priced:
            attention = self._attention_ms(replace(layer, mlp_width=self.base.mlp_width))
            self._priced[layer] = max(0.0, attention + self._mlp_ms(layer.mlp_width) - self._ms(self.base))
        return self._priced[layer]

    def _mlp_ms(self, width: int) -> float:
        ends = bracket(self.mlp, width)
        if ends is None:
            raise self._outside(f"an MLP of width {width}")
        return sum(part * self._ms(replace(self.base, mlp_width=size)) for size, part in ends)

    def _attention_ms(self, layer: LayerShape) -> float:
        if layer in self._known:
            return self._known[layer]
        if layer.coded:
            return self._coded_ms(layer)
        for lattice in self._fitting(layer):
            sizes = (layer.kv_heads, layer.queries_per_group, layer.qk_dim, layer.v_dim)
            ends = [bracket(axis, size) for axis, size in zip(lattice.axes, sizes, strict=True)]
            if all(ends):
                return self._between(lattice, [end for end in ends if end])
        heads = f"{layer.query_heads} heads on {layer.kv_heads}"
        if layer.pooled > 1:
            heads += f" rows of {layer.pooled} pooled heads"
        raise self._outside(f"attention of {heads}, qk {layer.qk_dim} of {layer.qk_width}, v {layer.v_dim}")

    def _coded_ms(self, layer: LayerShape) -> float:
        lattice = next((lattice for lattice in self.codes if lattice.fits(layer)), None)
        if lattice is None:
            raise self._outside("a cache in bits", "bits")
        return max(0.0, sum(part * self._ms(corner) for corner, part in lattice.corners(layer)))

    def _fitting(self, layer: LayerShape) -> Iterable[Lattice]:
        """Lattices that price the layer; one whose queries are computed at a larger width is never too fast."""
        alike = [lattice for lattice in self.lattices if lattice.pooled == layer.pooled]
        if not layer.projected:
            return [lattice for lattice in alike if not lattice.width]
        wide = [lattice for lattice in alike if lattice.width >= layer.qk_width]
        return sorted(wide, key=lambda lattice: lattice.width)

    def _between(self, lattice: Lattice, ends: Sequence[tuple[tuple[int, float], ...]]) -> float:
        total = 0.0
        for corner in product(*ends):
            sizes, parts = zip(*corner, strict=True)
            total += prod(parts) * self._ms(lattice.shape(self.base, *sizes))
        return total

    def _outside(self, what: str, units: str = "UNITS") -> BudgetError:
        return BudgetError(
            f"{what} is outside the table that was measured for {self.workload}; measure it too, with the same "
            f"--allow: headwise probe MODEL --latency {self.workload} --allow {units} --out FOLDER"
        )


def _refuse_times(*times: float) -> None:
    if not all(isfinite(time) and time >= 0 for time in times):
        raise BudgetError(
            "a measured time is negative or not a finite number; measure again: headwise probe --latency."
        )


def bracket(sizes: Sequence[int], size: int) -> tuple[tuple[int, float], ...] | None:
    """The measured sizes (rising) around one, and what each counts; None outside.

    >>> bracket((16, 32, 64), 40)
    ((32, 0.75), (64, 0.25))
    """
    if size in sizes:
        return ((size, 1.0),)
    below = [s for s in sizes if s < size]
    above = [s for s in sizes if s > size]
    if not below or not above:
        return None
    low, high = below[-1], above[0]
    part = (size - low) / (high - low)
    return (low, 1 - part), (high, part)


def along(ticks: Sequence[int], place: int) -> tuple[tuple[int, float], ...]:
    """The numbers of the rising ticks around a place, and what each counts.

    Above the last, the line continues; below the first, that counts alone: less is not taken to be faster.

    >>> along((16, 32, 64), 40), along((16, 32, 64), 96), along((16, 32, 64), 8)
    (((1, 0.75), (2, 0.25)), ((1, -1.0), (2, 2.0)), ((0, 1.0),))
    """
    if place <= ticks[0] or len(ticks) == 1:
        return ((0, 1.0),)
    high = next((number for number, tick in enumerate(ticks) if tick >= place), len(ticks) - 1)
    part = (place - ticks[high - 1]) / (ticks[high] - ticks[high - 1])
    return (high - 1, 1 - part), (high, part)
