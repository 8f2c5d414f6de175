"""A lean loop: greedy text without the ordinary one's work between steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from headwise.errors import ModelError
from headwise.fast.cache import FastCache
from headwise.fast.choice import Case, rounded
from headwise.fast.model import attentions, decode_step
from headwise.types import LayerShape


@torch.no_grad()
def greedy(
    model: Any,
    ids: torch.Tensor,
    steps: int,
    attention_mask: torch.Tensor | None = None,
    cache: FastCache | None = None,
) -> torch.Tensor:
    """The likeliest next tokens (B, steps) of a fast model; it does not stop at an end of text."""
    if not hasattr(model, "headwise_fast"):
        raise ModelError("only a model loaded with optimise=True writes this way.")
    rows, tokens = ids.shape
    cache = cache or model.headwise_fast.cache(model, rows, tokens + steps)
    given: dict[str, Any] = {}
    if attention_mask is not None:
        given = {"attention_mask": attention_mask, "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0)}
    out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **given)
    token = out.logits[:, -1].argmax(-1, keepdim=True)
    positions = given["position_ids"][:, -1:] + 1 if given else torch.full_like(token, cache.get_seq_length())
    if ids.device.type == "cuda" and not cache.irregular:
        return torch.cat((token, replayed(model, cache, token, positions, steps - 1)), 1)
    written = [token]
    for step in range(steps - 1):
        out = model(input_ids=token, position_ids=positions + step, past_key_values=cache, use_cache=True)
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        written.append(token)
    return torch.cat(written, 1)


def filled(model: Any, rows: int, length: int) -> FastCache:
    """A cache for texts of `length` with random keys and values but for the last place: what a step is timed with."""
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
    """What decode steps of layers like a model's, but of these sizes, will ask for."""
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
    """One step after what a cache holds, which holds no more afterwards: again and again the same, for its time."""
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
    """So many tokens after one, on CUDA: nothing but replays."""
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
