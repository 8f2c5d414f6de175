"""A text read, another written: translation, summaries, whatever an encoder-decoder was made for.

What is written is given by pairs of texts, or else by the source model itself, drawn from its own distribution: then
no label is needed, and the divergence is measured where the model goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from headwise.data import GIVEN, NOTHING, WRITTEN, Paired, closed_blocks, closed_lengths, rows_by_length
from headwise.errors import DataError
from headwise.families import Family
from headwise.tasks._task import Answers, Prepared, Task, Track, divergence_of

IGNORED = -100  # label of a token that is only read


@dataclass(frozen=True, slots=True)
class Seq2Seq(Task):
    """Every token of a target is predicted from the input and from those before it."""

    start: int = 0  # the token that a decoder begins with
    end: int | None = None  # the token that ends a target

    name = "seq2seq"
    unit = "nats per target token"
    agreement_name = "next_token_agreement"
    perplexity = True
    generates = True
    refit_strength = 1e-2

    @classmethod
    def for_model(cls, config: Any, tokenizer: Any, where: str) -> Self:
        """Begin and end of a target, by the configuration."""
        ends = config.eos_token_id
        return cls(config.decoder_start_token_id or 0, ends[0] if isinstance(ends, list) else ends)

    def prepare(self, ids: torch.Tensor, seed: int) -> Prepared:
        """The model reads rows without their last token; the label of a target's token is the one after it.

        The label of the marker before a target is the marker, which says where the target is from.
        """
        place, last = torch.arange(ids.shape[1], device=ids.device), (ids != NOTHING).sum(1, keepdim=True) - 1
        written = (ids < NOTHING).cumsum(1) > 0  # the marker and all behind it
        after = torch.cat((ids[:, 1:], torch.full_like(ids[:, :1], NOTHING)), 1)
        labels = torch.where(written & (place < last), torch.where(ids < NOTHING, ids, after), IGNORED)
        return Prepared(ids.masked_fill(place == last, NOTHING), labels)

    def outputs(
        self, family: Family, model: nn.Module, batch: Prepared, stream: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Log-probabilities (B, T, V) of the tokens of the target."""
        return family.run(model, batch.inputs, stream).log_softmax(-1)

    def outputs_from(self, family: Family, model: nn.Module, stream: torch.Tensor, batch: Prepared) -> torch.Tensor:
        """The same from the stream after the last layer."""
        return family.logits(model, family.answering(stream, batch.inputs)).log_softmax(-1)

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Surprise at all tokens of the target."""
        target = labels[:, -outputs.shape[1] :]
        return nn.functional.nll_loss(outputs.flatten(0, 1), target.flatten(), reduction="sum", ignore_index=IGNORED)

    def terms(self, batch: Prepared) -> int:
        """Tokens of targets."""
        return int((batch.labels >= 0).sum())

    def divergence(self, reference: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """Mean KL over a target."""
        return divergence_of(reference, found).mean(-1)

    def compare(self, before: torch.Tensor, after: torch.Tensor, labels: torch.Tensor) -> Answers:
        """KL and equal best tokens; the loss where targets were given, as the model's own prove nothing."""
        same = (before.argmax(-1) == after.argmax(-1)).double().mean(1)
        kl = divergence_of(before.double(), after.double()).mean(1)
        if (labels == WRITTEN).any():
            return Answers(None, None, kl, same)
        target = labels[:, -before.shape[1] :].unsqueeze(-1)
        losses = [-found.gather(-1, target).squeeze(-1).double().mean(1) for found in (before, after)]
        return Answers(losses[0], losses[1], kl, same)

    def blocks(
        self, texts: Iterable[str], tokenizer: Any, length: int, count: int | None = None, what: str = "the text"
    ) -> torch.Tensor:
        """One row for each text that is no longer than `length`, longer ones cut; pairs with both, each cut there."""
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
        """A target is taken to be as long as its input."""
        lengths = closed_lengths(length)
        return 2 * sum(lengths) // len(lengths)

    @torch.no_grad()
    def complete(self, model: Any, rows: torch.Tensor, seed: int, track: Track) -> torch.Tensor:
        """Rows with targets that the model writes itself at temperature 1, as long as their inputs at most."""
        if (rows < NOTHING).any():
            return rows
        random = torch.Generator(model.device).manual_seed(seed)
        found: dict[int, list[int]] = {}
        for places, length in track(rows_by_length(rows, 4096), "targets by the model"):
            inputs = rows[places, :length]
            for place, row, target in zip(places.tolist(), inputs, self._written(model, inputs, random), strict=True):
                found[place] = [*row.tolist(), WRITTEN, *target]
        return padded([found[place] for place in range(len(rows))])

    def _written(self, model: Any, inputs: torch.Tensor, random: torch.Generator) -> list[list[int]]:
        """Targets drawn token by token, from the token that begins them to the one that ends them."""
        inputs = inputs.to(model.device)
        told: dict[str, Any] = {"encoder_outputs": model.get_encoder()(inputs)}
        tokens = torch.full((len(inputs), 1), self.start, device=model.device)
        open_ended = torch.ones(len(inputs), dtype=torch.bool, device=model.device)
        while tokens.shape[1] <= max(SHORTEST_TARGET, inputs.shape[1]) and open_ended.any():
            out = model(decoder_input_ids=tokens[:, -1:], use_cache=True, **told)
            told["past_key_values"] = out.past_key_values
            drawn = torch.multinomial(out.logits[:, -1].softmax(-1), 1, generator=random)
            tokens = torch.cat((tokens, drawn), 1)
            open_ended &= drawn[:, 0] != (NOTHING if self.end is None else self.end)
        rows = tokens.tolist()
        return [row[: row.index(self.end, 1) + 1] if self.end in row[1:] else row for row in rows]


SHORTEST_TARGET = 8  # where a model does not end it sooner


def padded(rows: list[list[int]]) -> torch.Tensor:
    """Rows of one tensor, shorter ones ended."""
    width = max(map(len, rows))
    return torch.tensor([row + [NOTHING] * (width - len(row)) for row in rows])


TASK = Seq2Seq
