"""`headwise train`: its flags, its progress bar and its summary."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.research.train.settings import TrainSettings

DEFAULT = TrainSettings(config="", data="")  # every default has its home there

HELP = (
    "Train a model from a configuration, or train one further.\n\n"
    "The folder then holds model/ (loads with from_pretrained), training.json, curve.jsonl, logs/ (TensorBoard) and "
    "checkpoints/. An interrupted run resumes with the same command and ends with the same result. "
    "On several GPUs: torchrun --nproc-per-node 4 -m headwise train ..."
)
Option = typer.Option


def command(
    config: Annotated[
        str, typer.Argument(help="Folder or config.json, stock or tailored; existing weights are trained further.")
    ],
    data: Annotated[
        str,
        Option(help="Text or jsonl file (also compressed), datasets name, 'stdlib'; with labels: .jsonl, .tsv, .npz."),
    ],
    out: Annotated[Path, Option(help="Folder to write; an unfinished run in it resumes.")],
    eval: Annotated[str | None, Option(help="Data to evaluate on; held out from --data if not given.")] = None,
    task: Annotated[
        str | None,
        Option(help="causal, masked, classification or image_classification; if not given, by data and model."),
    ] = None,
    tokenizer: Annotated[str | None, Option(help="Folder of the tokenizer, if CONFIG has none beside it.")] = None,
    train_tokenizer: Annotated[
        int | None, Option(metavar="VOCAB", help="Train a tokenizer of this many tokens on the data.")
    ] = None,
    epochs: Annotated[
        float, Option(help="Passes over the data, unless --steps or --tokens is given.")
    ] = DEFAULT.epochs,
    steps: Annotated[int | None, Option(help="Optimizer steps.")] = None,
    tokens: Annotated[int | None, Option(help="Tokens to train on.")] = None,
    batch_tokens: Annotated[int | None, Option(help="Batch size in tokens, over all processes; default 32768.")] = None,
    batch_rows: Annotated[int | None, Option(help="Batch size in rows; default 32 labelled texts, 128 images.")] = None,
    micro_tokens: Annotated[
        int, Option(help="Tokens per forward pass of a process; more are accumulated.")
    ] = DEFAULT.micro_tokens,
    length: Annotated[int, Option(help="Tokens of a row of text, at most what the model takes.")] = DEFAULT.length,
    rate: Annotated[
        float | None,
        Option(help="Peak learning rate; if not given, by width: 6e-4 at 768, a twentieth of it for trained weights."),
    ] = None,
    warm_up: Annotated[float, Option(help="Share of the steps for warm-up.")] = DEFAULT.warm_up,
    decay: Annotated[float, Option(help="Weight decay, of matrices only.")] = DEFAULT.decay,
    clip: Annotated[float, Option(help="Gradient clipping norm; 0: none.")] = DEFAULT.clip,
    augment: Annotated[bool, Option(help="Images: random crops and flips.")] = DEFAULT.augment,
    fresh: Annotated[bool, Option("--fresh", help="Start from random weights even where CONFIG has weights.")] = False,
    seed: Annotated[int, Option(help="Random seed.")] = DEFAULT.seed,
    device: Annotated[str, Option(help="auto, cpu, cuda.")] = DEFAULT.device,
    bf16: Annotated[bool | None, Option(help="Compute in bfloat16; if not given, on CUDA.")] = None,
    compile: Annotated[bool, Option("--compile", help="Compile the model: slower start, faster steps.")] = False,
    eval_tokens: Annotated[int, Option(help="Tokens to evaluate on, at most.")] = DEFAULT.eval_tokens,
    eval_every: Annotated[int, Option(help="Steps between evaluations; 0: ten in a run.")] = DEFAULT.eval_every,
    save_every: Annotated[int, Option(help="Steps between checkpoints.")] = DEFAULT.save_every,
    save_minutes: Annotated[float, Option(help="Minutes between checkpoints, at most.")] = DEFAULT.save_minutes,
    point_every: Annotated[int, Option(help="Steps between points of the curve.")] = DEFAULT.point_every,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an existing training in --out.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a model; `HELP` is the text for users."""
    given = {name: value for name, value in locals().items() if name not in ("config", "data", "out", "as_json")}
    from headwise.research.train.run import train

    with _bar() as watch:
        found = train(config, data, out, watch=watch, **given)
    _answer(found, out, as_json)


def _answer(found: dict[str, Any], out: Path, as_json: bool) -> None:
    """Print the result, in the main process alone."""
    if os.environ.get("RANK", "0") == "0":
        typer.echo(json.dumps(found, indent=1) if as_json else _summary(found, out))


def _summary(found: dict[str, Any], out: Path) -> str:
    scores = found["evaluation"]
    parts = [f"{name} {scores[name]:.4f} ± {scores[f'{name}_se']:.4f}" for name in scores if not name.endswith("_se")]
    return (
        f"{found['fit']['steps']:,} steps, {found['tokens']:,} tokens in {found['seconds']:.0f} s "
        f"({found['tokens_per_second']:,.0f} tokens/s)\n"
        f"training loss {found['train_loss']:.4f}; held out: {', '.join(parts)}\n"
        f"{out / 'model'}"
    )


@contextmanager
def _bar() -> Iterator[Any]:
    """A progress bar with loss, speed and time left, on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = ("training", BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    progress = Progress(*columns, console=Console(stderr=True))
    bar = progress.add_task("", total=None)

    def watch(now: Any) -> None:
        progress.start()
        loss = "" if now.loss is None else f"loss {now.loss:.3f}"
        speed = "" if now.tokens_per_second is None else f"{now.tokens_per_second:,.0f} tokens/s"
        progress.update(bar, total=now.steps, completed=now.step, description=f"{loss} {speed}")

    try:
        yield watch
    finally:
        progress.stop()
