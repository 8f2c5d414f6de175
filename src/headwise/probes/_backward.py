"""Backward passes in which only activations carry gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import NamedTuple

import torch
from torch import nn

from headwise import processes
from headwise.data import mean_length, places
from headwise.families import Family
from headwise.linalg import fast_products
from headwise.memory import available_bytes, recomputing, spread
from headwise.progress import Track
from headwise.tasks import Prepared, Task
from headwise.tasks._task import random_for
from headwise.tasks.causal import Causal
from headwise.types import ModelShape

TOKENS = 4096  # of a batch, at most
ROOM = 32 << 30  # bytes of activations, at most
LOGITS = 2**27  # numbers of logits that are held at a time
FUSED = 256  # widest head of fused attention kernels
Labels = Callable[[torch.Tensor, Prepared], torch.Tensor]  # of a batch, from the model's answers to it


def passes(
    family: Family,
    model: nn.Module,
    task: Task,
    tokens: torch.Tensor,
    seed: int,
    track: Track,
    title: str,
    recompute: bool | None = None,
    spread_out: bool = False,
    labels: Labels | None = None,
) -> Iterator[tuple[Prepared, Callable[[], None]]]:
    """Every batch of this process, with the function that runs it forward and backward.

    `recompute` is gradient checkpointing; unless it is chosen, batches are as small as memory wants them, and layers
    are computed twice where not even one row fits. `spread_out` places a model that is in host memory on all GPUs. The
    labels are the batch's own unless `labels` gives others.
    """
    recompute = True if spread_out and recompute is None else recompute
    at_once, recompute = way(family, model, tokens, task, recompute)
    wanted = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.requires_grad_(False)
    try:
        with ExitStack() as ways:
            device = ways.enter_context(spread(model)) if spread_out else model.device
            if recompute:
                ways.enter_context(recomputing(family.layers(model)))
            size = processes.batch_tokens(at_once, places(tokens, task.row_tokens))
            parts = processes.mine(task.prepare(tokens, seed).batches(size), each=True)
            for part in track(parts, title):
                batch = part.to(device)

                def run(batch: Prepared = batch) -> None:
                    stream = family.embed(model, batch.inputs).requires_grad_()
                    if isinstance(task, Causal) and not spread_out:
                        end = family.last_stream(model, batch.inputs, stream)
                        end.backward(gradient_of_loss(family, model, task, batch, end.detach(), labels))
                        return
                    outputs = task.outputs(family, model, batch, stream)
                    task.loss(outputs, batch.labels if labels is None else labels(outputs, batch)).backward()

                yield batch, run
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in wanted)


def gradient_of_loss(
    family: Family, model: nn.Module, task: Task, batch: Prepared, end_BTD: torch.Tensor, labels: Labels | None = None
) -> torch.Tensor:
    """The gradient of a decoder's loss with respect to the stream after its last layer.

    Row by row: logits of a whole batch in float32, with their exponentials and gradients, are gigabytes.
    """
    found = torch.empty_like(end_BTD)
    count = max(1, LOGITS // (end_BTD.shape[1] * int(model.config.vocab_size)))
    exact = end_BTD.dtype == torch.bfloat16  # whose products TF32 does not round
    with fast_products(end_BTD.device) if exact else nullcontext():
        for start in range(0, len(end_BTD), count):
            here = slice(start, start + count)
            stream = end_BTD[here].requires_grad_()
            part = batch._replace(inputs=batch.inputs[here], labels=batch.labels[here])
            outputs = task.outputs_from(family, model, stream, part)
            loss = task.loss(outputs, part.labels if labels is None else labels(outputs, part))
            found[here] = torch.autograd.grad(loss, stream)[0]
    return found


def drawn_labels(seed: int) -> Labels:
    """Labels that are drawn from the model's own answers: squares of their gradients are the true Fisher matrix."""

    def labels(outputs: torch.Tensor, batch: Prepared) -> torch.Tensor:
        rows = zip(batch.inputs, outputs.detach()[:, :-1], strict=True)
        draws = torch.stack([_drawn(log_probabilities, random_for(row, seed)) for row, log_probabilities in rows])
        return torch.cat((batch.labels[:, :1], draws), 1)

    return labels


def _drawn(log_probabilities_TV: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """A token for every place of a row. Every row has its own numbers: batches and processes do not change them.

    The largest of log-probabilities with Gumbel noise is a draw, and rounding changes it only where the two largest
    nearly tie. Inverting the distribution function would change it wherever a boundary between two of all tokens moves:
    one other label of thousands moves prices by a percent, and a GPU would find another plan than a CPU. Noise for
    every token is too much, so a block of tokens is drawn first, and then a token of it.
    """
    count, size = log_probabilities_TV.shape
    width = math.ceil(math.sqrt(size))  # of a block
    blocks = -(-size // width)
    padded = nn.functional.pad(log_probabilities_TV.detach().float(), (0, blocks * width - size), value=-torch.inf)
    within_TBW = padded.view(count, blocks, width)
    block_T = _largest(within_TBW.logsumexp(-1), random)
    token_T = _largest(within_TBW[torch.arange(count, device=block_T.device), block_T], random)
    return block_T * width + token_T


def _largest(scores_TN: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """One of every row, drawn by its share of the exponentials; numbers come from the CPU, the same for all devices."""
    uniform = torch.rand(scores_TN.shape, generator=random, dtype=torch.float64).to(scores_TN.device)
    noise = -(-uniform.clamp_min(1e-300).log()).clamp_min(1e-300).log()
    return (scores_TN.double() + noise).argmax(-1)


class Way(NamedTuple):
    """How gradients are computed: tokens of a batch, and whether layers are computed twice."""

    tokens: int
    recompute: bool


def way(family: Family, model: nn.Module, rows: torch.Tensor, task: Task, recompute: bool | None = None) -> Way:
    """The fastest way for which there is memory: smaller batches first, then layers that are computed twice."""
    shape, size = family.shape_of(model.config), next(model.parameters()).element_size()
    length = max(1, mean_length(rows, task.row_tokens))
    room = min(ROOM, available_bytes(next(model.parameters()).device) // 2)
    able = not family.anatomy(model.config).roles  # gradients also reach an encoder's output
    return chosen_way(kept_per_token(shape, length, size), length, room, able, recompute)


def chosen_way(kept: int, length: int, room: int, able: bool, recompute: bool | None) -> Way:
    """`way`, for a model that keeps so many bytes of every token; `able`: whether its layers can be computed twice."""
    fitting = room // max(1, kept)
    if able and (recompute or (recompute is None and fitting < length)):
        return Way(TOKENS, True)
    return Way(max(length, min(TOKENS, fitting)), False)


def kept_per_token(shape: ModelShape, length: int, size: int) -> int:
    """Bytes of activations that a token's backward pass needs, in numbers of `size` bytes; norms keep float32.

    Every head reads its own part of a shared row. Heads wider than fused kernels take keep their attention weights too.
    """
    total = 0
    for layer in shape.layers:
        qk, v = layer.qk_width // layer.pooled, layer.out_dim
        heads = layer.query_heads + layer.kv_heads * layer.pooled
        attention = 2 * heads * (qk + v) + (max(qk, v) > FUSED) * 3 * layer.query_heads * length
        total += 12 * shape.hidden_size + size * (3 * layer.mlp_width + attention)
    return total
