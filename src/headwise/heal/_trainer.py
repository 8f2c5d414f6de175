"""Trains a distillation loss: which rows a step reads, in how many parts, and how far the student is from the source.

Steps are the same for any number of processes.
"""

from collections.abc import Callable, Iterable
from math import ceil

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headwise import processes
from headwise.data import count_tokens, lengths_of, mean_length, rows_by_length
from headwise.errors import HeadwiseError
from headwise.heal._adam import RelativeAdam, sizes_of
from headwise.heal._job import rows_of
from headwise.heal._loss import Batch, DistillationLoss
from headwise.linalg import exact_products
from headwise.tasks import Prepared
from headwise.training import shards
from headwise.training.captured import WORTH, CapturedStep
from headwise.training.loop import Evaluate, FitSettings, State, fit
from headwise.training.order import Order

WHOLE = 1 << 40  # tokens: all rows of one length are one batch
HELD_OUT = {"cuda": 32_768, "cpu": 4_096}  # tokens to judge by, at most

Weights = dict[str, torch.Tensor]


def divided(prepared: Prepared, device: torch.device) -> tuple[Prepared, Prepared]:
    """Rows to train on and, of every eight, one held out to judge by; the same rows twice where there is only one."""
    every = torch.arange(len(prepared.inputs))
    if len(every) < 2:
        return prepared, prepared
    held = every % 8 == 7 if len(every) >= 8 else every == len(every) - 1
    most = max(1, HELD_OUT.get(device.type, 4_096) // mean_length(prepared.inputs, prepared.row))
    held_out = every[held]
    held_out = held_out[:: max(1, len(held_out) // most)][:most]
    return rows_of(prepared, every[~held]), rows_of(prepared, held_out)


class Trainer:
    """A loss, the rows that it is minimised on and those that it is judged by."""

    def __init__(
        self,
        loss: DistillationLoss,
        learned: Prepared,
        held_out: Prepared,
        batch_tokens: int,
        micro_tokens: int,
        seed: int,
    ) -> None:
        self.loss, self.learned, self.held_out = loss, learned, held_out
        self.device = next(loss.parameters()).device
        self.sizes = sizes_of(loss)  # at the start and of whole tensors: a resumed run finds the same
        self.model: nn.Module = loss  # as it computes: wrapped where several processes train
        length = mean_length(learned.inputs, learned.row)
        self.rows = max(1, batch_tokens // length)
        self.tokens_of_step = self.rows * count_tokens(learned.inputs, learned.row) / len(learned.inputs)
        least, most = self.rows // processes.count(), ceil(self.rows / processes.count())
        if not least:
            raise HeadwiseError(
                f"{processes.count()} processes cannot share the {self.rows} rows of a step; add --heal-option "
                f"batch={processes.count() * length}."
            )
        self.parts = min(least, ceil(most * length / max(length, micro_tokens)))  # of a step, computed one by one
        self.order = Order(len(learned.inputs), self.rows, seed)
        self.one_length = len(lengths_of(learned.inputs, learned.row).unique()) == 1

    def distribute(self, shard: bool) -> None:
        """Let processes share the work, each with the whole model (DDP) or, to `shard`, with a part of it (FSDP2)."""
        if processes.count() > 1 and shard:
            self.loss.shard()
        elif processes.count() > 1:
            self.model = DistributedDataParallel(self.loss, [self.device] if self.device.type == "cuda" else None)

    def batches(self, number: int) -> list[Batch]:
        """The batches of this process in one part of a step; as many in every process, as DDP and FSDP need."""
        rows = rows_of(self.learned, self._rows(number, processes.index()))
        found = [Batch(batch.to(self.device)) for batch in rows.batches(WHOLE)]
        if self.one_length:
            return found
        others = (self.learned.inputs[self._rows(number, other)] for other in range(processes.count()))
        most = max(len(rows_by_length(rows, WHOLE, self.learned.row)) for rows in others)
        return found + [found[0]._replace(weight=0.0)] * (most - len(found))

    def _rows(self, number: int, process: int) -> torch.Tensor:
        """The row numbers of a process in one part of a step."""
        step, part = divmod(number, self.parts)
        return self.order(step)[process :: processes.count()].tensor_split(self.parts)[part]

    def mean_loss(self, model: nn.Module, batches: list[Batch]) -> torch.Tensor:
        """This part's share of the mean over all rows of a step: parts and processes are averaged afterwards."""
        value: torch.Tensor = model(batches) * (self.parts * processes.count() / self.rows)
        return value

    @torch.no_grad()
    def judge(self, loss: nn.Module | None = None) -> dict[str, float]:
        """Mean divergence on the held-out rows; as `loss` once more, the name under which curves show it.

        In full precision: lightly damaged models differ by less than bfloat16 resolves.
        """
        self.loss.eval()
        found = torch.zeros(2, dtype=torch.float64)
        with torch.autocast(self.device.type, enabled=False), exact_products():
            batches = self.held_out.batches(4096)
            for number in range(ceil(len(batches) / processes.count())):  # as many in every process
                number = number * processes.count() + processes.index()
                rows = self.loss([Batch(batches[number % len(batches)].to(self.device))], each=True).double()
                found += torch.stack((rows, torch.ones_like(rows)), 1).sum(0).cpu() * (number < len(batches))
        divergence, count = processes.total(found).tolist()
        return {"divergence": divergence / count, "loss": divergence / count}

    def state(self, settings: FitSettings) -> State:
        """A run before its first step; its learning rate is the share of a tensor's size that a step moves it by."""
        trained = self.trained()
        if not trained:
            raise HeadwiseError("the cut model has no weights left to train; heal with --heal refit.")
        sizes = [self.sizes[name] for name in trained]
        optimiser = RelativeAdam(list(trained.values()), sizes, settings.rate, (settings.beta1, settings.beta2))
        return State(self.model, optimiser, torch.zeros(2, device=self.device))

    def train(
        self,
        settings: FitSettings,
        state: State,
        progress: Iterable[object],
        evaluate: Evaluate | None = None,
        after: Callable[[State], None] | None = None,
    ) -> None:
        """All steps that a run has left; `progress` is advanced with every one, behind `after`."""
        shown = iter(progress)
        next(shown, None)  # the first step begins

        def on_step(state: State) -> None:
            if after is not None:
                after(state)
            next(shown, None)

        captured = self.capturable() and settings.steps - state.step >= WORTH
        move_by = CapturedStep() if captured else None
        fit(
            self.loss, self.batches, settings, self.mean_loss,
            evaluate=evaluate, on_step=on_step, state=state, move_by=move_by,
        )  # fmt: skip

    def capturable(self) -> bool:
        """Whether all steps are alike, on a GPU with one process.

        Gradients of embeddings (T5 has some in its layers) are sorted, and gradient checkpointing reads the state of
        the random number generator: the host waits for both, so that neither can be captured.
        """
        alone = self.device.type == "cuda" and processes.count() == 1 and not self.loss.recompute
        tables = (part.weight for part in self.loss.modules() if isinstance(part, nn.Embedding))
        alike = self.one_length and self.rows % self.parts == 0
        return alone and alike and not any(weight.requires_grad for weight in tables)

    def trained(self) -> Weights:
        """The parameters that are trained, by name."""
        return {name: p for name, p in self.loss.named_parameters() if p.requires_grad}

    def copy(self) -> Weights:
        """A copy of this process's part of the trained parameters, on the host."""
        return {name: shards.own(p.detach()).cpu().clone() for name, p in self.trained().items()}

    @torch.no_grad()
    def put_back(self, weights: Weights) -> None:
        """Set the trained parameters to a copy."""
        for name, parameter in self.trained().items():
            shards.own(parameter).copy_(weights[name])

    def gathered(self, weights: Weights) -> Weights:
        """A copy with the other processes' parts; all of them have to call this."""
        found = self.trained()
        return {name: shards.joined(part, found[name]).cpu() for name, part in weights.items()}

    def own_parts(self, weights: Weights) -> Weights:
        """This process's part of whole tensors."""
        found = self.trained()
        return {name: shards.own(shards.laid_out(tensor, found[name])).cpu() for name, tensor in weights.items()}

    def freeze_unused(self) -> None:
        """Freeze parameters on which no answer depends, such as a pooler that the task does not read."""
        first = rows_of(self.learned, torch.arange(1)).batches()[0]
        self.loss([Batch(first.to(self.device))]).backward()
        for parameter in self.loss.parameters():
            if parameter.grad is None:
                parameter.requires_grad_(False)
            parameter.grad = None
