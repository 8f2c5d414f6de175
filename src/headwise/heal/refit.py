"""Refit in sequence: walk the cut model from the first layer to the last and let each make up for what went before.

At every layer least-squares problems are solved from moments of the cut model's own activations: the projections of
queries and keys, so that logits come out as the source's; the value directions and the output projection, so that the
residual stream after attention does; the MLP's first projections, so that its channels do; and the down projection, so
that the stream after the MLP does. Nothing of a layer but the streams behind it is held when the next one is solved.
Scales of the MLP's norm and the projections before rotary positions, solved in the same way, gained nothing on held-out
text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headwise.families import Block, Family
from headwise.families._watch import batches, places
from headwise.heal._job import Job, origins
from headwise.linalg import balanced, ridge, value_basis
from headwise.progress import Track, silently

NAME = "refit"
MEANING = "closed form, seconds to minutes, no gradients"
AFTER = None
OPTIONS = ()


@dataclass(slots=True)
class _Rows:
    """One batch on its way through both models: the residual streams of the source and of the cut model."""

    source: torch.Tensor
    cut: torch.Tensor
    contexts: list[dict[str, Any]]  # of the source's layers
    source_z: torch.Tensor | None = None  # what the heads of the layer put out, while it is worked on
    z: torch.Tensor | None = None
    source_middle: torch.Tensor | None = None  # the layer's own tokens after its attention
    source_end: torch.Tensor | None = None  # and after its MLP, where that is known beforehand
    cut_middle: torch.Tensor | None = None
    channels: torch.Tensor | None = None  # of the cut model's MLP


def heal(job: Job) -> tuple[nn.Module, dict[str, Any]]:
    """The cut model refitted on all calibration rows, held as near to itself as the task wants."""
    strength = job.task.refit_strength
    return refit(job.family, job.source, job.cut, job.calibration.inputs, strength, job.track)


@torch.no_grad()
def refit(
    family: Family,
    source: nn.Module,
    cut: nn.Module,
    tokens: torch.Tensor,
    strength: float = 1e-2,
    track: Track = silently,
) -> tuple[nn.Module, dict[str, Any]]:
    """A healed copy of `cut` and what was gained per layer; neither model is changed."""
    healed = family.tailor(cut)
    device = healed.device
    kept = origins(source, healed)
    image = family.row_tokens(source.config, tokens)
    parts = [part.to(device) for part in batches(tokens, row=image)]
    contexts = family.contexts(source, parts)
    rows = [_Rows(family.embed(source, p), family.embed(healed, p), c) for p, c in zip(parts, contexts, strict=True)]
    ours, theirs = family.blocks(healed), family.blocks(source)
    gains = []
    for row in rows:
        for i in range(kept[0]):  # lost before the first that is left
            row.source = theirs[i](row.source, row.contexts[i])
    for index in track(range(len(ours)), "refit"):
        until = kept[index + 1] if index + 1 < len(kept) else len(theirs)
        lost = range(kept[index] + 1, until)
        worker = LayerRefit(ours[index], theirs, kept[index], rows, strength)
        worker.queries_and_keys()
        worker.values()
        gains.append(worker.output_and_down(lost, inner=True))
    return healed, {"method": NAME, "tokens": places(tokens, image), "strength": strength, "layers": gains}


class LayerHealer:
    """Heals single cut layers among whole ones, so that an option can be priced as it will end up.

    An uneven cut looks cheaper than it is before healing: what one layer lost whole, no refit brings back.
    """

    def __init__(self, family: Family, model: nn.Module, tokens: torch.Tensor, strength: float = 1e-2) -> None:
        self.family, self.strength = family, strength
        self.whole = family.blocks(model)
        self.known: tuple[int, list[tuple[torch.Tensor, ...]]] = (-1, [])  # what one whole layer computes
        row = family.row_tokens(model.config, tokens)
        parts = [part.to(model.device) for part in batches(tokens, row=row)]
        self.contexts = family.contexts(model, parts)
        self.streams: list[list[torch.Tensor]] = [[] for _ in self.whole]
        with torch.no_grad():
            for part, contexts in zip(parts, self.contexts, strict=True):
                stream = family.embed(model, part)
                for index, context in enumerate(contexts):
                    self.streams[index].append(stream)
                    stream = family.run_layer(model, index, stream, context)

    @torch.no_grad()
    def heal(self, index: int, layer: nn.Module) -> nn.Module:
        """The layer with values, output and down projection refitted; changes and returns `layer`."""
        if index != self.known[0]:  # several options of a layer are tried in turn
            pairs = zip(self.streams[index], self.contexts, strict=True)
            self.known = (index, [self._computed(index, stream, contexts[index]) for stream, contexts in pairs])
        found = zip(self.streams[index], self.contexts, self.known[1], strict=True)
        rows = [
            _Rows(stream, stream, contexts, z, source_middle=middle, source_end=end[0] if end else None)
            for stream, contexts, (z, middle, *end) in found
        ]
        worker = LayerRefit(self.family.block(layer), self.whole, index, rows, self.strength)
        worker.values()
        worker.output_and_down()
        return layer

    def _computed(self, index: int, stream: torch.Tensor, context: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        """What a whole layer's heads put out, and its own tokens after attention and, where it has one, the MLP."""
        block = self.whole[index]
        own, z = block.own(stream, context), block.attended(*block.heads(stream, context), context)
        middle = block.middle(own, z)
        return (z, middle, block.end(middle, block.channels(own, middle))) if block.down else (z, middle)


class LayerRefit:
    """The refits of one layer, which was number `index` of the source's; moves both residual streams past it."""

    def __init__(self, ours: Block, source: list[Block], index: int, rows: list[_Rows], strength: float) -> None:
        self.ours, self.theirs, self.rows, self.strength = ours, source[index], rows, strength
        self.source, self.index = source, index

    def _context(self, row: _Rows) -> dict[str, Any]:
        return row.contexts[self.index]

    def _outputs(self, block: Block, stream: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        return block.attended(*block.heads(stream, context), context)

    def _source_z(self, row: _Rows) -> torch.Tensor:
        """What the source's heads put out, worked out once."""
        if row.source_z is None:
            row.source_z = self._outputs(self.theirs, row.source, self._context(row))
        return row.source_z

    def _source_middle(self, row: _Rows) -> torch.Tensor:
        """The source's own tokens after attention, worked out once."""
        if row.source_middle is None:
            own = self.theirs.own(row.source, self._context(row))
            row.source_middle = self.theirs.middle(own, self._source_z(row))
        return row.source_middle

    def _wanted(self, row: _Rows) -> torch.Tensor:
        """What the output projection should give: the source's sum, or its own output where a norm follows it."""
        theirs = self.theirs
        source, cut = (theirs.own(stream, self._context(row)) for stream in (row.source, row.cut))
        if theirs.by_channel:
            return _before(self.ours.attention_scale, self._source_middle(row) - cut)
        if theirs.attention_scale is None and theirs.attention_end is None:
            return self._source_middle(row) - cut
        given: torch.Tensor = theirs.output(self._source_z(row))
        return given if theirs.attention_scale is not None else source + given - cut

    def queries_and_keys(self) -> None:
        """Reduced-rank regression of the source's logits on the cut model's queries and keys."""
        ours, theirs = self.ours.attention, self.theirs.attention
        if ours.qk_dim == ours.qk_width or ours.query_heads != theirs.query_heads or ours.qk_width != theirs.qk_dim:
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
        """Value directions anew, from the source's values under the cut model's attention, with the output they want.

        The wanted output projection at full width says what each direction is worth; the best directions of every
        key/value head stay, and their output projection starts as the full one seen through them.
        """
        ours, theirs = self.ours.attention, self.theirs.attention
        if ours.v_dim == theirs.v_dim or ours.query_heads != theirs.query_heads or ours.pooled > 1:
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
        readout = torch.linalg.solve(p_head.mT @ gram @ p_head, p_head.mT @ gram)
        self.ours.output.weight.copy_((readout @ full.view(heads, width, -1)).flatten(0, 1).mT)
        for row in self.rows:  # attention mixes tokens, not directions: no need to attend anew
            z = row.z.unflatten(-1, (heads, width)).transpose(-3, -2)
            row.z = (z @ p_head.to(z)).transpose(-3, -2).flatten(-2)

    def output_and_down(self, lost: Sequence[int] = (), inner: bool = False) -> dict[str, dict[str, float]]:
        """The refits that a residual stream wants, and what they gained; `lost` layers of the source lay behind.

        `inner` also refits what comes before the MLP's channels, which a layer among whole ones hardly needs.
        """
        if self.ours.down is None:
            return {"attention": self._output(lost, last=True)}
        found = {"attention": self._output()}
        if inner and self.ours.inner[0].weight.shape == self.theirs.inner[0].weight.shape:
            found["channels"] = self._inner()
        return {**found, "mlp": self._down(self.ours.down, lost)}

    def _past(self, row: _Rows, own: torch.Tensor, lost: Sequence[int]) -> torch.Tensor:
        """The source's stream after the layer, whose own tokens it is given, and after the lost ones behind it."""
        stream = self.theirs.joined(row.source, own, self._context(row))
        for index in lost:
            stream = self.source[index](stream, row.contexts[index])
        return stream

    def _output(self, lost: Sequence[int] = (), last: bool = False) -> dict[str, float]:
        """Output projection: the stream after attention becomes the source's, as far as it can.

        If that is the `last` part of the layer, so does the one after the layers that were lost behind it.
        """
        problem, theirs = _LeastSquares(self.ours.output), self.theirs
        for row in self.rows:
            context = self._context(row)
            row.z = self._outputs(self.ours, row.cut, context) if row.z is None else row.z
            wanted, middle = self._wanted(row), self._source_middle(row)
            row.source_z = None
            if last:
                row.source, row.source_middle = self._past(row, middle, lost), None
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

    def _inner(self) -> dict[str, float]:
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
        return {name: sum(gain[name] for gain in gains) / len(gains) for name in gains[0]}

    def _down(self, down: nn.Linear, lost: Sequence[int]) -> dict[str, float]:
        """Down projection: the same for the stream after the MLP, and after the layers that were `lost` behind it."""
        problem, theirs = _LeastSquares(down), self.theirs
        for row in self.rows:
            context = self._context(row)
            channels = None
            if row.source_end is None:
                channels = theirs.channels(theirs.own(row.source, context), row.source_middle)
                row.source_end = theirs.end(row.source_middle, channels)
            before, row.source = row.source, self._past(row, row.source_end, lost)
            ends = theirs.own(row.source, context)
            if theirs.by_channel:
                wanted = _before(self.ours.mlp_scale, ends - row.cut_middle)
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


def _before(scale: Any, wanted: torch.Tensor) -> torch.Tensor:
    """What factors of channels must be given so that they put out what is wanted."""
    factors = scale(torch.ones_like(wanted[:1, :1]))
    return wanted / torch.where(factors == 0, 1, factors)


class _LeastSquares:
    """Moments of one linear layer's inputs and wanted outputs, and its new weight."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear = linear
        width = linear.weight.shape[1]
        self.xx = torch.zeros(width, width, dtype=torch.float64, device=linear.weight.device)
        self.xy = torch.zeros(width, linear.weight.shape[0], dtype=torch.float64, device=linear.weight.device)
        self.yy = 0.0

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        x, y = x.flatten(0, 1), y.flatten(0, 1)
        if self.linear.bias is not None:
            y = y - self.linear.bias
        self.xx += x.mT @ x
        self.xy += x.mT @ y
        self.yy += float(y.double().square().sum())

    def _error(self, weight: torch.Tensor) -> float:
        """Mean squared error, relative to the wanted output's power."""
        error = self.yy - 2 * (weight * self.xy).sum() + (weight * (self.xx @ weight)).sum()
        return float(error / max(self.yy, 1e-30))

    def solution(self, strength: float) -> torch.Tensor:
        """The best weight (inputs, outputs), held near the present one."""
        return ridge(self.xx, self.xy, self.linear.weight.mT, strength)

    def solve(self, strength: float) -> dict[str, float]:
        """Set the best weight; returns what it gained."""
        before, after = self.linear.weight.mT.double(), self.solution(strength)
        self.linear.weight.copy_(after.mT)
        return {"error_before": self._error(before), "error_after": self._error(after)}
