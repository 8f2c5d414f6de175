"""Sentence embeddings: one vector per text, compared by its cosine."""

from typing import Any, Self

from headwise.errors import ModelError
from headwise.families import companions
from headwise.files.json import read_object
from headwise.tasks._rows import Vectors

POOLING = "1_Pooling/config.json"  # as sentence-transformers writes it
WAYS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"}


class Embedding(Vectors):
    """The mean of a text's last stream, or that of its first token, at length one."""

    name = "embedding"
    unit = "1 - cosine"

    @classmethod
    def for_model(cls, config: Any, tokenizer: Any, where: str) -> Self:
        """Tokens are pooled as the files of a sentence-transformers model say; without them, by their mean."""
        file = companions(where).get(POOLING) if where else None
        if file is None:
            return cls(config.hidden_size)
        modes = read_object(file, ModelError, "fetch it again")
        used = [mode for mode, on in modes.items() if mode.startswith("pooling_mode_") and on]
        if len(used) != 1 or used[0] not in WAYS:
            raise ModelError(f"{where} pools its tokens by {', '.join(used)}; supported: {', '.join(WAYS)}.")
        return cls(config.hidden_size, WAYS[used[0]])


MEANING = "one vector per text, compared by its cosine"
AUTO = "AutoModel"
TASK = Embedding
