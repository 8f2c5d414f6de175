"""Writing the report of a run folder, and the comparison of several. No torch."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from headwise.errors import HeadwiseError, OutputError
from headwise.files.card import facts_of
from headwise.runs.dossier import Dossier
from headwise.runs.folder import RunFolder
from headwise.runs.lock import output
from headwise.stages import frontier
from headwise.types import VERSION, write_atomically


def write_report(folder: RunFolder) -> Dossier:
    """Write report.html and report.md from what the folder holds; a missing frontier is solved first."""
    from headwise.report import model_card, render

    with folder.held("report"):
        dossier = solved(folder, folder.dossier())
        card = model_card(dossier, facts_of(folder.model_card_file) if folder.model.is_dir() else None)
        write_atomically(folder.card_file, card)
        folder.write_card(card)
        write_atomically(folder.report_file, render(dossier))
        used = ("plan.json", "heal.json", *(["verdict.json"] if dossier.verdict else []))
        folder.ledger.record("report", ("report.html", "report.md"), used)
    return dossier


def write_comparison(folders: Sequence[Path], out: Path, overwrite: bool = False) -> None:
    """Write one page that compares several runs."""
    from headwise.report import compare

    if len({path.resolve() for path in folders}) < len(folders):
        raise HeadwiseError("a run folder was given twice; name every run once.")
    names = [path.name for path in folders]
    unique = [path.name if names.count(path.name) == 1 else str(path) for path in folders]
    runs = {name: RunFolder(path) for name, path in zip(unique, folders, strict=True)}
    reports = {name: folder.report_file for name, folder in runs.items() if folder.report_file.exists()}
    links = {name: quote(os.path.relpath(path, out.parent)) for name, path in reports.items()}
    with output(out, "report"):
        if out.exists() and not overwrite:
            raise OutputError(f"{out} exists already; choose another --out or add --overwrite.")
        write_atomically(out, compare([(name, folder.dossier()) for name, folder in runs.items()], links))


def solved(folder: RunFolder, dossier: Dossier) -> Dossier:
    """The dossier with what other strategies would have done, and with its frontier, stored or solved now."""
    readings, plan = dossier.readings, dossier.plan
    if readings is None or plan is None:
        return dossier
    allow = folder.require().allow
    if plan.free_damage is not None:  # planned with fewer sizes, and without bits
        readings = replace(readings, shape=plan.source)
        allow = tuple(unit for unit in allow if unit != "bits")
    dossier = replace(dossier, baselines=frontier.rivals(readings, plan, allow))
    known = frontier.stored(folder.frontier_file, frontier.fingerprint(readings, plan, allow), len(plan.keep))
    if known is None or not frontier.complete(known, plan):
        try:
            known = frontier.solve(readings, plan, allow, known)
        except HeadwiseError:  # readings that price too little for the exact strategy: the page does without
            return dossier
        if known is not None:
            folder.write_json(folder.frontier_file, {"headwise": "Sweep", "version": VERSION, **known.to_json()}, None)
    return replace(dossier, sweep=known)
