"""Modules of a fast model: the quickest attention path, one product for q, k and v, one for gate and up, and so on.

A module becomes fast by changing its class; outside a fast step it computes as before. Joined weights are no copies:
the modules' own weights become views of them. Where they no longer are (after a move to another device, for example),
the ordinary code runs.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from headwise.fast.cache import FastCache
from headwise.fast.choice import case_of, quickest, small_kernels_run
from headwise.fast.coded import padding_mask, write_prompt
from headwise.fast.joined import PackedJoint, fused_mlp, is_known, joined, joined_packed, subclass, together
from headwise.fast.paths import Seen
from headwise.fast.products import is_plain, linear
from headwise.runtime.cache_headwise import NEAR, WHOLE
from headwise.runtime.modeling_headwise import SoftmaxAttention, TailoredAttention, _signed, _turned
from headwise.runtime.packed_headwise import PackedLinear


class Before(NamedTuple):
    """A norm of what is multiplied, in the kernel of the product."""

    weight: torch.Tensor
    eps: float
    plus: bool  # one is added to its weight


class Switch:
    """Shared by all layers of a model: the cache of the fast step that is running, if one is."""

    def __init__(self) -> None:
        self.cache: FastCache | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Switch:
        memo[id(self)] = made = Switch()
        return made


class FastAttend(SoftmaxAttention):
    """Attention by the quickest path while a fast step runs; otherwise the ordinary one."""

    switch: Switch

    def forward(
        self, q_BHTK: torch.Tensor, k_BGTK: torch.Tensor, v_BGTV: torch.Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Same arguments and result as the class that it replaces."""
        cache = self.switch.cache
        if cache is None or cache.seen is None or kwargs.get("masked"):
            return super().forward(q_BHTK, k_BGTK, v_BGTV, attention_mask, **kwargs)
        seen = replace(cache.seen, window=self.sliding_window, scaling=float(self.scaling), softcap=self.softcap)
        if q_BHTK.shape[2] == 1:
            k_BGTK, v_BGTV, seen = _in_window(k_BGTK, v_BGTV, seen)
        return quickest(case_of(q_BHTK, k_BGTK, v_BGTV, seen))(q_BHTK, k_BGTK, v_BGTV, seen), None


def _in_window(k: torch.Tensor, v: torch.Tensor, seen: Seen) -> tuple[torch.Tensor, torch.Tensor, Seen]:
    """Only the places inside the window, where the host knows which they are."""
    if seen.end is None or seen.window is None or seen.padded or seen.end <= seen.window:
        return k, v, seen
    k, v = (x[:, :, seen.end - seen.window :] for x in (k, v))
    return k, v, replace(seen, end=seen.window)


class FusedAttention(TailoredAttention):
    """One product for queries, keys and values; on CUDA one kernel from there to the cache."""

    switch: Switch
    small: bool
    apart: bool  # some weights are packed: products one by one, where these are not joined
    packed: PackedJoint | None
    gains: Any
    decode: Any

    def fuse(self, switch: Switch, small: bool) -> None:
        """Join weights where possible; `small`: whether our small kernels run here."""
        parts = [self.q_proj, self.k_proj, self.v_proj]
        biases = [part.bias for part in parts]
        plain = all(type(part) is nn.Linear for part in parts)
        self.switch, self.small, self.apart = switch, small, any(isinstance(part, PackedLinear) for part in parts)
        self.packed = joined_packed(parts) if small else None
        self.joint, self.joint_bias = joined(parts) if plain else None, None
        if plain and any(bias is not None for bias in biases):  # values in bits have one, also where queries have none
            both = zip(parts, biases, strict=True)
            made = [part.weight.new_zeros(len(part.weight)) if bias is None else bias.detach() for part, bias in both]
            self.joint_bias = torch.cat(made)
        norms = [self.q_norm, self.k_norm]
        per_head = all(norm is None or norm.weight.numel() == self.head_width for norm in norms)
        pairs = self.pooled > 1 and self.head_width < self.head_dim  # rotary pairs of pooled heads: the ordinary code
        self.placed = per_head and (norms[0] is None) == (norms[1] is None) and small and not pairs
        self.norms = self.columns_HW = self.gains = self.decode = None
        if self.rotary and self.qk_width < self.head_dim and self.pooled == 1:
            pairs = self.pairs_GP.repeat_interleave(self.query_heads // self.kv_heads, 0)
            self.columns_HW = torch.cat((pairs, self.pairs_GP)).repeat(1, 2)
        if per_head and norms[0] is not None:
            self.norms = torch.stack([norm.weight.detach() for norm in norms])
        if self.coders is not None and any((gain != 1).any() for gain in (self.k_gain_GK, self.v_gain_GV)):
            self.gains = self.k_gain_GK, self.v_gain_GV

    def _whole(self) -> bool:
        """Whether the joined weights are still the parts' own, and no adapter was put around them."""
        parts = self.q_proj, self.k_proj, self.v_proj
        if self.apart:
            return all(map(is_known, parts))
        own = all(map(is_plain, parts))
        return own and self.joint is not None and self.joint.data_ptr() == self.q_proj.weight.data_ptr()

    def heads(self, hidden: torch.Tensor, position_embeddings: Any = None, memory: Any = None) -> Any:
        """Queries, keys and values; queries and keys are turned together."""
        ordinary = self.switch.cache is None or memory is not None or self.q_norm is not None or self.pooled > 1
        if ordinary or self.apart or not self._whole():
            return super().heads(hidden, position_embeddings, memory)
        H, G = self.query_heads, self.kv_heads
        both, v = linear(hidden, self.joint, self.joint_bias).split([(H + G) * self.qk_width, G * self.v_dim], -1)
        x = both.view(*hidden.shape[:-1], H + G, self.qk_width).transpose(1, 2)
        if self.rotary and position_embeddings is not None:
            cos, sin = (self._table(table) for table in position_embeddings)
            x = _turned(x, cos, _signed(*sin.chunk(2, -1)))
        return x[:, :H], x[:, H:], v.view(*hidden.shape[:-1], G, self.v_dim).transpose(1, 2)

    def _table(self, table_BTW: torch.Tensor) -> torch.Tensor:
        """Cosines or sines of all query heads, then all key heads."""
        if self.qk_width == self.head_dim:
            return table_BTW.unsqueeze(1)
        return table_BTW[..., self.columns_HW.to(table_BTW.device)].transpose(1, 2)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Same arguments and result as the class that it replaces."""
        coded = self.coders is not None and self._coding() and hidden_states.shape[1] == 1
        if not coded and (args[1:] or not self.direct()):
            return super().forward(hidden_states, *args, **kwargs)
        z = self.outputs(hidden_states, args[1] if len(args) > 1 else kwargs.get("position_embeddings"))
        z = self.o_proj(z) if hasattr(self, "o_proj") else z
        return (z if self.resid_dropout is None else self.resid_dropout(z)), None

    def direct(self) -> bool:
        """Whether a step of one token runs whose keys and values one kernel brings to their places."""
        cache: Any = self.switch.cache
        runs = cache is not None and cache.place is not None and self.placed and self._whole()
        return runs and (self.coders is not None or bool(cache.layers[self.layer_idx].is_initialized))

    def outputs(self, hidden: torch.Tensor, positions: Any, before: Before | None = None) -> torch.Tensor:
        """What heads give for one new token of every text, side by side; of a single text `before` may be normed."""
        if self.coders is not None:
            return self._coded_token(hidden, positions, before)
        q, keys, values = self._to_places(hidden, positions, self.switch.cache.layers[self.layer_idx], before)
        return self._heads_own(self.attend(q, keys, values, None)[0])

    def _rows(self, q: torch.Tensor, k: torch.Tensor, buffer: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys of one token as rows have them; keys go to the step's place of a `buffer`, if given."""
        cache: Any = self.switch.cache
        gain = None if self.gains is None else self.gains[0]
        if self.small and self.projects:
            from headwise.fast.project import to_rows

            downs, mean = (self.q_down_GWK, self.k_down_GWK), self._parameters.get("k_mean_GK")
            heads = k.reshape(len(k), self.kv_heads * self.pooled, 1, -1)
            return to_rows(q, heads, downs, mean, gain, buffer, cache.starts_B if buffer is None else cache.place)
        q, k = self.project(q, k)
        if gain is not None:  # powers of two
            q = q / gain.repeat_interleave(self.query_heads // self.kv_heads, 0).unsqueeze(1)
            k = k * gain.unsqueeze(1)
        return q, k if buffer is None else buffer.index_copy_(2, cache.place, k)

    def _heads_own(self, z_B1HV: torch.Tensor) -> torch.Tensor:
        """What every head has of the values that it read in rows, side by side."""
        gain = None if self.gains is None else self.gains[1]
        if self.small and self.v_projects:
            from headwise.fast.project import from_rows

            return from_rows(z_B1HV, self.v_up_NVO, gain)
        if gain is not None:
            z_B1HV = z_B1HV / gain.repeat_interleave(self.query_heads // self.kv_heads, 0)
        return self.own_values(z_B1HV)

    def _coding(self) -> bool:
        """Whether a fast step runs, and rows go to its cache in bits."""
        return self.switch.cache is not None and self.switch.cache.seen is not None

    def remembered(self, k: torch.Tensor, v: torch.Tensor, mask: Any = None, cache: Any = None) -> Any:
        """As the ordinary one; in a fast step rows in bits go where our kernels read them."""
        if self.coders is None or not self._coding():
            return super().remembered(k, v, mask, cache)
        if self.gains is None:
            return write_prompt(self, self.switch.cache, k, v)
        k_gain, v_gain = (gain.unsqueeze(1) for gain in self.gains)
        return write_prompt(self, self.switch.cache, k * k_gain, v * v_gain)._replace(gains=self.gains)

    def attended(self, q: torch.Tensor, rows: Any, mask: Any, **kwargs: Any) -> Any:
        """As the ordinary one; a fast step has no mask but its cache's own."""
        mask = padding_mask(self.switch.cache) if self.coders is not None and self._coding() else mask
        return super().attended(q, rows, mask, **kwargs)

    def _coded_token(self, hidden: torch.Tensor, positions: Any, before: Before | None) -> torch.Tensor:
        """One new token of every text against rows in bits."""
        cache: Any = self.switch.cache
        layer, seen = cache.layers[self.layer_idx], cache.seen
        if cache.place is not None and self.placed and self._whole():
            q, k, v = self._one_place(hidden, positions, before)
        else:
            q, k, v = self.heads(hidden, positions)
        q, k = self._rows(q, k)
        if self.gains is not None:
            v = v * self.gains[1].unsqueeze(1)
        if not layer.is_initialized:
            layer.allocate_codes(cache.batch, self.kv_heads, k)
        sides = [side.of(cache.rows) for side in layer.sides]
        past = seen.end - 1 if cache.place is None else cache.place

        def write() -> None:
            for side, x in zip(sides, (k, v), strict=True):
                side.write(x, seen.starts_B, past)

        if self.decode is None:
            from headwise.fast.code_beside import CodeDecode

            self.decode = CodeDecode(layer.layouts[0], layer.layouts[1], WHOLE, NEAR)
        how = seen.ends_B, seen.starts_B, float(self.attend.scaling), self.attend.softcap
        return self._heads_own(self.decode(q[:, :, 0], *sides, *how, write).unsqueeze(1))

    def _one_place(self, hidden: torch.Tensor, positions: Any, before: Before | None) -> tuple[torch.Tensor, ...]:
        """Queries, keys before projection, and values of one token, by one kernel."""
        rows, heads = len(hidden), self.kv_heads * self.pooled
        keys = hidden.new_empty(rows, heads, 1, self.head_width)
        values = hidden.new_empty(rows, self.kv_heads, 1, self.v_dim)
        here = values.as_strided(values.shape, (*values.stride()[:2], 0, 1))
        q = self._placed_heads(hidden, positions, keys, here, True, before)
        return q, keys.view(rows, self.kv_heads, 1, self.qk_width), values

    def _to_places(self, hidden: torch.Tensor, positions: Any, layer: Any, before: Before | None) -> Any:
        """Queries, and the buffers of keys and values with the new ones written into them."""
        aside, heads = self.projects or self.pooled > 1, self.kv_heads * self.pooled
        keys = layer.keys if not aside else layer.keys.new_empty(len(hidden), heads, 1, self.head_width)
        q = self._placed_heads(hidden, positions, keys, layer.values, aside, before)
        if aside:
            q, _ = self._rows(q, keys.view(len(hidden), self.kv_heads, 1, self.qk_width), layer.keys)
        return q, layer.keys, layer.values

    def _placed_heads(
        self, hidden: torch.Tensor, positions: Any, keys: torch.Tensor, values: torch.Tensor, aside: bool,
        before: Before | None,
    ) -> torch.Tensor:  # fmt: skip
        """Queries; keys and values are written into the given buffers, at the place of the step."""
        from headwise.fast.small import place_heads

        turning = bool(self.rotary) and positions is not None
        cos, sin = positions if turning else (hidden, hidden)
        pairs = self.pairs_GP if turning and self.head_width < self.head_dim else None
        turned = 0 if not turning else cos.shape[-1] if pairs is None else 2 * pairs.shape[1]
        eps, plus = _norm_kind(self.q_norm)
        if self.apart:
            if before is not None:
                from headwise.fast.small import rms_norm

                hidden = rms_norm(hidden, *before)
            qkv = together([self.q_proj, self.k_proj, self.v_proj], self.packed, hidden)
        elif before is None:
            qkv = linear(hidden, self.joint, self.joint_bias)
        else:
            from headwise.fast.thin import heads_of_row, thin

            if self.norms is None and self.head_width % 2 == self.v_dim % 2 == 0:
                return heads_of_row(
                    hidden, self.joint, self.joint_bias, before, (cos, sin, pairs, turned), keys, values,
                    self.switch.cache.place, aside, self.query_heads,
                )  # fmt: skip
            qkv = thin(hidden, self.joint, self.joint_bias, before=before)
        return place_heads(
            qkv, cos, sin, pairs, self.norms, keys, values, self.switch.cache.place, eps, plus, turned, aside,
            self.query_heads, self.head_width,
        )  # fmt: skip


def _norm_kind(norm: Any) -> tuple[float, bool]:
    """The epsilon of a norm, and whether it adds one to its weight (Gemma)."""
    if norm is None:
        return 0.0, False
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0))), "Gemma" in type(norm).__name__


@functools.cache
def _fused_norm(base: type) -> type:
    inner: Any = base

    def forward(self: Any, x: torch.Tensor) -> Any:
        if self.switch.cache is None or self.switch.cache.place is None:
            return inner.forward(self, x)
        from headwise.fast.small import rms_norm

        return rms_norm(x, self.weight, *self.kind)

    return subclass(base, forward=forward)


def fuse(model: Any, switch: Switch) -> None:
    """Make every module of a known kind fast, in place."""
    some = next(x for x in model.parameters() if x.is_floating_point())  # packed weights are whole numbers
    small = some.is_cuda and small_kernels_run(some.device, some.dtype)
    modules: list[Any] = list(model.modules())
    for module in modules:
        name = type(module).__name__
        if name == "TailoredAttention":
            for attend in filter(None, (module.attend, getattr(module, "attend_apart", None))):
                attend.__class__, attend.switch = FastAttend, switch
            module.__class__ = FusedAttention
            module.fuse(switch, small)
        elif name.endswith("MLP") and all(hasattr(module, part) for part in ("gate_proj", "up_proj", "act_fn")):
            parts = [module.gate_proj, module.up_proj]
            plain = all(type(part) is nn.Linear for part in parts)
            join: Any = joined if plain else joined_packed if small else lambda parts: None
            if all(part.bias is None for part in parts) and (joint := join(parts)) is not None:
                module.switch, module.joint, module.silu = switch, joint, "silu" in type(module.act_fn).__name__.lower()
                module.silu = small and (module.silu or module.act_fn is nn.functional.silu)
                module.__class__ = fused_mlp(type(module))
        elif small and name.endswith("RMSNorm") and isinstance(getattr(module, "weight", None), torch.Tensor):
            _fuse_norm(module, switch)


@torch.no_grad()
def _fuse_norm(module: Any, switch: Switch) -> None:
    """Only if our kernel gives the norm's own result: several kinds of norm have this name."""
    from headwise.fast.small import rms_norm

    kind = _norm_kind(module)
    x = torch.randn(3, module.weight.shape[-1], device=module.weight.device).to(module.weight.dtype)
    expected, got = module(x).float(), rms_norm(x, module.weight, *kind).float()
    if torch.allclose(got, expected, rtol=1e-5 if x.dtype == torch.float32 else 1e-2, atol=1e-5):
        module.switch, module.kind = switch, kind
        module.__class__ = _fused_norm(type(module))
