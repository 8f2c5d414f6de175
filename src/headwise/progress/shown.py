"""Progress with the time left, on standard error: bars in a terminal and in notebooks, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from headwise.progress import Label, Track, is_main_process, silently

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

SECONDS = 30.0  # between two lines of one loop


@contextmanager
def following(track: Track | None, shown: bool = True) -> Iterator[Track]:
    """Give `track` where there is one; otherwise what shows progress, or what is silent if it is not to be shown."""
    if track is not None or not shown:
        yield track or silently
        return
    with progress_shown() as found:
        yield found


@contextmanager
def progress_shown() -> Iterator[Track]:
    """Give a function that wraps any loop of the library and shows its progress."""
    from rich.progress import Progress, TimeElapsedColumn

    console = console_for_bars()
    if console is None:
        yield lines
        return
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        yield partial(bar, progress)


def console_for_bars() -> Console | None:
    """Standard error, if bars can be drawn there; notebooks need ipywidgets for them. Otherwise None."""
    from rich.console import Console

    console = Console(stderr=True, quiet=not is_main_process())
    widgets = console.is_jupyter and find_spec("ipywidgets") is not None
    return console if console.is_terminal or widgets else None


def bar(progress: Progress, items: Sequence[Any], label: Label) -> Iterator[Any]:
    """The items one by one, with a bar that counts them."""
    task = progress.add_task(_text(label), total=len(items))
    for item in items:
        yield item
        progress.update(task, advance=1, description=_text(label))


def lines(items: Sequence[Any], label: Label) -> Iterator[Any]:
    """The items one by one, with a line at the beginning, at the end, and every `SECONDS` between them."""
    start = last = time.monotonic()
    say(_text(label))
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - last >= SECONDS and done < len(items):
            last, left = now, (now - start) * (len(items) - done) / done
            say(f"{_text(label)}: {done / len(items):.0%}, about {in_time(left)} left")
    if (took := time.monotonic() - start) >= 1:
        say(f"{_text(label)}: done in {in_time(took)}")


def in_time(seconds: float) -> str:
    """Seconds in words.

    >>> [in_time(seconds) for seconds in (3.4, 200, 7300)]
    ['3 s', '3 min 20 s', '2 h 1 min']
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def _text(label: Label) -> str:
    return label if isinstance(label, str) else label()


def say(text: str) -> None:
    """Print a line on standard error at once, in the first process only."""
    if is_main_process():
        print(text, file=sys.stderr, flush=True)
