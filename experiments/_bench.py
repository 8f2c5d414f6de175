"""A model with its text, whose heads A7 makes smaller: one at a time or all at once, before training and after."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments._finetune import Damage, Narrow, Reference, by_activations, by_weights, finetune, narrowed, only
from experiments._models import settings_for
from experiments._training import minimise
from headwise import pipeline
from headwise.progress import Track

SEED = 0
WAYS = ("activations", "weights")
PARTS = ("both", "qk", "v")
FIRST = 64  # position from which damage is told, in spans that double


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured. Rows are blocks of `length` tokens; training and evaluation share none."""

    length: int
    layers: int | None  # how many, spread over the depth; None: all
    heads: int | None  # per layer, spread
    dims: tuple[int, ...]
    moment_rows: int
    head_rows: int  # that single heads are fine-tuned on, the source's predictions kept
    train_rows: int  # that all heads together are fine-tuned on, at most
    eval_rows: int
    head_steps: int
    head_batch: int  # tokens
    steps: int
    batch: int  # tokens
    head_rate: float = 2e-4  # more does harm where the damage is small to begin with
    rate: float = 1e-3
    parts: tuple[str, ...] = PARTS
    long: tuple[int, int] = (0, 0)  # rows and tokens of each, for damage by position


class Setting(NamedTuple):
    """One way to reduce a head."""

    way: str
    part: str
    dim: int


class Bench:
    """A model, its text and its directions; measures reductions of it."""

    def __init__(self, name: str, effort: Effort, device: str, assets: Path | None, track: Track) -> None:
        self.effort, self.name = effort, name
        tokens = (effort.train_rows * effort.length, effort.eval_rows * effort.length, 0)
        desk = pipeline.load_source(settings_for(name, assets, device, tokens, effort.length, seed=SEED), track)
        self.family, self.source, self.train = desk.family, desk.model.requires_grad_(False), desk.calibration
        self.student = self.family.tailor(self.source).requires_grad_(False)  # trained and put back, head after head
        self.evaluation = Reference(self.family, self.source, desk.evaluation)
        self.blocks = self.family.blocks(self.student)
        attention = self.blocks[0].attention
        self.width, self.heads = attention.v_dim, _spread(attention.query_heads, effort.heads)
        self.layers = _spread(len(self.blocks), effort.layers)
        self.directions = {
            "activations": by_activations(self.family, self.source, self.train[: effort.moment_rows]),
            "weights": by_weights(self.family, self.source, effort.length),
        }

    def narrow(self, setting: Setting, layer: int, heads: Sequence[int]) -> Narrow:
        """The factors of a setting."""
        return Narrow(heads, self.directions[setting.way][layer], setting.dim, setting.part)

    def before(self, setting: Setting, layer: int, head: int) -> Damage:
        """The damage of one reduced head, nothing trained."""
        with narrowed(self.blocks, {layer: self.narrow(setting, layer, (head,))}):
            return self.evaluation.damage(self.student, layer)

    def after(self, lessons: Reference, setting: Setting, layer: int, head: int) -> Damage:
        """The damage of one reduced head after its factors and its layer's q, k, v and o were trained."""
        effort, narrow, attention = self.effort, self.narrow(setting, layer, (head,)), self.blocks[layer].attention
        weights = [p for name in "qkvo" for p in getattr(attention, f"{name}_proj").parameters()]
        saved, chosen = [weight.clone() for weight in weights], [*weights, *narrow.parameters()]
        with narrowed(self.blocks, {layer: narrow}):
            with only(self.student, chosen):
                minimise(
                    lambda rows: lessons.divergence(self.student, rows, layer),
                    chosen,
                    len(lessons.tokens),
                    effort.head_batch // effort.length,
                    effort.head_steps,
                    effort.head_rate,
                    SEED,
                )
            found = self.evaluation.damage(self.student, layer)
        for weight, value in zip(weights, saved, strict=True):
            weight.copy_(value)
        return found

    def by_position(self, device: str, assets: Path | None, track: Track) -> dict[str, Any]:
        """Mean damage of single heads at the smallest dimension, by the span of positions that it is measured on."""
        count, length = self.effort.long
        settings = settings_for(self.name, assets, device, (length, count * length, 0), length, seed=SEED)
        rows = pipeline.load_source(settings, track).evaluation
        reference, length = Reference(self.family, self.source, rows), rows.shape[1]
        ends = [end for end in (FIRST << place for place in range(12)) if end <= length] or [length]
        setting, found = Setting("activations", "both", self.effort.dims[-1]), []
        for layer, head in track(list(itertools.product(self.layers, self.heads)), "by position"):
            with narrowed(self.blocks, {layer: self.narrow(setting, layer, (head,))}):
                kl = reference.by_position(self.student, layer)
            found.append([float(kl[start:end].mean()) for start, end in zip([0, *ends], ends, strict=False)])
        table = np.array(found)
        return {"ends": ends, "kl": table.mean(0).tolist(), "kl_se": standard_error(table.T).tolist()}

    def together(self, way: str, dim: int) -> dict[str, Any]:
        """All heads of all layers at one dimension, before and after all parameters were trained."""
        effort, student = self.effort, self.family.tailor(self.source)
        heads, setting = range(self.blocks[0].attention.query_heads), Setting(way, "both", dim)
        narrows = {layer: self.narrow(setting, layer, heads) for layer in range(len(self.blocks))}
        with narrowed(self.family.blocks(student), narrows):
            found = {"way": way, "dim": dim, "before": self.evaluation.damage(student)._asdict()}
            if effort.steps:
                chosen = [*student.parameters(), *(p for narrow in narrows.values() for p in narrow.parameters())]
                fast = student.device.type == "cuda"  # bfloat16's floor is far below what all heads at once cost
                how = dict(batch_tokens=effort.batch, rate=effort.rate, seed=SEED, parameters=chosen, bf16=fast)
                found["training"] = finetune(self.family, self.source, student, self.train, effort.steps, **how)
                found["after"] = self.evaluation.damage(student)._asdict()
        return found


def _spread(count: int, wanted: int | None) -> list[int]:
    """Some of `count` numbers, from the first to the last.

    >>> _spread(8, 2)
    [0, 7]
    """
    return sorted({int(i) for i in np.linspace(0, count - 1, wanted or count).round()})


def standard_error(values: np.ndarray) -> np.ndarray:
    """Standard error of the mean over the last axis; zero where there is one value."""
    count = values.shape[-1]
    return values.std(-1, ddof=min(1, count - 1)) / np.sqrt(count)
