"""Whose folder it is: a new run's, or that of the run which goes on. No torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from headwise.errors import OutputError
from headwise.train.settings import TrainSettings


def claim(folder: Path, settings: TrainSettings, overwrite: bool) -> None:
    """Take the folder for a run: a new one, or one that the same run left unfinished."""
    about, source = folder / "train.json", Path(settings.config)
    if source.is_dir() and folder.resolve().is_relative_to(source.resolve()):
        raise OutputError(f"{folder} lies in the folder of {settings.config}, which is never written; choose another.")
    if overwrite and about.exists():
        shutil.rmtree(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if not about.is_file():
            raise OutputError(f"{folder} is not empty and holds no training of headwise; choose another --out.")
        before = TrainSettings.read(about)
        if settings.same_run(before):
            if (folder / "training.json").exists():
                raise OutputError(f"{folder} holds a finished training; choose another --out or add --overwrite.")
            return
        if any((folder / "checkpoints").glob("step-*")):
            raise OutputError(
                f"{folder} holds a training with other settings; run it with the same ones, "
                "choose another --out or add --overwrite."
            )
        if not settings.same_data(before):  # it never began: only its tokens are there
            for part in ("data", "tokenizer"):
                shutil.rmtree(folder / part, ignore_errors=True)
    try:
        settings.save(about)
    except OSError as error:
        raise OutputError(f"{folder} cannot be written ({error.strerror}); choose another --out.") from None
