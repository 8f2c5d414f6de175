"""Progress bars with the time left, on standard error."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Label = str | Callable[[], str]  # asked again at every step where it can change


def speaks() -> bool:
    """Whether this is the process that is heard, of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


class Bars:
    """Wraps any loop of the library."""

    def __enter__(self) -> Any:
        from rich.console import Console
        from rich.progress import Progress, TimeElapsedColumn

        console = Console(stderr=True, quiet=not speaks())
        self.progress = Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console)
        self.progress.start()
        return self.track

    def track(self, items: Sequence[Any], label: Label) -> Iterator[Any]:
        """The items one by one, with a bar that counts them."""
        bar = self.progress.add_task(label if isinstance(label, str) else label(), total=len(items))
        for item in items:
            yield item
            self.progress.update(bar, advance=1, description=label if isinstance(label, str) else label())

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
