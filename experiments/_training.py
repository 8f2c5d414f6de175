"""Trains the experiments' models by the package's own loop: some parameters of one model, or many small models at once.

Small models leave a GPU idle, so several of one shape (seeds, learning rates) are trained side by side, as a stack.
Each member has its own weights, learning rate and clipping; they share nothing but the launches of kernels. On a GPU a
step is captured once as a CUDA graph and replayed, since steps of small tensors are mostly launches.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.training.loop import FitSettings, Point, State, fit
from headwise.training.order import Order

CAPTURED_AFTER = 3  # steps: a graph is captured once all that a step allocates is there
EPSILON = 1e-6  # of AdamW in fine-tuning: a gradient that is rounding alone, as at a KL of zero, must not move anything
DIVERGED = 1e3  # in place of a loss that is no number: the other members of a stack are trained to the end


def minimise(
    loss: Callable[[Tensor], Tensor],
    parameters: Sequence[nn.Parameter],
    rows: int,
    per_step: int,
    steps: int,
    rate: float,
    seed: int = 0,
) -> list[Point]:
    """Fine-tune the parameters on `loss(row numbers)`, without decay and in full precision; returns the curve."""
    model = nn.ParameterList(p for p in parameters if p.numel())
    device = model[0].device
    settings = FitSettings(
        steps, rate, warm_up=0.05, last_rate=0.05, decay=0.0, beta2=0.98, bf16=False, point_every=max(1, steps // 50)
    )
    optimiser = torch.optim.AdamW(
        model, lr=rate, betas=(0.9, 0.98), eps=EPSILON, weight_decay=0.0, fused=device.type == "cuda"
    )
    order = Order(rows, min(per_step, rows), seed, device)
    state = State(model, optimiser, torch.zeros(2, device=device))
    return fit(model, order, settings, lambda _, chosen: loss(chosen), state=state)


class Stack(NamedTuple):
    """Trained members: all weights of each in one row."""

    flat: Tensor  # (S, P), float32
    curve: Tensor  # (steps, S), training losses
    step_seconds: float  # of all members together


Losses = Callable[[Tensor, Tensor], Tensor]  # weights (S, P) and the step's number (1,) -> a loss per member (S,)


def train_stack(flat_SP: Tensor, losses: Losses, rates: Sequence[float], settings: FitSettings) -> Stack:
    """Train all members, each at its own highest learning rate; whatever else `settings` says holds for all.

    Seconds of a step leave out the first tenth of the steps, in which a graph is captured.
    """
    device = flat_SP.device
    flat_SP = flat_SP.clone()  # an expanded tensor has rows that share their memory
    members = nn.ParameterList(nn.Parameter(row) for row in flat_SP)  # views: a step of AdamW moves `flat_SP`
    on_cuda = device.type == "cuda"
    optimiser = torch.optim.AdamW(
        [{"params": [member]} for member in members],
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.decay,
        capturable=on_cuda,
        fused=on_cuda,
    )
    step = _Step(flat_SP, members, losses, rates, settings)
    state = State(members, optimiser, torch.zeros(2, device=device))
    points = fit(members, lambda number: number, settings, state=state, move_by=step.move)
    seconds, count = points[-1].seconds, points[-1].step
    if len(points) > 1:
        seconds, count = seconds - points[0].seconds, count - points[0].step
    return Stack(flat_SP, step.curve, seconds / count)


def settings_of(steps: int, rates: Sequence[float], **rest: Any) -> FitSettings:
    """The settings of a stack, whose highest rate stands for all."""
    every = max(CAPTURED_AFTER + 1, steps // 10)
    return FitSettings(steps, max(rates), last_rate=0.0, bf16=False, point_every=every, **rest)


class _Step:
    """One step of a stack, for `fit`: all members' losses, their gradients, clipping and AdamW, each member alone."""

    def __init__(
        self,
        flat_SP: Tensor,
        members: nn.ParameterList,
        losses: Losses,
        rates: Sequence[float],
        settings: FitSettings,
    ) -> None:
        self.flat_SP, self.members, self.losses = flat_SP, list(members), losses
        device = flat_SP.device
        self.on_cuda = device.type == "cuda"
        self.shares = torch.tensor([rate / settings.rate for rate in rates], device=device)
        self.rates = torch.zeros_like(self.shares)  # read by a captured step
        self.count = torch.zeros(1, dtype=torch.long, device=device)
        self.curve = torch.zeros(settings.steps, len(rates), device=device)
        self.replay: Callable[[], None] | None = None

    def move(self, state: State, batches: Any, loss: Any, settings: FitSettings, cast: Any) -> None:
        """Do the step; the loop has set the learning rate of a member whose share is 1."""
        groups = state.optimiser.param_groups
        torch.mul(self.shares, groups[0]["lr"], out=self.rates)
        for group, rate in zip(groups, self.rates if self.on_cuda else self.rates.tolist(), strict=True):
            group["lr"] = rate
        if self.on_cuda and state.step == CAPTURED_AFTER:
            self.replay = self._captured(state.optimiser, settings)
        if self.replay is not None:
            self.replay()
        else:
            self._work(state.optimiser, settings)
        state.sums[0] += self.curve[state.step].nan_to_num(DIVERGED, DIVERGED).mean()

    def _work(self, optimiser: torch.optim.Optimizer, settings: FitSettings) -> None:
        flat_SP = self.flat_SP.detach().requires_grad_()
        found = self.losses(flat_SP, self.count)
        (grad_SP,) = torch.autograd.grad(found.sum(), flat_SP)
        if settings.clip:
            norms = torch.linalg.vector_norm(grad_SP, dim=1, keepdim=True)
            grad_SP *= (settings.clip / (norms + 1e-6)).clamp(max=1.0)
        for member, grad in zip(self.members, grad_SP, strict=True):
            member.grad = grad
        optimiser.step()
        self.curve.index_copy_(0, self.count, found.detach()[None].float())
        self.count.add_(1)

    def _captured(self, optimiser: torch.optim.Optimizer, settings: FitSettings) -> Callable[[], None] | None:
        """The step as a graph; None, with a warning, where this device cannot capture it."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._work(optimiser, settings)
        except RuntimeError as error:
            warnings.warn(f"steps are not captured, which is slower: {error}", stacklevel=2)
            torch.cuda.synchronize()
            return None
        return graph.replay
