"""The settings of a search, and the flags that say them. No torch."""

from dataclasses import dataclass

from headwise.errors import HeadwiseError
from headwise.runs.flags import check_smallest, option
from headwise.types import Record

CAUSAL_FAMILIES = ("llama", "gpt2")
C = "search"  # the command that takes these settings


@dataclass(frozen=True, slots=True)
class SearchSettings(Record):
    """What to search, and how long each trial trains."""

    family: str = option("llama", f"{' or '.join(CAUSAL_FAMILIES)}.", C)
    budget: tuple[str, ...] = option((), "params=5M, flops=2G@1k, kv=1MiB@1k; repeatable.", C, required=C)
    data: str = option("stdlib", "Text to train trials on: a file, a datasets name, 'stdlib'.", C)
    tokenizer: str = option("embedded", "Folder or hub id of a tokenizer; 'embedded' for code.", C)
    trials: int = option(20, "Trials of the study in all, those of other workers included.", C, least=1)
    steps: int = option(200, "Training steps of a trial that is not stopped early.", C, least=1)
    batch: int = option(8, "Batch size in rows.", C, least=1)
    length: int = option(128, "Tokens in a row.", C, least=1)
    tokens: int = option(400_000, "Tokens of training text.", C)
    depth: int | None = option(None, "Layers; searched if not given.", C)
    seed: int = option(0, "Random seed.", C)
    device: str = option("auto", "auto, cpu, cuda.", C)

    def __post_init__(self) -> None:
        check_smallest(self)
        if self.family not in CAUSAL_FAMILIES:
            raise HeadwiseError(
                f"trials train language models, which {self.family} is none of; search {', '.join(CAUSAL_FAMILIES)}, "
                "or compare designs of it with headwise design --measure."
            )
