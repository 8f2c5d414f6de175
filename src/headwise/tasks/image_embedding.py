"""Image embeddings: one vector per image, pooled as the model is used, compared by its cosine."""

from dataclasses import dataclass
from typing import Any, Self

from headwise.families import family_of
from headwise.tasks._rows import ImageTask, Vectors, tokens_of


@dataclass(frozen=True, slots=True)
class ImageEmbedding(ImageTask, Vectors):
    """The embedding that the family defines: the class token, or the projected image."""

    row_tokens: int = 1

    name = "image_embedding"
    unit = "1 - cosine per image"

    @classmethod
    def for_model(cls, config: Any, tokenizer: Any, where: str) -> Self:
        """The width is that of the embedding, which may be projected."""
        return cls(family_of(config).embedding_width(config), "first", tokens_of(config, tokenizer))


MEANING = "one vector per image, compared by its cosine"
AUTO = "AutoModel"
TASK = ImageEmbedding
