"""The command line: flags in, a stage called, errors printed in one line. Imports torch only where a stage needs it."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise import __version__, budgets, strategies
from headwise.cli.options import Folder, Json, ListsPlugIns, Out, Overwrite, ShowsExamples
from headwise.cli.stdout import keep_stdout_clean
from headwise.engines.process import require
from headwise.errors import HeadwiseError, known_reason
from headwise.fast.command import command as kernels
from headwise.progress import is_main_process, stage
from headwise.progress.shown import progress_shown
from headwise.research import advise, reproduce
from headwise.research.designs.command import command as design
from headwise.research.search.command import command as search
from headwise.research.theory import command
from headwise.research.train import command as training
from headwise.runs.flags import with_flags
from headwise.runs.settings import Settings

NOT_VERIFIED = 3  # exit code
app = typer.Typer(
    cls=ShowsExamples,
    help="Fit a Transformer to a budget: probe, allocate, reshape, heal, verify, report.",
    epilog="Exit codes: 0 fine, 2 bad input, 3 not verified (a check failed, or quality is beyond --max-loss).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(command.app, name="theory")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"headwise {__version__}")
        raise typer.Exit()


DEMO: dict[str, Any] = {
    "model": "embedded", "budgets": ("kv=25%",), "heal": "refit", "tokens": 12_288, "eval_tokens": 8_192,
    "swap_tokens": 1_024, "length": 512, "seed": 0,
}  # fmt: skip


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """Fit a Transformer to a budget: probe, allocate, reshape, heal, verify, report."""


@app.command(cls=ListsPlugIns)
@with_flags(Settings, "run")
def run(settings: dict[str, Any], out: Out, overwrite: Overwrite = False, as_json: Json = False) -> None:
    """Fit a model to a budget: all six stages, from model to report."""
    _refuse_names(settings)
    _run(out, as_json, overwrite=overwrite, **settings)


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Run folder; if not given, a free one in runs/.")] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Cut the cache of the embedded model to a quarter, on the source code of your own standard library."""
    if out is None:
        names = ["demo", *(f"demo-{n}" for n in range(2, 1000))]
        out = next(path for path in (Path("runs") / name for name in names) if not (path / "report.html").exists())
    _run(out, as_json, overwrite=overwrite, **DEMO)


def _run(out: Path, as_json: bool, budgets: tuple[str, ...], **settings: Any) -> None:
    """Run all stages, print the verdict, and end with code 3 if it is not good."""
    with progress_shown() as track:
        with stage(track, "starting"):
            from headwise import api
            from headwise.cli.show import finished
        dossier = api.run(budget=budgets, out=out, track=track, **settings)
    asked = {name: value for name, value in settings.items() if name != "overwrite"}
    memory = api.memory_needed(budget=budgets, **asked) if as_json else []
    verdict, plan = dossier.verdict, dossier.plan
    assert verdict is not None and plan is not None, "a run ends with both"
    whole = {"verdict": verdict.to_json(), "plan": plan.to_json(), "memory": memory, "out": str(out)}
    _print(whole if as_json else finished(dossier, out))
    _exit(verdict)


@app.command(cls=ListsPlugIns)
@with_flags(Settings, "probe")
def probe(
    settings: dict[str, Any],
    out: Out,
    latency: Annotated[
        list[str] | None,
        typer.Option(
            help="Also time layers on this device: decode or prefill, length, batch, as in decode,32k,b8; repeatable.",
            metavar="WORKLOAD",
        ),
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Measure the damage of cutting each unit of a model; with --budget, only the units that these budgets concern."""
    _refuse_names(settings)
    from headwise import api

    budget = settings.pop("budgets")
    with progress_shown() as track:
        readings = api.probe(
            out=out, track=track, overwrite=overwrite, latency=latency or (), budget=budget, **settings
        )
    _print(readings.to_json() if as_json else f"{len(readings.curves)} readings in {out}/readings.json")


@app.command(cls=ListsPlugIns)
@with_flags(Settings, "allocate")
def allocate(settings: dict[str, Any], folder: Folder, as_json: Json = False) -> None:
    """Decide every size for a budget, from readings alone: no model, no GPU, no torch."""
    from headwise.stages.allocate import allocate_in

    plan = allocate_in(folder, **settings)
    if as_json:
        _print(plan.to_json())
    else:
        from headwise.cli.show import show_record

        show_record(plan)
        _print(f"written to {folder}/plan.json; next: headwise heal {folder}")


@app.command()
@with_flags(Settings, "reshape")
def reshape(settings: dict[str, Any], folder: Folder, as_json: Json = False) -> None:
    """Build the smaller model that plan.json describes, without healing."""
    _build(folder, as_json, heal="none", **settings)


@app.command(cls=ListsPlugIns)
@with_flags(Settings, "heal")
def heal(settings: dict[str, Any], folder: Folder, as_json: Json = False) -> None:
    """Build the smaller model that plan.json describes, and heal it."""
    _build(folder, as_json, **settings)


def _build(folder: Path, as_json: bool, heal: str, **settings: Any) -> None:
    from headwise import api

    with progress_shown() as track:
        api.reshape(folder, heal, track, **settings)
    found = {"model": str(folder / "model"), "heal": heal}
    _print(found if as_json else f"model in {folder}/model; next: headwise verify {folder}")


@app.command()
@with_flags(Settings, "verify")
def verify(
    settings: dict[str, Any],
    folder: Folder,
    engine: Annotated[
        str | None,
        typer.Option(help="Check instead that this engine serves the model: vllm.", metavar="ENGINE"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the saved model: sizes, quality at every length, retrieval, speed."""
    if engine is not None:
        return _serve(folder, engine, as_json, settings["trust_remote_code"])
    from headwise import api
    from headwise.cli.show import in_short

    with progress_shown() as track:
        verdict = api.verify(folder, track, **settings)
    _print(verdict.to_json() if as_json else f"{in_short(verdict)}\nnext: headwise report {folder}")
    _exit(verdict)


def _serve(folder: Path, engine: str, as_json: bool, trust: bool) -> None:
    """Let an engine serve the model of a run folder; code 3 where it does not write what transformers writes."""
    require(engine)
    from headwise import api
    from headwise.cli.serving import in_words

    with progress_shown() as track:
        found = api.serve(folder, engine, track, trust)
    _print(found.to_json() if as_json else f"{in_words(found)}\nwritten to {folder}/serving.json")
    if not found.passed:
        raise typer.Exit(NOT_VERIFIED)


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
        _print({"out": str(out)} if as_json else str(out))
        return
    if out is not None:
        raise HeadwiseError("--out is for several runs; one run's report is written into its folder.")
    dossier = write_report(RunFolder(folders[0]))
    if figures is not None:
        from headwise.report.figures import save_figures

        save_figures(dossier, figures, overwrite)
    _print(dossier.to_json() if as_json else f"{folders[0] / 'report.html'}")


@app.command()
def export(
    folder: Annotated[str, typer.Argument(help="A run folder, or the folder of a model.", metavar="FOLDER")],
    to: Annotated[str, typer.Option(help="The format: gguf, onnx or openvino.", metavar="FORMAT")],
    out: Annotated[Path | None, typer.Option(help="What to write; if not given, a name beside the model.")] = None,
    kind: Annotated[
        str, typer.Option("--type", help="GGUF: number format of weights, such as f16 or q8_0; auto: the file's own.")
    ] = "auto",
    tokenizer: Annotated[
        str, typer.Option(help="GGUF: text, or ids for a file that is given token numbers in place of text.")
    ] = "text",
    check: Annotated[bool, typer.Option(help="Run the result where its engine is installed, and compare.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace --out.")] = False,
    as_json: Json = False,
) -> None:
    """Write a model in the format of another engine, and run it there to compare."""
    from headwise.exports import export as write
    from headwise.exports import in_words

    with progress_shown() as track:
        found = write(folder, to, out, overwrite, track, type=kind, tokenizer=tokenizer, check=check)
    _print(found if as_json else in_words(found))


@app.command()
def families(
    as_json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table for a document.")] = False,
) -> None:
    """List the model families that can be reshaped."""
    from headwise.cli.show import show_families

    show_families(as_json, markdown)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="plan.json, readings.json, verdict.json, or a run folder.")],
) -> None:
    """Draw a plan, readings or a verdict in the terminal."""
    from headwise.cli.show import show_file

    show_file(file)


app.command("train", help=training.HELP)(training.command)
app.command("design")(design)
app.command("search")(search)
app.command("advise")(advise.command)
app.command("reproduce")(reproduce.command)
app.command("kernels")(kernels)


def _refuse_names(settings: dict[str, Any]) -> None:
    """Refuse names that do not exist before torch is imported, which takes seconds."""
    asked = Settings(**settings)
    strategies.chosen(asked.strategy, asked.allow, asked.portable)
    for text in asked.budgets:
        budgets.read(text)


def _print(found: str | dict[str, Any]) -> None:
    """Print a text, or a record as JSON."""
    typer.echo(found if isinstance(found, str) else json.dumps(found, indent=1))


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
        _check_words(sys.argv[1:])
        app()
    except HeadwiseError as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        sys.exit(2)
    except Exception as error:  # of any type: libraries raise what they like where memory or disk runs out
        if not (reason := known_reason(error)):
            raise
        typer.echo(f"error: {reason}", err=True)
        sys.exit(2)
    except _Terminated:
        _stop(128 + signal.SIGTERM)
    except SystemExit as stop:  # as typer ends what was interrupted
        if stop.code == 128 + signal.SIGINT:
            _stop(128 + signal.SIGINT)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_words(words: list[str]) -> None:
    """Refuse words that can be no name or value: an empty one would stand for the current folder."""
    for word in words:
        if not word:
            raise HeadwiseError("one of the words of this command is empty; if it is a variable of the shell, set it.")
        try:
            word.encode()
        except UnicodeEncodeError:
            raise HeadwiseError(f"{ascii(word)} is not UTF-8; rename the file, or type the word again.") from None


def _stop(code: int) -> None:
    typer.echo("interrupted; the same command resumes where it stopped.", err=True)
    sys.exit(code)
