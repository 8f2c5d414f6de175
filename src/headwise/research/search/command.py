"""`headwise search`: its flags, its trials, and the Pareto front that they found."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.devices import chosen
from headwise.files.disk import explained, recover, refuse_pipes
from headwise.research.search import front
from headwise.runs.lock import locked

PATIENCE = 60.0  # seconds that a worker waits for another to write
Option = typer.Option


def command(
    budget: Annotated[list[str], Option("--budget", help="params=5M, flops=2G@1k, kv=1MiB@1k; repeatable.")],
    out: Annotated[Path, Option(help="Folder for the study, pareto.json, pareto.svg, search.html and best/.")],
    family: Annotated[str, Option(help="llama or gpt2.")] = "llama",
    data: Annotated[str, Option(help="Text to train trials on: a file, a datasets name, 'stdlib'.")] = "stdlib",
    tokenizer: Annotated[str, Option(help="Folder or hub id of a tokenizer; 'embedded' for code.")] = "embedded",
    trials: Annotated[int, Option(help="Trials of the study in all, those of other workers included.")] = 20,
    steps: Annotated[int, Option(help="Training steps of a trial that is not stopped early.")] = 200,
    batch: Annotated[int, Option(help="Batch size in rows.")] = 8,
    length: Annotated[int, Option(help="Tokens in a row.")] = 128,
    tokens: Annotated[int, Option(help="Tokens of training text.")] = 400_000,
    depth: Annotated[int | None, Option(help="Layers; searched if not given.")] = None,
    storage: Annotated[
        str | None, Option(help="sqlite:///study.db, another database, or a journal file; shared by workers.")
    ] = None,
    study: Annotated[str, Option(help="Name of the study in the storage.")] = "headwise",
    minutes: Annotated[float | None, Option(help="Start no further trial after this many minutes.")] = None,
    seed: Annotated[int, Option(help="Random seed.")] = 0,
    device: Annotated[str, Option(help="auto, cpu, cuda.")] = "auto",
    as_json: Annotated[bool, Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Search shapes under a budget by training each for a few steps; bad ones are stopped early.

    The same command resumes an interrupted study. On several machines, give all workers the same --storage.
    """
    from headwise.research.search.study import SearchSettings, search

    settings = SearchSettings(
        family=family,
        budget=tuple(budget),
        data=data,
        tokenizer=tokenizer,
        trials=trials,
        steps=steps,
        batch=batch,
        length=length,
        tokens=tokens,
        depth=depth,
        seed=seed,
        device=chosen(device),
    )
    front.refuse(out)
    refuse_pipes(out)
    done, made = search(settings, out, storage, study, minutes, watch=_say)
    found = front.summary(rows := front.rows_of(done), settings.to_json())
    best = next((row for row in rows if row["number"] == found["best"]), None)
    page = _write(found, best, made, out)
    typer.echo(json.dumps(found, indent=1) if as_json else _summary(found, best, page))


def _write(found: dict[str, Any], best: dict[str, Any] | None, made: Any, out: Path) -> Path:
    """Write the front and the best configuration; returns the page. Workers share a folder and take turns."""
    from headwise.research.designs import configs

    with explained(out), locked(out, "search", PATIENCE):
        recover(out)
        page = front.write(found, out)[-1]
        if best is not None:
            configs.write(made.maker.config(made.shape_of(best)), made.maker.kind.auto, out / "best", overwrite=True)
    return page


def _summary(found: dict[str, Any], best: dict[str, Any] | None, page: Path) -> str:
    """What was found, in words."""
    if best is None:
        return "no trial is complete yet; the same command resumes."
    layers, first = best["layers"], best["layers"][0]
    return (
        f"{found['trials']} trials, {found['given_up']} stopped early; best loss {best['loss']:.4f}: "
        f"{len(layers)} layers, width {best['hidden_size']}, {first['query_heads']} heads of {first['qk_dim']} in the "
        f"first, {best['parameters']:,} parameters\n"
        f"{page}; next: headwise train {page.parent / 'best'} --data TEXT --out FOLDER"
    )


def _say(done: int, wanted: int, best: float | None) -> None:
    known = "" if best is None else f", best loss {best:.4f}"
    typer.echo(f"{done} of {wanted} trials{known}", err=True)
