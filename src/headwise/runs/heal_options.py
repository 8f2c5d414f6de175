"""What can be told to a healing method. No torch: settings are checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from headwise.errors import HeadwiseError


@dataclass(frozen=True, slots=True)
class Options:
    """Limits of a healing; None leaves it to the method."""

    tokens: int | None = None  # of text that is learned from; distillation counts every reading, blockwise the text
    steps: int | None = None  # at most, of a block or of the whole model
    rate: float | None = None  # share of a tensor's mean size that a step moves it by, at most; None: found by trial
    batch: int | None = None  # tokens of a step
    micro: int | None = None  # tokens that a process computes at once
    lora: int | None = None  # rank of changes that are learned instead of whole weights, with less memory
    match: float | None = None  # weight of the streams' distance from the source's, beside the answers'
    cache: int | None = None  # likeliest tokens of the source's answers to store, instead of asking it again
    side_by_side: int | None = None  # layers that learn at once, on what refitted and not healed layers put out
    attention: float | None = None  # weight of the attention's distance from the source's, of layers that learn
    recompute: int | None = None  # 1: layers compute again what they do not keep, with less memory
    truth: float | None = None  # weight of the surprise at the text's own next tokens, beside the source's answers
    embeddings: int | None = None  # 1: embeddings and head learn too
    shard: int | None = None  # 1: processes share the weights, each with a part, so that larger models fit
    blockwise: float | None = None  # share of the tokens that layers learn from before the whole model does; 0: none

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not (value > 0 or (value == 0 and field.name == "blockwise")):
                raise HeadwiseError(f"the healing option {field.name} is {value:g}; it must be above 0.")
        if self.blockwise is not None and not self.blockwise < 1:
            raise HeadwiseError(
                f"the healing option blockwise is {self.blockwise:g}; it is a share of the tokens, below 1. "
                "For layers alone, use --heal blockwise."
            )
        if self.blockwise and self.tokens is None:
            raise HeadwiseError("the healing option blockwise is a share of the tokens; add --heal-option tokens=1e6.")

    def given(self) -> tuple[str, ...]:
        """The names of those that are not left to the method."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name) is not None)

    def fixed(self) -> Options:
        """The same without what may change when a run goes on, because only its memory depends on it."""
        return replace(self, micro=None, recompute=None, shard=None)

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Options:
        """Read options such as `steps=200` and `rate=3e-3`.

        >>> Options.parse(["steps=200", "rate=3e-3"]).steps
        200
        """
        kinds = {field.name: int if "int" in str(field.type) else float for field in fields(cls)}
        found: dict[str, float] = {}
        for text in texts:
            name, _, value = (part.strip() for part in text.partition("="))
            if name not in kinds:
                raise HeadwiseError(f"no healing option is called '{name}'. Known: {', '.join(kinds)}.")
            try:
                found[name] = kinds[name](float(value))
            except (ValueError, OverflowError):
                raise HeadwiseError(f"'{value}' is no number; write it as {name}=100.") from None
        return cls(**found)  # type: ignore[arg-type]  # each is of its own kind
