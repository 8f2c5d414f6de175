"""The progress of a training on standard error, with loss, speed and time left: a bar, or lines where none is drawn."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from headwise.progress.shown import SECONDS, console_for_bars, in_time, say


class TrainProgress(NamedTuple):
    """How far a training is."""

    step: int
    steps: int
    loss: float | None  # at the last point of the curve
    tokens_per_second: float | None

    def __str__(self) -> str:
        loss = "" if self.loss is None else f"loss {self.loss:.3f}"
        speed = "" if self.tokens_per_second is None else f"{self.tokens_per_second:,.0f} tokens/s"
        return " ".join(filter(None, (loss, speed)))


Watch = Callable[[TrainProgress], None]


@contextmanager
def watching(watch: Watch | None, shown: bool = True) -> Iterator[Watch | None]:
    """Give `watch` where there is one; otherwise what shows the progress, or None if it is not to be shown."""
    if watch is not None or not shown:
        yield watch
    elif (console := console_for_bars()) is None:
        yield Lines()
    else:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        progress = Progress("training", *columns, console=console)
        bar = progress.add_task("", total=None)

        def draw(now: TrainProgress) -> None:
            progress.start()
            progress.update(bar, total=now.steps, completed=now.step, description=str(now))

        try:
            yield draw
        finally:
            progress.stop()


class Lines:
    """A line at the first step and every `SECONDS`."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.last = -SECONDS

    def __call__(self, now: TrainProgress) -> None:
        taken = time.monotonic() - self.start
        if taken - self.last >= SECONDS or now.step == now.steps:
            self.last = taken
            left = f", about {in_time(taken * (now.steps - now.step) / now.step)} left" if now.step else ""
            say(f"training: step {now.step:,} of {now.steps:,}{left} {now}".rstrip())
