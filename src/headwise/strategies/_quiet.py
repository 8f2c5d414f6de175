"""HiGHS without a line that it prints for its own developers."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

MARK = b"HighsMipSolverData::"  # how that line begins, whatever the solver was told to print


@contextmanager
def without_marked_lines() -> Iterator[None]:
    """Hold back what this process prints until the end, and leave out the solver's own lines.

    The solver is C++ code that knows nothing of Python's streams: its two channels themselves are turned aside.
    """
    try:
        _flush()
        kept = [(channel, os.dup(channel), tempfile.TemporaryFile()) for channel in (1, 2)]  # noqa: SIM115  # closed below
    except (OSError, ValueError):  # closed: nobody reads them
        yield
        return
    try:
        for channel, _, file in kept:
            os.dup2(file.fileno(), channel)
        yield
    finally:
        _flush()
        for channel, own, file in kept:
            os.dup2(own, channel)
            os.close(own)
            with file:
                file.seek(0)
                for line in file:
                    if not line.startswith(MARK):
                        os.write(channel, line)


def _flush() -> None:
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)  # of the C library, where the solver's lines wait
