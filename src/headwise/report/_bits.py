"""The cache in bits, as plain data and in words: what the numbers of every cached row take, layer by layer."""

from typing import NamedTuple

from headwise.cost import kv_bytes_per_token
from headwise.report._text import human
from headwise.types import LayerShape, Plan, Sweep
from headwise.types.codes import BITS, CACHE_BYTES, CODE_GROUP, COUNTED_TOKENS, NEAR_TOKENS, WHOLE_TOKENS

WHOLE = 8 * CACHE_BYTES  # bits of a cached number that is not coded
PARTS = ("keys", "values")
HOW = (
    "Keys and values are cached as uncorrelated coefficients, most important first. Each gets "
    f"{BITS[0]} to 0 bits: more bits where an error would do more damage. What gets no bits is not computed."
)
COUNTED = (
    f"Everything that is stored is counted: codes, scales (a byte for {CODE_GROUP} numbers), the first {WHOLE_TOKENS} "
    f"tokens of a text, which are also stored in 16 bits, and the newest {NEAR_TOKENS}, also stored in 8 to 12 bits "
    f"(the bytes of both are spread over {COUNTED_TOKENS:,} tokens)."
)
GENERATE = "model.generate(...) uses the coded cache automatically: the DynamicCache of transformers then holds bytes."
LIMITS = (
    "Other caches (static ones, or those of other libraries) hold plain numbers, which are rounded when they are read: "
    "answers are the same, but no memory is saved.",
    "Layers with a sliding window store their window in bits, without extra copies of first and newest tokens.",
    "Speed: plain PyTorch unpacks the bits of all cached tokens at every step, so generating is slower than with a "
    "plain cache. On CUDA, headwise.load(folder, optimise=True) reads the bits with its own kernels, "
    "and on a CPU with a library that it compiles.",
)


class BitRow(NamedTuple):
    """The keys or the values of one layer's cached rows: how many numbers have how many bits, most bits first."""

    layer: int
    part: str  # one of PARTS
    spans: tuple[tuple[int, int], ...]  # bits and how many numbers have them; those with none come last
    bytes: int

    @property
    def full(self) -> int:
        """Numbers of a row in the source."""
        return sum(count for _, count in self.spans)

    @property
    def kept(self) -> int:
        """Numbers that have bits."""
        return sum(count for bits, count in self.spans if bits)

    @property
    def mean(self) -> float:
        """Bits for every number of the source's row, of everything that is stored."""
        return 8 * self.bytes / self.full if self.full else 0.0


def bit_words(bits: int) -> str:
    """So many bits of a number, in words."""
    return f"{bits} bit{'s' * (bits > 1)}" if bits else "without bits"


def is_coded(plan: Plan | None, sweep: Sweep | None = None) -> bool:
    """Whether a plan, or an answer of the frontier around it, caches keys or values in few bits."""
    layers = (*(plan.target.layers if plan else ()), *(sweep.shapes if sweep else ()))
    return any(layer.coded for layer in layers)


def row_sizes(old: LayerShape) -> tuple[int, int]:
    """Numbers of a cached row's keys and values before anything was coded."""
    return old.qk_width if old.k_code else old.qk_dim, old.v_width or old.v_dim if old.v_code else old.v_dim


def mean_bits(old: LayerShape, new: LayerShape) -> tuple[float, float]:
    """Bits per number of keys and of values, to one decimal, for every number that the source caches."""
    found = zip((new.k_bytes, new.v_bytes), row_sizes(old), strict=True)
    keys, values = (round(8 * part / full, 1) if full and new.query_heads else 0.0 for part, full in found)
    return keys, values


def in_bits(old: LayerShape, new: LayerShape) -> str:
    """What a coded layer caches, in words."""
    keys, values = mean_bits(old, new)
    return f"keys {keys:.1f} bits, values {values:.1f} bits"


def bit_rows(plan: Plan, part: str) -> tuple[BitRow, ...]:
    """A row per layer that has heads."""
    place, rows = PARTS.index(part), []
    for index, (old, new) in enumerate(zip(plan.source.layers, plan.target.layers, strict=True)):
        if not new.query_heads:
            continue
        code, size, taken = ((new.k_code, new.qk_dim, new.k_bytes), (new.v_code, new.v_dim, new.v_bytes))[place]
        spans = [(bits, count) for bits, count in zip(BITS, code, strict=True) if count] if code else [(WHOLE, size)]
        if lost := row_sizes(old)[place] - sum(count for _, count in spans):
            spans.append((0, lost))
        rows.append(BitRow(index, part, tuple(spans), taken))
    return tuple(rows)


def average_bits(plan: Plan, *parts: str) -> float:
    """Bits per number over all layers, of keys, of values or of both."""
    taken = full = 0
    for part in parts or PARTS:
        for row in bit_rows(plan, part):
            taken += 8 * row.bytes * plan.target.layers[row.layer].kv_heads
        full += sum(row_sizes(layer)[PARTS.index(part)] * layer.kv_heads for layer in plan.source.layers)
    return taken / full if full else 0.0


def plan_in_bits(plan: Plan) -> str:
    """What a coded plan caches on average, in words."""
    keys, values = (average_bits(plan, part) for part in PARTS)
    return f"keys {keys:.1f} bits and values {values:.1f} bits per number on average, of {WHOLE}"


def share_in_words(plan: Plan) -> str:
    """What a share of the cache means, with the numbers of the plan."""
    before, after = kv_bytes_per_token(plan.source), kv_bytes_per_token(plan.target)
    share = f"{after / before:.1%} of" if before else "beside"
    return (
        f"The cache takes {human(after)} bytes per token, {share} the source's {human(before)} at "
        f"{8 * plan.source.cache_bytes} bits per number: "
        f"{average_bits(plan):.1f} bits per number. {COUNTED}{longest_text(plan)}"
    )


def longest_text(plan: Plan) -> str:
    """What the longest text that is served takes, in a sentence, where bytes are counted for a longer one."""
    tokens, whole = plan.context, kv_bytes_per_token(plan.source)
    if not (is_coded(plan) and whole and 0 < tokens < COUNTED_TOKENS):
        return ""
    taken = sum(layer.text_bytes(tokens, plan.target.cache_bytes) for layer in plan.target.layers if layer.query_heads)
    return f" The longest text that is served, of {tokens:,} tokens, takes {taken / tokens / whole:.1%}."
