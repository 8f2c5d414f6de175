"""What removing any unit would cost, in the task's unit of damage (such as nats per token), from one backward pass.

An activation times its gradient, summed over a unit's coordinates, is the first-order change `a` of the loss when the
unit goes. With the Fisher approximation of the Hessian the removal of a set costs `1/2 E[(sum of a over the set)^2]`,
cross terms included. Directions are ordered, so one cumulative sum prices every size; pairs, channels and heads are
not, so their cross moments `A = E[a a']` are kept and units are eliminated greedily; of MLP channels those first that
the others make up for (see _channels). Answers to tokens are taken to err independently; where a whole text has one
answer, what a unit does at all its tokens adds up before it is squared.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from headwise import processes
from headwise.data import places
from headwise.families import Block, Family, widened
from headwise.families._watch import watching
from headwise.linalg import balanced, elimination_order, elimination_orders, value_basis
from headwise.probes._backward import passes
from headwise.probes._channels import channel_order
from headwise.probes._layers import Row, reading
from headwise.probes._magnitude import Orders, weight_orders
from headwise.probes._products import Gram
from headwise.progress import Track, silently
from headwise.tasks import Task
from headwise.tasks.causal import Causal
from headwise.types import LayerShape, Reading

NAME = "sensitivity"
MEANING = "predicted damage of every size, from gradients"
Kept = dict[str, tuple[tuple[tuple[int, ...], ...], list[list[float]]]]  # units by need, and damage by removals


@dataclass(slots=True)
class _LayerSums:
    """Running sums of one layer; `tails` are per sequence, so that their spread gives a standard error."""

    tails: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    cross: dict[str, torch.Tensor] = field(default_factory=dict)
    mlp: Gram = field(default_factory=Gram)
    tokens: int = 0  # that the layer changed

    def add_tail(self, name: str, a_BTC: torch.Tensor) -> None:
        tail = a_BTC.flip(-1).cumsum(-1).flip(-1)  # removing directions c and all after it
        self.tails.setdefault(name, []).append(0.5 * tail.square().mean(1))

    def add_cross(self, name: str, a_GBTU: torch.Tensor) -> None:
        part = (a_GBTU.mT @ a_GBTU).sum(1, dtype=torch.float64)  # many small products keep a GPU busier than few long
        self.cross[name] = self.cross[name] + part if name in self.cross else part


class Sensitivity:
    """Accumulates prices while the model runs forward and backward."""

    def __init__(
        self, family: Family, model: nn.Module, moments: list[dict[str, torch.Tensor]], mlp: bool, task: Task
    ) -> None:
        self.family, self.model, self.mlp, self.task = family, model, mlp, task
        self.layers = family.blocks(model)
        shape = family.shape_of(model.config)
        self.shapes, self.grain = shape.layers, shape.grain
        self.sums = [_LayerSums() for _ in self.layers]
        self.terms = 0  # answers
        self.whole = False  # whether a whole text has one answer
        self.recompute: bool | None = None
        self.spread = False
        self.grams = [moment.get("gram_mlp") for moment in moments]
        pairs = list(zip(self.layers, moments, strict=True))
        self.bases = processes.side_by_side(lambda pair: self._bases(*pair), pairs, self.shapes[0].qk_width)

    def _bases(self, block: Block, moment: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        p_q, p_k, _ = balanced(moment["gram_q"], moment["gram_k"])
        o_weight = block.read_out()
        p, r = value_basis(moment["gram_z"], o_weight, p_q.shape[0])
        return tuple(t.to(widened(o_weight)) for t in (p_q, p_k, p, r.mT))

    def _attention(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor) -> None:
        if not q.requires_grad:  # will be computed again
            return
        queries, outputs = q.detach(), z.detach()  # a hook that held the tensors themselves would keep their graph
        q.register_hook(lambda grad: self._see_queries(layer, queries, grad))
        z.register_hook(lambda grad: self._see_outputs(layer, outputs, grad))

    def _channels(self, layer: int, h: torch.Tensor) -> None:
        if h.requires_grad:
            channels = h.detach()
            h.register_hook(lambda grad: self._see_channels(layer, widened(channels) * grad))

    def _answered(self, a: torch.Tensor, tokens: int) -> torch.Tensor:
        """Changes per answer: those of a text's tokens (along that axis), or all of them together."""
        return a.sum(tokens, keepdim=True) if self.whole else a

    def _see_channels(self, layer: int, a: torch.Tensor) -> None:
        self.sums[layer].mlp.add(self._answered(a, -2).flatten(0, -2))

    def _see_queries(self, layer: int, q: torch.Tensor, grad: torch.Tensor) -> None:
        groups, (p_q, p_k, _, _) = self.shapes[layer].kv_heads, (t.to(q.device) for t in self.bases[layer])
        q, grad = (widened(t).unflatten(1, (groups, -1)).transpose(0, 1) for t in (q, grad))  # G B H/G T K
        a_BTC = (_through(q, p_q) * _through(grad, p_k)).sum((0, 2))
        self.sums[layer].add_tail("qk_projected", self._answered(a_BTC, 1))
        if self.grain.rotary and not self.shapes[layer].projected:
            plain = (q * grad).sum(2)
            pairs = plain.unflatten(-1, (2, -1)).sum(-2)  # coordinate j pairs with j + half
            self.sums[layer].add_cross("qk_pairs", self._answered(pairs, 2))

    def _see_outputs(self, layer: int, z: torch.Tensor, grad: torch.Tensor) -> None:
        groups, (_, _, p, r) = self.shapes[layer].kv_heads, (t.to(z.device) for t in self.bases[layer])
        z, grad = widened(z), widened(grad)
        heads_BTH = self._answered((z * grad).sum(-1), 1)
        self.sums[layer].add_cross("heads", heads_BTH.unsqueeze(0))
        z, grad = (t.unflatten(2, (groups, -1)).permute(2, 0, 3, 1, 4) for t in (z, grad))  # G B H/G T V
        a_BTC = (_through(z, p) * _through(grad, r)).sum((0, 2))
        self.sums[layer].add_tail("v", self._answered(a_BTC, 1))
        self.sums[layer].tokens += a_BTC.shape[0] * a_BTC.shape[1]

    def run(self, tokens: torch.Tensor, seed: int, track: Track = silently) -> None:
        """Read the calibration text. Only activations carry gradients; parameters get none."""
        with watching(self.layers, self._attention, self._channels if self.mlp else None):
            model, task = self.model, self.task
            less = self.recompute, self.spread
            for batch, run in passes(self.family, model, task, tokens, seed, track, "sensitivity", *less):
                self.whole = not batch.per_token
                run()
                self.terms += self.task.terms(batch)
        self._share()
        for sums in self.sums:
            if sums.mlp.sum is not None:
                sums.cross["mlp"] = sums.mlp.total().unsqueeze(0)
            if self.spread:  # layers were on several devices
                sums.cross = {name: cross.cpu() for name, cross in sums.cross.items()}

    def _share(self) -> None:
        """Put together what all processes read."""
        if processes.count() == 1:
            return
        self.terms = int(processes.total(torch.tensor(self.terms)))
        for sums in self.sums:
            sums.tokens = int(processes.total(torch.tensor(sums.tokens)))
            sums.tails = {name: [processes.joined(torch.cat(sums.tails[name]))] for name in sorted(sums.tails)}
            sums.cross = {name: processes.total(sums.cross[name]) for name in sorted(sums.cross)}


def _through(x_GBHTK: torch.Tensor, basis_GKC: torch.Tensor) -> torch.Tensor:
    """Every group's rows through its own basis: one batched product, a matrix per group and no copies of it."""
    return (x_GBHTK.flatten(1, 3) @ basis_GKC).view(*x_GBHTK.shape[:-1], -1)


def measure(
    family: Family,
    model: nn.Module,
    tokens: torch.Tensor,
    moments: list[dict[str, torch.Tensor]],
    mlp: bool,
    seed: int,
    track: Track = silently,
    task: Task | None = None,
    recompute: bool | None = None,
    spread: bool = False,
) -> tuple[list[Reading], list[Orders]]:
    """Damage curves per layer and unit, and the order in which pairs, channels and heads would be kept.

    `recompute` turns gradient checkpointing on or off; None: on where memory is short. `spread` places a model that is
    in host memory on all GPUs.
    """
    probe = Sensitivity(family, model, moments, mlp, task or Causal())
    probe.recompute, probe.spread = recompute, spread
    probe.run(tokens, seed, track)
    found = _all_orders(probe)
    priced = [_curves(*layer, probe) for layer in zip(probe.shapes, probe.sums, found, strict=True)]
    curves = {name: [layer[name] for layer in priced] for name in priced[0]}
    orders: list[Orders] = [{name: order for name, (order, _) in kept.items()} for kept in found]
    if probe.grain.rotary:
        curves["qk_pairs_shared"] = _share_pairs(probe, orders)
        for order, moment in zip(orders, moments, strict=True):
            order["qk_pairs_power"] = strongest_pairs(moment)
    else:
        curves.pop("qk_pairs")
    state = family.state_of(model, clone=False)
    for index, (shape, order) in enumerate(zip(probe.shapes, orders, strict=True)):
        order |= weight_orders(family.take_layer(dict(state), index, model.config), shape)
    read, unit = places(tokens, probe.task.row_tokens), probe.task.unit
    return [
        reading(NAME, f"damage.{name}", AXES[name][0], rows, unit, LOSS.format(AXES[name][1]), read, seed)
        for name, rows in curves.items()
    ], orders


def _curves(shape: LayerShape, sums: _LayerSums, kept: Kept, probe: Sensitivity) -> dict[str, Row]:
    """The damage of every size of a layer's units; a unit that cannot be cut has only its full size."""
    grain, scale = probe.grain, 1.0 if probe.whole else sums.tokens / probe.terms
    curves: dict[str, Row] = {
        "qk_projected": _tail_curve(sums.tails["qk_projected"], shape.qk_dim, grain.qk_sizes(shape.qk_dim), scale),
        "v": _tail_curve(sums.tails["v"], shape.v_dim, grain.v_sizes(shape.v_dim), scale),
    }
    for name, sizes, per_unit in (
        ("qk_pairs", grain.qk_sizes(shape.qk_width), 2),
        ("mlp", grain.mlp_sizes(shape.mlp_width), 1),
        ("heads", tuple(range(shape.queries_per_group, 0, -1)), 1),
        ("kv_heads", tuple(range(shape.kv_heads, 0, -1)), 1),
    ):
        if name in kept:
            curves[name] = sizes, tuple(_damage_at(kept[name][1], size // per_unit) for size in sizes), None
        else:
            curves[name] = (sizes[0],), (0.0,), None
    return curves


def _share_pairs(probe: Sensitivity, orders: list[Orders]) -> list[Row]:
    """One order of rotary pairs for the whole model, and its cost in each layer; no sizes where layers differ."""
    crosses = [sums.cross.get("qk_pairs") for sums in probe.sums]
    if any(c is None or c.shape[1:] != crosses[0].shape[1:] for c in crosses):
        return [((shape.qk_width,), (0.0,), None) for shape in probe.shapes]
    per_layer = [c.sum(0).cpu() / probe.terms for c in crosses if c is not None]
    gone, _ = elimination_order(sum(per_layer))
    rows: list[Row] = []
    for shape, order, cross in zip(probe.shapes, orders, per_layer, strict=True):
        order["qk_pairs_shared"] = (tuple(reversed(gone)),) * shape.kv_heads
        sizes = probe.grain.qk_sizes(shape.qk_width)
        lost = [gone[: (shape.qk_width - size) // 2] for size in sizes]
        rows.append((sizes, tuple(0.5 * float(cross[index][:, index].sum()) for index in lost), None))
    return rows


def strongest_pairs(moment: dict[str, torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """Pairs by the power of their queries times that of their keys, strongest first, per key/value head."""
    power = moment["gram_q"].diagonal(dim1=-2, dim2=-1) * moment["power_k"]
    score = power.unflatten(-1, (2, -1)).sum(-2)
    return tuple(tuple(row.tolist()) for row in torch.argsort(score, dim=-1, descending=True, stable=True))


LOSS = "Predicted loss increase with {}, by the size that is kept."
AXES = {
    "qk_projected": ("qk_dim", "query/key directions projected away after rotary"),
    "qk_pairs": ("qk_width", "rotary pairs dropped from every query and key head"),
    "qk_pairs_shared": ("qk_width", "the same rotary pairs dropped in the whole model"),
    "v": ("v_dim", "value directions dropped from every head"),
    "mlp": ("mlp_width", "MLP channels dropped"),
    "heads": ("queries_per_group", "query heads dropped from every key/value group"),
    "kv_heads": ("kv_heads", "key/value heads dropped with their query heads"),
}


def _tail_curve(parts: list[torch.Tensor], full: int, sizes: tuple[int, ...], scale: float) -> Row:
    per_row = torch.cat(parts).double().cpu() * scale  # from per token to per answer
    mean, error = per_row.mean(0), per_row.std(0) / max(1, len(per_row) - 1) ** 0.5
    pick = [size for size in sizes if size < full]
    values = (0.0, *(float(mean[size]) for size in pick))
    return sizes, values, (0.0, *(float(error[size]) for size in pick))


def _all_orders(probe: Sensitivity) -> list[Kept]:
    """Per layer and unit: which to keep, most needed first, and the damage after each removal, one list per group."""
    wide = [place for place, sums in enumerate(probe.sums) if "mlp" in sums.cross]
    crosses = [_believed(probe.sums[place].cross.pop("mlp")[0], probe) for place in wide]
    found = [_orders(sums, shape, probe) for sums, shape in zip(probe.sums, probe.shapes, strict=True)]
    for place, (order, damage) in zip(wide, elimination_orders(crosses), strict=True):
        kept, gram, down = tuple(reversed(order)), probe.grams[place], probe.layers[place].down
        if gram is not None and down is not None:
            kept = channel_order(gram, down.weight)  # after which less is lost than the damage says
        found[place]["mlp"] = (kept,), [[value / probe.terms for value in damage]]
    return found


def _believed(cross: torch.Tensor, probe: Sensitivity) -> torch.Tensor:
    """Cross moments, shrunk to their diagonal where answers are fewer than units: some units would look free."""
    if not probe.whole:
        return cross
    share = min(1.0, cross.shape[-1] / probe.terms)
    return (1 - share) * cross + share * torch.diag_embed(cross.diagonal(dim1=-2, dim2=-1))


def _orders(sums: _LayerSums, shape: LayerShape, probe: Sensitivity) -> Kept:
    """Which units of one layer to keep, without its MLP."""
    out = {
        name: _eliminate(list(_believed(cross / probe.terms, probe).cpu()))
        for name, cross in sums.cross.items()
        if name != "heads"
    }
    heads = (sums.cross["heads"][0] / probe.terms).cpu()
    groups = heads.view(shape.kv_heads, shape.queries_per_group, shape.kv_heads, shape.queries_per_group)
    out["heads"] = _eliminate([groups[g, :, g, :] for g in range(shape.kv_heads)])
    out["kv_heads"] = _eliminate([groups.sum((1, 3))])
    return out


def _eliminate(crosses: list[torch.Tensor]) -> tuple[tuple[tuple[int, ...], ...], list[list[float]]]:
    pairs = [elimination_order(cross) for cross in crosses]
    return tuple(tuple(reversed(order)) for order, _ in pairs), [damage for _, damage in pairs]


def _damage_at(damages: list[list[float]], kept: int) -> float:
    """Damage of keeping `kept` units in every group."""
    return sum(damage[len(damage) - kept - 1] for damage in damages if kept < len(damage))
