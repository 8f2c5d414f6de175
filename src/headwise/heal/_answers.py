"""The source's answers to the rows that a decoder is healed on, stored once: its likeliest tokens, and the rest's mass.

Written in shards of safetensors, each whole or not there, so that a run which was killed writes only those that are
missing; read by mapping them into memory. Without a folder they are held in memory.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from headwise import processes
from headwise.errors import HeadwiseError
from headwise.files.tensors import header
from headwise.heal._job import rows_of
from headwise.heal._lesson import Known, Lesson
from headwise.progress import Track, silently
from headwise.tasks import Prepared

ROWS = 64  # of a shard


class Answers:
    """Answers to `rows` of one length, by number; every process makes its part of the shards and reads all."""

    def __init__(
        self,
        lesson: Lesson,
        rows: Prepared,
        count: int,
        folder: Path | None,
        device: torch.device,
        track: Track = silently,
    ) -> None:
        self.lesson, self.rows, self.count, self.folder, self.device = lesson, rows, count, folder, device
        numbers = range(-(-len(rows.inputs) // ROWS))
        self.held: dict[int, dict[str, torch.Tensor]] = {}
        self.opened: dict[int, safe_open] = {}
        for number in track(processes.mine(numbers) if folder else numbers, "answers of the source"):
            self._make(number)
        processes.wait()

    def _path(self, number: int) -> Path:
        if self.folder is None:
            raise ValueError("answers that are held in memory have no path")
        return self.folder / f"answers-{number:05d}.safetensors"

    def _make(self, number: int) -> None:
        if self.folder is not None and self._is_whole(number):
            return
        batch = rows_of(self.rows, torch.arange(len(self.rows.inputs))[number * ROWS : (number + 1) * ROWS])
        made = [self.lesson.likeliest(part.to(self.device), self.count) for part in batch.batches(8192)]
        columns = {name: torch.cat([getattr(part, name) for part in made]).cpu() for name in Known._fields}
        if self.folder is None:
            self.held[number] = columns
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".{self._path(number).name}.{processes.index()}"
        save_file(columns, temporary)
        os.replace(temporary, self._path(number))

    def _is_whole(self, number: int) -> bool:
        """Whether a shard was written before, for all its rows."""
        if not self._path(number).exists():
            return False
        rows = min(ROWS, len(self.rows.inputs) - number * ROWS)
        try:
            found = header(self._path(number))
        except HeadwiseError:
            return False
        return set(found) == set(Known._fields) and all(entry.shape[:1] == (rows,) for entry in found.values())

    def of(self, rows: torch.Tensor) -> Known:
        """The answers to rows, by their numbers."""
        found = [self._row(*divmod(row, ROWS)) for row in rows.tolist()]
        return Known(*(torch.cat([row[place] for row in found]) for place in range(3))).to(self.device)

    def _row(self, number: int, row: int) -> Known:
        if self.folder is None:
            return Known(*(self.held[number][name][row : row + 1] for name in Known._fields))
        if number not in self.opened:
            self.opened[number] = safe_open(self._path(number), "pt")
        return Known(*(self.opened[number].get_slice(name)[row : row + 1] for name in Known._fields))
