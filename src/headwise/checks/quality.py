"""Quality against the source model on held-out text, with bootstrap intervals over blocks of text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from torch import nn

from headwise.probes._watch import Track, batches, silently
from headwise.types import Sample

RESAMPLES = 2000
KL_TRUST = 0.4


@dataclass(frozen=True, slots=True)
class Comparison:
    """Per block of text: mean loss of both models, KL to the source, share of equal best tokens."""

    loss_before: np.ndarray
    loss_after: np.ndarray
    kl: np.ndarray
    agreement: np.ndarray

    def summary(self, seed: int = 0) -> dict[str, float]:
        """Means and 95% intervals. Both models read the same text, so the interval is that of their difference."""
        damage = self.loss_after - self.loss_before
        low, high = interval(damage, seed)
        kl_low, kl_high = interval(self.kl, seed)
        before = float(self.loss_before.mean())
        return {
            "loss_before": before,
            "loss_after": float(self.loss_after.mean()),
            "perplexity_before": math.exp(before),
            "perplexity_after": math.exp(float(self.loss_after.mean())),
            "perplexity_after_low": math.exp(before + low),
            "perplexity_after_high": math.exp(before + high),
            "kl": float(self.kl.mean()),
            "kl_low": kl_low,
            "kl_high": kl_high,
            "next_token_agreement": float(self.agreement.mean()),
        }

    def damage(self, seed: int = 0) -> dict[str, float]:
        """Increase of the loss in nats per token, with its 95% interval."""
        damage = self.loss_after - self.loss_before
        low, high = interval(damage, seed)
        return {"measured": float(damage.mean()), "measured_low": low, "measured_high": high}

    def expected_damage(self) -> float:
        """What this text lets one expect on other text: loss and KL, weighted by how well each is known.

        The increase of the loss is unbiased but noisy on little text; the KL is what it would be if the source
        predicted its text perfectly: hardly noisy, but off by up to about `KL_TRUST` of itself.
        """
        damage = self.loss_after - self.loss_before
        kl = float(self.kl.mean())
        noise = float(damage.std() / math.sqrt(max(1, len(damage) - 1)))
        share = (KL_TRUST * kl) ** 2 / max((KL_TRUST * kl) ** 2 + noise**2, 1e-30)
        return share * float(damage.mean()) + (1 - share) * kl


def interval(values: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95% bootstrap interval of the mean.

    >>> interval(np.ones(8))
    (1.0, 1.0)
    """
    draws = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile(values[draws].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


@torch.no_grad()
def compare(
    family: ModuleType, source: nn.Module, cut: nn.Module, tokens: torch.Tensor, track: Track = silently
) -> Comparison:
    """Read the text with both models."""
    columns: list[list[torch.Tensor]] = [[], [], [], []]
    for batch in track(batches(tokens, 2048), "quality"):
        batch = batch.to(source.device)
        before = family.run(source, batch)[:, :-1].log_softmax(-1)
        after = family.run(cut, batch)[:, :-1].log_softmax(-1)
        target = batch[:, 1:].unsqueeze(-1)
        found = (
            -before.gather(-1, target).squeeze(-1),
            -after.gather(-1, target).squeeze(-1),
            (before.exp() * (before - after)).sum(-1),
            (before.argmax(-1) == after.argmax(-1)).float(),
        )
        for column, values in zip(columns, found, strict=True):
            column.append(values.double().mean(1).cpu())
    return Comparison(*(torch.cat(column).numpy() for column in columns))


@torch.no_grad()
def samples(
    source: nn.Module, cut: nn.Module, tokenizer: object, tokens: torch.Tensor, count: int = 3
) -> tuple[Sample, ...]:
    """The same beginnings of held-out text, continued greedily by both models."""
    out = []
    step = max(1, len(tokens) // count)
    for row in tokens[::step][:count]:
        prompt = row[: min(32, len(row) // 2)].unsqueeze(0).to(source.device)
        texts = [
            model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=40, pad_token_id=0
            )
            for model in (source, cut)
        ]
        decode = tokenizer.decode  # type: ignore[attr-defined]
        parts = [decode(text[0, prompt.shape[1] :], skip_special_tokens=True) for text in texts]
        out.append(Sample(decode(prompt[0], skip_special_tokens=True), *parts))
    return tuple(out)
