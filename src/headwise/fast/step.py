"""One decode step, captured once in a CUDA graph and replayed for every token: no launches, no masks, no copies."""

import warnings
from collections.abc import Callable
from typing import Any

import torch

from headwise.fast.cache import FastCache
from headwise.fast.choice import small_kernels_run
from headwise.fast.paths import Seen

Logits = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of ids and positions (B, 1)


def likeliest_on(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """What finds the likeliest token (B, 1) of every row of logits (B, V)."""
    if device.type != "cuda" or not small_kernels_run(device, torch.float32):
        return lambda logits: logits.argmax(-1, keepdim=True)
    from headwise.fast.small import likeliest

    return likeliest


class DecodeStep:
    """Static buffers in, logits out. The graph also advances its counters and feeds back the likeliest token.

    So greedy text needs nothing but replays; for other text, `set` gives the tokens before each step.
    """

    def __init__(self, logits: Logits, cache: FastCache, rows: int, device: torch.device, capture: bool) -> None:
        self.compute, self.cache, self.capture, self.choose = logits, cache, capture, likeliest_on(device)
        self.ids = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.positions = torch.zeros_like(self.ids)
        self.ends = torch.ones(rows, dtype=torch.int32, device=device)
        self.place = torch.zeros(1, dtype=torch.long, device=device)
        self.tokens = torch.zeros(rows, cache.capacity + 1, dtype=torch.long, device=device)  # chosen, by place
        self.at = -1  # the length that the device counts
        self.graph: Any = None

    def set(self, ids: torch.Tensor, positions: torch.Tensor) -> None:
        """The tokens that come next."""
        self.ids.copy_(ids)
        self.positions.copy_(positions)
        length = self.cache.get_seq_length()
        if self.at != length:
            self.ends.fill_(length + 1)
            self.place.fill_(length)
            self.at = length

    def run(self) -> torch.Tensor:
        """One step on the tokens that are set; the next step overwrites its logits."""
        if self.graph is None and self.capture:
            self._try_capture()
        if self.graph is None:
            self.logits = self._step()
            self._advance()
        else:
            self.graph.replay()
        self.at += 1
        self.cache.advance(1)
        return self.logits

    def _step(self) -> torch.Tensor:
        cache = self.cache
        assert cache.starts_B is not None
        cache.seen, cache.place, cache.rows = Seen(self.ends, cache.starts_B), self.place, slice(0, cache.batch)
        try:
            return self.compute(self.ids, self.positions)
        finally:
            cache.seen = cache.place = None

    def _advance(self) -> None:
        token = self.choose(self.logits[:, -1])
        self.ids.copy_(token)
        for counter in (self.positions, self.ends, self.place):
            counter.add_(1)
        self.tokens.index_copy_(1, self.place, token)

    def _try_capture(self) -> None:
        """Capture; where that fails, steps run uncaptured, slower but with the same result. A full memory is raised."""
        try:
            self._capture()
        except RuntimeError as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            self.capture = False
            warnings.warn(f"a decode step cannot be captured ({error}); each is launched anew.", stacklevel=2)
            if self.ids.is_cuda:
                torch.cuda.synchronize(self.ids.device)

    def _capture(self) -> None:
        """Run once before, so that kernels are chosen and compiled; the replay overwrites what that wrote."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self._step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.logits = self._step()
            self._advance()
        self.graph = graph
