"""One layer as Headwise works on it, whatever its family calls the parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headwise.runtime.modeling_headwise import TailoredAttention

Norm = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Block:
    """One layer as Headwise works on it: attention and MLP between two residual streams.

    `attention_norm` and `mlp_norm` come before a part, `attention_scale` and `mlp_scale` after it (sandwich norms),
    `attention_end` and `mlp_end` after the sum (post-norm layers). In a `parallel` layer both parts read one stream.
    `by_channel` says that scales are factors of channels, so that they can be undone.
    In an encoder-decoder a stream is that of a row's input followed by that of its output; a layer with a `role`
    changes its `own` tokens of it, and `cross` layers see what the encoder made of the others.
    """

    attention: TailoredAttention
    output: nn.Linear
    inner: tuple[nn.Linear, ...]  # gate and up, or up alone
    down: nn.Linear | None  # half a decoder's layer has no MLP
    activation: Any
    attention_norm: Norm | None = None
    mlp_norm: Norm | None = None
    attention_scale: Norm | None = None
    mlp_scale: Norm | None = None
    attention_end: Norm | None = None
    mlp_end: Norm | None = None
    channel_norm: Norm | None = None  # before the down projection
    parallel: bool = False
    by_channel: bool = False
    role: str = ""

    def own(self, stream: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        """The tokens of a stream that the layer changes: all, but in an encoder-decoder."""
        if not self.role:
            return stream
        return stream[:, : context["inputs"]] if self.role == "encoder" else stream[:, context["inputs"] :]

    def joined(self, stream: torch.Tensor, own: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        """The stream with those tokens changed."""
        if not self.role:
            return own
        before, after = stream[:, : context["inputs"]], stream[:, context["inputs"] :]
        return torch.cat((own, after) if self.role == "encoder" else (before, own), dim=1)

    def heads(
        self, stream: torch.Tensor, context: dict[str, Any], like: Block | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, before projection; the layer's input is normed as `like` does."""
        x = _maybe((like or self).attention_norm, self.own(stream, context))
        if self.role != "cross":
            return self.attention.heads(x, context.get("position_embeddings"))
        memory = _maybe(context["memory_norm"], stream[:, : context["inputs"]])
        return self.attention.heads(x, context.get("position_embeddings"), memory)

    def values(self, stream: torch.Tensor, context: dict[str, Any], like: Block | None = None) -> torch.Tensor:
        """Values alone, as `heads` gives them."""
        if self.role == "cross":
            seen = _maybe(context["memory_norm"], stream[:, : context["inputs"]])
        else:
            seen = _maybe((like or self).attention_norm, self.own(stream, context))
        v: torch.Tensor = self.attention.v_proj(seen)
        return v.view(*seen.shape[:-1], self.attention.kv_heads, self.attention.v_dim).transpose(1, 2)

    def attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        """What the heads put out (B, T, H O), for queries and keys before projection."""
        q, k = self.attention.looked_up(q, k)
        rows = self.attention.remembered(k, v, context.get("attention_mask"))
        mask = self.attention.added(q, rows.k, context.get("attention_mask"), context.get("position_bias"))
        found: torch.Tensor = self.attention.attended(q, rows, mask)[0]
        return found

    def read_out(self) -> torch.Tensor:
        """What the output projection makes of the values that heads read (D, H V): of pooled heads, of a whole row."""
        attention, weight = self.attention, self.output.weight.detach()
        if attention.pooled == 1:
            return weight
        heads, one = attention.query_heads, torch.eye(attention.v_dim, dtype=weight.dtype, device=weight.device)
        given = attention.own_values(one[:, None, None].expand(-1, 1, heads, -1)).detach().view(len(one), heads, -1)
        return torch.einsum("vho,dho->dhv", given, weight.view(len(weight), heads, -1)).flatten(1)

    def __call__(self, stream: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        """A stream through the whole layer, by its parts."""
        own = self.own(stream, context)
        middle = self.middle(own, self.attended(*self.heads(stream, context), context))
        return self.joined(stream, self.end(middle, self.channels(own, middle)) if self.down else middle, context)

    def mlp_input(self, start: torch.Tensor, middle: torch.Tensor) -> torch.Tensor:
        """What the MLP reads, for the streams before the layer and after attention."""
        return _maybe(self.mlp_norm, start if self.parallel else middle)

    def channels(self, start: torch.Tensor, middle: torch.Tensor) -> torch.Tensor:
        """The MLP's channels, for the streams before the layer and after attention."""
        x = self.mlp_input(start, middle)
        hidden: torch.Tensor = self.activation(self.inner[0](x))
        return _maybe(self.channel_norm, hidden * self.inner[1](x) if len(self.inner) > 1 else hidden)

    def middle(self, start: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """The stream after attention whose heads put out `z` (B, T, H V)."""
        return _maybe(self.attention_end, start + _maybe(self.attention_scale, self.output(z)))

    def end(self, middle: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
        """The stream after the MLP."""
        assert self.down is not None, "a layer without an MLP has no channels"
        return _maybe(self.mlp_end, middle + _maybe(self.mlp_scale, self.down(channels)))


def _maybe(norm: Norm | None, x: torch.Tensor) -> torch.Tensor:
    return x if norm is None else norm(x)


def rows_of_context(context: dict[str, Any], rows: slice) -> dict[str, Any]:
    """The keyword arguments of a layer for some of its rows; masks are those of all rows."""
    tables = context.get("position_embeddings")
    if tables is None or tables[0].shape[0] == 1:
        return context
    return {**context, "position_embeddings": tuple(table[rows] for table in tables)}


def repeated(context: dict[str, Any], times: int) -> dict[str, Any]:
    """The keyword arguments of a layer for rows, for `times` copies of these rows one after the other."""
    tables = context.get("position_embeddings")
    if tables is None or tables[0].shape[0] == 1:
        return context
    return {**context, "position_embeddings": tuple(table.repeat(times, 1, 1) for table in tables)}
