"""Standard output for our own text alone."""

import os
import sys


def keep_stdout_clean() -> None:
    """Send what compiled libraries print to standard error, so that standard output holds only our own text."""
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout.flush()
        own = os.dup(1)
        os.dup2(2, 1)
        sys.stdout = os.fdopen(own, "w", encoding=sys.stdout.encoding, buffering=1)
