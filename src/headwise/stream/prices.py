"""What removing units of a layer would cost, without a gradient: the error that it leaves in the residual stream.

The error of a size is the mean over tokens of `|stream after attention, cut - uncut|^2 / |uncut|^2`, measured on a few
rows while the layer is in memory. Equal errors of different layers do different harm. Therefore one cut of every layer
(to `REFERENCE` of its query/key and value directions) is followed to the end of the model: the divergence of answers
over the error is the layer's `gain`, and a price is an error times the gain. This is coarser than the measured prices
of a model in memory: one gain for all units and sizes of a layer, and nothing is healed.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from headwise.families import Block
from headwise.linalg import balanced, elimination_order, least_solution, value_basis
from headwise.probes._magnitude import Orders, weight_orders
from headwise.probes.sensitivity import strongest_pairs
from headwise.types import Grain, LayerShape

REFERENCE = 0.75  # of the directions of queries, keys and values that the cut keeps whose effect is followed
MEASURED = 33  # sizes of a row at most, the whole one included; errors in between are interpolated
HEAD_TOKENS = 128  # that all heads' outputs are held for at a time
Curve = tuple[tuple[int, ...], tuple[float, ...]]  # sizes, errors

Moments = dict[str, torch.Tensor]
Rows = list[tuple[torch.Tensor, dict[str, Any]]]  # streams before the layer, and its other arguments


class Priced(NamedTuple):
    """Relative squared errors of every size of a layer's units, and which units would be kept first."""

    errors: dict[str, Curve]
    orders: Orders
    reference: float  # error of the cut whose effect is followed


class Uncut(NamedTuple):
    """A batch of rows as a layer reads it: queries, keys, values, and the stream before and after its attention."""

    stream: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    z: torch.Tensor  # outputs of the heads (B, T, H, V)
    own: torch.Tensor  # the same as the output projection takes them (B, T, H O)
    whole: torch.Tensor  # the stream after attention
    weight: torch.Tensor  # of every token: one by its squared size


class Pricing:
    """Prices one layer that is in memory, from its moments and a few rows."""

    def __init__(self, block: Block, shape: LayerShape, grain: Grain, moments: Moments, rows: Rows) -> None:
        self.block, self.shape, self.grain, self.moments, self.rows = block, shape, grain, moments, rows
        assert block.down is not None, "every layer of a decoder that writes text has an MLP"
        weight, self.down = block.read_out(), block.down
        p_q, p_k, _ = balanced(moments["gram_q"], moments["gram_k"])
        self.p_q, self.p_k = (p.to(weight).unsqueeze(1) for p in (p_q, p_k))
        self.p = value_basis(moments["gram_z"], weight, shape.kv_heads)[0]
        self.gram_z = _of_key_heads(moments["gram_z"], shape).to(self.p)
        self.qk_sizes, self.v_sizes = grain.qk_sizes(shape.qk_dim), grain.v_sizes(shape.v_dim)
        self.pair_sizes = grain.qk_sizes(shape.qk_width)
        self.sums: dict[str, torch.Tensor] = {}
        self.tokens = 0
        self._made = 0, self.p  # the size and the matrices of the last read-out

    def _count(self, name: str, value: torch.Tensor) -> None:
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def _readout(self, size: int) -> torch.Tensor:
        """Head outputs seen through `size` value directions, as the cut refits them (H, V, V); the last one is kept."""
        if size == self._made[0]:
            return self._made[1]
        sharing = self.shape.queries_per_group
        p = self.p[..., :size].repeat_interleave(sharing, 0)
        inner = p.mT @ self.gram_z @ p
        inner += 1e-9 * inner.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * torch.eye(size).to(inner)
        self._made = size, (p @ least_solution(inner, p.mT @ self.gram_z)).to(self.block.output.weight)
        return self._made[1]

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        return self.block.attention.attend(q, k, v, context.get("attention_mask"))[0]

    def _projected(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys in the basis whose first directions a cut keeps."""
        groups = self.shape.kv_heads
        return (q.unflatten(1, (groups, -1)) @ self.p_q).flatten(1, 2), k @ self.p_k.squeeze(1)

    @torch.no_grad()
    def measure(self, pairs: bool, mlp: bool, sizes: bool = True) -> Priced:
        """Errors of all sizes: `pairs` also of rotary pairs, `mlp` also of channels (their moments are there then).

        Without `sizes` only the error of the cut that is followed.
        """
        if not sizes:
            for stream, context in self.rows:
                self._follow(stream, context)
            return Priced({}, {}, float(self.sums["reference"]) / self.tokens)
        strongest = strongest_pairs(self.moments) if self.grain.rotary and not self.shape.projected else None
        for stream, context in self.rows:
            self._see(stream, context, strongest if pairs else None)
        legal_sizes = {"qk_projected": self.qk_sizes, "v": self.v_sizes}
        if pairs and strongest is not None:
            legal_sizes["qk_pairs"] = self.pair_sizes
        errors: dict[str, Curve] = {}
        for name, legal in legal_sizes.items():
            seen = legal if name == "qk_pairs" else spread(legal)
            found = [0.0, *(float(self.sums[f"{name}.{size}"]) / self.tokens for size in seen[1:])]
            errors[name] = (legal, tuple(np.interp(legal, seen[::-1], found[::-1]).tolist()))
        orders = weight_orders(self._weights(), self.shape)
        if strongest is not None:
            orders |= {"qk_pairs": strongest, "qk_pairs_power": strongest}
        self._heads(errors, orders)
        if mlp:
            self._channels(errors, orders)
        return Priced(errors, orders, float(self.sums["reference"]) / self.tokens)

    def _weights(self) -> dict[str, torch.Tensor]:
        attention, inner = self.block.attention, self.block.inner
        found = {name: getattr(attention, f"{name}_proj") for name in "qkv"}
        found |= {"o": self.block.output, "down": self.down}
        found |= dict(zip(("gate", "up") if len(inner) > 1 else ("up",), inner, strict=True))
        return {f"{name}.weight": module.weight for name, module in found.items()}

    def _seen(self, stream: torch.Tensor, context: dict[str, Any]) -> Uncut:
        """What a layer makes of a batch of rows, uncut."""
        block = self.block
        q, k, v = block.heads(stream, context)
        q, k = block.attention.project(q, k)
        z = self._attend(q, k, v, context)
        own = block.attention.own_values(z)
        whole = block.middle(stream, own)
        weight = 1 / whole.square().sum(-1).clamp_min(1e-30)  # tokens differ in size, some a thousandfold
        self.tokens += weight.numel()
        return Uncut(stream, q, k, v, z, own, whole, weight)

    def _compare(self, name: str, seen: Uncut, other: torch.Tensor) -> None:
        """Count the error that other head outputs leave."""
        found = self.block.middle(seen.stream, self.block.attention.own_values(other))
        self._count(name, ((found - seen.whole).square().sum(-1) * seen.weight).double().sum())

    def _follow(self, stream: torch.Tensor, context: dict[str, Any]) -> None:
        seen = self._seen(stream, context)
        self._compare("reference", seen, self._cut(*self._projected(seen.q, seen.k), seen.v, context))

    def _see(self, stream: torch.Tensor, context: dict[str, Any], pairs: Any) -> None:
        seen, groups = self._seen(stream, context), self.shape.kv_heads
        _, q, k, v, z, own, _, weight = seen
        count = partial(self._compare, seen=seen)
        q_all, k_all = self._projected(q, k)
        for size in spread(self.qk_sizes)[1:]:
            count(f"qk_projected.{size}", other=self._attend(q_all[..., :size], k_all[..., :size], v, context))
        for size in spread(self.v_sizes)[1:]:
            count(f"v.{size}", other=self._through(z, size))
        for size in self.pair_sizes[1:] if pairs else ():
            kept = torch.zeros(groups, self.shape.qk_width // 2, device=q.device)
            for group, order in enumerate(pairs):
                kept[group, list(order[: size // 2])] = 1
            mask = torch.cat((kept, kept), 1)[:, None, None]
            turned = (q.unflatten(1, (groups, -1)) * mask).flatten(1, 2)
            count(f"qk_pairs.{size}", other=self._attend(turned, k, v, context))
        count("reference", other=self._cut(q_all, k_all, v, context))
        self._count_heads((own * weight.sqrt()[..., None]).flatten(0, 1).unflatten(1, (self.shape.query_heads, -1)))
        self._count("weight", weight.double().sum())

    def _count_heads(self, own_NHO: torch.Tensor) -> None:
        """Products of what heads add to the stream."""
        weight = self.block.output.weight
        per_head = weight.view(len(weight), *own_NHO.shape[1:]).permute(1, 2, 0)
        for some in own_NHO.split(HEAD_TOKENS):
            added = (some.transpose(0, 1) @ per_head).flatten(1)
            self._count("heads", added @ added.mT)

    def _through(self, z_BTHV: torch.Tensor, size: int) -> torch.Tensor:
        return (z_BTHV.transpose(1, 2) @ self._readout(size)).transpose(1, 2)

    def _cut(self, q_all: torch.Tensor, k_all: torch.Tensor, v: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        """Head outputs of the cut whose effect is followed."""
        qk, width = (nearest(sizes, REFERENCE) for sizes in (self.qk_sizes, self.v_sizes))
        z = self._attend(q_all[..., :qk], k_all[..., :qk], v, context)
        return self._through(z, width) if width < self.shape.v_dim else z

    @torch.no_grad()
    def followed(self, stream: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        """The stream after the layer if it were cut by the reference."""
        q, k, v = self.block.heads(stream, context)
        q_all, k_all = self._projected(*self.block.attention.project(q, k))
        middle = self.block.middle(stream, self.block.attention.own_values(self._cut(q_all, k_all, v, context)))
        return self.block.end(middle, self.block.channels(stream, middle))

    def _heads(self, errors: dict[str, Curve], orders: Orders) -> None:
        """Query heads and key/value groups, from the second moments of what they add to the stream."""
        groups, sharing = self.shape.kv_heads, self.shape.queries_per_group
        apart = (self.sums["heads"].double() / self.tokens).view(groups, sharing, groups, sharing)
        each = [eliminated(apart[g, :, g, :]) for g in range(groups)]
        orders["heads"] = tuple(order for order, _ in each)
        sizes = tuple(range(sharing, 0, -1))
        errors["heads"] = (sizes, tuple(sum(lost[sharing - size] for _, lost in each) for size in sizes))
        order, lost = eliminated(apart.sum((1, 3)))
        orders["kv_heads"], errors["kv_heads"] = (order,), (tuple(range(groups, 0, -1)), tuple(lost[:groups]))

    def _channels(self, errors: dict[str, Curve], orders: Orders) -> None:
        """MLP channels, from their second moments and the down projection."""
        down = self.down.weight
        cross = down.mT @ down
        cross *= self.moments["gram_mlp"].to(cross)
        cross *= float(self.sums["weight"]) / self.tokens
        order, lost = eliminated(cross)
        width = self.shape.mlp_width
        sizes = self.grain.mlp_sizes(width)
        orders["mlp"], errors["mlp"] = (order,), (sizes, tuple(lost[width - size] for size in sizes))


def eliminated(cross: torch.Tensor) -> tuple[tuple[int, ...], list[float]]:
    """Units by how much they are needed, most first, and the error after 0, 1, 2, ... removals."""
    order, lost = elimination_order(2 * cross)  # which halves
    return tuple(reversed(order)), [0.0, *lost]


def spread(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes that are measured: all, or where rows are wide some of them, the largest and the smallest included."""
    count = min(len(sizes), MEASURED)
    return tuple(sizes[number * (len(sizes) - 1) // max(1, count - 1)] for number in range(count))


def _of_key_heads(gram_HVV: torch.Tensor, shape: LayerShape) -> torch.Tensor:
    """Moments of head outputs; query heads of a key/value head share theirs where rows are shared, as in the cut."""
    if shape.pooled == 1:
        return gram_HVV
    sharing = shape.queries_per_group // shape.pooled
    return gram_HVV.unflatten(0, (-1, sharing)).sum(1).repeat_interleave(sharing, 0)


def nearest(sizes: tuple[int, ...], share: float) -> int:
    """The legal size nearest to a share of the largest, never the largest itself where there is another."""
    return min(sizes[1:] or sizes, key=lambda size: abs(size - share * sizes[0]))
