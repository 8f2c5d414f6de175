"""The settings of a training, and what follows from them. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import TypedDict

from headwise.errors import HeadwiseError
from headwise.runs.flags import check_smallest, option
from headwise.types import Record

TASKS = ("causal", "masked", "classification", "image_classification")
C = "train"  # the command that takes these settings
DATA, STEPS, RECORD, MACHINE = "Data", "Optimisation", "Evaluation and checkpoints", "Machine"  # headings in its help
RATE, RATE_WIDTH, HIGHEST_RATE = 6e-4, 768, 3e-3  # see `usual_rate`
TUNING = 0.05  # of the rate of a fresh model, for one that is trained already


@dataclass(frozen=True, slots=True)
class TrainSettings(Record):
    """A training that was killed resumes only under the same settings; the number of processes may differ."""

    config: str = option(
        ...,
        "Folder or config.json, stock or tailored; existing weights are trained further.",
        C,
        value="CONFIG",
        argument=True,
    )
    data: str = option(
        ..., "Text or jsonl file (also compressed), datasets name, 'stdlib'; labelled: .jsonl, .tsv, .npz.", C, DATA
    )
    eval: str | None = option(None, "Data to evaluate on; held out from --data if not given.", C, DATA)
    task: str | None = option(None, f"{', '.join(TASKS[:-1])} or {TASKS[-1]}; if not given, by data and model.", C)
    tokenizer: str | None = option(None, "Folder of the tokenizer, if CONFIG has none beside it.", C, DATA)
    train_tokenizer: int | None = option(None, "Train a tokenizer of this many tokens on the data.", C, DATA, "VOCAB")
    epochs: float = option(1.0, "Passes over the data, unless --steps or --tokens is given.", C, STEPS)
    steps: int | None = option(None, "Optimizer steps.", C, STEPS, least=1)
    tokens: int | None = option(None, "Tokens to train on.", C, STEPS, least=1)
    batch_tokens: int | None = option(
        None, "Batch size in tokens, over all processes; default 32768.", C, STEPS, least=1
    )
    batch_rows: int | None = option(
        None, "Batch size in rows; default 32 labelled texts, 128 images.", C, STEPS, least=1
    )
    micro_tokens: int = option(
        32_768, "Tokens per forward pass of a process; more are accumulated.", C, MACHINE, least=1
    )
    length: int = option(512, "Tokens of a row of text, at most what the model takes.", C, DATA, least=8)
    rate: float | None = option(
        None, "Peak learning rate; if not given, by width: 6e-4 at 768, a twentieth for trained weights.", C, STEPS
    )
    warm_up: float = option(0.02, "Share of the steps for warm-up.", C, STEPS)
    decay: float = option(0.1, "Weight decay, of matrices only.", C, STEPS)
    clip: float = option(1.0, "Gradient clipping norm; 0: none.", C, STEPS)
    augment: bool = option(True, "Images: random crops and flips.", C, DATA)
    fresh: bool = option(False, "Start from random weights even where CONFIG has weights.", C)
    seed: int = option(0, "Random seed.", C, MACHINE)
    device: str = option("auto", "auto, cpu, cuda.", C, MACHINE)
    bf16: bool | None = option(None, "Compute in bfloat16; if not given, on CUDA.", C, MACHINE)
    compile: bool = option(False, "Compile the model: slower start, faster steps.", C, MACHINE)
    eval_tokens: int = option(65_536, "Tokens to evaluate on, at most.", C, RECORD)
    eval_every: int = option(0, "Steps between evaluations; 0: ten in a run.", C, RECORD)
    save_every: int = option(1_000, "Steps between checkpoints.", C, RECORD, least=1)
    save_minutes: float = option(10.0, "Minutes between checkpoints, at most.", C, RECORD)
    point_every: int = option(10, "Steps between points of the curve.", C, RECORD, least=1)

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in TASKS:
            raise HeadwiseError(f"no task is called '{self.task}'. Known: {', '.join(TASKS)}.")
        if self.device not in ("auto", "cpu", "cuda"):
            raise HeadwiseError(f"no device is called '{self.device}'. Known: auto, cpu, cuda.")
        if self.steps is not None and self.tokens is not None:
            raise HeadwiseError("both steps and tokens are given; give one of them.")
        check_smallest(self)
        if self.epochs <= 0:
            raise HeadwiseError(f"epochs is {self.epochs}; it must be above 0.")

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


class TrainKeywords(TypedDict, total=False):
    """The fields of `TrainSettings` but for configuration and data, for type checkers; a test keeps both equal."""

    eval: str | None
    task: str | None
    tokenizer: str | None
    train_tokenizer: int | None
    epochs: float
    steps: int | None
    tokens: int | None
    batch_tokens: int | None
    batch_rows: int | None
    micro_tokens: int
    length: int
    rate: float | None
    warm_up: float
    decay: float
    clip: float
    augment: bool
    fresh: bool
    seed: int
    device: str
    bf16: bool | None
    compile: bool
    eval_tokens: int
    eval_every: int
    save_every: int
    save_minutes: float
    point_every: int


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
