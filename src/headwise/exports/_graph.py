"""A decoder as one graph: tokens and cache in, logits and cache out, for any number of tokens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from headwise.errors import ModelError
from headwise.families import CAUSAL, Family, family_of

Tensors = list[torch.Tensor]
TRIED = (2, 3, 5)  # rows, new tokens and tokens before them, of the example that the graph is traced with


class GraphCache(DynamicCache):
    """A cache that only appends: a class of its own, so that the runtime does nothing else for speed."""


class ShownCache(GraphCache):
    """A cache that shows a model the keys and values that an engine found, and holds the model's own."""

    def __init__(self, shown: Tensors) -> None:
        super().__init__()
        self.shown = shown

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *more: Any, **kwargs: Any) -> Any:
        """Append to the model's own and return the engine's."""
        super().update(key_states, value_states, layer_idx, *more, **kwargs)
        return self.shown[2 * layer_idx], self.shown[2 * layer_idx + 1]


class GraphDecoder(nn.Module):
    """A decoder without objects: everything that it is given and gives back is a tensor."""

    def __init__(self, model: Any, new_cache: Callable[[], GraphCache] = GraphCache) -> None:
        super().__init__()
        self.model, self.layers, self.new_cache = model, model.config.num_hidden_layers, new_cache

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor, past: Tensors
    ) -> tuple[torch.Tensor, Tensors]:
        """Logits of new tokens, and keys and values of all, by layer in turn. The mask covers past and new tokens."""
        cache = self.new_cache()
        for layer in range(self.layers):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        tokens, every = input_ids.shape[1], attention_mask.shape[1]
        device, before = input_ids.device, every - tokens
        seen = torch.arange(every, device=device) <= torch.arange(tokens, device=device)[:, None] + before
        mask = seen[None, None] & attention_mask.bool()[:, None, None, :]
        found = self.model(
            input_ids=input_ids, attention_mask=mask, position_ids=position_ids, past_key_values=cache, use_cache=True
        )
        held: Any = cache.layers
        return found.logits, [x for layer in held for x in (layer.keys, layer.values)]


def decoder(model: Any) -> tuple[GraphDecoder, Family]:
    """A model in the form of a graph; only models that write text have one."""
    family = family_of(model.config)
    if model.config.is_encoder_decoder or family.head(model.config) != CAUSAL:
        raise ModelError(f"only decoders are exported as a graph; this is a model of {family.name} with another head.")
    model.config._attn_implementation = "sdpa"
    return GraphDecoder(model).eval(), family


@contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Give modules of rotary positions their own tables back: some compute them anew and keep those of the tracing."""
    tables = [module for module in model.modules() if "inv_freq" in module._buffers]
    kept = [{**vars(module), "_buffers": dict(module._buffers)} for module in tables]
    try:
        yield
    finally:
        for module, before in zip(tables, kept, strict=True):
            module.__dict__.clear()
            module.__dict__.update(before)


def example(model: Any, family: Family, sizes: tuple[int, int, int] = TRIED, seed: int = 0) -> dict[str, Any]:
    """Random inputs: rows, new tokens and tokens before them."""
    rows, new, before = sizes
    draw = torch.Generator().manual_seed(seed)
    shapes = family.shape_of(model.config).layers
    sizes_of = [(layer.kv_heads, size) for layer in shapes for size in (layer.qk_dim, layer.v_dim)]
    past = [torch.randn(rows, heads, before, size, generator=draw) for heads, size in sizes_of]
    return {
        "input_ids": torch.randint(0, model.config.vocab_size, (rows, new), generator=draw),
        "attention_mask": torch.ones(rows, before + new, dtype=torch.long),
        "position_ids": torch.arange(before, before + new).expand(rows, -1).clone(),
        "past": past,
    }


def moving(count: int) -> dict[str, Any]:
    """Which sizes of the inputs may differ from those of the example."""
    rows, new, past, every = (torch.export.Dim(name) for name in ("rows", "tokens", "past", "every"))
    return {
        "input_ids": {0: rows, 1: new},
        "attention_mask": {0: rows, 1: every},
        "position_ids": {0: rows, 1: new},
        "past": [{0: rows, 2: past} for _ in range(count)],
    }
