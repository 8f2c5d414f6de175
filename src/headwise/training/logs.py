"""Writes the loss curve while a run trains: JSON lines, and TensorBoard events where that is installed."""

import json
from pathlib import Path
from typing import Any

from headwise.training.loop import Point
from headwise.types import write_atomically


class Logs:
    """Writes every point of the curve once. A resumed run first removes the points after its checkpoint."""

    def __init__(self, folder: Path, curve: list[Point], writes: bool) -> None:
        self.path, self.written = folder / "curve.jsonl", len(curve)
        self.board: Any = None
        self.file: Any = None
        if not writes:
            return
        write_atomically(self.path, "".join(_line(point) for point in curve))
        self.file = self.path.open("a")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self.board = SummaryWriter(str(folder / "logs"), purge_step=curve[-1].step + 1 if curve else None)

    def write(self, curve: list[Point]) -> bool:
        """Write the points that are new; returns whether there were any."""
        new = curve[self.written :]
        self.written = len(curve)
        for point in new if self.file is not None else ():
            self.file.write(_line(point))
            self.file.flush()
            if self.board is not None:
                self._draw(point)
        return bool(new)

    def _draw(self, point: Point) -> None:
        values = {"train/loss": point.loss, "train/gradient_norm": point.gradient_norm, "train/rate": point.rate}
        values |= {f"evaluation/{name}": value for name, value in (point.evaluation or {}).items()}
        for name, value in values.items():
            self.board.add_scalar(name, value, point.step)

    def close(self) -> None:
        """Close the files."""
        for file in (self.file, self.board):
            if file is not None:
                file.close()


def _line(point: Point) -> str:
    return json.dumps({name: value for name, value in point._asdict().items() if value is not None}) + "\n"
