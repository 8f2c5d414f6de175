"""What experiments on smaller heads share: reducing heads by hooks, damage against the source, short fine-tuning.

Reducing. A head of r dimensions has logits `(q A)(k B')'` and output `(z C) E`, with r columns in A and C. The same
comes out at full width when q is multiplied by the rank-r matrix A B and z by C E, so hooks around the softmax reduce
any head and touch no weight. Every query head has its own A and B, as if it had a key of its own.

Fine-tuning. The loss is the KL divergence to the source, never that of the text: with the source as its own optimum,
training cannot win by learning the text better than the source did, so what stays of the damage is the cut's.
Shape suffixes: B batch, T tokens, H query heads, K width of a head.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from experiments._training import minimise
from headwise.families._watch import batches, watching
from headwise.linalg import balanced, value_directions
from headwise.runtime.modeling_headwise import _signed, _turned

MEASURED_TOGETHER = 8192  # tokens in one batch when damage is measured


def finetune(
    family: ModuleType,
    source: nn.Module,
    cut: nn.Module,
    tokens: torch.Tensor,
    steps: int,
    batch_tokens: int = 8192,
    rate: float = 3e-4,
    seed: int = 0,
    parameters: Sequence[nn.Parameter] | None = None,
    bf16: bool = False,
) -> dict[str, Any]:
    """Train `cut` in place, or only the given parameters, on the KL to `source` over rows of `tokens` (B, T).

    `bf16` computes both models in bfloat16 where that is safe: faster, but the KL has a floor near 1e-4 then.
    """
    start = time.perf_counter()
    chosen = list(cut.parameters()) if parameters is None else list(parameters)
    device = next(cut.parameters()).device
    tokens = tokens.to(device)
    low = torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()

    def loss(rows: torch.Tensor) -> torch.Tensor:
        ids = tokens[rows.to(device)]
        with low:
            with torch.no_grad():
                wanted = family.run(source, ids)
            found = family.run(cut, ids)
        return divergence(wanted.float().log_softmax(-1), found.float().log_softmax(-1)).mean()

    per_step = max(1, batch_tokens // tokens.shape[1])
    with only(cut, chosen):
        curve = minimise(loss, chosen, len(tokens), per_step, steps, rate, seed)
    return {
        "steps": steps,
        "tokens": steps * min(per_step, len(tokens)) * tokens.shape[1],
        "rate": rate,
        "seconds": time.perf_counter() - start,
        "curve": [[point.step, point.loss] for point in curve],
    }


def divergence(wanted: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """KL at every position, in nats, between log-probabilities over the last axis."""
    return (wanted.exp() * (wanted - found)).sum(-1)


class Damage(NamedTuple):
    """What a change costs, in nats per token: KL to the source and increase of the loss, with errors over rows."""

    kl: float
    kl_se: float
    loss: float
    loss_se: float


class Reference:
    """Rows of text with what the source makes of them: the stream before every layer, and its predictions.

    A change in one layer leaves the stream before it alone, so measuring and training may start there, and many short
    trainings on the same rows ask the source once. Keeps `rows * tokens * vocabulary` numbers on the source's device.
    """

    @torch.no_grad()
    def __init__(self, family: ModuleType, source: nn.Module, tokens: torch.Tensor) -> None:
        self.family, self.tokens = family, tokens.to(source.device)
        self.contexts = family.layer_contexts(source, self.tokens)
        streams, predictions = [], []
        for batch in batches(self.tokens):
            stream, seen = family.embed(source, batch), []
            for index, context in enumerate(self.contexts):
                seen.append(stream)
                stream = family.run_layer(source, index, stream, context)
            streams.append(seen)
            predictions.append(family.logits(source, stream).log_softmax(-1))
        self.streams = [torch.cat(parts) for parts in zip(*streams, strict=True)]
        self.predictions = torch.cat(predictions)

    def predict(self, model: nn.Module, rows: torch.Tensor, layer: int | None = None) -> torch.Tensor:
        """The log-probabilities of a model that equals the source before `layer` (None: that may differ everywhere)."""
        if layer is None:
            logits: torch.Tensor = self.family.run(model, self.tokens[rows])
            return logits.log_softmax(-1)
        stream = self.streams[layer][rows]
        for index in range(layer, len(self.contexts)):
            stream = self.family.run_layer(model, index, stream, self.contexts[index])
        return self.family.logits(model, stream).log_softmax(-1)

    def divergence(self, model: nn.Module, rows: torch.Tensor, layer: int | None = None) -> torch.Tensor:
        """Mean KL of such a model over some rows: what to minimise."""
        rows = rows.to(self.tokens.device)
        return divergence(self.predictions[rows], self.predict(model, rows, layer)).mean()

    @torch.no_grad()
    def by_position(self, model: nn.Module, layer: int | None = None) -> torch.Tensor:
        """KL of such a model at every position, averaged over rows, (T,)."""
        rows = torch.arange(len(self.tokens), device=self.tokens.device)
        parts = [divergence(self.predictions[row], self.predict(model, row, layer)) for row in rows.split(1)]
        return torch.cat(parts).double().mean(0)

    @torch.no_grad()
    def damage(self, model: nn.Module, layer: int | None = None) -> Damage:
        """What such a model costs on all rows."""
        kl, loss = [], []
        count, length = self.tokens.shape
        for rows in torch.arange(count, device=self.tokens.device).split(max(1, MEASURED_TOGETHER // length)):
            wanted, found = self.predictions[rows], self.predict(model, rows, layer)
            target = self.tokens[rows, 1:, None]
            kl.append(divergence(wanted, found).mean(1))
            loss.append((wanted - found)[:, :-1].gather(-1, target).mean((1, 2)))
        return Damage(*_mean(torch.cat(kl)), *_mean(torch.cat(loss)))


def _mean(values: torch.Tensor) -> tuple[float, float]:
    """Mean and its standard error; of a single value the error is not known, and said to be zero."""
    values = values.double()
    error = values.std() / math.sqrt(len(values)) if len(values) > 1 else torch.zeros(())
    return float(values.mean()), float(error)


@contextmanager
def only(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let gradients reach the given parameters and no other of the model; what was set before is put back."""
    before = [(p, p.requires_grad) for p in {*model.parameters(), *parameters}]
    try:
        for parameter, _ in before:
            parameter.requires_grad_(False)
        for parameter in parameters:
            parameter.requires_grad_(parameter.numel() > 0)
        yield
    finally:
        for parameter, needed in before:
            parameter.requires_grad_(needed)


class Directions(NamedTuple):
    """Of every query head of a layer (H, K, K), most needed first: q and k go down; z goes down and up again."""

    q_HKK: torch.Tensor
    k_HKK: torch.Tensor
    z_down_HKK: torch.Tensor
    z_up_HKK: torch.Tensor

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, z: torch.Tensor, attention: Any) -> Directions:
        """From second moments of queries (H, K, K), keys (one per key/value head) and outputs."""
        sharing = len(q) // len(k)
        o = attention.o_proj.weight.detach().double().unflatten(1, (len(q), -1)).permute(1, 2, 0)
        p_q, p_k, _ = balanced(q, k.repeat_interleave(sharing, 0))
        down, up, _ = value_directions(z, o @ o.mT)
        return cls(p_q, p_k, down, up)


def by_weights(family: ModuleType, model: nn.Module, length: int) -> list[Directions]:
    """Directions of every layer from weights alone, for rows of `length`.

    Taking inputs to be white makes it the truncated SVD of the products W_q' W_k and W_v' W_o (norm's gain included).
    Rotary turns the first product by the distance, and no fixed projection commutes with that; so the moments of the
    turned weights are averaged over all positions: the best projection for white inputs anywhere in the row. The plain
    SVD at distance zero, put after rotary, does worse.
    """
    contexts = family.layer_contexts(model, torch.zeros(1, length, dtype=torch.long, device=model.device))
    found = []
    for block, context in zip(family.blocks(model), contexts, strict=True):
        attention, gain = block.attention, block.attention_norm.weight.detach().double()
        cos, sin = (table[0, :, None].double() for table in context["position_embeddings"])
        sin = _signed(*sin.chunk(2, -1))

        def moment(linear: nn.Linear, heads: int, gain: torch.Tensor = gain) -> torch.Tensor:
            weight = (linear.weight.detach().double() * gain).unflatten(0, (heads, -1))
            return weight @ weight.mT

        def turned(moments: torch.Tensor, cos: torch.Tensor = cos, sin: torch.Tensor = sin) -> torch.Tensor:
            return torch.stack([_turned(_turned(m, cos, sin).mT, cos, sin).mean(0) for m in moments])

        q = turned(moment(attention.q_proj, attention.query_heads))
        k = turned(moment(attention.k_proj, attention.kv_heads))
        z = moment(attention.v_proj, attention.kv_heads)
        found.append(Directions.of(q, k, z.repeat_interleave(len(q) // len(k), 0), attention))
    return found


@torch.no_grad()
def by_activations(family: ModuleType, model: nn.Module, tokens: torch.Tensor) -> list[Directions]:
    """Directions of every layer from what heads compute on text; keys about the mean key, which softmax ignores."""
    blocks = family.blocks(model)
    sums: list[Any] = [[0.0, 0.0, 0.0] for _ in blocks]

    def add(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor) -> None:
        for slot, x_BHTK in enumerate((q, k - k.mean(2, keepdim=True), z.transpose(1, 2))):
            rows = x_BHTK.transpose(0, 1).flatten(1, 2)
            sums[layer][slot] = sums[layer][slot] + (rows.mT @ rows).double()

    with watching(blocks, add):
        for batch in batches(tokens):
            family.run(model, batch.to(model.device))
    return [Directions.of(*three, block.attention) for three, block in zip(sums, blocks, strict=True)]


class Narrow(nn.Module):
    """Low-rank factors for some heads of one layer: `q <- q A B` before the softmax, `z <- z C E` after it."""

    def __init__(self, heads: Sequence[int], directions: Directions, dim: int, part: str = "both") -> None:
        super().__init__()
        q, k, z_down, z_up = (d[list(heads)] for d in directions)
        self.register_buffer("heads", torch.tensor(heads, device=q.device))
        self.part = part
        self.q_down, self.q_up = _even(q[..., :dim], k[..., :dim].mT)
        self.z_down, self.z_up = _even(z_down[..., :dim], z_up[..., :dim, :])

    def queries(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """A forward pre-hook of the softmax."""
        narrow = args[0][:, self.heads] @ self.q_down @ self.q_up
        return args[0].index_copy(1, self.heads, narrow.to(args[0].dtype)), *args[1:]

    def outputs(self, _module: nn.Module, _args: Any, output: tuple[Any, ...]) -> tuple[Any, ...]:
        """A forward hook of the softmax."""
        narrow = output[0][:, :, self.heads].transpose(1, 2) @ self.z_down @ self.z_up
        return output[0].index_copy(2, self.heads, narrow.transpose(1, 2).to(output[0].dtype)), *output[1:]


def _even(down: torch.Tensor, up: torch.Tensor) -> tuple[nn.Parameter, nn.Parameter]:
    """Two factors scaled to equal size, direction by direction, so that one rate suits both; their product stays."""
    scale = (up.norm(dim=-1).clamp_min(1e-12) / down.norm(dim=-2).clamp_min(1e-12)).sqrt()
    return nn.Parameter((down * scale.unsqueeze(-2)).float()), nn.Parameter((up / scale.unsqueeze(-1)).float())


@contextmanager
def narrowed(blocks: Sequence[Any], narrows: dict[int, Narrow]) -> Iterator[None]:
    """Reduce heads of the given layers; the model is as before afterwards."""
    hooks: list[Any] = []
    try:
        for layer, narrow in narrows.items():
            attend = blocks[layer].attention.attend
            if narrow.part != "v":
                hooks.append(attend.register_forward_pre_hook(narrow.queries))
            if narrow.part != "qk":
                hooks.append(attend.register_forward_hook(narrow.outputs))
        yield
    finally:
        for hook in hooks:
            hook.remove()
