"""The arguments and options of the command line, each described once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwise.runs.settings import Settings
from headwise.types import UNITS
from headwise.types.verdict import MAX_LOSS

Model = Annotated[str, typer.Argument(help="Hub id, local folder, .gguf file, or 'embedded'.")]
Folder = Annotated[Path, typer.Argument(help="A run folder.")]
Out = Annotated[Path, typer.Option(help="Run folder to write; an unfinished run in it resumes.")]
Budgets = Annotated[
    list[str],
    typer.Option(
        "--budget",
        help="kv=75%, kv=2GiB@32k, params=20M, flops=80%@8k, attention=85%, latency=80%@decode,32k,b8; repeatable.",
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Calibration: text or jsonl file, datasets name, 'stdlib', 'self'; of images: a folder, an .npz file, a "
        "datasets name; of speech: a folder of .wav files, a jsonl file."
    ),
]
Eval = Annotated[str | None, typer.Option(help="Evaluation text, images or speech; held out from --data if not given.")]
Task = Annotated[
    str | None,
    typer.Option(
        help="causal, seq2seq, speech, masked, embedding, classification, image_embedding or image_classification; "
        "that of the model's head if not given."
    ),
]
Strategy = Annotated[str, typer.Option(help="exact, uniform, depth, published, svd or magnitude.")]
Rounds = Annotated[int, typer.Option(help="Cut in this many rounds, probing again in between.")]
Heal = Annotated[
    str, typer.Option(help="none, refit (closed form), blockwise (every layer learns) or distill (the whole model).")
]
HealOptions = Annotated[
    list[str] | None,
    typer.Option("--heal-option", help="Of a healing that learns: tokens=1e6, rate=3e-3, lora=16, blockwise=0.2, ..."),
]
Portable = Annotated[bool, typer.Option("--portable", help="One size for all layers; loads in stock transformers.")]
Pool = Annotated[
    str,
    typer.Option(help="Key/value heads that share a cached row: all, or a number such as 2; more quality per byte."),
]
Allow = Annotated[str, typer.Option(help=f"What may be cut, of: {','.join(UNITS)}.")]
Seed = Annotated[int, typer.Option(help="Random seed.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda.")]
Tokens = Annotated[int, typer.Option(help="Calibration tokens; an image counts as many as it has patches.")]
EvalTokens = Annotated[int, typer.Option(help="Evaluation tokens.")]
SwapTokens = Annotated[int, typer.Option(help="Tokens on which prices are measured; 0: predicted only.")]
Length = Annotated[int, typer.Option(help="Tokens in a block of text.")]
Context = Annotated[
    int | None,
    typer.Option(help="Tokens of context that will be served; the model's own if not given, at most 32k."),
]
MaxLoss = Annotated[
    str | None, typer.Option(help=f"Most damage that counts as good: 2% of perplexity, 0.02 nats; default {MAX_LOSS}.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing run in --out.")]
Stream = Annotated[
    bool | None,
    typer.Option("--stream/--no-stream", help="One layer in memory at a time; if not given, where a model needs it."),
]
Remote = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that a model repository brings.")]
DEFAULT = Settings(model="")  # every default has its home there
ALLOW = ",".join(DEFAULT.allow)
