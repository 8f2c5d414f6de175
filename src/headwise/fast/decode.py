"""Decode steps on a filled cache, repeated to be timed: nothing runs between them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from headwise.fast.cache import FastCache
from headwise.fast.choice import Case, rounded
from headwise.fast.model import attentions, decode_step
from headwise.types import LayerShape


def filled(model: Any, rows: int, length: int) -> FastCache:
    """A cache for texts of `length`, filled with random keys and values up to the last place."""
    cache, some = FastCache(model.headwise_fast.layers, length), next(model.parameters())
    for part in attentions(model):
        layer: Any = cache.layers[part.layer_idx]
        layer.allocate(rows, *(some.new_empty(1, part.kv_heads, 1, dim) for dim in (part.qk_dim, part.v_dim)))
        for x in (layer.keys, layer.values):
            x.normal_()
    cache.rewind(length - 1)
    cache.batch, cache.starts_B = rows, torch.zeros(rows, dtype=torch.int32, device=some.device)
    return cache


def cases(model: Any, sizes: Iterable[LayerShape], rows: int, length: int, dtype: torch.dtype) -> list[Case]:
    """The cases of decode steps of a model whose layers have these sizes."""
    kinds = {(part.attend.sliding_window, part.attend.softcap is not None) for part in attentions(model)}
    device, places = next(model.parameters()).device, rounded(FastCache(1, length).capacity)
    made = []
    for x in sizes:
        heads = (x.query_heads, x.kv_heads, x.qk_dim, x.v_dim)
        for window, capped in sorted(kinds, key=str):
            made.append(Case(device, dtype, "decode", *heads, places, rounded(rows), capped=capped, window=window))
    return made


@torch.no_grad()
def repeated(model: Any, cache: FastCache, token: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One step on a cache, which is rewound afterwards, so that every call times the same work."""
    length = cache.get_seq_length()
    try:
        if token.is_cuda:
            return replayed(model, cache, token, positions, 1)
        given = {"input_ids": token, "position_ids": positions, "past_key_values": cache}
        logits: torch.Tensor = model(**given, use_cache=True, logits_to_keep=1).logits
        return logits
    finally:
        cache.rewind(length)


@torch.no_grad()
def replayed(model: Any, cache: FastCache, token: torch.Tensor, positions: torch.Tensor, steps: int) -> torch.Tensor:
    """The `steps` tokens after `token`, on CUDA: nothing but replays of the captured step."""
    model.headwise_fast.switch.cache = cache
    try:
        step = decode_step(model, cache)
        step.set(token, positions)
        first = cache.get_seq_length() + 1
        for _ in range(steps):
            step.run()
        return step.tokens[:, first : first + steps].clone()
    finally:
        model.headwise_fast.switch.cache = None
