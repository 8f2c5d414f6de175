"""The training loop: AdamW, warm-up and cosine, clipping, bfloat16 on CUDA. In memory; it knows no files and no tasks.

    curve = fit(model, lambda step: tokens[order(step)], FitSettings(steps=1000, rate=1e-3), next_token)

It adds little time to a step, for hundreds of small runs on one device: the host waits for the device only where a
point of the curve is read. Every step seeds its own random numbers, so that a resumed run draws the same ones.
"""

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from headwise import processes
from headwise.errors import HeadwiseError
from headwise.linalg import fast_products
from headwise.training import shards
from headwise.types import Record

Batches = Callable[[int], Any]  # number of a batch -> what the loss reads; accumulated parts count as batches
Loss = Callable[[nn.Module, Any], torch.Tensor]  # -> the mean loss of a batch, on the device
Evaluate = Callable[[nn.Module], Mapping[str, float]]
Move = Callable[["State", Batches, Loss, "FitSettings", Callable[[], Any]], None]  # as `move`


@dataclass(frozen=True, slots=True)
class FitSettings(Record):
    """How to train; the data are given separately."""

    steps: int
    rate: float = 1e-3  # highest learning rate
    warm_up: float = 0.02  # share of the steps during which the learning rate rises
    last_rate: float = 0.1  # share of the highest learning rate at the end of the cosine
    decay: float = 0.1  # weight decay of matrices; vectors have none
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0  # largest norm of a gradient; 0: any
    accumulate: int = 1  # batches of one step
    seed: int = 0  # random seed of dropout
    bf16: bool | None = None  # None: on CUDA
    compile: bool = False
    point_every: int = 50  # steps between points of the curve
    evaluate_every: int = 0  # steps between evaluations; 0: only at the end

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("accumulate", 1), ("point_every", 1), ("evaluate_every", 0)):
            if getattr(self, name) < least:
                raise HeadwiseError(f"{name} is {getattr(self, name)}; it must be at least {least}.")
        if not (self.rate > 0 and math.isfinite(self.rate)):
            raise HeadwiseError(f"rate is {self.rate}; it must be above 0, such as 1e-3.")


class Point(NamedTuple):
    """A point of the curve. Loss and gradient norm are means over the steps since the point before."""

    step: int  # steps done
    loss: float
    gradient_norm: float
    rate: float
    seconds: float  # of training, from the start of the run
    evaluation: dict[str, float] | None = None


@dataclass(slots=True)
class State:
    """The state of a run: all that is needed, beside the data, to resume it."""

    model: nn.Module  # as it computes: wrapped where several processes train
    optimiser: torch.optim.Optimizer
    sums: torch.Tensor  # loss and gradient norm since the last point, on the device
    step: int = 0  # steps done
    summed: int = 0  # of them since the last point
    seconds: float = 0.0
    curve: list[Point] = field(default_factory=list)


def begin(model: nn.Module, settings: FitSettings, accelerator: Any = None) -> State:
    """A run before its first step, on the model's device. An `accelerator` wraps the model for several processes."""
    optimiser = optimiser_for(model, settings)
    device = next(model.parameters()).device
    if accelerator is not None:
        model, optimiser = accelerator.prepare(model, optimiser)
    return State(model, optimiser, torch.zeros(2, device=device))


def fit(
    model: nn.Module,
    batches: Batches,
    settings: FitSettings,
    loss: Loss | None = None,
    *,
    evaluate: Evaluate | None = None,
    on_step: Callable[[State], None] | None = None,
    state: State | None = None,
    move_by: Move | None = None,
) -> list[Point]:
    """Train a model in place and return its curve.

    `batches(number)` gives a batch whose tensors are on the model's device; `loss(model, batch)` its mean loss, by
    default the loss of `model(**batch)`. `evaluate(model)` runs in evaluation mode, at the end and every
    `evaluate_every` steps. `on_step(state)` runs after every step. `state` (from `begin`, then loaded) resumes a run;
    `move_by` does a step's work in place of `move`.
    """
    state = state or begin(model, settings)
    device = state.sums.device
    compute = torch.compile(loss or stated_loss) if settings.compile else loss or stated_loss
    cast = bf16_on(device, settings)
    state.model.train()
    with fast_products(device):
        while state.step < settings.steps:
            started = time.perf_counter()
            _prepare(state, settings)
            (move_by or move)(state, batches, compute, settings, cast)
            state.step, state.summed = state.step + 1, state.summed + 1
            evaluates = _every(settings.evaluate_every, state, settings)
            means = _means(state, settings) if evaluates or _every(settings.point_every, state, settings) else None
            state.seconds += time.perf_counter() - started  # of training: neither evaluation nor `on_step`
            if means is not None:
                found = _evaluated(model, evaluate, cast) if evaluate is not None and evaluates else None
                rate = settings.rate * pace(state.step - 1, settings)
                state.curve.append(Point(state.step, *means, rate, state.seconds, found))
            if on_step is not None:
                on_step(state)
    return state.curve


def _prepare(state: State, settings: FitSettings) -> None:
    """Learning rate and random numbers of the step to come."""
    for group in state.optimiser.param_groups:
        group["lr"] = settings.rate * pace(state.step, settings)
    torch.manual_seed((settings.seed * 1_000_003 + state.step) * 1_009 + processes.index())  # of dropout


def move(state: State, batches: Batches, loss: Loss, settings: FitSettings, cast: Callable[[], Any]) -> None:
    """The work of one step: accumulate gradients, clip them, update the weights. Never waits for the device."""
    for part in range(settings.accumulate):
        with _unsynchronised(state.model, part < settings.accumulate - 1):
            with cast():
                value = loss(state.model, batches(state.step * settings.accumulate + part))
            (value / settings.accumulate).backward()
        state.sums[0] += value.detach() / settings.accumulate
    limit = settings.clip or math.inf
    state.sums[1] += shards.whole(nn.utils.clip_grad_norm_(state.model.parameters(), limit))
    state.optimiser.step()
    state.optimiser.zero_grad()


def _unsynchronised(model: nn.Module, wanted: bool) -> contextlib.AbstractContextManager[Any]:
    """Processes need not exchange a gradient that is still being accumulated."""
    return model.no_sync() if wanted and hasattr(model, "no_sync") else contextlib.nullcontext()


def _every(count: int, state: State, settings: FitSettings) -> bool:
    """Whether so many steps have passed, or all; 0: only at the end."""
    return state.step == settings.steps or bool(count and state.step % count == 0)


def _means(state: State, settings: FitSettings) -> tuple[float, float]:
    """Mean loss and gradient norm since the last point. The only place where the host waits for the device."""
    sums = processes.total(state.sums) / processes.count()
    value, norm = (sums / state.summed).tolist()
    state.sums, state.summed = torch.zeros_like(state.sums), 0
    if not math.isfinite(value):
        raise Diverged(
            f"training diverged: the loss is {value} after {state.step} steps at rate {settings.rate:.3g}; "
            f"lower the rate, for example to {settings.rate / 3:.2g}."
        )
    return value, norm


class Diverged(HeadwiseError):
    """The loss is not finite."""


def _evaluated(model: nn.Module, evaluate: Evaluate, cast: Callable[[], Any]) -> dict[str, float]:
    model.eval()
    with torch.no_grad(), cast():
        found = dict(evaluate(model))
    model.train()
    return found


def pace(step: int, settings: FitSettings) -> float:
    """The learning rate of a step as a share of the highest: a straight rise, then a cosine.

    >>> [round(pace(step, FitSettings(steps=100, warm_up=0.05)), 2) for step in (0, 4, 52, 99)]
    [0.2, 1.0, 0.54, 0.1]
    """
    warm = max(1, round(settings.warm_up * settings.steps))
    if step < warm:
        return (step + 1) / warm
    share = (step + 1 - warm) / max(1, settings.steps - warm)
    return settings.last_rate + (1 - settings.last_rate) * 0.5 * (1 + math.cos(math.pi * share))


def optimiser_for(model: nn.Module, settings: FitSettings) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves biases and norms alone; one fused kernel on CUDA."""
    trained = [p for p in model.parameters() if p.requires_grad and p.numel()]
    if not trained:
        raise HeadwiseError("the model has no parameters to train; give some of them requires_grad.")
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": settings.decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(groups, lr=settings.rate, betas=betas, fused=trained[0].device.type == "cuda")


def bf16_on(device: torch.device, settings: FitSettings) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """The context in which the loss is computed: bfloat16 as the settings have it; by default on CUDA."""
    wanted = device.type == "cuda" if settings.bf16 is None else settings.bf16
    return lambda: torch.autocast(device.type, torch.bfloat16) if wanted else contextlib.nullcontext()


def stated_loss(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """The loss that a transformers model computes when it is given labels."""
    value: torch.Tensor = model(**batch).loss
    return value


def next_token(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of a causal language model on unpadded rows (B, T), without the first token."""
    logits = model(input_ids=ids, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
