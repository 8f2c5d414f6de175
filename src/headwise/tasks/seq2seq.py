"""A text is read, another is written: translation, summaries and other uses of an encoder-decoder.

Targets are given by pairs of texts, or sampled from the source model: then no label is needed, and the divergence is
measured on texts that the model would write.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch

from headwise.data import GIVEN, NOTHING, WRITTEN, Paired, closed_blocks, closed_lengths, rows_by_length
from headwise.errors import DataError
from headwise.tasks._target import Target, padded
from headwise.tasks._task import Track


@dataclass(frozen=True, slots=True)
class Seq2Seq(Target):
    """A target for a text."""

    start: int = 0  # the token that a decoder begins with
    end: int | None = None  # the token that ends a target

    name = "seq2seq"
    unit = "nats per target token"

    @classmethod
    def for_model(cls, config: Any, tokenizer: Any, where: str) -> Self:
        """Begin and end of a target, by the configuration."""
        ends = config.eos_token_id
        return cls(config.decoder_start_token_id or 0, ends[0] if isinstance(ends, list) else ends)

    def blocks(
        self, texts: Iterable[str], tokenizer: Any, length: int, count: int | None = None, what: str = "the text"
    ) -> torch.Tensor:
        """One row per text, cut at `length`; both texts of a pair are cut there."""
        rows: list[list[int]] = []
        for row in self._rows(texts, tokenizer, length):
            if rows and any(token < NOTHING for token in rows[0]) != any(token < NOTHING for token in row):
                raise DataError(f'{what} has a "target" on some lines only; give one on every line, or on none.')
            rows.append(row)
            if len(rows) == count:
                break
        if not rows:
            raise DataError(f"{what} holds no text; give a longer one.")
        return padded(rows)

    def _rows(self, texts: Iterable[str], tokenizer: Any, length: int) -> Iterator[list[int]]:
        for text in texts:
            ids = tokenizer(text, verbose=False)["input_ids"]
            if isinstance(text, Paired):
                target = tokenizer(text_target=text.target, verbose=False)["input_ids"]
                yield [*ids[:length], GIVEN, self.start, *target[:length]]
            elif len(ids) <= length:
                if ids:
                    yield ids
            else:
                for row in closed_blocks([text], tokenizer, length):
                    yield row[row != NOTHING].tolist()

    def block_tokens(self, length: int) -> int:
        """Assumes that a target is as long as its input."""
        lengths = closed_lengths(length)
        return 2 * sum(lengths) // len(lengths)

    @torch.no_grad()
    def complete(self, model: Any, rows: torch.Tensor, seed: int, track: Track) -> torch.Tensor:
        """Rows with targets sampled from the model at temperature 1, at most as long as their inputs."""
        if (rows < NOTHING).any():
            return rows
        random = torch.Generator(model.device).manual_seed(seed)
        found: dict[int, list[int]] = {}
        for places, length in track(rows_by_length(rows, 4096), "targets by the model"):
            inputs = rows[places, :length]
            given = {"encoder_outputs": model.get_encoder()(inputs.to(model.device))}
            begun = torch.full((len(inputs), 1), self.start, device=model.device)
            targets = self.drawn(model, given, begun, max(SHORTEST_TARGET, length), random)
            for place, row, target in zip(places.tolist(), inputs, targets, strict=True):
                found[place] = [*row.tolist(), WRITTEN, *target]
        return padded([found[place] for place in range(len(rows))])


SHORTEST_TARGET = 8  # where a model does not end it sooner

MEANING = "a text from a text: translation, summaries"
AUTO = "AutoModelForSeq2SeqLM"
TASK = Seq2Seq
