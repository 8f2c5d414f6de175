"""Refit in sequence: walk the cut model from the first layer to the last and let each make up for what went before.

At every layer least-squares problems are solved from moments of the cut model's own activations: the projections of
queries and keys, so that logits come out as the source's; the value directions and the output projection, so that the
residual stream after attention does; and the down projection, so that the stream after the MLP does.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from headwise.linalg import balanced, ridge, value_basis
from headwise.probes._watch import Track, batches, silently

NAME = "refit"
MEANING = "closed form, seconds to minutes, no gradients"


@dataclass(slots=True)
class _Rows:
    """One batch on its way through both models: the residual streams of the source and of the cut model."""

    source: torch.Tensor
    cut: torch.Tensor
    z: torch.Tensor | None = None


@torch.no_grad()
def refit(
    family: ModuleType,
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
    parts = batches(tokens)
    rows = [_Rows(family.embed(source, p.to(device)), family.embed(healed, p.to(device))) for p in parts]
    ours, theirs = family.blocks(healed), family.blocks(source)
    gains = []
    for index in track(range(len(ours)), "refit"):
        worker = _LayerRefit(ours[index], theirs[index], contexts[index], rows, strength)
        worker.queries_and_keys()
        worker.values()
        gains.append({"attention": worker.output(), "mlp": worker.down()})
    return healed, {"method": NAME, "tokens": tokens.numel(), "strength": strength, "layers": gains}


class LayerHealer:
    """Heals single cut layers among whole ones, so that an option can be priced as it will end up.

    An uneven cut looks cheaper than it is before healing: what one layer lost whole, no refit brings back.
    """

    def __init__(self, family: ModuleType, model: nn.Module, tokens: torch.Tensor, strength: float = 1e-2) -> None:
        self.family, self.strength = family, strength
        self.whole = family.blocks(model)
        self.contexts = family.layer_contexts(model, tokens[:1].to(model.device))
        self.streams: list[list[torch.Tensor]] = [[] for _ in self.whole]
        with torch.no_grad():
            for part in batches(tokens):
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

    def __init__(self, ours: Any, theirs: Any, context: dict[str, Any], rows: list[_Rows], strength: float) -> None:
        self.ours, self.theirs, self.rows, self.strength = ours, theirs, rows, strength
        self.positions = context["position_embeddings"]
        self.context = {k: v for k, v in context.items() if k not in ("position_embeddings", "position_ids")}

    def _heads(
        self, block: Any, stream: torch.Tensor, norm: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads: tuple[torch.Tensor, ...] = block.attention.heads((norm or block.attention_norm)(stream), self.positions)
        return heads  # type: ignore[return-value]

    def _outputs(self, block: Any, stream: torch.Tensor) -> torch.Tensor:
        q, k, v = self._heads(block, stream)
        z: torch.Tensor = block.attention.attend(*block.attention.project(q, k), v, **self.context)[0]
        return z.flatten(2)

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
        problem = _LeastSquares(theirs.o_proj)
        for row in self.rows:
            q, k, _ = self._heads(self.ours, row.cut)
            v = self._heads(self.theirs, row.cut, self.ours.attention_norm)[2]
            z = ours.attend(*ours.project(q, k), v, **self.context)[0].flatten(2)
            wanted = row.source + theirs.o_proj(self._outputs(self.theirs, row.source)) - row.cut
            problem.add(z, wanted)
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
        ours.o_proj.weight.copy_((readout @ full.view(heads, width, -1)).flatten(0, 1).mT)

    def output(self) -> dict[str, float]:
        """Output projection: the stream after attention becomes the source's, as far as it can."""
        problem = _LeastSquares(self.ours.attention.o_proj)
        for row in self.rows:
            row.z = self._outputs(self.ours, row.cut)
            row.source = row.source + self.theirs.attention.o_proj(self._outputs(self.theirs, row.source))
            problem.add(row.z, row.source - row.cut)
        gain = problem.solve(self.strength)
        for row in self.rows:
            row.cut = row.cut + self.ours.attention.o_proj(row.z)
            row.z = None
        return gain

    def down(self) -> dict[str, float]:
        """Down projection: the same for the stream after the MLP."""
        problem = _LeastSquares(self.ours.down)
        for row in self.rows:
            row.source = row.source + self.theirs.down(self.theirs.channels(row.source))
            problem.add(self.ours.channels(row.cut), row.source - row.cut)
        gain = problem.solve(self.strength)
        for row in self.rows:
            row.cut = row.cut + self.ours.down(self.ours.channels(row.cut))
        return gain


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
