"""Training: `headwise.train(...)` is `headwise train`, with files, checkpoints and processes; `loop.fit` trains any
module in memory. Importing this is light: torch is imported when a run begins.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class _Train(ModuleType):
    """A module that can be called, because the package and what it does have one name."""

    def __call__(self, config: str, data: str, out: Path | str, **settings: Any) -> dict[str, Any]:
        """Train a model into a folder and return what training.json says; see `headwise.train.run.train`."""
        from headwise.train.run import train

        return train(config, data, out, **settings)


sys.modules[__name__].__class__ = _Train
