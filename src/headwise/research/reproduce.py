"""`headwise reproduce`: the claims of the papers, each as an experiment that anyone can run again.

Experiments live beside the package in its repository, with their committed results; everything written about them in
docs/EVIDENCE.md comes from there. Nothing heavy is imported before an experiment runs.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from headwise.errors import HeadwiseError
from headwise.files.json import read_object

REWRITE = "headwise reproduce --render"
INTRO = (
    "Each claim is tested by one experiment in `experiments/`, and every number below comes from its result in "
    "`experiments/results/`, with intervals over seeds or data where given. A verdict is decided by the "
    f"experiment's own code from those numbers; this page is written by `{REWRITE}`."
)
PAPERS = {
    "a": "Allocation of Parameters in Transformers (arXiv 2510.03784)",
    "b": "Leaner Transformers: More Heads, Less Depth (arXiv 2505.20802)",
    "q": "Open questions",
}
UNMEASURED = "not measured yet"
RULES = "DESIGN_RULES.md"


class Experiment(NamedTuple):
    """An experiment, with its committed result if there is one."""

    name: str
    module: Any
    result: dict[str, Any] | None

    @property
    def verdict(self) -> str:
        return UNMEASURED if self.result is None else str(self.module.verdict(self.result["found"]))

    @property
    def heading(self) -> str:
        return f"{self.module.CLAIM}: {self.module.TITLE}"


def command(
    experiment: Annotated[str | None, typer.Argument(help="Its name or claim, such as A4, or 'all'.")] = None,
    size: Annotated[str, typer.Option(help="tiny: seconds; small: minutes; full: as published, one GPU.")] = "full",
    out: Annotated[Path | None, typer.Option(help="Folder of results; needed for sizes below full.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
    assets: Annotated[Path | None, typer.Option(help="Folder of models and texts; what is absent is left out.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a result in --out.")] = False,
    minutes: Annotated[float | None, typer.Option(help="Begin no further part after so long.")] = None,
    shared: Annotated[bool, typer.Option(help="Note that the machine has other work meanwhile.")] = False,
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
    """All experiments in order, with what was measured."""
    bench = lab(root)
    return [Experiment(name, bench.load(name), _result(root, name)) for name in bench.experiments()]


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
        rows.append({**about, "measured": entry.result is not None, **made, "verdict": entry.verdict})
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
            results.append(bench.run(name, request, track))
            if not as_json:
                typer.echo(f"{bench.summary(results[-1])}\n{old}\n")
    if as_json:
        typer.echo(json.dumps(results if every else results[0], indent=1))


def _render(root: Path) -> None:
    """Write the page and a figure per result."""
    from headwise.report import plots
    from headwise.types import write_atomically

    found = entries(root)
    for entry in found:
        if entry.result is not None:
            figure = plots.new_figure()
            entry.module.draw(entry.result["found"], figure)
            plots.save(figure, root / "docs" / _figure(entry.name))
    page = root / "docs" / "EVIDENCE.md"
    write_atomically(page, evidence(found))
    write_atomically(root / "docs" / RULES, rules(found))
    typer.echo(f"{page}: {sum(entry.result is not None for entry in found)} of {len(found)} experiments measured")


def _check(root: Path) -> None:
    """Compare the pages with the results; figures only need to be there, since drawing differs between versions."""
    found = entries(root)
    pages = (("EVIDENCE.md", evidence(found)), (RULES, rules(found)))
    stale = [words for name, text in pages if (words := _difference(root / "docs" / name, text))]
    figures = [_figure(entry.name) for entry in found if entry.result is not None]
    stale += [f"docs/{name} is missing" for name in figures if not (root / "docs" / name).exists()]
    if stale:
        typer.echo(f"{stale[0]}; type: {REWRITE}", err=True)
        raise typer.Exit(1)
    typer.echo(f"docs/EVIDENCE.md and docs/{RULES} say what the results say.")


def rules(found: Sequence[Experiment]) -> str:
    """The page of design rules, from what was measured."""
    made = importlib.import_module("experiments._rules")
    return str(made.page({entry.name: entry.result["found"] for entry in found if entry.result is not None}))


def _difference(page: Path, text: str) -> str:
    """Where a page differs from what it should say, in words; empty if it does not."""
    if not page.exists():
        return f"docs/{page.name} is missing"
    lines = zip_longest(page.read_text().splitlines(), text.splitlines(), fillvalue="(nothing)")
    for number, (before, after) in enumerate(lines, 1):
        if before != after:
            first = max(0, len(os.path.commonprefix([before, after])) - 20)
            before, after = before[first : first + 80], after[first : first + 80]
            return f"docs/{page.name} is stale from line {number}: it has '{before}', results say '{after}'"
    return ""


def _figure(name: str) -> str:
    return f"evidence/{name}.svg"


def evidence(found: Sequence[Experiment]) -> str:
    """The page: a table of all claims, then a section for each."""
    lines = ["# Evidence", "", INTRO, "", "| claim | what the paper says | verdict |", "| --- | --- | --- |"]
    lines += [f"| {_link(entry)} | {entry.module.SAYS} | {entry.verdict} |" for entry in found]
    for letter, paper in PAPERS.items():
        mine = [entry for entry in found if entry.name.startswith(letter)]
        if mine:
            lines += ["", f"## {paper}"]
        for entry in mine:
            lines += ["", *_section(entry)]
    return "\n".join(lines) + "\n"


def _link(entry: Experiment) -> str:
    """A link to the section, as GitHub names it."""
    kept = [sign for sign in entry.heading.lower() if sign.isalnum() or sign in " -_"]
    return f"[{entry.module.CLAIM}](#{''.join(kept).replace(' ', '-')})"


def _section(entry: Experiment) -> list[str]:
    head = [f"### {entry.heading}", "", f"> {entry.module.SAYS}", ""]
    if (result := entry.result) is None:
        return [*head, f"{UNMEASURED.capitalize()}: run `headwise reproduce {entry.name}`."]
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return [
        *head,
        f"    {result['command']}",
        "",
        entry.module.measured(result["found"]),
        "",
        f"**Verdict: {entry.verdict}.**",
        "",
        f"![{entry.heading}]({_figure(entry.name)})",
        "",
        f"Size {result['size']}, {result['seconds']:,.0f} s on {result['hardware']}, {result['date']}, commit "
        f"{result['commit']}; {versions}.",
    ]
