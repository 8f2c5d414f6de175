"""What can be cut. One entry per curve of damage: everything else asks this table and knows no unit by name."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from headwise.errors import PlanError
from headwise.types.codes import code_bytes
from headwise.types.shape import Grain, LayerShape
from headwise.types.weights import ENDS, MATRICES, WIDTHS

Order = dict[str, tuple[tuple[int, ...], ...]]  # of a layer's units: most needed first, by group; and the codes of rows
Sizes = dict[str, Any]
PARTS = ("query", "key", "value", "output", "MLP gate", "MLP up", "MLP down")  # of a layer
WORDS = dict(zip(MATRICES, (f"{part} weights" for part in PARTS), strict=True))
WORDS |= dict(zip((end.removeprefix("w_") for end in ENDS), ("word table", "output table"), strict=True))
TRIED = (3,)  # bits at which damage of weights is measured: enough of it, and still alike at other widths
DAMAGE = "damage."  # how the kind of every reading begins that prices a cut


@dataclass(frozen=True, slots=True)
class Unit:
    """Something of a layer that a plan can make smaller.

    Queries and keys have several entries under one name in `--allow`: they can be projected, or lose rotary pairs.
    """

    curve: str  # the reading `damage.<curve>` prices its sizes
    allow: str  # as `--allow` names it
    axis: str  # the property of LayerShape that a size on its curve counts
    size: str  # the size of LayerShape that a reader is shown
    label: str  # of that size
    title: str  # of its curve
    cut: str  # what is lost, in words
    sets: Callable[[LayerShape, int, bool, Order], Sizes]  # layer, size, folds, what goes first -> fields of LayerShape
    grain: str = ""  # which step and floor of a Grain make sizes legal; empty: every count is
    swapped: bool = True  # whether its prices are checked by measurement, one layer at a time
    cached: bool = True  # whether it is of use where only the cache is limited
    tried: tuple[int, ...] = ()  # the sizes that are measured, where these are not spread over the curve

    @property
    def kind(self) -> str:
        """The kind of the reading that prices it."""
        return DAMAGE + self.curve

    def full(self, shape: LayerShape) -> int:
        """The size that a layer has."""
        return int(getattr(shape, self.axis, 0))

    def sizes(self, shape: LayerShape, grain: Grain) -> tuple[int, ...]:
        """Legal sizes of a layer, its own first, then falling."""
        full = self.full(shape)
        if self.allow == "weights":
            return tuple(bits for bits in WIDTHS if bits <= full)
        return grain.sizes(self.grain, full) if self.grain else tuple(range(full, 0, -1))

    def shape(self, shape: LayerShape, size: int, folds: bool, order: Order) -> LayerShape:
        """The layer cut to a size; `order` is the one of its units that a probing found."""
        return replace(shape, **self.sets(shape, size, folds, order))


def _projected(shape: LayerShape, size: int, folds: bool, order: Order) -> Sizes:
    """A projection that is folded into the weights leaves nothing wider behind."""
    return {"qk_width": size if folds else shape.qk_width, "qk_dim": size}


def _q_rank(shape: LayerShape, size: int, *_: Any) -> Sizes:
    """Of full rank is one matrix."""
    return {"q_rank": size if size < shape.query_heads * shape.head_width else 0}


def _code(order: Order, name: str, numbers: int, size: int) -> Any:
    """The code of keys or values that takes so many bytes, of those that the probing found best."""
    for code in order.get(name, ()):
        if code_bytes(code, numbers) == size:
            return code
    raise PlanError(f"the readings price {size} bytes in {name}, for which they hold no code; probe again.")


def _weight(matrix: str, words: str) -> Unit:
    """Bits of one matrix."""
    field = f"w_{matrix}"
    return Unit(
        field, "weights", field, field, "weight bits", f"Bits of {words}", f"{words} stored in fewer bits",
        lambda shape, size, *_: {field: size}, swapped=matrix in MATRICES, cached=False, tried=TRIED,
    )  # fmt: skip


# In the order in which prices are measured.
CUTS = (
    Unit("qk_projected", "qk", "qk_dim", "qk_dim", "query/key dim", "Query/key dimensions",
         "query/key directions projected away after rotary", _projected, "qk"),
    Unit("v", "v", "v_dim", "v_dim", "value dim", "Value dimensions", "value directions dropped from every head",
         lambda shape, size, *_: {"v_dim": size}, "v"),
    Unit("mlp", "mlp", "mlp_width", "mlp_width", "MLP width", "MLP width", "MLP channels dropped",
         lambda shape, size, *_: {"mlp_width": size}, "mlp", cached=False),
    Unit("k_bits", "bits", "k_bytes", "k_bytes", "cache bits", "Bits of cached keys", "keys cached in fewer bits",
         lambda shape, size, folds, order: {"k_code": _code(order, "k_bits", shape.qk_dim, size)}),
    Unit("v_bits", "bits", "v_bytes", "v_bytes", "cache bits", "Bits of cached values", "values cached in fewer bits",
         lambda shape, size, folds, order: {"v_code": _code(order, "v_bits", shape.v_dim, size)}),
    Unit("qk_pairs", "qk", "qk_width", "qk_dim", "query/key dim", "Rotary pairs",
         "rotary pairs dropped from every query and key head",
         lambda shape, size, *_: {"qk_width": size, "qk_dim": size}, "qk", cached=False),
    Unit("qk_pairs_shared", "qk", "qk_width", "qk_dim", "query/key dim", "Rotary pairs, one set for all layers",
         "the same rotary pairs dropped in the whole model",
         lambda shape, size, *_: {"qk_width": size, "qk_dim": size}, "qk", swapped=False),
    Unit("heads", "heads", "queries_per_group", "query_heads", "query heads", "Query heads",
         "query heads dropped from every key/value group",
         lambda shape, size, *_: {"query_heads": size * shape.kv_heads}),
    Unit("kv_heads", "kv_heads", "kv_heads", "kv_heads", "key/value heads", "Key/value heads",
         "key/value heads dropped with their query heads",
         lambda shape, size, *_: {"query_heads": size * shape.queries_per_group, "kv_heads": size}),
    Unit("q_rank", "rank", "query_rank", "query_rank", "query rank", "Rank of the projection of queries",
         "the projection of queries made of two thin factors", _q_rank, cached=False),
    *(_weight(matrix, words) for matrix, words in WORDS.items()),
    Unit("depth", "depth", "layers removed", "", "whole layer", "Whole layers", "whole layers removed",
         lambda *_: {}, swapped=False),
)  # fmt: skip
WEIGHTS = tuple(unit.kind for unit in CUTS if unit.allow == "weights")
END_KINDS = tuple(DAMAGE + end for end in ENDS)  # of the whole model, as depth is
UNIT_OF = {unit.kind: unit for unit in CUTS}  # by the kind of the reading
UNITS = tuple(dict.fromkeys(unit.allow for unit in CUTS))  # what a plan may cut, as `--allow` names them
SIZED = ("qk", "v", "heads", "kv_heads")  # sizes of attention
DEFAULT_UNITS = ("qk", "v", "mlp", "bits", "weights")
LABELS = {unit.allow: unit.label for unit in CUTS}


def under_time(allow: Iterable[str]) -> tuple[str, ...]:
    """The units that a plan under a limit on time may cut: sizes of attention or bits of the cache, not both.

    >>> under_time(("qk", "v", "mlp", "bits")), under_time(("mlp", "bits"))
    (('qk', 'v', 'mlp'), ('mlp', 'bits'))
    """
    allow = tuple(allow)
    return tuple(unit for unit in allow if unit != "bits") if set(SIZED) & set(allow) else allow
