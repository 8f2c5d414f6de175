"""Training steps captured once as a CUDA graph and replayed: with small models most of a step is launching kernels.

A graph reads and writes the same memory every time: batches are copied to where the first one was, the learning rate
is written to the device before a replay, and loss and gradient norm are added to the run's sums after it. A replay
computes what the loop would compute; batches of another shape, and steps that cannot be captured, are left to the loop.
`torch.cuda.make_graphed_callables` does not do this: it captures the passes of a module, not the optimizer's step.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from headwise.training.loop import Batches, FitSettings, Loss, State, move

WARM_UP = 3  # steps before a capture, in which libraries allocate what they need
WORTH = 16  # steps below which a capture costs more than it saves


def captured(work: Callable[[], None]) -> Callable[[], None]:
    """A function that replays what `work` launches on the device; while it is captured, `work` computes nothing."""
    graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with _without_masks(), torch.cuda.graph(graph):
            work()
    except BaseException:
        torch.cuda.set_stream(here)  # a capture that failed may leave its own
        raise
    return graph.replay


@contextmanager
def _without_masks() -> Iterator[None]:
    """No attention mask for rows without padding, as in steps that are not captured.

    To see that none is needed, transformers reads the positions, for which the host waits; within a capture it makes a
    mask to be safe, and attention with a mask is slower.
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
def _side_stream(device: torch.device) -> Iterator[None]:
    """A CUDA stream of its own, which the steps before a capture need."""
    if device.type != "cuda":
        yield
        return
    here, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        yield
    here.wait_stream(side)


class CapturedStep:
    """`move_by` for one run of `fit`: after some ordinary steps, one is captured and then replayed.

    An optimizer whose learning rate is on the device offers `write_rate`, which is called before every replay.
    """

    def __init__(self, capture: Callable[[Callable[[], None]], Callable[[], None]] = captured) -> None:
        self.capture = capture
        self.done, self.failed = 0, False
        self.replay: Callable[[], None] | None = None
        self.held: list[Any] = []  # the tensors that the captured step reads
        self.layout: Any = None
        self.sums = torch.zeros(2)

    def __call__(
        self, state: State, batches: Batches, loss: Loss, settings: FitSettings, cast: Callable[[], Any]
    ) -> None:
        """One step."""
        first = state.step * settings.accumulate
        parts = [batches(first + number) for number in range(settings.accumulate)]

        def ordinary() -> None:
            move(state, lambda number: parts[number - first], loss, settings, cast)

        self.done += 1
        if self.done <= WARM_UP:
            with _side_stream(state.sums.device):
                ordinary()
            return
        if self.replay is None and not self.failed:
            self._capture(state, parts, loss, settings, cast)
        if self.replay is None or not self._copied(parts):
            ordinary()
            return
        if hasattr(state.optimiser, "write_rate"):
            state.optimiser.write_rate()
        self.replay()
        state.sums += self.sums

    def _capture(
        self, state: State, parts: list[Any], loss: Loss, settings: FitSettings, cast: Callable[[], Any]
    ) -> None:
        """Capture a step, with memory of its own for what it reads."""
        leaves, self.layout = pytree.tree_flatten(parts)
        self.held = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.sums = torch.zeros_like(state.sums)
        static = pytree.tree_unflatten(self.held, self.layout)
        inner = State(state.model, state.optimiser, self.sums)

        def work() -> None:
            self.sums.zero_()
            move(inner, static.__getitem__, loss, settings, cast)

        try:
            self.replay = self.capture(work)
        except Exception as error:
            self.failed, self.held = True, []
            state.optimiser.zero_grad()
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"steps are not captured, which is slower: {said}", stacklevel=2)

    def _copied(self, parts: list[Any]) -> bool:
        """Copy a batch to where the captured step reads it; False if it has another shape."""
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
