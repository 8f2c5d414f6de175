"""What an engine that serves a saved model was seen to do."""

from dataclasses import dataclass
from statistics import median

from headwise.types._record import Record


@dataclass(frozen=True, slots=True)
class Cache(Record):
    """A model's cache, by the engine's own count."""

    block_size: int  # tokens of a block
    blocks: int
    tokens: int  # that the whole cache holds
    bytes_per_token: float  # padding included


@dataclass(frozen=True, slots=True)
class Served(Record):
    """A saved model in an engine, beside the same model in transformers and beside its source in the engine.

    A token of the engine counts as the same if ours gives it the highest probability, or one that is no further below
    than `tie` nats: rounding differs between engines.
    """

    engine: str
    version: str
    prompts: int
    new_tokens: int  # written after every prompt
    same: int  # prompts after which all tokens are the same
    first_difference: int | None  # the earliest place of a token that is not; None: all are
    log_probability_error: float  # the largest difference in nats, over all tokens that the engine wrote
    tie: float
    cache: Cache
    source_cache: Cache | None  # None: the engine does not serve the source
    cache_memory: int  # bytes, the same for both
    tokens_per_second: tuple[float, ...]  # of the saved model, turn by turn; on a CPU of processor time
    source_tokens_per_second: tuple[float, ...]
    machine: str
    date: str
    not_measured: str = ""  # why nothing is known about the source

    @property
    def passed(self) -> bool:
        """Whether the engine writes what transformers writes."""
        return self.same == self.prompts

    @property
    def room(self) -> float | None:
        """How many times as many tokens as those of the source the same cache memory holds."""
        known = self.source_cache is not None and self.source_cache.tokens
        return self.cache.tokens / self.source_cache.tokens if self.source_cache and known else None

    @property
    def speed(self) -> float | None:
        """Tokens per second as a multiple of the source's: the median over turns."""
        pairs = list(zip(self.tokens_per_second, self.source_tokens_per_second, strict=False))
        return median(own / other for own, other in pairs) if pairs else None
