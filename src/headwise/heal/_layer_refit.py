"""The least-squares problems of one layer, which `refit` solves layer by layer."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headwise.families import Block, widened
from headwise.linalg import balanced, fast_products, least_solution, ridge, value_basis
from headwise.types import Gain


@dataclass(slots=True)
class RefitBatch:
    """One batch before a layer: both models' residual streams, and what is known of the layer while it is refitted.

    `own` tokens are those that a layer changes: all, except in an encoder-decoder.
    """

    source: torch.Tensor
    cut: torch.Tensor
    contexts: list[dict[str, Any]]  # of the source's layers: positions, masks
    source_z: torch.Tensor | None = None  # what the source's heads put out
    z: torch.Tensor | None = None  # what the cut model's heads put out
    source_middle: torch.Tensor | None = None  # the source's own tokens after attention
    source_end: torch.Tensor | None = None  # and after the MLP, where that was computed before
    cut_middle: torch.Tensor | None = None  # the cut model's own tokens after attention
    channels: torch.Tensor | None = None  # of the cut model's MLP


class LayerRefit:
    """The refits of one layer, which was number `index` of the source; takes both residual streams past it."""

    def __init__(self, ours: Block, source: list[Block], index: int, rows: list[RefitBatch], strength: float) -> None:
        self.ours, self.theirs, self.rows, self.strength = ours, source[index], rows, strength
        self.source, self.index = source, index

    def _context(self, row: RefitBatch) -> dict[str, Any]:
        return row.contexts[self.index]

    def _source_z(self, row: RefitBatch) -> torch.Tensor:
        """What the source's heads put out, computed once."""
        if row.source_z is None:
            row.source_z = heads_out(self.theirs, row.source, self._context(row))
        return row.source_z

    def _source_middle(self, row: RefitBatch) -> torch.Tensor:
        """The source's own tokens after attention, computed once."""
        if row.source_middle is None:
            own = self.theirs.own(row.source, self._context(row))
            row.source_middle = self.theirs.middle(own, self._source_z(row))
        return row.source_middle

    def _wanted(self, row: RefitBatch) -> torch.Tensor:
        """What the output projection should give: the source's sum, or its own output where a norm follows it."""
        theirs = self.theirs
        source, cut = (theirs.own(stream, self._context(row)) for stream in (row.source, row.cut))
        if theirs.by_channel:
            return _unscaled(self.ours.attention_scale, self._source_middle(row) - cut)
        if theirs.attention_scale is None and theirs.attention_end is None:
            return self._source_middle(row) - cut
        given: torch.Tensor = theirs.output(self._source_z(row))
        return given if theirs.attention_scale is not None else source + given - cut

    def all(self, removed: Sequence[int] = ()) -> dict[str, Gain]:
        """Every refit of the layer, in order, and their gains; `removed`: see `output_and_down`."""
        self.queries_and_keys()
        self.values()
        return self.output_and_down(removed, inner=True)

    def queries_and_keys(self) -> None:
        """Reduced-rank regression of the source's logits on the cut model's queries and keys."""
        ours, theirs = self.ours.attention, self.theirs.attention
        same_heads = ours.query_heads == theirs.query_heads and ours.qk_width == theirs.qk_dim
        if ours.coders is not None or ours.qk_dim == ours.qk_width or not same_heads:  # codes are for one basis
            return
        sums: list[torch.Tensor] = []
        for row in self.rows:
            context = self._context(row)
            q, k, _ = self.ours.heads(row.cut, context)
            q = ours.spread(q)
            q0, k0, v0 = self.theirs.heads(row.source, context)
            row.source_z = self.theirs.attended(q0, k0, v0, context)
            q0, k0 = theirs.project(q0, k0)
            k, k0 = (t - t.mean(2, keepdim=True) for t in (k, k0))  # softmax ignores the mean key
            q, q0, k, k0 = (
                t.transpose(0, 1).unflatten(0, (ours.kv_heads, -1)).flatten(1, 3).double() for t in (q, q0, k, k0)
            )
            parts = [q.mT @ q, q.mT @ q0, k.mT @ k, k.mT @ k0]
            sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
        qq, qq0, kk, kk0 = sums
        eye = torch.eye(ours.qk_width, dtype=torch.float64, device=qq.device)
        core = ridge(qq, qq0, eye, self.strength) @ ridge(kk, kk0, eye, self.strength).mT
        p_q, p_k, _ = balanced(qq, kk, core)
        ours.q_down_GWK.copy_(p_q[..., : ours.qk_dim])
        ours.k_down_GWK.copy_(p_k[..., : ours.qk_dim])

    def values(self) -> None:
        """New value directions and output projection, from the source's values under the cut model's attention.

        The output projection is first solved at full width. It shows what each direction is worth: every key/value head
        keeps its best directions, and the output projection starts as the full one restricted to them.
        """
        ours, theirs = self.ours.attention, self.theirs.attention
        if ours.v_dim == theirs.v_dim or ours.query_heads != theirs.query_heads or ours.pooled > 1 or ours.coders:
            return
        problem = _LeastSquares(self.theirs.output)
        for row in self.rows:
            context = self._context(row)
            q, k, _ = self.ours.heads(row.cut, context)
            row.z = self.ours.attended(q, k, self.theirs.values(row.cut, context, self.ours), context)
            problem.add(row.z, self._wanted(row))
        full = problem.solution(self.strength)
        heads, width, groups = theirs.query_heads, theirs.v_dim, ours.kv_heads
        per_head = problem.xx.view(heads, width, heads, width)
        gram = torch.stack([per_head[h, :, h] for h in range(heads)])
        p = value_basis(gram, full.mT, groups)[0][..., : ours.v_dim]
        ours.v_proj.weight.copy_((p.mT @ theirs.v_proj.weight.double().view(groups, width, -1)).flatten(0, 1))
        if ours.v_proj.bias is not None:
            ours.v_proj.bias.copy_((p.mT @ theirs.v_proj.bias.double().view(groups, width, 1)).flatten())
        p_head = p.repeat_interleave(heads // groups, dim=0)
        readout = least_solution(p_head.mT @ gram @ p_head, p_head.mT @ gram)
        self.ours.output.weight.copy_((readout @ full.view(heads, width, -1)).flatten(0, 1).mT)
        for row in self.rows:  # attention mixes tokens, not directions: no need to attend again
            z = row.z.unflatten(-1, (heads, width)).transpose(-3, -2)
            row.z = (z @ p_head.to(z)).transpose(-3, -2).flatten(-2)

    def output_and_down(self, removed: Sequence[int] = (), inner: bool = False) -> dict[str, Gain]:
        """The refits of output, inner and down projections, and their gains.

        `removed` are the source's layers behind this one that the cut model does not have. `inner` also refits the
        projections before the MLP's channels, which a layer among whole ones hardly needs.
        """
        if self.ours.down is None:
            return {"attention": self._output(removed, last=True)}
        found = {"attention": self._output()}
        if inner and self.ours.inner[0].weight.shape == self.theirs.inner[0].weight.shape:
            found["channels"] = self._inner()
        return {**found, "mlp": self._down(self.ours.down, removed)}

    def _past(self, row: RefitBatch, own: torch.Tensor, removed: Sequence[int]) -> torch.Tensor:
        """The source's stream after the layer, whose own tokens are given, and after the removed ones behind it."""
        stream = self.theirs.joined(row.source, own, self._context(row))
        for index in removed:
            stream = self.source[index](stream, row.contexts[index])
        return stream

    def _output(self, removed: Sequence[int] = (), last: bool = False) -> Gain:
        """Output projection: the stream after attention becomes as close as possible to the source's.

        Where this is the `last` part of the layer, it also makes up for the removed layers behind.
        """
        problem, theirs = _LeastSquares(self.ours.output), self.theirs
        for row in self.rows:
            context = self._context(row)
            row.z = heads_out(self.ours, row.cut, context) if row.z is None else row.z
            wanted, middle = self._wanted(row), self._source_middle(row)
            row.source_z = None
            if last:
                row.source, row.source_middle = self._past(row, middle, removed), None
                if theirs.attention_scale is None and theirs.attention_end is None:
                    wanted = theirs.own(row.source, context) - theirs.own(row.cut, context)
            problem.add(row.z, wanted)
        gain = problem.solve(self.strength)
        for row in self.rows:
            context = self._context(row)
            row.cut_middle, row.z = self.ours.middle(self.ours.own(row.cut, context), row.z), None
            if last:
                row.cut, row.cut_middle = self.ours.joined(row.cut, row.cut_middle, context), None
        return gain

    def _inner(self) -> Gain:
        """The MLP's first projections: its channels before the activation become the source's, as far as they can."""
        gains = []
        for ours, theirs in zip(self.ours.inner, self.theirs.inner, strict=True):  # one at a time: they are wide
            problem = _LeastSquares(ours)
            for row in self.rows:
                context = self._context(row)
                read = self.ours.mlp_input(self.ours.own(row.cut, context), row.cut_middle)
                wanted = self.theirs.mlp_input(self.theirs.own(row.source, context), row.source_middle)
                problem.add(read, theirs(wanted))
            gains.append(problem.solve(self.strength))
        before, after = ([getattr(gain, name) for gain in gains] for name in ("error_before", "error_after"))
        return Gain(sum(before) / len(gains), sum(after) / len(gains))

    def _down(self, down: nn.Linear, removed: Sequence[int]) -> Gain:
        """Down projection: the stream after the MLP, and after the `removed` layers behind, becomes the source's."""
        problem, theirs = _LeastSquares(down), self.theirs
        for row in self.rows:
            context = self._context(row)
            channels = None
            if row.source_end is None:
                channels = theirs.channels(theirs.own(row.source, context), row.source_middle)
                row.source_end = theirs.end(row.source_middle, channels)
            before, row.source = row.source, self._past(row, row.source_end, removed)
            ends = theirs.own(row.source, context)
            if theirs.by_channel:
                wanted = _unscaled(self.ours.mlp_scale, ends - row.cut_middle)
            elif theirs.mlp_scale is None and theirs.mlp_end is None:
                wanted = ends - row.cut_middle
            else:
                if channels is None:
                    channels = theirs.channels(theirs.own(before, context), row.source_middle)
                given = theirs.down(channels) if theirs.down is not None else channels  # ours has one, so has theirs
                wanted = given if theirs.mlp_scale is not None else row.source_middle + given - row.cut_middle
            row.channels = self.ours.channels(self.ours.own(row.cut, context), row.cut_middle)
            problem.add(row.channels, wanted)
        gain = problem.solve(self.strength)
        for row in self.rows:
            row.cut = self.ours.joined(row.cut, self.ours.end(row.cut_middle, row.channels), self._context(row))
            row.source_middle = row.source_end = row.cut_middle = row.channels = None
        return gain


def heads_out(block: Block, stream: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
    """What a layer's heads put out (B, T, H V)."""
    return block.attended(*block.heads(stream, context), context)


def _unscaled(scale: Any, wanted: torch.Tensor) -> torch.Tensor:
    """What a per-channel scale must be given so that it puts out `wanted`."""
    factors = scale(torch.ones_like(wanted[:1, :1]))
    return wanted / torch.where(factors == 0, 1, factors)


class _LeastSquares:
    """Second moments of a linear layer's inputs and wanted outputs, and its new weight."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear = linear
        width = linear.weight.shape[1]
        self.xx = torch.zeros(width, width, dtype=torch.float64, device=linear.weight.device)
        self.xy = torch.zeros(width, linear.weight.shape[0], dtype=torch.float64, device=linear.weight.device)
        self.yy = 0.0

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        x, y = widened(x.flatten(0, 1)), widened(y.flatten(0, 1))
        if self.linear.bias is not None:
            y = y - self.linear.bias
        with fast_products(x.device) if self.linear.weight.dtype == torch.bfloat16 else nullcontext():  # as exact there
            self.xx += x.mT @ x
            self.xy += x.mT @ y
        self.yy += float(y.double().square().sum())

    def _error(self, weight: torch.Tensor) -> float:
        """Mean squared error, relative to the mean square of the wanted output."""
        error = self.yy - 2 * (weight * self.xy).sum() + (weight * (self.xx @ weight)).sum()
        return float(error / max(self.yy, 1e-30))

    def solution(self, strength: float) -> torch.Tensor:
        """The best weight (inputs, outputs), held near the present one by a ridge."""
        return ridge(self.xx, self.xy, self.linear.weight.mT, strength)

    def solve(self, strength: float) -> Gain:
        """Set the best weight; returns what it gained."""
        before, after = self.linear.weight.mT.double(), self.solution(strength)
        self.linear.weight.copy_(after.mT)
        return Gain(self._error(before), self._error(after))
