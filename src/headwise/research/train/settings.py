"""The settings of a training, and what follows from them. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from headwise.errors import HeadwiseError
from headwise.types import Record

TASKS = ("causal", "masked", "classification", "image_classification")
RATE, RATE_WIDTH, HIGHEST_RATE = 6e-4, 768, 3e-3  # see `usual_rate`
TUNING = 0.05  # of the rate of a fresh model, for one that is trained already


@dataclass(frozen=True, slots=True)
class TrainSettings(Record):
    """A training that was killed resumes only under the same settings; the number of processes may differ."""

    config: str  # folder or config.json; a folder with weights is trained further
    data: str
    eval: str | None = None  # None: held out from `data`
    task: str | None = None  # None: by the data and the model's head
    tokenizer: str | None = None  # None: that beside the configuration
    train_tokenizer: int | None = None  # size of a vocabulary to train on the data
    epochs: float = 1.0  # unless steps or tokens are given
    steps: int | None = None
    tokens: int | None = None
    batch_tokens: int | None = None  # of one step, all processes together; None: 32,768
    batch_rows: int | None = None  # the same in rows, for labelled data; None: 32 texts, 128 images
    micro_tokens: int = 32_768  # computed at once by one process; more are accumulated
    length: int = 512  # tokens of a row of text, at most what the model takes
    rate: float | None = None  # None: `usual_rate`
    warm_up: float = 0.02
    decay: float = 0.1
    clip: float = 1.0
    augment: bool = True  # images: random crops and flips
    fresh: bool = False  # begin with random weights even where the folder has some
    seed: int = 0
    device: str = "auto"
    bf16: bool | None = None  # None: on CUDA
    compile: bool = False
    eval_tokens: int = 65_536
    eval_every: int = 0  # steps; 0: ten times in a run
    save_every: int = 1_000  # steps
    save_minutes: float = 10.0
    point_every: int = 10  # steps between points of the curve

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in TASKS:
            raise HeadwiseError(f"no task is called '{self.task}'. Known: {', '.join(TASKS)}.")
        if self.device not in ("auto", "cpu", "cuda"):
            raise HeadwiseError(f"no device is called '{self.device}'. Known: auto, cpu, cuda.")
        if self.steps is not None and self.tokens is not None:
            raise HeadwiseError("both steps and tokens are given; give one of them.")
        for name in ("steps", "tokens", "batch_tokens", "batch_rows", "micro_tokens", "save_every", "point_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise HeadwiseError(f"{name} is {value}; it must be at least 1.")
        if self.epochs <= 0:
            raise HeadwiseError(f"epochs is {self.epochs}; it must be above 0.")
        if self.length < 8:
            raise HeadwiseError(f"length is {self.length}; it must be at least 8.")

    def same_run(self, other: TrainSettings) -> bool:
        """Whether a run under other settings is this one: where it computes, and how much at once, may change."""
        free = {
            name: getattr(self, name) for name in ("device", "compile", "micro_tokens", "save_every", "save_minutes")
        }
        return replace(other, **free) == self

    def same_data(self, other: TrainSettings) -> bool:
        """Whether the tokens of a run under other settings can be read again."""
        names = ("data", "eval", "config", "task", "tokenizer", "train_tokenizer", "seed")
        return all(getattr(self, name) == getattr(other, name) for name in names)


def usual_rate(width: int, trained: bool) -> float:
    """A highest learning rate for AdamW by the width of the model: 6e-4 at 768, falling as 1 / width.

    That is how the best rate of hidden matrices moves with width, and within a third of the rates of GPT-3's table;
    below a width of 154 it stays at 3e-3. A model that is trained already gets a twentieth: 3e-5 at 768.

    >>> [usual_rate(width, False) for width in (64, 768, 2048)], usual_rate(768, True)
    ([0.003, 0.0006, 0.000225], 3e-05)
    """
    rate = min(HIGHEST_RATE, RATE * RATE_WIDTH / width) * (TUNING if trained else 1.0)
    return float(f"{rate:.6g}")


def rows_of_step(settings: TrainSettings, row_tokens: int, default_rows: int | None) -> int:
    """Rows that all processes together read in one step; `default_rows` is that of labelled data."""
    if settings.batch_rows is not None:
        return settings.batch_rows
    if settings.batch_tokens is None and default_rows is not None:
        return default_rows
    tokens = settings.batch_tokens or 32_768
    if tokens < row_tokens:
        raise HeadwiseError(
            f"a step of {tokens} tokens is smaller than one row of {row_tokens}; "
            f"raise --batch-tokens to {row_tokens} or more, or lower --length."
        )
    return tokens // row_tokens


def parts_of_step(rows: int, row_tokens: int, processes: int, micro_tokens: int) -> int:
    """How many parts a process computes one after the other, each of at most `micro_tokens`, all of one size.

    >>> parts_of_step(rows=64, row_tokens=512, processes=2, micro_tokens=4096)
    4
    """
    if rows % processes:
        near = max(processes, rows // processes * processes)
        raise HeadwiseError(
            f"{processes} processes cannot share the {rows} rows of a step evenly; "
            f"give --batch-rows {near} or --batch-tokens {near * row_tokens}."
        )
    own = rows // processes
    least = ceil(own * row_tokens / max(micro_tokens, row_tokens))
    return next(parts for parts in range(least, own + 1) if own % parts == 0)


def steps_of(settings: TrainSettings, rows: int, per_step: int, row_tokens: int) -> int:
    """Steps of a run over `rows` rows."""
    if settings.steps is not None:
        return settings.steps
    if settings.tokens is not None:
        return max(1, round(settings.tokens / (per_step * row_tokens)))
    return max(1, round(settings.epochs * rows / per_step))
