"""What tasks on images share: how images become rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwise.data import Rows, images
from headwise.families import family_of
from headwise.tasks._task import Task


class ImageTask(Task):
    """A task whose rows are images, as the model's own image processor makes them."""

    @property
    def labels(self) -> Mapping[str, int]:
        """Names of the classes that a folder of images may be sorted by."""
        return {}

    def read(self, source: str, reader: Any, length: int, count: int, seed: int) -> Rows:
        """Images of a source as `images` names it."""
        return images.read(source, reader, count, seed, self.labels)

    def block_tokens(self, length: int) -> int:
        """What an image counts for, whatever the length of texts."""
        return self.row_tokens or 1


def tokens_of(config: Any, processor: Any) -> int:
    """Tokens that an image makes: patches, and whatever a model puts before them."""
    family = family_of(config)
    rows = family.example(config, 1) if processor is None else images.blank(processor, config)
    return family.row_tokens(config, rows) or 1
