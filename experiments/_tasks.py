"""What stacks of models learn in the experiments of the second paper, and the rule by which all of them are trained.

A task gives a stack its losses, in an order that only the seed decides, and scores it on data that trained nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from experiments import _data
from experiments._stack import (
    Loss,
    Member,
    Net,
    Run,
    Weights,
    class_logits,
    cross_entropy,
    hidden,
    logits,
    named,
    step_seconds,
    train,
    working,
)

MASKED = 0.3  # share of the tokens that a masked language model predicts; more of them teach faster
PATTERNS = 4096  # of masks
TUNING_SEED = 1000
AT_ONCE = 1 << 16  # positions of all members together that are scored in one go
DIVERGED = 1e3  # stands for a loss that is no number


class Task(ABC):
    """Rows to learn from."""

    batch: int
    count: int  # of training rows
    device: torch.device

    @abstractmethod
    def losses(self, net: Net, w: Weights, rows_SB: Tensor, extra_SB: Tensor) -> Tensor:
        """One loss per member for these rows; `extra` are random numbers below `PATTERNS`, for whatever is random."""

    @abstractmethod
    def answers(self, net: Net, w: Weights, rows: slice, part: str) -> tuple[Tensor, Tensor]:
        """Answers and targets, both (S, ...), for held-out rows."""

    @abstractmethod
    def held(self, part: str) -> int:
        """How many rows are held out in `valid`, which chooses rates, or in `test`."""

    def loss(self, net: Net, seeds: Sequence[int], steps: int) -> Loss:
        """What `train` asks for."""
        rows = _data.orders(list(seeds), steps, self.batch, self.count, self.device)
        extra = _data.orders([seed + 7 for seed in seeds], steps, self.batch, PATTERNS, self.device)
        return lambda w, step: self.losses(net, w, rows[step][0], extra[step][0])

    @torch.no_grad()
    def score(self, run: Run, part: str = "valid") -> list[dict[str, float]]:
        """Loss and accuracy of every member."""
        members = len(run.flat)
        w = named(run.net, run.flat.to(working(self.device)))
        stride = max(1, AT_ONCE // (run.net.length * members))
        wrong, right, count = torch.zeros(2, members, device=self.device).double().unbind() + (0,)
        for at in range(0, self.held(part), stride):
            answers, targets = self.answers(run.net, w, slice(at, min(self.held(part), at + stride)), part)
            size = targets[0].numel()
            wrong = wrong + cross_entropy(answers, targets).double() * size
            right = right + (answers.argmax(-1) == targets).flatten(1).sum(1)
            count += size
        wrong = (wrong / count).nan_to_num(DIVERGED, DIVERGED)
        return [{"loss": a, "accuracy": b} for a, b in zip(wrong.tolist(), (right / count).tolist(), strict=True)]


class NextToken(Task):
    """Text, token by token."""

    def __init__(self, texts: _data.Texts, length: int, batch: int, valid_rows: int = 0) -> None:
        self.batch, self.device = batch, texts.train.device
        self.rows, self.valid = (
            part if part.dim() == 2 else part.unfold(0, length + 1, length) for part in (texts.train, texts.valid)
        )
        border = valid_rows or len(self.valid)
        self.valid, self.test = self.valid[:border], self.valid[border : 2 * border]
        self.count = len(self.rows)

    def losses(self, net: Net, w: Weights, rows_SB: Tensor, extra_SB: Tensor) -> Tensor:
        tokens = self.rows[rows_SB]
        return cross_entropy(logits(net, w, hidden(net, w, tokens[..., :-1])), tokens[..., 1:])

    def answers(self, net: Net, w: Weights, rows: slice, part: str) -> tuple[Tensor, Tensor]:
        tokens = (self.test if part == "test" else self.valid)[rows].expand(len(w["embed"]), -1, -1)
        return logits(net, w, hidden(net, w, tokens[..., :-1])), tokens[..., 1:].flatten(1)

    def held(self, part: str) -> int:
        return len(self.test if part == "test" else self.valid)


class Masked(Task):
    """Text with some tokens hidden; the same number in every row, so that shapes are fixed."""

    def __init__(self, texts: _data.Texts, length: int, batch: int, valid_rows: int = 0) -> None:
        self.batch, self.device = batch, texts.train.device
        self.rows, self.valid = (part.unfold(0, length, length) for part in (texts.train, texts.valid))
        self.valid = self.valid[: valid_rows or None]
        self.count = len(self.rows)
        rng = torch.Generator().manual_seed(0)
        hidden_at = torch.rand(PATTERNS, length, generator=rng).argsort(1)[:, : max(1, round(MASKED * length))]
        self.places = hidden_at.to(self.device)

    def _split(self, net: Net, w: Weights, tokens: Tensor, pattern: Tensor) -> tuple[Tensor, Tensor]:
        places = self.places[pattern]  # (S, B, hidden)
        shown = tokens.scatter(2, places, torch.full_like(places, _data.MASK))
        stream = hidden(net, w, shown).unflatten(1, tokens.shape[1:])
        picked = stream.gather(2, places[..., None].expand(-1, -1, -1, net.width)).flatten(1, 2)
        return logits(net, w, picked), tokens.gather(2, places).flatten(1)

    def losses(self, net: Net, w: Weights, rows_SB: Tensor, extra_SB: Tensor) -> Tensor:
        return cross_entropy(*self._split(net, w, self.rows[rows_SB], extra_SB))

    def answers(self, net: Net, w: Weights, rows: slice, part: str) -> tuple[Tensor, Tensor]:
        tokens = self.valid[rows]
        pattern = torch.arange(rows.start, rows.stop, device=self.device) % PATTERNS
        members = len(w["embed"])
        return self._split(net, w, tokens.expand(members, -1, -1), pattern.expand(members, -1))

    def held(self, part: str) -> int:
        return len(self.valid)


class Pictures(Task):
    """Images in patches; half of them mirrored, all of them shifted by up to four pixels."""

    def __init__(self, images: _data.Images, batch: int) -> None:
        self.batch, self.device, self.images = batch, images.train.device, images
        self.count = len(images.train)

    def losses(self, net: Net, w: Weights, rows_SB: Tensor, extra_SB: Tensor) -> Tensor:
        down, across, mirror = extra_SB % 9 - 4, extra_SB // 9 % 9 - 4, (extra_SB // 81) % 2
        pixel = torch.arange(32, device=self.device)
        ys = (pixel + down[..., None]).clamp(0, 31)
        xs = torch.where(mirror[..., None] == 1, 31 - pixel, pixel) + across[..., None]
        xs = xs.clamp(0, 31)
        pictures = self.images.train[rows_SB[..., None, None], ys[..., None], xs[..., None, :]]
        return cross_entropy(class_logits(net, w, _data.patches(pictures)), self.images.train_labels[rows_SB])

    def answers(self, net: Net, w: Weights, rows: slice, part: str) -> tuple[Tensor, Tensor]:
        pictures, labels = (
            (self.images.test, self.images.test_labels)
            if part == "test"
            else (self.images.valid, self.images.valid_labels)
        )
        members = len(w["embed"])
        x = _data.patches(pictures[rows]).expand(members, -1, -1, -1)
        return class_logits(net, w, x), labels[rows].expand(members, -1)

    def held(self, part: str) -> int:
        return len(self.images.test if part == "test" else self.images.valid)


class Sentences(Task):
    """Rows of tokens with a class, padded."""

    def __init__(self, train: _data.Examples, valid: _data.Examples, test: _data.Examples, batch: int) -> None:
        self.batch, self.device, self.count = batch, train.tokens.device, len(train.tokens)
        self.train, self.parts = train, {"valid": valid, "test": test}

    def losses(self, net: Net, w: Weights, rows_SB: Tensor, extra_SB: Tensor) -> Tensor:
        chosen = self.train.rows(rows_SB)
        return cross_entropy(class_logits(net, w, chosen.tokens, chosen.keep), chosen.labels)

    def answers(self, net: Net, w: Weights, rows: slice, part: str) -> tuple[Tensor, Tensor]:
        chosen, members = self.parts[part].rows(rows), len(w["embed"])
        tokens, keep = (x.expand(members, -1, -1) for x in (chosen.tokens, chosen.keep))
        return class_logits(net, w, tokens, keep), chosen.labels.expand(members, -1)

    def held(self, part: str) -> int:
        return len(self.parts[part].labels)


def learn_at(net: Net, task: Task, seeds: Sequence[int], steps: int, rates: Sequence[float]) -> list[Run]:
    """Every seed at every rate in one stack: a run per rate."""
    members = [Member(seed, rate) for rate in rates for seed in seeds]
    run = train(net, members, task.loss(net, [member.seed for member in members], steps), steps, task.device)
    share, size = run.step_seconds / len(rates), len(seeds)
    cuts = [slice(at, at + size) for at in range(0, len(members), size)]
    return [Run(net, run.flat[cut], share, run.curve[:, cut]) for cut in cuts]


def times(nets: Mapping[str, Net], task: Task, steps: int, turns: int = 3) -> dict[str, float]:
    """Seconds of a training step of every model alone. In turns, the least of each, so that other work on the machine
    does not favour any."""
    found: dict[str, list[float]] = {name: [] for name in nets}
    for _ in range(turns):
        for name, net in nets.items():
            found[name].append(step_seconds(net, task.loss(net, [0], steps), task.device, steps))
    return {name: min(seconds) for name, seconds in found.items()}


def facts(net: Net, run: Run, steps: int, batch: int) -> dict[str, Any]:
    """What a training cost."""
    return {
        "depth": len(net.layers),
        "heads": net.layers[0].heads,
        "width": net.width,
        "mlp": net.layers[0].mlp,
        "parameters": net.parameters,
        "flops": net.flops * steps * batch,
        "steps": steps,
        "step_seconds": run.step_seconds / len(run.flat),
        "seconds": run.step_seconds / len(run.flat) * steps,
        "curve": thinned(run.curve),
    }


def thinned(curve: Tensor, points: int = 40) -> list[float]:
    """Training losses averaged over members, in so many stretches."""
    return [float(part.mean()) for part in curve.tensor_split(min(points, len(curve)))]
