"""Trains several Transformers of one shape at once, side by side in stacked matrices.

Small models leave a GPU idle; a stack of seeds and learning rates fills it (`_training`). Blocks are pre-norm and
plain: no biases, norms without learned gains (the next matrix can hold them), which count little and cost time. Each
member has its weights, its data in an order that only its seed decides, and its learning rate.

Suffixes of tensors: S members, B rows of a batch, T positions, N = B T, C channels, H heads, K their dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments._nystrom import KERNEL, nystrom
from experiments._training import settings_of, train_stack

Weights = dict[str, Tensor]
DECAY, WARM_UP = 0.05, 0.1  # weight decay; share of the steps during which the learning rate rises
ROTARY_BASE = 10000.0
RIGHT_WITH_MASKS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # cuDNN may score masked places (Hopper, bfloat16)


class Layer(NamedTuple):
    """Sizes of one block."""

    heads: int
    dim: int  # of queries, keys and values of a head
    mlp: int
    kv_heads: int = 0  # 0: as many as heads
    v_dim: int = 0  # of values, where it differs

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Widths of all queries, all keys, all values together."""
        kv, v = self.kv_heads or self.heads, self.v_dim or self.dim
        return self.heads * self.dim, kv * self.dim, kv * v

    @property
    def out(self) -> int:
        return self.heads * (self.v_dim or self.dim)


class Net(NamedTuple):
    """A Transformer: what it reads, its blocks, what it answers."""

    width: int
    layers: tuple[Layer, ...]
    length: int
    symbols: int  # vocabulary, or numbers of an image patch
    classes: int = 0  # of a classifier (mean over positions); 0: tokens are predicted by the embedding
    patches: bool = False  # reads image patches instead of tokens
    causal: bool = False
    rotary: bool = False  # Llama's block: rotary positions, RMS norms, gated MLP; otherwise learned positions and GELU
    landmarks: int = 0  # of Nystrom attention; 0: exact
    head_dim: int = 0  # that attention is scaled and turned for, where layers differ; 0: each layer's own
    qk_norm: bool = False  # queries and keys are normed, with a learned temperature per head
    tilt: float | None = None  # initial values' singular values fall as 1 / i ** tilt; None: a normal matrix's

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every matrix of one member."""
        found: dict[str, tuple[int, ...]] = {"embed": (self.symbols, self.width)}
        if not self.rotary:
            found["position"] = (self.length, self.width)
        for i, layer in enumerate(self.layers):
            found[f"{i}.qkv"] = (self.width, sum(layer.sizes))
            found[f"{i}.out"] = (layer.out, self.width)
            found[f"{i}.up"] = (self.width, layer.mlp * (1 + self.rotary))
            found[f"{i}.down"] = (layer.mlp, self.width)
            if self.landmarks:
                found[f"{i}.conv"] = (layer.heads, KERNEL)
            if self.qk_norm:
                found[f"{i}.warmth"] = (layer.heads,)
        if self.classes:
            found["classes"] = (self.width, self.classes)
        return found

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def flops(self) -> float:
        """Of training on one row: three times its forward pass; every position attends to all, or half if causal."""
        looked_up = 0 if self.patches else math.prod(self.shapes["embed"])
        head = 0 if self.classes or self.patches else looked_up  # predicting tokens multiplies with the embedding
        matrices = self.parameters - looked_up + head
        seen = self.landmarks * 2 if self.landmarks else self.length * (0.5 if self.causal else 1.0)
        attention = sum(layer.sizes[0] + layer.out for layer in self.layers) * seen
        return 6.0 * self.length * (matrices + attention)


def even(depth: int, heads: int, width: int, mlp: int, **rest: Any) -> Net:
    """All blocks alike, heads sharing the width."""
    return Net(width, (Layer(heads, width // heads, mlp),) * depth, **rest)


def initial(net: Net, seed: int) -> Weights:
    """Weights of one member before training: normal, smaller where a block adds to the stream."""
    rng = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in net.shapes.items():
        deviation = (3 * shape[0]) ** -0.5
        if name in ("position", "classes") or (name == "embed" and not net.patches):
            deviation = 0.02
        elif name.endswith((".out", ".down")):
            deviation /= math.sqrt(2 * len(net.layers))
        elif name.endswith(".conv"):
            deviation = (3 * KERNEL) ** -0.5
        elif name.endswith(".warmth"):
            deviation = 0.0
        found[name] = torch.randn(shape, generator=rng) * deviation
        if net.tilt is not None and name.endswith(".qkv"):
            values = found[name][:, -net.layers[int(name.partition(".")[0])].sizes[2] :]
            u, s, vh = torch.linalg.svd(values, full_matrices=False)
            wanted = torch.arange(1.0, len(s) + 1) ** -net.tilt
            values.copy_(u * (wanted * s.norm() / wanted.norm()) @ vh)
    return found


class _Lookup(torch.autograd.Function):
    """Rows of a table. Its gradient adds up in float32, without a sort, so that a step can be captured."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.table = table.shape, table.dtype
        return table[rows]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        total = torch.zeros(ctx.table[0], dtype=torch.float32, device=grad.device)
        total.index_add_(0, rows.flatten(), grad.flatten(0, -2).float())
        return total.to(ctx.table[1]), None


class _Turn(torch.autograd.Function):
    """Rotary positions on queries or keys, (..., T, K), with cosines and sines (T, K / 2): half the passes over memory
    of what autograd would make of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, -sin), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of numbers, one of each half, turned."""
    found = torch.empty_like(x)
    (left, right), (to_left, to_right) = x.chunk(2, -1), found.chunk(2, -1)
    torch.mul(left, cos, out=to_left).addcmul_(right, sin, value=-1)
    torch.mul(right, cos, out=to_right).addcmul_(left, sin)
    return found


def norm(net: Net, x: Tensor) -> Tensor:
    if net.rotary:
        return F.rms_norm(x, (net.width,), eps=1e-6)
    return F.layer_norm(x, (net.width,))


def hidden(net: Net, w: Weights, x: Tensor, keep: Tensor | None = None, seen: list[Tensor] | None = None) -> Tensor:
    """The stream after the last norm, (S, N, C), from tokens (S, B, T) or patches (S, B, T, C).

    `keep` (S, B, T) says which positions are there; `seen` collects the heads' outputs side by side, (S B, T, H K).
    """
    members, rows, length = x.shape[:3]
    if net.patches:
        stream = x.flatten(1, 2).to(w["embed"].dtype) @ w["embed"]
    else:
        shift = torch.arange(members, device=x.device)[:, None, None] * net.symbols
        stream = _Lookup.apply(w["embed"].flatten(0, 1), x + shift).flatten(1, 2)
    if "position" in w:
        stream = (stream.unflatten(1, (rows, length)) + w["position"][:, None, :length]).flatten(1, 2)
    turn = _turns(net, length, stream) if net.rotary else None
    for i, layer in enumerate(net.layers):
        if layer.heads:
            qkv = norm(net, stream) @ w[f"{i}.qkv"]
            warmth = w[f"{i}.warmth"].repeat_interleave(rows, 0) if net.qk_norm else None
            z = attention(net, layer, qkv.reshape(members * rows, length, -1), turn, keep, w.get(f"{i}.conv"), warmth)
            if seen is not None:
                seen.append(z)
            stream = stream + z.reshape(members, rows * length, -1) @ w[f"{i}.out"]
        if layer.mlp:
            inner = norm(net, stream) @ w[f"{i}.up"]
            if net.rotary:
                gate, inner = inner.chunk(2, -1)
                inner = F.silu(gate) * inner
            else:
                inner = F.gelu(inner, approximate="tanh")
            stream = stream + inner @ w[f"{i}.down"]
    return norm(net, stream)


def attention(
    net: Net,
    layer: Layer,
    qkv: Tensor,
    turn: Any,
    keep: Tensor | None = None,
    conv: Tensor | None = None,
    warmth: Tensor | None = None,
) -> Tensor:
    """All heads' outputs side by side, (S B, T, H K); `warmth` (S B, H) is the logarithm of normed queries' length."""
    heads, kv = layer.heads, layer.kv_heads or layer.heads
    q, k, v = (
        part.unflatten(-1, (count, -1)).transpose(1, 2)
        for part, count in zip(qkv.split(layer.sizes, -1), (heads, kv, kv), strict=True)
    )
    if warmth is not None:
        q, k = (F.rms_norm(x, (x.shape[-1],), eps=1e-6) for x in (q, k))
        q = q * warmth.exp()[:, :, None, None]
    if turn is not None:
        cos, sin = turn[layer.dim]
        q, k = (_Turn.apply(x, cos, sin) for x in (q, k))
    if net.landmarks:
        z = nystrom(q, k, v, net.landmarks, keep, conv)
    else:
        mask = None if keep is None else keep.flatten(0, 1)[:, None, None, :]
        wide = max(q.shape[-1], v.shape[-1])  # kernels want one dimension; zeros change nothing
        q, k, padded = (F.pad(x, (0, wide - x.shape[-1])) if x.shape[-1] < wide else x for x in (q, k, v))
        with nullcontext() if mask is None else sdpa_kernel(RIGHT_WITH_MASKS):
            z = F.scaled_dot_product_attention(
                q, k, padded, mask, is_causal=net.causal, scale=(net.head_dim or layer.dim) ** -0.5,
                enable_gqa=kv != heads,
            )[..., : v.shape[-1]]  # fmt: skip
    return z.transpose(1, 2).flatten(2)


def _turns(net: Net, length: int, like: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    """Cosines and sines by head dimension, as Llama's; a head below `head_dim` turns with some of its frequencies."""
    found = {}
    for dim in {layer.dim for layer in net.layers if layer.heads}:
        full, pairs = net.head_dim or dim, dim // 2
        kept = torch.arange(pairs, device=like.device) * (full // 2) // pairs
        rates = ROTARY_BASE ** (-2.0 * kept / full)
        angles = torch.arange(length, device=like.device)[:, None] * rates
        found[dim] = angles.cos().to(like.dtype), angles.sin().to(like.dtype)
    return found


def logits(net: Net, w: Weights, stream: Tensor) -> Tensor:
    """Of tokens, by the embedding, for a stream (S, N, C)."""
    return stream @ w["embed"].transpose(1, 2)


def class_logits(net: Net, w: Weights, x: Tensor, keep: Tensor | None = None) -> Tensor:
    """Of classes, (S, B, classes): the mean over positions that are there."""
    stream = hidden(net, w, x, keep).unflatten(1, x.shape[1:3])
    if keep is None:
        mean = stream.mean(2)
    else:
        there = keep[..., None].to(stream.dtype)
        mean = (stream * there).sum(2) / there.sum(2)
    return mean @ w["classes"]


def cross_entropy(answers: Tensor, targets: Tensor) -> Tensor:
    """One loss per member, in float32."""
    logs = answers.flatten(0, -2).log_softmax(-1, dtype=torch.float32)
    each = F.nll_loss(logs, targets.flatten(), reduction="none")
    return each.view(len(answers), -1).mean(1)


class Member(NamedTuple):
    """One model of a stack."""

    seed: int
    rate: float


class Run(NamedTuple):
    """A trained stack."""

    net: Net
    flat: Tensor  # (S, parameters), float32
    step_seconds: float  # of the whole stack
    curve: Tensor  # (steps, S) training losses

    @property
    def weights(self) -> Weights:
        return named(self.net, self.flat.to(working(self.flat.device)))


Loss = Callable[[Weights, Tensor], Tensor]  # weights and step to one loss per member


def working(device: torch.device) -> torch.dtype:
    """What products are computed in."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def named(net: Net, flat: Tensor) -> Weights:
    """The matrices of a stack, (S, ...) each, as views."""
    shapes = net.shapes
    parts = flat.split([math.prod(shape) for shape in shapes.values()], 1)
    return {name: part.unflatten(1, shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}


def stacked(net: Net, members: Sequence[Member], device: torch.device) -> Tensor:
    """Initial weights of all members, flat."""
    rows = [torch.cat([part.flatten() for part in initial(net, member.seed).values()]) for member in members]
    return torch.stack(rows).to(device)


def train(
    net: Net, members: Sequence[Member], loss: Loss, steps: int, device: torch.device, start: Tensor | None = None
) -> Run:
    """Train all members with AdamW, warm-up and a cosine; `loss` is given the step's number as a tensor of one."""
    flat = stacked(net, members, device) if start is None else start
    rates, dtype = [member.rate for member in members], working(device)
    settings = settings_of(steps, rates, warm_up=WARM_UP, decay=DECAY)
    found = train_stack(flat, lambda weights, step: loss(named(net, weights.to(dtype)), step), rates, settings)
    return Run(net, found.flat, found.step_seconds, found.curve)


def step_seconds(net: Net, loss: Loss, device: torch.device, steps: int) -> float:
    """Seconds of a training step of a single model, alone on the device."""
    return train(net, [Member(0, 1e-4)], loss, steps, device).step_seconds


@torch.no_grad()
def conditioning(net: Net, flat: Tensor, x: Tensor, keep: Tensor | None = None) -> Tensor:
    """Condition number of the heads' outputs side by side, (S, layers): geometric means over rows of `x`.

    In float64 throughout, since rounding fills the smallest singular values: in float32 numbers end near 1e6.
    """
    seen: list[Tensor] = []
    wide = x.double() if net.patches else x
    hidden(net, named(net, flat.double()), wide, keep, seen)
    found = []
    for z in seen:
        sizes = torch.linalg.svdvals(z)
        ratio = sizes[:, 0] / sizes[:, -1].clamp(min=1e-15 * sizes[:, 0])
        found.append(ratio.log().view(len(flat), -1).mean(1).exp())
    return torch.stack(found, 1)
