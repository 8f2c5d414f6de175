"""Calibration text that the model writes, for users who have none."""

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from headwise.errors import DataError

CACHE = 16 << 30  # bytes of keys and values of texts that a model writes side by side on a GPU
ROWS = 128  # that it writes side by side on a CPU


def writes_itself(source: str) -> bool:
    """Whether a source includes text that the model writes.

    >>> [writes_itself(source) for source in ("self", "notes.txt+self", "myself.txt")]
    [True, True, False]
    """
    return source == "self" or source.endswith("+self")


def too_slow_to_write() -> DataError:
    """The error for a model that is read from disk layer by layer."""
    return DataError("a streamed model is too slow to write its own text; give --data FILE (and --eval FILE).")


def refuse_to_write(name: str, config: Any, hears: bool, generates: bool) -> None:
    """Refuse models that cannot write their own calibration text."""
    if config.is_encoder_decoder:
        first, give = ("hears a recording", "recordings with --data FOLDER") if hears else ("reads a text", "")
        raise DataError(f"{name} {first} before it writes one; give {give or 'texts with --data FILE'}.")
    if not generates:
        raise DataError(f"{name} writes no text that it could be calibrated on; give --data FILE.")


@torch.no_grad()
def written_by(
    model: Any,
    count: int,
    length: int,
    seed: int = 0,
    batch: int | None = None,
    track: Callable[[Sequence[int], str], Iterable[int]] = lambda items, label: items,
    start: int | None = None,
) -> torch.Tensor:
    """Text sampled from the model at temperature 1, after a token; the model's own first one if none is given.

    Every row has random numbers of its own, so it does not depend on how many rows are written at once, except for
    rounding: another batch size may round logits differently, which changes one token in about a hundred thousand and
    the rest of its row.
    """
    refuse_to_write(
        type(model).__name__, model.config, model.main_input_name == "input_features", bool(model.can_generate())
    )
    start = model.config.bos_token_id if start is None else start
    start = start if isinstance(start, int) else 0
    drawn = _drawn(count, length, seed)
    batch = batch or _rows_at_once(model, length)
    rows: list[torch.Tensor] = []
    for first in track(range(0, count, batch), "text by the model"):
        rows += _written(model, drawn[first : first + batch], start)
    return torch.cat(rows)


def _drawn(count: int, length: int, seed: int) -> torch.Tensor:
    """A number in [0, 1) for every token of every row (count, length), from a generator of the row's own."""
    rows = [torch.Generator().manual_seed(zlib.crc32(f"{seed} {row}".encode())) for row in range(count)]
    return torch.stack([torch.rand(length, generator=row, dtype=torch.float64) for row in rows])


def _written(model: Any, drawn: torch.Tensor, start: int) -> list[torch.Tensor]:
    """Rows of text; in two halves where memory is too small for all."""
    prompt = torch.full((len(drawn), 1), start, device=model.device)
    try:
        made = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=drawn.shape[1] - 1,
            max_new_tokens=drawn.shape[1] - 1,
            pad_token_id=start,
            logits_processor=[_Draw(drawn.to(model.device))],
        )
        return [made.cpu()]
    except torch.OutOfMemoryError:
        if len(drawn) == 1:
            raise
    half = len(drawn) // 2
    return [*_written(model, drawn[:half], start), *_written(model, drawn[half:], start)]


class _Draw:
    """Samples by inverse transform: the token at which the cumulative probability passes the row's random number."""

    def __init__(self, drawn: torch.Tensor) -> None:
        self.drawn = drawn

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores that allow only this token."""
        sums = scores.double().softmax(-1).cumsum(-1)
        wanted = self.drawn[:, ids.shape[1], None] * sums[:, -1:]
        token = torch.searchsorted(sums, wanted, right=True).clamp_max(sums.shape[1] - 1)
        return torch.full_like(scores, -math.inf).scatter(1, token, 0.0)


def _rows_at_once(model: Any, length: int) -> int:
    """Rows to write at once: on a GPU a step takes equally long for many. It depends on the model alone, not on free
    memory, so that rounding is always the same.

    >>> _rows_at_once(torch.nn.Linear(1, 1), 512)
    128
    """
    if next(model.parameters()).device.type != "cuda":
        return ROWS
    config = model.config.get_text_config()
    kept = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = kept * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    row = 2 * model.dtype.itemsize * config.num_hidden_layers * width * length  # keys and values
    return max(1, min(1024, CACHE // row))
