"""Quality against the source model on held-out text, with bootstrap intervals over blocks of text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from headwise.checks._lengths import Tokens
from headwise.checks._lengths import interval as interval
from headwise.families import Family, explained, family_of, quietly
from headwise.progress import Track, silently
from headwise.tasks import Prepared, Task
from headwise.tasks.causal import Causal
from headwise.types import Sample

KL_TRUST = 0.4
SAMPLE_TOKENS = 40  # that each model writes for a sample
LOGITS = 2**27  # numbers of one model's logits that are held at a time


@dataclass(frozen=True, slots=True)
class Comparison:
    """Per block of text: mean loss of both models, KL to the source, share of equal best answers.

    Tasks without labels have no losses (they are empty); embeddings have 1 - cosine in place of the KL.
    """

    loss_before: np.ndarray
    loss_after: np.ndarray
    kl: np.ndarray
    agreement: np.ndarray
    task: type[Task] = Causal
    right_before: np.ndarray | None = None  # where right answers are known, whether the source gave them
    right_after: np.ndarray | None = None

    def _changes(self) -> np.ndarray:
        """Damage per block: the increase of the loss, or the divergence where there is none."""
        changes: np.ndarray = self.loss_after - self.loss_before if len(self.loss_before) else self.kl
        return changes

    def summary(self, seed: int = 0) -> dict[str, float]:
        """Means and 95% intervals. Both models read the same text, so intervals are of their difference."""
        found = self._losses(seed) if len(self.loss_before) else {}
        mean, (low, high) = float(self.kl.mean()), interval(self.kl, seed)
        if self.task.divergence_name == "1 - cosine":
            found |= {"cosine": 1 - mean, "cosine_low": 1 - high, "cosine_high": 1 - low}
        else:
            found |= {"kl": mean, "kl_low": low, "kl_high": high}
        found |= {self.task.agreement_name: float(self.agreement.mean())} if len(self.agreement) else {}
        return found | self._accuracy(seed)

    def _accuracy(self, seed: int) -> dict[str, float]:
        if self.right_before is None or self.right_after is None:
            return {}
        before, after = float(self.right_before.mean()), float(self.right_after.mean())
        low, high = interval(self.right_after - self.right_before, seed)
        ends = {"accuracy_after_low": before + low, "accuracy_after_high": before + high}
        return {"accuracy_before": before, "accuracy_after": after, **ends}

    def _losses(self, seed: int) -> dict[str, float]:
        before, after = float(self.loss_before.mean()), float(self.loss_after.mean())
        low, high = interval(self._changes(), seed)
        found = {"loss_before": before, "loss_after": after}
        if not self.task.perplexity:
            return found | {"loss_after_low": before + low, "loss_after_high": before + high}
        return found | {
            "perplexity_before": math.exp(before),
            "perplexity_after": math.exp(after),
            "perplexity_after_low": math.exp(before + low),
            "perplexity_after_high": math.exp(before + high),
        }

    def damage(self, seed: int = 0) -> dict[str, float]:
        """Increase of the loss, or the divergence where there is none, with its 95% interval."""
        damage = self._changes()
        low, high = interval(damage, seed)
        return {"measured": float(damage.mean()), "measured_low": low, "measured_high": high}

    def worse_than(self, other: Comparison, seed: int = 0) -> bool:
        """Whether the damage on the same rows is larger than in another comparison, beyond noise.

        A larger loss alone is not enough: a cut may lower the loss on some rows by chance, and whatever brings the
        model back to the source raises it again. So the divergence must be larger too.
        """
        more, apart = self._changes() - other._changes(), self.kl - other.kl
        return not np.isfinite(more).all() or bool(interval(more, seed)[0] > 0 and apart.mean() > 0)

    def expected_damage(self) -> float:
        """The damage to expect on other text: loss and KL, weighted by how well each is known.

        The increase of the loss is unbiased but noisy on little text; the KL is what it would be if the source
        predicted its text perfectly: hardly noisy, but off by up to about `KL_TRUST` of itself.
        """
        damage, kl = self._changes(), float(self.kl.mean())
        noise = float(damage.std() / math.sqrt(max(1, len(damage) - 1)))
        share = (KL_TRUST * kl) ** 2 / max((KL_TRUST * kl) ** 2 + noise**2, 1e-30)
        return share * float(damage.mean()) + (1 - share) * kl


def of_tokens(found: Tokens) -> Comparison:
    """The comparison of a decoder's rows, from both models' predictions of every token."""
    columns = (found.loss_before, found.loss_after, found.kl, found.same)
    return Comparison(*(column.mean(1).numpy() for column in columns))


@torch.no_grad()
def compare(
    family: Family,
    source: nn.Module,
    cut: nn.Module,
    tokens: torch.Tensor,
    track: Track = silently,
    task: Task | None = None,
    seed: int = 0,
    truth: torch.Tensor | None = None,
    label: str = "quality",
) -> Comparison:
    """Read the same rows with both models; `truth` holds their classes, -1 where one is not known."""
    task = task or Causal()
    columns: list[list[torch.Tensor | None]] = [[], [], [], [], [], []]
    for batch in track(task.prepare(tokens, seed)._replace(truth=truth).batches(2048), label):
        for part, before, after in _answers(family, (source, cut), task, batch.to(source.device)):
            right = [_right(task, outputs, part.truth) for outputs in (before, after)]
            for column, values in zip(columns, (*task.compare(before, after, part.labels), *right), strict=True):
                column.append(values)
    rows = [
        torch.cat([v.double().cpu() for v in column if v is not None] or [torch.zeros(0)]).numpy() for column in columns
    ]
    known = (rows[4], rows[5]) if len(rows[4]) else (None, None)
    return Comparison(rows[0], rows[1], rows[2], rows[3], type(task), *known)


def _answers(
    family: Family, models: tuple[nn.Module, nn.Module], task: Task, batch: Prepared
) -> Iterator[tuple[Prepared, torch.Tensor, torch.Tensor]]:
    """Both models' answers to a batch; of a decoder to some rows at a time, where logits of all are too large."""
    vocabulary = int(getattr(models[0].config, "vocab_size", 0)) if isinstance(task, Causal) else 0
    if batch.inputs.numel() * vocabulary <= LOGITS:
        before, after = (task.outputs(family, model, batch) for model in models)
        yield batch, before, after
        return
    streams = [family.last_stream(model, batch.inputs) for model in models]
    count = max(1, LOGITS // (batch.inputs.shape[1] * vocabulary))
    for start in range(0, len(batch.inputs), count):
        here = slice(start, start + count)
        part = batch._replace(inputs=batch.inputs[here], labels=batch.labels[here])
        before, after = (
            task.outputs_from(family, model, stream[here], part) for model, stream in zip(models, streams, strict=True)
        )
        yield part, before, after


def _right(task: Task, outputs: torch.Tensor, truth: torch.Tensor | None) -> torch.Tensor | None:
    """Whether each answer is right, of rows whose right answer is known."""
    found = None if truth is None else task.right(outputs, truth)
    return None if truth is None or found is None else found[truth >= 0]


@torch.no_grad()
def samples(
    source: nn.Module, cut: nn.Module, tokenizer: object, tokens: torch.Tensor, count: int = 3
) -> tuple[Sample, ...]:
    """Beginnings of held-out text, continued greedily by both models; encoder-decoders answer whole texts."""
    family = family_of(source.config)
    step, most = max(1, len(tokens) // count), min(SAMPLE_TOKENS, family.longest(source.config) // 2)
    prompts, starts = zip(*(_prompt(family, row, tokenizer) for row in tokens[::step][:count]), strict=True)
    alike = len({prompt.shape for prompt in prompts}) == 1
    ends = source.generation_config.eos_token_id
    end = ends[0] if isinstance(ends, list) else ends or 0  # a text that ends before others is filled up with it
    out = []
    for prompt, before in zip([torch.cat(prompts)] if alike else prompts, starts, strict=False):
        prompt = prompt.to(source.device)
        with explained(str(source.config._name_or_path)), quietly():
            texts = [
                model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    do_sample=False,
                    max_new_tokens=most,
                    pad_token_id=end,
                )
                for model in (source, cut)
            ]
        decode = partial(tokenizer.decode, skip_special_tokens=True)  # type: ignore[attr-defined]
        for asked, *answers in zip(prompt, *texts, strict=True):
            shown = "(a recording)" if family.audio else decode(asked)
            out.append(Sample(shown, *(decode(answer[before:]) for answer in answers)))
    return tuple(out)


def _prompt(family: Family, row: torch.Tensor, tokenizer: Any) -> tuple[torch.Tensor, int]:
    """A prompt of a row, and how many tokens of an answer belong to it; one that is continued begins with a line."""
    prompt, before = family.prompt(row)
    if family.audio or before != prompt.shape[1]:
        return prompt, before
    start = line_start(row, tokenizer, len(row) - before)
    return row[None, start : start + before], before


def line_start(row: torch.Tensor, tokenizer: Any, most: int) -> int:
    """Where the first whole line of a row begins, at most at `most`; 0 where none does, or the row begins a text."""
    if row[0].item() in getattr(tokenizer, "all_special_ids", ()):
        return 0
    texts = [tokenizer.decode([token]) for token in row[: most + 1].tolist()]
    ends = ["\n" in text and not text.rpartition("\n")[2].strip() for text in texts]
    return next((i for i in range(1, len(texts)) if ends[i - 1] and texts[i].strip("\n")), 0)
