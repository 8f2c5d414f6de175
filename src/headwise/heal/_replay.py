"""Steps of a healing captured once as a CUDA graph and replayed: of small models a step is mostly launches.

A graph reads and writes the same memory every time: batches are copied to where the first one lay, the rate is written
beside the weights, and loss and gradient norm are added to the run's after every replay. What is replayed is what the
loop would do step by step. Where a step cannot be captured, and for batches of another shape, the loop does it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from headwise.heal._adam import RelativeAdam
from headwise.training.loop import Batches, FitSettings, Loss, State, move

WARM_UP = 3  # steps before a capture: libraries set themselves up
WORTH = 16  # steps below which a capture costs more than it saves


def captured(body: Callable[[], None]) -> Callable[[], None]:
    """What does again what `body` launches on the device; `body` itself does nothing meanwhile."""
    graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with _unmasked(), torch.cuda.graph(graph):
            body()
    except BaseException:
        torch.cuda.set_stream(here)  # a capture that failed may leave its own
        raise
    return graph.replay


@contextmanager
def _unmasked() -> Iterator[None]:
    """No masks where steps one by one have none: rows that come without one are whole, each a text of its own.

    To see that, transformers looks at the positions, for which the host waits; within a capture it makes a mask to be
    safe, and attention with a mask is slower.
    """
    from transformers import masking_utils as masks

    own = {
        name: getattr(masks, name) for name in ("find_packed_sequence_indices", "is_tracing") if hasattr(masks, name)
    }
    new = {
        "find_packed_sequence_indices": lambda position_ids: None,
        "is_tracing": lambda tensor=None: tensor is not None and own["is_tracing"](tensor),
    }
    try:
        for name in own:
            setattr(masks, name, new[name])
        yield
    finally:
        for name, function in own.items():
            setattr(masks, name, function)


@contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """Beside the device's usual queue, as steps before a capture have to be."""
    if device.type != "cuda":
        yield
        return
    here, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        yield
    here.wait_stream(side)


class Replay:
    """A step for `fit` that is captured when some have been done, and replayed from then on; for one run."""

    def __init__(self, capture: Callable[[Callable[[], None]], Callable[[], None]] = captured) -> None:
        self.capture = capture
        self.done, self.failed = 0, False
        self.again: Callable[[], None] | None = None
        self.held: list[Any] = []  # what the captured step reads
        self.layout: Any = None
        self.sums = torch.zeros(2)

    def __call__(
        self, state: State, batches: Batches, loss: Loss, settings: FitSettings, cast: Callable[[], Any]
    ) -> None:
        """One step."""
        first = state.step * settings.accumulate
        parts = [batches(first + number) for number in range(settings.accumulate)]

        def given(number: int) -> Any:
            return parts[number - first]

        self.done += 1
        if self.done <= WARM_UP:
            with _aside(state.sums.device):
                move(state, given, loss, settings, cast)
            return
        if self.again is None and not self.failed:
            self._begin(state, parts, loss, settings, cast)
        if self.again is None or not self._takes(parts):
            move(state, given, loss, settings, cast)
            return
        if isinstance(state.optimiser, RelativeAdam):
            state.optimiser.tell_rate()
        self.again()
        state.sums += self.sums

    def _begin(
        self, state: State, parts: list[Any], loss: Loss, settings: FitSettings, cast: Callable[[], Any]
    ) -> None:
        """Capture a step, with memory of its own for what it reads."""
        leaves, self.layout = pytree.tree_flatten(parts)
        self.held = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.sums = torch.zeros_like(state.sums)
        static = pytree.tree_unflatten(self.held, self.layout)
        inner = State(state.model, state.optimiser, self.sums)

        def body() -> None:
            self.sums.zero_()
            move(inner, static.__getitem__, loss, settings, cast)

        try:
            self.again = self.capture(body)
        except Exception as error:
            self.failed, self.held = True, []
            state.optimiser.zero_grad()
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"healing goes on step by step, which is slower: {said}", stacklevel=2)

    def _takes(self, parts: list[Any]) -> bool:
        """Copy a batch to where the captured step reads it, if it has the shape of that."""
        leaves, layout = pytree.tree_flatten(parts)
        if layout != self.layout or not all(map(_alike, leaves, self.held)):
            return False
        for leaf, held in zip(leaves, self.held, strict=True):
            if isinstance(held, torch.Tensor):
                held.copy_(leaf, non_blocking=True)
        return True


def _alike(leaf: Any, held: Any) -> bool:
    """Whether one can be read in place of the other."""
    if isinstance(leaf, torch.Tensor) and isinstance(held, torch.Tensor):
        return leaf.shape == held.shape and leaf.dtype == held.dtype
    return type(leaf) is type(held) and bool(leaf == held)
