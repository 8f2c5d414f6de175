"""Image classification: the source's class probabilities are to be kept; labels, where known, give an accuracy."""

from dataclasses import dataclass, field
from typing import Any, Self

from headwise.tasks._rows import Classes, ImageTask, kind_of, tokens_of


@dataclass(frozen=True, slots=True)
class ImageClassification(ImageTask, Classes):
    """Class probabilities of images."""

    row_tokens: int = 1
    labels: dict[str, int] = field(default_factory=dict, compare=False)

    name = "image_classification"
    unit = "nats per image"

    @classmethod
    def for_model(cls, config: Any, tokenizer: Any, where: str) -> Self:
        """What the head's outputs mean, by the configuration."""
        return cls(*kind_of(config), tokens_of(config, tokenizer), dict(getattr(config, "label2id", None) or {}))


MEANING = "class probabilities of an image"
AUTO = "AutoModelForImageClassification"
TASK = ImageClassification
