"""The quantised caches that transformers brings, read as in generation: teacher forcing with the cache, in chunks.

They need `optimum-quanto` or `hqq`, which Headwise does not depend on. A chunk is as long as the window of tokens that
such a cache keeps whole, so that every token sees what it would see if tokens came one by one. Bytes are counted on the
real object; numbers that are not coded count 16 bits each, whatever the model computes in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from headwise.families import Family
from headwise.types import LayerShape

WINDOW = 128  # newest tokens that are kept whole, at most
NUMBER = 2  # bytes of a number that is not coded


def _asked(backend: str, bits: int, axis: int) -> dict[str, Any]:
    """Axes as the documentation of transformers recommends: 0 for quanto, 1 for HQQ."""
    more = dict(nbits=bits, axis_key=axis, axis_value=axis, q_group_size=64, residual_length=WINDOW)
    return {"backend": backend, **more}


LIBRARY: dict[str, dict[str, Any]] = {
    "transformers, quanto int4": _asked("quanto", 4, 0),
    "transformers, quanto int2": _asked("quanto", 2, 0),
    "transformers, HQQ int8": _asked("hqq", 8, 1),
    "transformers, HQQ int4": _asked("hqq", 4, 1),
    "transformers, HQQ int2": _asked("hqq", 2, 1),
    "transformers, float8": {"backend": "fp8"},
}


class Stored(NamedTuple):
    """What a real cache holds: bytes of coded tokens, how many tokens those are, and whether it has a window."""

    coded: int
    tokens: int
    window: int

    def at(self, layers: Sequence[LayerShape], length: int) -> float:
        """Bytes of a text of so many tokens; the window is half full on average."""
        whole = (self.window - 1) / 2 if self.window else 0.0
        number = NUMBER * sum(layer.kv_heads * (layer.qk_dim + layer.v_dim) for layer in layers)
        return self.coded / self.tokens * (length - whole) + whole * number


def refused(name: str, config: Any) -> str:
    """Why a cache cannot be made here; empty if it can."""
    try:
        _cache(name, config)
    except (ImportError, ValueError, TypeError, AttributeError) as error:
        return " ".join(str(error).split())
    return ""


def _cache(name: str, config: Any) -> Any:
    from transformers import QuantizedCache

    options = dict(LIBRARY[name])
    return QuantizedCache(options.pop("backend"), config, **options)


@torch.no_grad()
def stream(family: Family, model: nn.Module, name: str, ids: torch.Tensor) -> tuple[torch.Tensor, Stored]:
    """The last residual stream of rows (rows, length, hidden) and what the cache of one row holds at its end."""
    seen: list[torch.Tensor] = []
    hook = family.layers(model)[-1].register_forward_hook(
        lambda _module, _args, out: seen.append(out[0] if isinstance(out, tuple) else out)
    )
    rows, held = [], Stored(0, 1, 0)
    try:
        for row in ids.to(model.device).split(1):  # groups of numbers must not reach into another text
            cache = _cache(name, model.config)
            for chunk in row.split(WINDOW, 1):
                family.body(model)(input_ids=chunk, past_key_values=cache, use_cache=True)
            rows.append(torch.cat(seen, 1))
            seen.clear()
            held = _held(cache)
    finally:
        hook.remove()
    return torch.cat(rows), held


def _held(cache: Any) -> Stored:
    layer = cache.layers[0]
    window = int(getattr(layer, "residual_length", 0))
    whole = layer.keys.shape[-2] if window and layer.keys.dim() == 4 else 0
    found = [part for one in cache.layers for part in (one._quantized_keys, one._quantized_values)]
    coded = sum(_bytes(tensor) for part in found for tensor in _tensors(part))
    return Stored(coded, layer.get_seq_length() - whole, window)


def _bytes(tensor: torch.Tensor) -> int:
    coded = not tensor.is_floating_point() or tensor.element_size() == 1  # float8
    return tensor.nbytes if coded else tensor.numel() * min(NUMBER, tensor.element_size())


def _tensors(part: Any) -> Iterator[torch.Tensor]:
    """All plain tensors of something that a cache stores."""
    if hasattr(part, "__tensor_flatten__"):
        for name in part.__tensor_flatten__()[0]:
            yield from _tensors(getattr(part, name))
    elif isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, dict):
        for value in part.values():
            yield from _tensors(value)
    elif isinstance(part, (tuple, list)):
        for value in part:
            yield from _tensors(value)
