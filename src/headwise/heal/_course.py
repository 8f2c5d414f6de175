"""The rows of a healing and how a step reads them: the same steps for any number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil
from typing import Any

import torch
from torch import nn

from headwise import processes
from headwise.data import count_tokens, lengths_of, mean_length, rows_by_length
from headwise.errors import HeadwiseError
from headwise.heal._adam import RelativeAdam, sizes_of
from headwise.heal._answers import Answers
from headwise.heal._job import rows_of
from headwise.heal._lesson import Lesson, Part
from headwise.heal._replay import WORTH, Replay
from headwise.linalg import exact_products
from headwise.tasks import Prepared
from headwise.training import shards
from headwise.training.accelerator import accelerator_for
from headwise.training.loop import Evaluate, FitSettings, Loss, State, fit
from headwise.training.order import Order

WHOLE = 1 << 40  # rows of a length are one batch
WATCHED = {"cuda": 32_768, "cpu": 4_096}  # tokens to choose by, at most


def divided(prepared: Prepared, device: torch.device) -> tuple[Prepared, Prepared]:
    """Rows to learn from and, of every eight, one to choose by; the same ones where there are too few."""
    every = torch.arange(len(prepared.inputs))
    if len(every) < 2:
        return prepared, prepared
    held = every % 8 == 7 if len(every) >= 8 else every == len(every) - 1
    most = max(1, WATCHED.get(device.type, 4_096) // mean_length(prepared.inputs, prepared.row))
    watched = every[held]
    watched = watched[:: max(1, len(watched) // most)][:most]
    return rows_of(prepared, every[~held]), rows_of(prepared, watched)


class Course:
    """A lesson, the rows that it is taught on and those that it is judged by."""

    def __init__(
        self,
        lesson: Lesson,
        learned: Prepared,
        watched: Prepared,
        batch_tokens: int,
        micro_tokens: int,
        seed: int,
    ) -> None:
        self.lesson, self.learned, self.watched = lesson, learned, watched
        self.accelerator: Any = None
        self.answers: Answers | None = None
        self.device = next(lesson.parameters()).device
        self.sizes = sizes_of(lesson)  # at the start, of whole tensors: a run that goes on finds the same
        self.model: nn.Module = lesson
        length = mean_length(learned.inputs, learned.row)
        self.rows = max(1, batch_tokens // length)
        self.tokens_of_step = self.rows * count_tokens(learned.inputs, learned.row) / len(learned.inputs)
        least, most = self.rows // processes.count(), ceil(self.rows / processes.count())
        if not least:
            raise HeadwiseError(
                f"{processes.count()} processes cannot share the {self.rows} rows of a step; add --heal-option "
                f"batch={processes.count() * length}."
            )
        self.parts = min(least, ceil(most * length / max(length, micro_tokens)))
        self.order = Order(len(learned.inputs), self.rows, seed)
        self.shared_lengths = len(lengths_of(learned.inputs, learned.row).unique()) == 1

    def spread(self, shard: bool) -> None:
        """Let processes share the work, each with the whole model (DDP) or, to `shard`, with a part of it (FSDP2)."""
        if processes.count() == 1:
            return
        self.accelerator = accelerator_for("cpu" if self.device.type == "cpu" else "auto")
        if shard:
            self.lesson.spread()
        else:
            self.model = self.accelerator.prepare(self.lesson)

    def batches(self, number: int) -> list[Part]:
        """What this process reads in one part of a step; all read as many batches, as those that share weights must."""
        rows = self._rows(number, processes.index())
        if self.answers is not None:
            batch = rows_of(self.learned, rows).to(self.device)
            return [Part(batch, self.answers.of(rows))]
        found = [Part(batch.to(self.device)) for batch in rows_of(self.learned, rows).batches(WHOLE)]
        if self.shared_lengths:
            return found
        others = (self.learned.inputs[self._rows(number, other)] for other in range(processes.count()))
        most = max(len(rows_by_length(rows, WHOLE, self.learned.row)) for rows in others)
        return found + [found[0]._replace(weight=0.0)] * (most - len(found))

    def _rows(self, number: int, process: int) -> torch.Tensor:
        """The rows that a process reads in one part of a step."""
        step, part = divmod(number, self.parts)
        return self.order(step)[process :: processes.count()].tensor_split(self.parts)[part]

    def loss(self) -> Loss:
        """The mean over all rows of a step, of which this process has some: processes and parts are averaged."""
        share = self.parts * processes.count() / self.rows

        def value(model: nn.Module, parts: list[Part]) -> torch.Tensor:
            found: torch.Tensor = model(parts) * share
            return found

        return value

    @torch.no_grad()
    def judge(self, lesson: nn.Module | None = None) -> dict[str, float]:
        """Mean divergence on the watched rows and, as `loss`, what states are chosen by.

        In full precision: lightly damaged models are nearer than bfloat16.
        """
        self.lesson.eval()
        found = torch.zeros(3, dtype=torch.float64)
        with torch.autocast(self.device.type, enabled=False), exact_products():
            batches = self.watched.batches(4096)
            for number in range(ceil(len(batches) / processes.count())):  # as many in every process
                number = number * processes.count() + processes.index()
                batch = batches[number % len(batches)].to(self.device)
                rows = self.lesson([Part(batch)], judging=True).double()
                found += torch.cat((rows.sum(0), rows.new_tensor([len(rows)]))).cpu() * (number < len(batches))
        apart, chosen, count = processes.total(found).tolist()
        return {"divergence": apart / count, "loss": chosen / count}

    def state(self, settings: FitSettings) -> State:
        """A run before its first step; its rate is the share of a tensor's size that a step moves it by."""
        trained = self.trained()
        if not trained:
            raise HeadwiseError("the cut model has no weights left that could learn; heal with --heal refit.")
        sizes = [self.sizes[name] for name in trained]
        optimiser = RelativeAdam(list(trained.values()), sizes, settings.rate, (settings.beta1, settings.beta2))
        return State(self.model, optimiser, torch.zeros(2, device=self.device))

    def learn(
        self,
        settings: FitSettings,
        state: State,
        bar: Iterable[object],
        evaluate: Evaluate | None = None,
        after: Callable[[State], None] | None = None,
    ) -> None:
        """All steps from where a run stands; `bar` is advanced with every one."""
        progress = iter(bar)
        next(progress, None)  # the first step begins

        def on_step(state: State) -> None:
            if after is not None:
                after(state)
            next(progress, None)

        more: dict[str, Any] = dict(evaluate=evaluate, on_step=on_step, state=state, accelerator=self.accelerator)
        if self.replayable() and settings.steps - state.step >= WORTH:
            more["move_by"] = Replay()
        fit(self.lesson, self.batches, settings, self.loss(), **more)

    def replayable(self) -> bool:
        """Whether one step is like another, on a GPU that one process has.

        What embeddings learn is sorted on the way, for which the host waits; layers that compute again look up the
        state of random numbers. Neither can be captured.
        """
        alone = self.device.type == "cuda" and processes.count() == 1 and not self.lesson.recompute
        looked_up = (part.weight for part in self.lesson.modules() if isinstance(part, nn.Embedding))
        alike = self.shared_lengths and self.rows % self.parts == 0
        return alone and alike and not any(weight.requires_grad for weight in looked_up)

    def trained(self) -> dict[str, torch.Tensor]:
        """The parameters that change, by name."""
        return {name: p for name, p in self.lesson.named_parameters() if p.requires_grad}

    def copy(self) -> dict[str, torch.Tensor]:
        """The same as they are now, on the host: what this process has of them."""
        return {name: shards.own(p.detach()).cpu().clone() for name, p in self.trained().items()}

    @torch.no_grad()
    def put_back(self, weights: dict[str, torch.Tensor]) -> None:
        """Set the parameters that change to a copy."""
        for name, parameter in self.trained().items():
            shards.own(parameter).copy_(weights[name])

    def whole(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A copy as it is with what the other processes have; all of them have to ask."""
        found = self.trained()
        return {name: shards.joined(part, found[name]).cpu() for name, part in weights.items()}

    def parts_of(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A copy of what is whole."""
        found = self.trained()
        return {name: shards.own(shards.laid_out(tensor, found[name])).cpu() for name, tensor in weights.items()}

    def freeze_idle(self) -> None:
        """Leave alone what the answers do not depend on: a pooler nobody asks, or the last of what is never read."""
        first = rows_of(self.learned, torch.arange(1)).batches()[0]
        self.lesson([Part(first.to(self.device))]).backward()
        for parameter in self.lesson.parameters():
            if parameter.grad is None:
                parameter.requires_grad_(False)
            parameter.grad = None
