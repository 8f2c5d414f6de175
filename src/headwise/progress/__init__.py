"""Progress and notes: how a long loop reports how far it is, and what the user should know that stops nothing."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")
Label = str | Callable[[], str]  # a function is asked again at every step
Track = Callable[[Sequence[Any], Label], Iterable[Any]]  # wraps a loop to show its progress
log = logging.getLogger("headwise")


def silently(items: Sequence[T], label: Label) -> Iterable[T]:
    """No progress is shown."""
    return items


@contextmanager
def stage(track: Track, label: Label) -> Iterator[None]:
    """Show work that has no steps to count."""
    steps = iter(track([None], label))
    next(steps)
    yield
    next(steps, None)


def aside(work: Callable[[], T]) -> Callable[[], T]:
    """Begin work that mostly waits for another process; the function that is returned waits for its result."""
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:
            found.set_exception(error)

    Thread(target=run, daemon=True).start()
    return found.result


def is_main_process() -> bool:
    """Whether this process prints: the first of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def note(text: str) -> None:
    """Tell the user something that stops nothing."""
    if is_main_process():
        log.warning("note: %s", text)
