"""Options of the healing methods. No torch: they are checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from headwise.errors import HeadwiseError


@dataclass(frozen=True, slots=True)
class Options:
    """Limits and choices of a healing; None leaves a choice to the method."""

    tokens: int | None = None  # of text to train on; distillation counts every reading, blockwise each text once
    steps: int | None = None  # at most, of one layer or of the whole model
    rate: float | None = None  # highest learning rate, as a share of each tensor's mean size; None: found by trial
    batch: int | None = None  # tokens of a step
    micro: int | None = None  # tokens that a process computes at once
    lora: int | None = None  # rank of the changes that are trained instead of whole weights; needs less memory
    recompute: int | None = None  # 1: gradient checkpointing; needs less memory
    shard: int | None = None  # 1: each process holds a part of the weights (FSDP), so that larger models fit
    ridge: float | None = None  # of the refit: how strongly weights are held near those that a cut left
    blockwise: float | None = None  # share of the tokens for training layer by layer, before distillation; 0: none

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
        """The names of the options that are not None."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name) is not None)

    def fixed(self) -> Options:
        """The options that a run must resume with: without those on which only its memory depends."""
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
