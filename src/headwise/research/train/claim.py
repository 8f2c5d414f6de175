"""Whose folder it is: a new training's, or that of one which resumes. Locks, records and replacing are those of `runs`.

No torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headwise.errors import HeadwiseError, OutputError
from headwise.files import disk
from headwise.research.train.settings import TrainSettings
from headwise.runs import aside, fingerprint
from headwise.runs.finished import Ledger
from headwise.runs.lock import locked

OWN = (
    "train.json", "finished.json", "data", "tokenizer", "checkpoints", "curve.jsonl", "logs", "model", "training.json",
)  # fmt: skip  # everything that a training writes; whatever else lies in its folder is not touched
WORK = ("data", "checkpoints")


@contextmanager
def held(folder: Path, settings: TrainSettings) -> Iterator[None]:
    """Keep other commands out of the folder, and complete or undo what a kill interrupted in it.

    A training that is replaced is deleted when the new one is finished. It comes back if the new one fails before its
    first checkpoint. A folder whose training would write over its own inputs is refused.
    """
    source = Path(settings.config)
    if source.is_dir() and folder.resolve().is_relative_to(source.resolve()):
        raise OutputError(f"{folder} lies in the folder of {settings.config}, which is never written; choose another.")
    if folder.is_dir():
        aside.refuse_inside(folder, OWN, (settings.config, settings.data, settings.eval, settings.tokenizer))
    with disk.explained(folder), locked(folder, "train") as taken:
        if taken:
            disk.refuse_pipes(folder)
            aside.undo_move(folder)
            disk.recover(folder, WORK)
            if (folder / "training.json").exists():  # killed before it deleted what it replaced
                aside.drop(folder)
        try:
            yield
        except HeadwiseError as error:
            fresh = not isinstance(error, OutputError) and not _begun(folder)
            if taken and fresh and (folder / aside.PREVIOUS).exists():
                aside.put_back(folder, OWN)
            raise
        if taken:
            aside.drop(folder)


def claim(folder: Path, settings: TrainSettings, overwrite: bool) -> None:
    """Take the folder for a training: a new one, or one that the same training left unfinished."""
    about = folder / "train.json"
    models = [name for name in (settings.config, settings.tokenizer) if name and name != "embedded"]
    found = [fingerprint.of_model(name, name) for name in models]
    found += [fingerprint.of_data(name) for name in (settings.data, settings.eval)]
    inputs = {name: value for part in found for name, value in part.items()}
    if folder.exists() and (not folder.is_dir() or aside.strangers(folder)):
        replacing = (folder / aside.PREVIOUS / about.name).is_file()  # killed before the new training had a file
        if not about.is_file() and not replacing:
            raise OutputError(f"{folder} is not empty and holds no training of headwise; choose another --out.")
        differs = _difference(folder, settings, inputs) if about.is_file() else None
        if differs and not overwrite:
            raise OutputError(f"{folder} holds {differs}; choose another --out or add --overwrite.")
        if differs:
            aside.set_aside(folder, OWN)
        elif about.is_file() and not _begun(folder) and not _same_data(folder, settings, inputs):
            aside.discard(folder, ("data", "tokenizer", "finished.json"))
    with disk.explained(folder):
        settings.save(about)  # first: a folder without it is no training's
        Ledger(folder).begin(inputs)


def _begun(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("step-*"))


def _same_data(folder: Path, settings: TrainSettings, inputs: dict[str, str]) -> bool:
    """Whether tokens that a training left before its first checkpoint are those of this one."""
    known = Ledger(folder).read().inputs
    return settings.same_data(TrainSettings.read(folder / "train.json")) and not fingerprint.difference(known, inputs)


def _difference(folder: Path, settings: TrainSettings, inputs: dict[str, str]) -> str | None:
    """Why a training with these settings and inputs cannot resume here; None if it can."""
    try:
        before, known = TrainSettings.read(folder / "train.json"), Ledger(folder).read().inputs
    except HeadwiseError as error:
        return f"a training that cannot be read ({error})"
    if (folder / "training.json").exists() and settings.same_run(before):
        return "a finished training"
    if not _begun(folder):
        return None
    if not settings.same_run(before):
        return "a training with other settings; run it with the same ones"
    changed = fingerprint.difference(known, inputs)
    return f"a training that began with another {changed}; restore it" if changed else None
