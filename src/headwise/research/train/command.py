"""`headwise train`: its flags and its summary."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.research.train.settings import TrainSettings
from headwise.runs.flags import with_flags

HELP = (
    "Train a model from a configuration, or train one further.\n\n"
    "The folder then holds model/ (loads with from_pretrained), training.json, curve.jsonl, logs/ (TensorBoard) and "
    "checkpoints/. An interrupted run resumes with the same command and ends with the same result. "
    "On several GPUs: torchrun --nproc-per-node 4 -m headwise train ..."
)


@with_flags(TrainSettings, "train")
def command(
    settings: dict[str, Any],
    out: Annotated[Path, typer.Option(help="Folder to write; an unfinished run in it resumes.", metavar="FOLDER")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing training in --out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a model; `HELP` is the text for users."""
    from headwise.research.train.run import train

    found = train(out=out, overwrite=overwrite, **settings)
    if os.environ.get("RANK", "0") == "0":  # the main process alone
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
