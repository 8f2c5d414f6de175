"""Backward passes in which only activations carry gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import torch
from torch import nn

from headwise import processes
from headwise.data import places
from headwise.families import Family
from headwise.memory import recomputing, spread
from headwise.progress import Track
from headwise.tasks import Prepared, Task

Labels = Callable[[torch.Tensor, Prepared], torch.Tensor]  # of a batch, from the model's answers to it


def passes(
    family: Family,
    model: nn.Module,
    task: Task,
    tokens: torch.Tensor,
    seed: int,
    track: Track,
    title: str,
    recompute: bool = False,
    spread_out: bool = False,
    labels: Labels | None = None,
) -> Iterator[tuple[Prepared, Callable[[], None]]]:
    """Every batch of this process, with the function that runs it forward and backward.

    `recompute` is gradient checkpointing; `spread_out` places a model that is in host memory on all GPUs. The labels
    are the batch's own unless `labels` gives others.
    """
    wanted = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.requires_grad_(False)
    try:
        with ExitStack() as ways:
            device = ways.enter_context(spread(model)) if spread_out else model.device
            if recompute:
                ways.enter_context(recomputing(family.layers(model)))
            size = min(4096, places(tokens, task.row_tokens) // processes.count())
            parts = processes.mine(task.prepare(tokens, seed).batches(size), each=True)
            for part in track(parts, title):
                batch = part.to(device)

                def run(batch: Prepared = batch) -> None:
                    stream = family.embed(model, batch.inputs).requires_grad_()
                    outputs = task.outputs(family, model, batch, stream)
                    task.loss(outputs, batch.labels if labels is None else labels(outputs, batch)).backward()

                yield batch, run
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in wanted)
