"""Refit in sequence: walk the cut model from the first layer to the last and let each make up for what went before.

At every layer least-squares problems are solved from moments of the cut model's own activations: the projections of
queries and keys, so that logits come out as the source's; the value directions and the output projection, so that the
residual stream after attention does; and the down projection, so that the stream after the MLP does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headwise.families import Block, Family, of_length
from headwise.linalg import balanced, ridge, value_basis
from headwise.probes._watch import Track, batches, places, silently

NAME = "refit"
MEANING = "closed form, seconds to minutes, no gradients"


@dataclass(slots=True)
class _Rows:
    """One batch on its way through both models: the residual streams of the source and of the cut model."""

    source: torch.Tensor
    cut: torch.Tensor
    z: torch.Tensor | None = None
    source_start: torch.Tensor | None = None  # before the layer's attention, while its MLP is worked on
    cut_start: torch.Tensor | None = None


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
    contexts = family.layer_contexts(source, tokens[:1].to(device))
    kept = _kept_of(source, healed)
    image = family.row_tokens(source.config, tokens)
    parts = batches(tokens, row=image)
    rows = [_Rows(family.embed(source, p.to(device)), family.embed(healed, p.to(device))) for p in parts]
    ours, theirs = family.blocks(healed), family.blocks(source)
    gains = []
    for row in rows:
        for i in range(kept[0]):  # lost before the first that is left
            row.source = _pass(theirs[i], row.source, contexts[i])
    for index in track(range(len(ours)), "refit"):
        until = kept[index + 1] if index + 1 < len(kept) else len(theirs)
        lost = [(theirs[i], contexts[i]) for i in range(kept[index] + 1, until)]
        worker = _LayerRefit(ours[index], theirs[kept[index]], contexts[kept[index]], rows, strength)
        worker.queries_and_keys()
        worker.values()
        gains.append({"attention": worker.output(), "mlp": worker.down(lost)})
    return healed, {"method": NAME, "tokens": places(tokens, image), "strength": strength, "layers": gains}


class LayerHealer:
    """Heals single cut layers among whole ones, so that an option can be priced as it will end up.

    An uneven cut looks cheaper than it is before healing: what one layer lost whole, no refit brings back.
    """

    def __init__(self, family: Family, model: nn.Module, tokens: torch.Tensor, strength: float = 1e-2) -> None:
        self.family, self.strength = family, strength
        self.whole = family.blocks(model)
        self.contexts = family.layer_contexts(model, tokens[:1].to(model.device))
        self.streams: list[list[torch.Tensor]] = [[] for _ in self.whole]
        with torch.no_grad():
            for part in batches(tokens, row=family.row_tokens(model.config, tokens)):
                stream = family.embed(model, part.to(model.device))
                for index, context in enumerate(self.contexts):
                    self.streams[index].append(stream)
                    stream = family.run_layer(model, index, stream, context)

    @torch.no_grad()
    def heal(self, index: int, layer: nn.Module) -> nn.Module:
        """The layer with values, output and down projection refitted; changes and returns `layer`."""
        rows = [_Rows(stream, stream) for stream in self.streams[index]]
        ours = self.family.block(layer)
        worker = _LayerRefit(ours, self.whole[index], self.contexts[index], rows, self.strength)
        worker.values()
        worker.output()
        worker.down()
        return layer


class _LayerRefit:
    """The refits of one layer; moves both residual streams past it."""

    def __init__(self, ours: Block, theirs: Block, context: dict[str, Any], rows: list[_Rows], strength: float) -> None:
        self.ours, self.theirs, self.rows, self.strength = ours, theirs, rows, strength
        self.context = context

    def _heads(
        self, block: Block, stream: torch.Tensor, like: Block | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of a block; its input is normed as `like` does."""
        norm = (like or block).attention_norm
        positions = of_length(self.context, stream.shape[1]).get("position_embeddings")
        return block.attention.heads(stream if norm is None else norm(stream), positions)

    def _mask(self, stream: torch.Tensor) -> Any:
        return of_length(self.context, stream.shape[1]).get("attention_mask")

    def _outputs(self, block: Block, stream: torch.Tensor) -> torch.Tensor:
        q, k, v = self._heads(block, stream)
        z: torch.Tensor = block.attention.attend(*block.attention.project(q, k), v, self._mask(stream))[0]
        return z.flatten(2)

    def _wanted(self, row: _Rows, z: torch.Tensor) -> torch.Tensor:
        """What the output projection should give: the source's sum, or its own output where a norm follows it."""
        given: torch.Tensor = self.theirs.output(z)
        if self.theirs.by_channel:
            return _before(self.ours.attention_scale, self.theirs.middle(row.source, z) - row.cut)
        return given if self.theirs.attention_scale is not None else row.source + given - row.cut

    def queries_and_keys(self) -> None:
        """Reduced-rank regression of the source's logits on the cut model's queries and keys."""
        ours, theirs = self.ours.attention, self.theirs.attention
        if ours.qk_dim == ours.qk_width or ours.query_heads != theirs.query_heads or ours.qk_width != theirs.qk_dim:
            return
        sums: list[torch.Tensor] = []
        for row in self.rows:
            q, k, _ = self._heads(self.ours, row.cut)
            q0, k0 = theirs.project(*self._heads(self.theirs, row.source)[:2])
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
        if ours.v_dim == theirs.v_dim or ours.query_heads != theirs.query_heads:
            return
        problem = _LeastSquares(self.theirs.output)
        for row in self.rows:
            q, k, _ = self._heads(self.ours, row.cut)
            v = self._heads(self.theirs, row.cut, self.ours)[2]
            z = ours.attend(*ours.project(q, k), v, self._mask(row.cut))[0].flatten(2)
            problem.add(z, self._wanted(row, self._outputs(self.theirs, row.source)))
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

    def output(self) -> dict[str, float]:
        """Output projection: the stream after attention becomes the source's, as far as it can."""
        problem = _LeastSquares(self.ours.output)
        for row in self.rows:
            row.z = self._outputs(self.ours, row.cut)
            z = self._outputs(self.theirs, row.source)
            problem.add(row.z, self._wanted(row, z))
            row.source_start, row.source = row.source, self.theirs.middle(row.source, z)
        gain = problem.solve(self.strength)
        for row in self.rows:
            row.cut_start, row.cut = row.cut, self.ours.middle(row.cut, row.z)
            row.z = None
        return gain

    def down(self, lost: Sequence[tuple[Block, dict[str, Any]]] = ()) -> dict[str, float]:
        """Down projection: the same for the stream after the MLP, and after the layers that were `lost` behind it."""
        problem = _LeastSquares(self.ours.down)
        for row in self.rows:
            channels = self.theirs.channels(row.source_start, row.source)
            given = self.theirs.down(channels)
            before, row.source = row.source, self.theirs.end(row.source, channels)
            for block, context in lost:
                row.source = _pass(block, row.source, context)
            bare = self.theirs.mlp_scale is None and self.theirs.mlp_end is None
            wanted = row.source - row.cut if bare else given if self.theirs.mlp_scale else before + given - row.cut
            if self.theirs.by_channel:
                wanted = _before(self.ours.mlp_scale, row.source - row.cut)
            problem.add(self.ours.channels(row.cut_start, row.cut), wanted)
        gain = problem.solve(self.strength)
        for row in self.rows:
            row.cut = self.ours.end(row.cut, self.ours.channels(row.cut_start, row.cut))
            row.source_start = row.cut_start = None
        return gain


def _kept_of(source: nn.Module, cut: nn.Module) -> list[int]:
    """Which of the source's layers each layer of the cut model was."""
    numbers = [
        model.config.headwise.get("kept") or range(len(model.config.headwise["layers"])) for model in (source, cut)
    ]
    return [list(numbers[0]).index(number) for number in numbers[1]]


def _before(scale: Any, wanted: torch.Tensor) -> torch.Tensor:
    """What factors of channels must be given so that they put out what is wanted."""
    factors = scale(torch.ones_like(wanted[:1, :1]))
    return wanted / torch.where(factors == 0, 1, factors)


def _pass(block: Block, stream: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
    """A stream through one whole layer of the source."""
    context = of_length(context, stream.shape[1])
    x = stream if block.attention_norm is None else block.attention_norm(stream)
    q, k, v = block.attention.heads(x, context.get("position_embeddings"))
    z = block.attention.attend(*block.attention.project(q, k), v, context.get("attention_mask"))[0].flatten(2)
    middle = block.middle(stream, z)
    return block.end(middle, block.channels(stream, middle))


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
