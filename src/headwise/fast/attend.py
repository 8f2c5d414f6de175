"""Attention of a fast model: by the quickest path while a fast step is under way, as ever otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from headwise.fast.cache import FastCache
from headwise.fast.choice import Case, quickest, rounded
from headwise.fast.paths import Path, Seen
from headwise.runtime.modeling_headwise import SoftmaxAttention


class Switch:
    """Shared by all layers of a model: the cache of the fast step that is under way, if one is, and paths found."""

    def __init__(self) -> None:
        self.cache: FastCache | None = None
        self.paths: dict[Any, dict[Any, Path]] = {}  # layer -> what was asked before -> the quickest

    def __deepcopy__(self, memo: dict[int, Any]) -> Switch:
        memo[id(self)] = made = Switch()
        return made


class FastAttend(SoftmaxAttention):
    """Put in the place of a layer's attention by changing its class; everything that it knows stays."""

    switch: Switch

    def forward(
        self, q_BHTK: torch.Tensor, k_BGTK: torch.Tensor, v_BGTV: torch.Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As of what it replaces."""
        cache = self.switch.cache
        if cache is None or cache.seen is None:
            return super().forward(q_BHTK, k_BGTK, v_BGTV, attention_mask, **kwargs)
        seen = cache.seen.at(self.sliding_window, float(self.scaling), self.softcap)
        if q_BHTK.shape[2] == 1:
            k_BGTK, v_BGTV, seen = _in_window(k_BGTK, v_BGTV, seen)
        plain = seen.end is not None and seen.plain() and (q_BHTK.shape[2] == 1 or k_BGTK.shape[2] == q_BHTK.shape[2])
        known = (len(q_BHTK), q_BHTK.shape[2] == 1, rounded(k_BGTK.shape[2]), plain, q_BHTK.dtype, q_BHTK.device)
        path = self.switch.paths.setdefault(self.layer_idx, {}).get(known)
        if path is None:
            path = quickest(self._case(q_BHTK, k_BGTK, v_BGTV, seen, plain))
            self.switch.paths[self.layer_idx][known] = path
        return path(q_BHTK, k_BGTK, v_BGTV, seen), None

    def _case(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Seen, plain: bool) -> Case:
        decode = q.shape[2] == 1
        known = seen.end is not None
        return Case(
            device=q.device,
            dtype=q.dtype,
            phase="decode" if decode else "prefill",
            query_heads=q.shape[1],
            kv_heads=k.shape[1],
            qk_dim=q.shape[3],
            v_dim=v.shape[3],
            places=rounded(k.shape[2]),
            rows=rounded(len(q)),
            masked=known and not plain,
            capped=seen.softcap is not None,
            window=seen.window if decode and not known else None,
        )


def _in_window(k: torch.Tensor, v: torch.Tensor, seen: Seen) -> tuple[torch.Tensor, torch.Tensor, Seen]:
    """The last places alone, where the host knows which they are."""
    if seen.end is None or seen.window is None or seen.padded or seen.end <= seen.window:
        return k, v, seen
    k, v = (x[:, :, seen.end - seen.window :] for x in (k, v))
    return k, v, replace(seen, end=seen.window)
