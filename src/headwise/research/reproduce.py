"""`headwise reproduce`: the claims of the papers, each as an experiment that anyone can run again.

Experiments live beside the package in its repository, with their committed results; everything written about them in
docs/EVIDENCE.md comes from there. Nothing heavy is imported before an experiment runs.
"""

import importlib
import json
import os
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.errors import HeadwiseError
from headwise.files import disk
from headwise.files.json import read_object
from headwise.research import evidence
from headwise.research.evidence import REWRITE, Experiment
from headwise.runs.lock import output

RULES = "DESIGN_RULES.md"
ADVICE = "src/headwise/research/advice.json"  # what `headwise advise` knows, so that it needs no repository


def command(
    experiment: Annotated[str | None, typer.Argument(help="Its name or claim, such as A4, or 'all'.")] = None,
    size: Annotated[str, typer.Option(help="tiny: seconds; small: minutes; full: as published, one GPU.")] = "full",
    out: Annotated[Path | None, typer.Option(help="Folder of results; needed for sizes below full.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
    assets: Annotated[Path | None, typer.Option(help="Folder of models and texts; what is absent is left out.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a result in --out.")] = False,
    minutes: Annotated[float | None, typer.Option(help="Start no further part after this many minutes.")] = None,
    shared: Annotated[bool, typer.Option(help="Record that other work runs on the machine.")] = False,
    render: Annotated[bool, typer.Option("--render", help="Write docs/EVIDENCE.md from the results.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Fail if docs/EVIDENCE.md is not what they say.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Test the papers' claims again: list the experiments, run one or all, write the evidence."""
    root = repository()
    if render or check:
        if experiment is not None or (render and check):
            raise HeadwiseError(f"--render and --check each stand alone; type: {REWRITE}")
        _check(root) if check else _render(root)
    elif experiment is None:
        _list(root, as_json)
    else:
        how = dict(size=size, device=device, assets=assets, out=out, overwrite=overwrite, minutes=minutes)
        _run(root, experiment, how | {"shared": shared}, as_json)


def repository(near: Path | None = None) -> Path:
    """The folder that holds `experiments/`: the current one, or the checkout that this package is installed from."""
    here = Path.cwd() if near is None else near
    for root in (here, Path(__file__).resolve().parents[3]):
        if (root / "experiments" / "_lab.py").is_file():
            return root.resolve()
    raise HeadwiseError(
        "the experiments are in the repository of headwise, not in the installed package, and neither the current "
        "folder nor the package's own has them; clone the repository, go there and type the same again."
    )


def lab(root: Path) -> Any:
    """The module that runs experiments."""
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module("experiments._lab")


def entries(root: Path) -> list[Experiment]:
    """All experiments in order, with what was measured and what the rules make of it."""
    bench = lab(root)
    kept = {name: result for name in bench.experiments() if (result := _result(root, name)) is not None}
    founds = {name: bench.shown(result["found"]) for name, result in kept.items()}
    rows = []
    for name in bench.experiments():
        judged = bench.judged(name, founds[name], founds) if name in kept else None
        made = bench.made_by(name, kept[name]) if name in kept else ""
        rows.append(
            Experiment(name, bench.load(name), bench.CLAIMS[name], kept.get(name), founds.get(name, {}), judged, made)
        )
    return rows


def _result(root: Path, name: str) -> dict[str, Any] | None:
    path = root / "experiments" / "results" / f"{name}.json"
    if not path.exists():
        return None
    return read_object(path, HeadwiseError, f"restore it or run: headwise reproduce {name}")


def _list(root: Path, as_json: bool) -> None:
    sizes = list(lab(root).SIZES)
    rows: list[dict[str, Any]] = []
    for entry in entries(root):
        about = {"claim": entry.module.CLAIM, "name": entry.name, "title": entry.module.TITLE, "sizes": sizes}
        made = {key: (entry.result or {}).get(key) for key in ("size", "date", "hardware")}
        by_rule = {"verdict": entry.verdict, "number": entry.judged.number if entry.judged else None}
        rows.append({**about, "source": entry.claim.source, "measured": entry.result is not None, **made, **by_rule})
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    shown = ("claim", "name", "title", "date", "hardware", "verdict")
    table = Table(*shown, title=f"experiments; sizes: {', '.join(sizes)}", title_justify="left")
    for row in rows:
        table.add_row(*(str(row[key] or "") for key in shown))
    Console().print(table)
    typer.echo("next: headwise reproduce NAME --size tiny --out FOLDER")


def _run(root: Path, experiment: str, how: dict[str, Any], as_json: bool) -> None:
    bench = lab(root)
    request = bench.Request(**how)
    every = experiment == "all"
    results = []
    with bench.progress() as track:
        for name in bench.experiments() if every else [bench.find(experiment)]:
            old = request.folder / f"{name}.json"
            if every and not request.overwrite and old.exists():
                typer.echo(f"{old} is kept; --overwrite runs it again.", err=True)
                continue
            with output(old, "reproduce"):
                disk.recover_one(old.with_name(f".{name}-{request.size}.parts.json"))
                results.append(bench.run(name, request, track))
            if not as_json:
                typer.echo(f"{bench.summary(results[-1])}\n{old}\n")
    if as_json:
        typer.echo(json.dumps(results if every else results[0], indent=1))


def _render(root: Path) -> None:
    """Write the pages, what `headwise advise` knows, and the figures of every result."""
    from headwise.report import plots
    from headwise.types import write_atomically

    found = entries(root)
    for entry in found:
        if entry.result is not None:
            figure = plots.new_figure()
            entry.module.draw(entry.found, figure)
            plots.save(figure, root / "docs" / entry.figure)
    for name, text in _pages(root, found).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(root / name, text)
    typer.echo(f"docs/EVIDENCE.md: {sum(entry.result is not None for entry in found)} of {len(found)} measured")


def _pages(root: Path, found: Sequence[Experiment]) -> dict[str, str]:
    """Everything that follows from the results, word for word, by its path."""
    pages = {"docs/EVIDENCE.md": evidence.page(found, lab(root).RULES_DATE), f"docs/{RULES}": rules(found)}
    pages[ADVICE] = importlib.import_module("experiments._advice").written(found)
    for entry in found:
        if entry.judged is not None and entry.judged.strip is not None:
            pages[f"docs/{entry.strip}"] = evidence.strip_svg(*entry.judged.strip)
    return pages


def _check(root: Path) -> None:
    """Compare the pages with the results; figures only need to be there, since drawing differs between versions."""
    found = entries(root)
    stale = [words for name, text in _pages(root, found).items() if (words := _difference(root, name, text))]
    figures = [entry.figure for entry in found if entry.result is not None]
    stale += [f"docs/{name} is missing" for name in figures if not (root / "docs" / name).exists()]
    if stale:
        typer.echo(f"{stale[0]}; type: {REWRITE}", err=True)
        raise typer.Exit(1)
    typer.echo(f"docs/EVIDENCE.md, docs/{RULES} and {ADVICE} say what the results say.")


def rules(found: Sequence[Experiment]) -> str:
    """The page of design rules, from what was measured."""
    made = importlib.import_module("experiments._rules")
    return str(made.page({entry.name: entry for entry in found if entry.result is not None}))


def _difference(root: Path, name: str, text: str) -> str:
    """Where a page differs from what it should say, in words; empty if it does not."""
    if not (root / name).exists():
        return f"{name} is missing"
    lines = zip_longest((root / name).read_text().splitlines(), text.splitlines(), fillvalue="(nothing)")
    for number, (before, after) in enumerate(lines, 1):
        if before != after:
            first = max(0, len(os.path.commonprefix([before, after])) - 20)
            before, after = before[first : first + 80], after[first : first + 80]
            return f"{name} is stale from line {number}: it has '{before}', results say '{after}'"
    return ""
