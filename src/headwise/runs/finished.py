"""The record of a folder: which stages are finished, the settings they followed, what they read and what they wrote."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from headwise.errors import OutputError, PlanError
from headwise.files import disk
from headwise.runs.fingerprint import of_path
from headwise.types._record import Record

NAME = "finished.json"


@dataclass(frozen=True, slots=True)
class Stage(Record):
    """A finished stage. Files and folders are named by their path in the run folder, with their fingerprints."""

    name: str
    made: dict[str, str]
    used: dict[str, str]
    asked: dict[str, str] = field(default_factory=dict)  # settings that it followed


@dataclass(frozen=True, slots=True)
class Finished(Record):
    """What a run began with, by fingerprint, and the stages that are finished."""

    inputs: dict[str, str] = field(default_factory=dict)
    stages: tuple[Stage, ...] = ()


class Ledger:
    """Reads and writes the record. A stage counts only from the moment that it is recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / NAME

    def read(self) -> Finished:
        """The record; an empty one where there is none."""
        if not self.file.exists():
            return Finished()
        try:
            return Finished.read(self.file)
        except PlanError as error:
            raise OutputError(f"{error} Or delete it: the stages before are then done again.") from None

    def begin(self, inputs: dict[str, str]) -> None:
        """Record the inputs of a run; those that are known already stay."""
        before = self.read()
        replace(before, inputs={**inputs, **{k: v for k, v in before.inputs.items() if v}}).save(self.file)

    def stage(self, name: str) -> Stage | None:
        """What is recorded of a stage."""
        return next((stage for stage in self.read().stages if stage.name == name), None)

    def record(
        self,
        name: str,
        made: Sequence[str],
        used: Sequence[str] = (),
        asked: dict[str, str] | None = None,
        ends: Sequence[str] = (),
    ) -> None:
        """Record a stage whose files are all written; stages in `ends` no longer count."""
        for path in made:
            if (self.folder / path).exists():
                disk.sync_all(self.folder / path)
        wrote, read = ({path: of_path(self.folder / path) for path in paths} for paths in (made, used))
        before = self.read()
        others = tuple(stage for stage in before.stages if stage.name not in (name, *ends))
        replace(before, stages=(*others, Stage(name, wrote, read, asked or {}))).save(self.file)

    def difference(self, name: str) -> str | None:
        """Why a stage is not finished and current: the first file that changed, or its name where it is not recorded.

        None where it is.
        """
        found = self.stage(name)
        if found is None:
            return name
        for path, known in {**found.used, **found.made}.items():
            if of_path(self.folder / path) != known:
                return path
        return None

    def current(self, name: str, asked: dict[str, str] | None = None) -> bool:
        """Whether a stage is recorded and neither its files nor what it was made from changed since.

        With `asked`, it must have followed these settings.
        """
        found = self.stage(name)
        return found is not None and (asked is None or found.asked == asked) and self.difference(name) is None
