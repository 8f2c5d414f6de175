"""`headwise search`: its flags, its trials, and the Pareto front that they found."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.devices import check
from headwise.files.disk import explained, recover, refuse_pipes
from headwise.research.search import front
from headwise.research.search.settings import SearchSettings
from headwise.runs.flags import with_flags
from headwise.runs.lock import locked

PATIENCE = 60.0  # seconds that a worker waits for another to write
Option = typer.Option


@with_flags(SearchSettings, "search")
def command(
    settings: dict[str, Any],
    out: Annotated[Path, Option(help="Folder for the study, pareto.json, pareto.svg, search.html and best/.")],
    storage: Annotated[
        str | None, Option(help="sqlite:///study.db, another database, or a journal file; shared by workers.")
    ] = None,
    study: Annotated[str, Option(help="Name of the study in the storage.")] = "headwise",
    minutes: Annotated[float | None, Option(help="Start no further trial after this many minutes.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Search shapes under a budget by training each for a few steps; bad ones are stopped early.

    The same command resumes an interrupted study. On several machines, give all workers the same --storage.
    """
    asked = SearchSettings(**settings)
    from headwise.research.search.study import search

    check(asked.device)
    front.refuse(out)
    refuse_pipes(out)
    done, made = search(asked, out, storage, study, minutes, watch=_say)
    found = front.summary(rows := front.rows_of(done), asked.to_json())
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
