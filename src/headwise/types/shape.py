"""Shapes: the sizes of a model, layer by layer, and which sizes are legal."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from headwise.errors import ShapeError
from headwise.types._record import Record
from headwise.types.codes import BITS, CACHE_BYTES, beside_bytes, code_bytes, kept_beside, near_bytes
from headwise.types.weights import ENDS, FIELDS, WHOLE, WIDTHS

SIZES = ("query_heads", "kv_heads", "qk_dim", "v_dim", "mlp_width", "qk_width")  # of a layer
CODES = ("k_code", "v_code")  # of a layer whose cache is coded
ENGINES = {  # sizes of heads that an engine's cache holds without filling them up
    "vllm": (32, 64, 80, 96, 112, 128, 160, 192, 224, 256),
}
ROLES = ("encoder", "self", "cross")  # of a layer in a model of two stacks
MOST_LAYERS = 4_096
WIDEST = 1 << 22  # of any size of a layer or of the stream between layers
MOST_TOKENS = 1 << 28  # of a vocabulary


@dataclass(frozen=True, slots=True)
class LayerShape(Record):
    """Sizes of one layer. No heads: attention is gone. No width: the MLP is gone.

    `qk_width > qk_dim` means that queries and keys are computed and rotated at `qk_width` and projected to `qk_dim`
    afterwards: the cache and the softmax see `qk_dim` only. In an encoder-decoder a layer has a role: a block of the
    decoder counts as two layers, `self` without an MLP and `cross`, which looks at the encoder's output, with it.

    With `pooled` heads one cached row is that of several key/value heads together: `kv_heads` counts such rows, whose
    keys and values are projected from `qk_width` and `v_width`, those of the heads side by side, to `qk_dim` and
    `v_dim`. What the heads have in common is kept once, and those that need more get more.
    """

    USUAL = ("role", "pooled", "v_width", *CODES, "q_rank", *FIELDS)
    query_heads: int
    kv_heads: int
    qk_dim: int  # per head, queries and keys, as cached
    v_dim: int  # per head, values
    mlp_width: int
    qk_width: int  # per head, width at which queries and keys are computed, before projection to qk_dim
    role: str = ""  # in a model of two stacks: one of ROLES
    pooled: int = 1  # key/value heads whose keys and values share a cached row
    v_width: int = 0  # width of a row's values before projection to v_dim, where heads are pooled
    k_code: tuple[int, ...] = ()  # how many of a row's qk_dim keys are cached in 12, 11, ... 1 bits; none: not coded
    v_code: tuple[int, ...] = ()  # and how many of its v_dim values; the others get no bits
    q_rank: int = 0  # of the projection of queries, where it is two factors; 0: it is one matrix
    w_q: int = WHOLE  # bits of a weight, as stored, of the projection of queries, and so on
    w_k: int = WHOLE
    w_v: int = WHOLE
    w_o: int = WHOLE
    w_gate: int = WHOLE
    w_up: int = WHOLE
    w_down: int = WHOLE

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary; a code is a count for each width that it uses: {"4": 96, "2": 32}."""
        codes = {name: zip(map(str, BITS), getattr(self, name), strict=True) for name in CODES if getattr(self, name)}
        by_bits = {name: {bits: count for bits, count in code if count} for name, code in codes.items()}
        return Record.to_json(self) | by_bits

    @classmethod
    def from_file(cls, data: dict[str, Any]) -> dict[str, Any]:
        """The inverse of `to_json` for codes."""
        return {**data, **{name: _counts(data[name], name) for name in CODES if isinstance(data.get(name), dict)}}

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in (*SIZES, "q_rank", "v_width")}
        if self.role not in ("", *ROLES):
            raise ShapeError(f"no layer has the role '{self.role}'; known: {', '.join(ROLES)}.")
        if negative := [name for name, size in sizes.items() if size < 0]:
            raise ShapeError(f"{negative[0]} is {sizes[negative[0]]}; sizes cannot be negative.")
        if large := [name for name, size in sizes.items() if size > WIDEST]:
            raise ShapeError(f"{large[0]} is {sizes[large[0]]:,}; sizes are at most {WIDEST:,}.")
        if self.pooled < 1:
            raise ShapeError(f"pooled is {self.pooled}; it is at least 1.")
        check_bits({name: getattr(self, name) for name in FIELDS})
        if self.query_heads == 0:
            return
        if self.kv_heads == 0 or self.query_heads % self.kv_heads:
            raise ShapeError(_uneven_sharing(self.query_heads, self.kv_heads))
        if self.qk_dim == 0 or self.v_dim == 0:
            raise ShapeError("qk_dim and v_dim must be at least 1 where there are heads; set query_heads to 0 instead.")
        self._check_codes()
        if self.qk_dim > self.qk_width:
            raise ShapeError(
                f"qk_dim {self.qk_dim} is larger than qk_width {self.qk_width}; a projection only shrinks."
            )
        if self.pooled > 1 and not self._pools():
            raise ShapeError(
                f"rows of {self.pooled} pooled heads need widths that these share, query heads for each and v_dim of "
                f"at most v_width; qk_width is {self.qk_width}, v_width {self.v_width}, v_dim {self.v_dim}."
            )

    def _check_codes(self) -> None:
        for name, code, size in (("k_code", self.k_code, self.qk_dim), ("v_code", self.v_code, self.v_dim)):
            if code and (len(code) != len(BITS) or min(code) < 0 or not 0 < sum(code) <= size):
                raise ShapeError(
                    f"{name} gives bits to {sum(code)} numbers of a cached row, which has {size}; give counts from 0 "
                    f"that add up to 1 to {size}."
                )

    def _pools(self) -> bool:
        even = all(size % self.pooled == 0 for size in (self.qk_width, self.v_width, self.queries_per_group))
        return even and self.v_dim <= self.v_width

    @property
    def queries_per_group(self) -> int:
        """How many query heads share one key/value head."""
        return self.query_heads // self.kv_heads if self.kv_heads else 0

    @property
    def query_rank(self) -> int:
        """The rank of the projection of queries: at most as many as they have numbers."""
        return self.q_rank or self.query_heads * self.head_width

    @property
    def head_width(self) -> int:
        """Width of one head's queries and keys before projection."""
        return self.qk_width // self.pooled

    @property
    def out_dim(self) -> int:
        """What one head gives the output projection."""
        return self.v_width // self.pooled if self.pooled > 1 else self.v_dim

    @property
    def v_projected(self) -> bool:
        """Whether values of pooled heads are projected, and back after attention."""
        return self.pooled > 1 and (self.v_dim < self.v_width or bool(self.v_code))

    def pooling(self, heads: int) -> LayerShape:
        """The layer with `heads` key/value heads to a cached row, before anything is cut."""
        if heads == 1 or not self.query_heads:
            return self
        if self.pooled > 1 or self.projected or self.kv_heads % heads:
            raise ShapeError(f"{self.kv_heads} key/value heads cannot share rows by {heads}; give a divisor, or all.")
        qk, v = heads * self.qk_width, heads * self.v_dim
        rows = replace(self, kv_heads=self.kv_heads // heads, qk_width=qk, qk_dim=qk, v_dim=v)
        return replace(rows, pooled=heads, v_width=v)

    @property
    def apart(self) -> LayerShape:
        """The layer before its heads were pooled, if rows are still as wide as heads side by side; else itself."""
        if self.pooled == 1 or self.cut_rows:
            return self
        width, heads = self.head_width, self.kv_heads * self.pooled
        return replace(self, kv_heads=heads, qk_width=width, qk_dim=width, v_dim=self.out_dim, pooled=1, v_width=0)

    @property
    def cut_rows(self) -> bool:
        """Whether pooled rows are narrower than heads side by side, or coded."""
        return self.pooled > 1 and (self.projected or self.v_projected)

    @property
    def gone(self) -> bool:
        """Whether the whole layer is removed."""
        return not (self.query_heads or self.mlp_width)

    @property
    def packed(self) -> bool:
        """Whether some of its matrices are stored in few bits."""
        return any(getattr(self, name) != WHOLE for name in FIELDS)

    @property
    def coded(self) -> bool:
        """Whether keys or values are cached in few bits."""
        return bool(self.k_code or self.v_code)

    @property
    def projected(self) -> bool:
        """Whether queries and keys are projected after rotary."""
        return self.qk_width > self.qk_dim or bool(self.k_code)

    def row_bytes(self, number: int = CACHE_BYTES) -> int:
        """Bytes of a cached row, keys and values; `number` is those of one that is not coded."""
        return _part_bytes(self.k_code, self.qk_dim, number) + _part_bytes(self.v_code, self.v_dim, number)

    def text_bytes(self, tokens: int, number: int = CACHE_BYTES) -> int:
        """Bytes of the cached rows of a text of so many tokens, as long as all that is kept beside codes."""
        parts = [(code, size) for code, size in ((self.k_code, self.qk_dim), (self.v_code, self.v_dim)) if code]
        each = self.row_bytes(number) - sum(beside_bytes(code, size, number) for code, size in parts)
        beside = sum(kept_beside(size, near_bytes(code, size), number) for code, size in parts)
        return self.kv_heads * (tokens * each + beside)

    @property
    def k_bytes(self) -> int:
        """Bytes of a cached row's keys."""
        return _part_bytes(self.k_code, self.qk_dim, CACHE_BYTES)

    @property
    def v_bytes(self) -> int:
        """Bytes of a cached row's values."""
        return _part_bytes(self.v_code, self.v_dim, CACHE_BYTES)


def check_bits(bits: dict[str, int]) -> None:
    """Refuse widths of weights that no plan chooses."""
    if wrong := [name for name, width in bits.items() if width not in WIDTHS]:
        raise ShapeError(f"{wrong[0]} is {bits[wrong[0]]} bits; weights have {', '.join(map(str, WIDTHS))}.")


def _part_bytes(code: tuple[int, ...], size: int, number: int) -> int:
    return code_bytes(code, size, number) if code else size * number


def _counts(by_bits: dict[str, Any], name: str) -> list[Any]:
    if unknown := set(by_bits) - {str(bits) for bits in BITS}:
        raise ShapeError(f"{name} gives a count for '{min(unknown)}' bits; widths are 1 to {BITS[0]} bits.")
    if wrong := [bits for bits, count in by_bits.items() if type(count) is not int]:
        raise ShapeError(f"{name} gives {by_bits[wrong[0]]!r} numbers {wrong[0]} bits; give a whole number.")
    return [by_bits.get(str(bits), 0) for bits in BITS]


def _uneven_sharing(query_heads: int, kv_heads: int) -> str:
    if kv_heads == 0:
        return f"{query_heads} query heads have no key/value heads to share; set both to 0 to remove attention."
    below = query_heads // kv_heads * kv_heads
    near = [str(n) for n in (below, below + kv_heads) if n > 0]
    return (
        f"{query_heads} query heads cannot share {kv_heads} key/value heads evenly; "
        f"the nearest counts that can are {' and '.join(near)}."
    )


GONE = LayerShape(0, 0, 0, 0, 0, 0)  # what is left of a removed layer


@dataclass(frozen=True, slots=True)
class Grain(Record):
    """Which sizes are legal. Given by the family, so that strategies know no families."""

    USUAL = ("multiple", "heads", "equal")
    qk_step: int
    v_step: int
    mlp_step: int
    qk_floor: int
    v_floor: int
    mlp_floor: int
    rotary: bool  # rotary pairs can be dropped: pairs of coordinates turn together, so widths are even
    projectable: bool  # queries and keys can be projected after their positions are applied
    folds: bool = False  # that projection can be folded into the weights, as no position lies in between
    portable: tuple[str, ...] | None = None  # units that a portable plan may cut; None: all
    multiple: int = 1  # sizes of heads and MLPs are multiples of this
    heads: tuple[int, ...] = ()  # the only sizes of heads that an engine takes; none: all
    equal: bool = False  # queries, keys and values of a layer have the same size

    def __post_init__(self) -> None:
        for name in ("qk_step", "v_step", "mlp_step", "qk_floor", "v_floor", "mlp_floor", "multiple"):
            if getattr(self, name) < 1:
                raise ShapeError(f"{name} is {getattr(self, name)}; steps and floors of sizes are at least 1.")

    def sizes(self, of: str, full: int) -> tuple[int, ...]:
        """Legal sizes of `qk`, `v` or `mlp` of a layer that has `full`, largest first.

        >>> Grain(16, 16, 64, 20, 16, 64, rotary=True, projectable=True).sizes("qk", 64)
        (64, 48, 32)
        """
        step, floor = getattr(self, f"{of}_step"), getattr(self, f"{of}_floor")
        largest = (full - 1) // step * step
        return (full, *(size for size in range(largest, 0, -step) if size >= floor))

    def takes(self, of: str, size: int) -> bool:
        """Whether a size of `qk`, `v` or `mlp` suits the engine that a model is planned for."""
        return size % self.multiple == 0 and (of == "mlp" or not self.heads or size in self.heads)

    def qk_sizes(self, full: int) -> tuple[int, ...]:
        """Legal query/key dimensions of a layer that has `full`, largest first."""
        return self.sizes("qk", full)

    def v_sizes(self, full: int) -> tuple[int, ...]:
        """Legal value dimensions of a layer that has `full`, largest first."""
        return self.sizes("v", full)

    def mlp_sizes(self, full: int) -> tuple[int, ...]:
        """Legal MLP widths of a layer that has `full`, largest first."""
        return self.sizes("mlp", full)


@dataclass(frozen=True, slots=True)
class ModelShape(Record):
    """Everything that the cost of a model depends on."""

    USUAL = ENDS
    family: str
    hidden_size: int
    vocab_size: int
    tied_embeddings: bool
    layers: tuple[LayerShape, ...]
    grain: Grain
    qkv_bias: bool = False
    k_bias: bool = True  # whether keys have one too where queries and values do
    o_bias: bool = False
    mlp_bias: bool = False
    mlp_matrices: int = 3  # gate, up and down; two without a gate
    cached: bool = True  # whether keys and values are kept while a text grows; encoders keep none
    layer_norms: int = 0  # parameters of a layer that go only with the whole layer; half of them without an MLP
    other_parameters: int = 0  # whatever else no plan changes
    element_bytes: int = 4  # of one number, as the model is saved
    row_tokens: int | None = None  # tokens of every input where their number is fixed, as that of an image's patches
    w_embed: int = WHOLE  # bits of a number of the table of words, as stored
    w_head: int = WHOLE  # and of the output's table, where it is another one

    def __post_init__(self) -> None:
        if not 1 <= len(self.layers) <= MOST_LAYERS:
            raise ShapeError(f"a model needs at least one layer and at most {MOST_LAYERS:,}, not {len(self.layers):,}.")
        limits = {"hidden_size": (1, WIDEST), "vocab_size": (0, MOST_TOKENS), "element_bytes": (1, 16)}
        limits |= {"layer_norms": (0, WIDEST**2), "other_parameters": (0, WIDEST**2), "mlp_matrices": (1, 8)}
        for name, (least, most) in limits.items():
            if not least <= getattr(self, name) <= most:
                raise ShapeError(f"{name} is {getattr(self, name):,}; it lies between {least} and {most:,}.")
        check_bits({name: getattr(self, name) for name in ENDS})
        if any(layer.pooled > 1 for layer in self.layers):  # a row's directions are those of several heads
            object.__setattr__(self, "grain", replace(self.grain, rotary=False, folds=False, portable=()))

    @property
    def packed(self) -> bool:
        """Whether some matrix is stored in few bits."""
        return any(getattr(self, name) != WHOLE for name in ENDS) or any(layer.packed for layer in self.layers)

    @property
    def packable(self) -> bool:
        """Whether weights can be stored in few bits: a decoder's, unless they are, or its queries have two factors."""
        return self.cached and not self.packed and not any(layer.role or layer.q_rank for layer in self.layers)

    @property
    def codable(self) -> bool:
        """Whether keys and values can be cached in few bits: a decoder's, unless they are already."""
        return self.cached and not any(layer.role or layer.coded for layer in self.layers)

    @property
    def apart(self) -> ModelShape:
        """The model before its heads were pooled; itself where none were, or rows are also cut or coded."""
        if any(layer.cut_rows for layer in self.layers) or all(layer.pooled == 1 for layer in self.layers):
            return self
        return self.with_layers(tuple(layer.apart for layer in self.layers))

    @property
    def cache_bytes(self) -> int:
        """Bytes of one cached number that is not coded."""
        return min(self.element_bytes, CACHE_BYTES)

    def with_layers(self, layers: tuple[LayerShape, ...]) -> ModelShape:
        """The model with other layers."""
        return replace(self, layers=layers)
