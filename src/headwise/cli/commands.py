"""The command line: flags in, a stage called, errors printed in one line. Imports torch only where a stage needs it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise import strategies
from headwise.cli.options import (
    ALLOW,
    DEFAULT,
    Allow,
    Budgets,
    Context,
    Data,
    Device,
    Eval,
    EvalTokens,
    Folder,
    Heal,
    HealOptions,
    Json,
    Length,
    MaxLoss,
    Model,
    Out,
    Overwrite,
    Pool,
    Portable,
    Remote,
    Rounds,
    Seed,
    Strategy,
    Stream,
    SwapTokens,
    Task,
    Tokens,
)
from headwise.cli.progress import Bars, keep_stdout_clean
from headwise.errors import NO_MEMORY, HeadwiseError, lacks_memory
from headwise.fast.command import command as kernels
from headwise.progress import is_main_process
from headwise.research import reproduce
from headwise.research.designs.command import command as design
from headwise.research.search.command import command as search
from headwise.research.theory import command
from headwise.research.train import command as training
from headwise.runs.settings import Settings

NOT_VERIFIED = 3  # exit code
app = typer.Typer(
    help="Fit a Transformer to a budget: probe, allocate, reshape, heal, verify, report.",
    epilog="Exit codes: 0 fine, 2 bad input, 3 not verified (a check failed, or quality is beyond --max-loss).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(command.app, name="theory")


@app.command()
def run(
    model: Model,
    budget: Budgets,
    out: Out,
    data: Data = None,
    eval: Eval = None,
    task: Task = None,
    strategy: Strategy = DEFAULT.strategy,
    rounds: Rounds = DEFAULT.rounds,
    heal: Heal = DEFAULT.heal,
    heal_option: HealOptions = None,
    portable: Portable = False,
    allow: Allow = ALLOW,
    seed: Seed = DEFAULT.seed,
    device: Device = DEFAULT.device,
    tokens: Tokens = DEFAULT.tokens,
    eval_tokens: EvalTokens = DEFAULT.eval_tokens,
    swap_tokens: SwapTokens = DEFAULT.swap_tokens,
    length: Length = DEFAULT.length,
    context: Context = None,
    trust_remote_code: Remote = False,
    stream: Stream = None,
    pool: Pool = DEFAULT.pool,
    max_loss: MaxLoss = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Fit a model to a budget: all six stages, from model to report."""
    settings: dict[str, Any] = dict(
        data=data, eval=eval, task=task, strategy=strategy, rounds=rounds, heal=heal,
        heal_options=tuple(heal_option or ()), portable=portable, allow=_units(allow), seed=seed, device=device,
        tokens=tokens, eval_tokens=eval_tokens, swap_tokens=swap_tokens, length=length, context=context,
        trust_remote_code=trust_remote_code, stream=stream, pool=pool, max_loss=max_loss,
    )  # fmt: skip
    _refuse_names(settings)
    from headwise import api

    with Bars() as track:
        dossier = api.run(model, budget, out, overwrite, track, **settings)
    _finish(dossier, out, as_json)


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Run folder; a free one under runs/ if not given.")] = None,
    as_json: Json = False,
) -> None:
    """Halve the embedded model's cache and heal it, on the source code of your own standard library."""
    from headwise import api

    if out is None:
        names = ["demo", *(f"demo-{n}" for n in range(2, 1000))]
        out = next(path for path in (Path("runs") / name for name in names) if not (path / "report.html").exists())
    small: dict[str, Any] = dict(tokens=12_288, eval_tokens=8_192, swap_tokens=1_024, length=512, seed=0, pool="all")
    healing: dict[str, Any] = dict(heal="blockwise", heal_options=("steps=48",))
    with Bars() as track:
        dossier = api.run("embedded", "kv=50%", out, track=track, **small, **healing)
    _finish(dossier, out, as_json)


@app.command()
def probe(
    model: Model,
    out: Out,
    budget: Annotated[list[str] | None, typer.Option("--budget", help="Probe only what these budgets need.")] = None,
    latency: Annotated[
        list[str] | None,
        typer.Option(help="Also time layers on this device: decode or prefill, length, batch, as in decode,32k,b8."),
    ] = None,
    data: Data = None,
    task: Task = None,
    allow: Allow = ALLOW,
    seed: Seed = DEFAULT.seed,
    device: Device = DEFAULT.device,
    tokens: Tokens = DEFAULT.tokens,
    swap_tokens: SwapTokens = DEFAULT.swap_tokens,
    length: Length = DEFAULT.length,
    context: Context = None,
    trust_remote_code: Remote = False,
    stream: Stream = None,
    pool: Pool = DEFAULT.pool,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Measure what every unit of a model is worth."""
    settings: dict[str, Any] = dict(
        budgets=tuple(budget or ()), data=data, task=task, allow=_units(allow), seed=seed, device=device, tokens=tokens,
        swap_tokens=swap_tokens, length=length, context=context, trust_remote_code=trust_remote_code, stream=stream,
        pool=pool,
    )  # fmt: skip
    _refuse_names(settings)
    from headwise import api

    with Bars() as track:
        readings = api.probe(model, out, track, overwrite, latency or (), **settings)
    _say(readings.to_json() if as_json else f"{len(readings.curves)} readings in {out}/readings.json", as_json)


@app.command()
def allocate(
    folder: Folder,
    budget: Budgets,
    strategy: Strategy = DEFAULT.strategy,
    portable: Portable = False,
    allow: Allow = ALLOW,
    seed: Seed = DEFAULT.seed,
    as_json: Json = False,
) -> None:
    """Decide every size for a budget, from readings alone: no model, no GPU, no torch."""
    from headwise.stages.allocate import allocate_in

    plan = allocate_in(folder, tuple(budget), strategy, _units(allow), portable, seed)
    if as_json:
        _say(plan.to_json(), True)
    else:
        from headwise.cli.show import show_record

        show_record(plan)
        typer.echo(f"written to {folder}/plan.json; next: headwise heal {folder}")


def _build(folder: Path, method: str, as_json: bool, options: Sequence[str] = (), trusted: bool = False) -> None:
    from headwise import api

    with Bars() as track:
        api.reshape(folder, method, track, options, trusted)
    found = {"model": str(folder / "model"), "heal": method}
    _say(found if as_json else f"model in {folder}/model; next: headwise verify {folder}", as_json)


@app.command()
def reshape(folder: Folder, trust_remote_code: Remote = False, as_json: Json = False) -> None:
    """Carry out plan.json without healing: build the smaller model."""
    _build(folder, "none", as_json, trusted=trust_remote_code)


@app.command()
def heal(
    folder: Folder,
    heal: Heal = DEFAULT.heal,
    heal_option: HealOptions = None,
    trust_remote_code: Remote = False,
    as_json: Json = False,
) -> None:
    """Carry out plan.json and repair the result."""
    _build(folder, heal, as_json, heal_option or (), trust_remote_code)


@app.command()
def verify(folder: Folder, max_loss: MaxLoss = None, trust_remote_code: Remote = False, as_json: Json = False) -> None:
    """Prove what was done: sizes, quality at every length, retrieval, speed."""
    from headwise import api
    from headwise.cli.show import in_short

    with Bars() as track:
        verdict = api.verify(folder, track, max_loss, trust_remote_code)
    _say(verdict.to_json() if as_json else f"{in_short(verdict)}\nnext: headwise report {folder}", as_json)
    _exit(verdict)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="A run folder; several are compared on one page.")],
    out: Annotated[Path | None, typer.Option(help="Where the comparison of several runs is written.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Also write the pictures there, as SVG and PNG.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace --out or --figures.")] = False,
    as_json: Json = False,
) -> None:
    """Write report.html and report.md from what a run folder holds, or compare several."""
    from headwise.runs.folder import RunFolder
    from headwise.stages.report import write_comparison, write_report

    if len(folders) > 1:
        if out is None or figures is not None:
            raise HeadwiseError("several runs are compared on one page; add --out compare.html, leave out --figures.")
        write_comparison(folders, out, overwrite)
        _say({"out": str(out)} if as_json else str(out), as_json)
        return
    if out is not None:
        raise HeadwiseError("--out is for several runs; one run's report is written into its folder.")
    dossier = write_report(RunFolder(folders[0]))
    if figures is not None:
        from headwise.report.figures import save_figures

        save_figures(dossier, figures, overwrite)
    _say(dossier.to_json() if as_json else f"{folders[0] / 'report.html'}", as_json)


@app.command()
def families(
    as_json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table for a document.")] = False,
) -> None:
    """List the model families that can be reshaped."""
    from headwise.cli.show import show_families

    show_families(as_json, markdown)


@app.command()
def show(file: Annotated[Path, typer.Argument(help="plan.json, readings.json or verdict.json.")]) -> None:
    """Draw a plan, readings or a verdict in the terminal."""
    from headwise.cli.show import show_file

    show_file(file)


app.command("train", help=training.HELP)(training.command)
app.command("design")(design)
app.command("search")(search)
app.command("reproduce")(reproduce.command)
app.command("kernels")(kernels)


def _refuse_names(settings: dict[str, Any]) -> None:
    """Refuse names that do not exist before torch is imported, which takes seconds."""
    asked = Settings(model="", **settings)
    strategies.chosen(asked.strategy, asked.allow, asked.portable)


def _units(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _say(found: Any, as_json: bool) -> None:
    typer.echo(json.dumps(found, indent=1) if as_json else found)


def _finish(dossier: Any, out: Path, as_json: bool) -> None:
    """The verdict, for people in a few lines or for programs as JSON."""
    from headwise.cli.show import finished

    whole = {"verdict": dossier.verdict.to_json(), "plan": dossier.plan.to_json(), "out": str(out)} if as_json else None
    _say(whole or finished(dossier, out), as_json)
    _exit(dossier.verdict)


def _exit(verdict: Any) -> None:
    """End with code 3 where a check failed or quality is beyond the limit: scripts must not take it for a success."""
    if not verdict.passed:
        raise typer.Exit(NOT_VERIFIED)


class _Terminated(BaseException):
    """The system asked this process to end."""


def _terminate(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: files are closed and the lock is given back meanwhile
    raise _Terminated


def main() -> None:
    """Entry point: bad input ends in one line and code 2, what is not verified in 3, Ctrl-C in 130, SIGTERM in 143."""
    keep_stdout_clean()
    if not is_main_process():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # for as long as the process lives
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        app()
    except HeadwiseError as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        sys.exit(2)
    except (MemoryError, SystemError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        typer.echo(f"error: {NO_MEMORY}", err=True)
        sys.exit(2)
    except _Terminated:
        _stop(128 + signal.SIGTERM)
    except SystemExit as stop:  # as typer ends what was interrupted
        if stop.code == 128 + signal.SIGINT:
            _stop(128 + signal.SIGINT)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(code: int) -> None:
    typer.echo("interrupted; the same command resumes where it stopped.", err=True)
    sys.exit(code)
