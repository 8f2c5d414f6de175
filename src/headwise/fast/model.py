"""Makes a decoder's own `generate` fast: it gets our cache, and a forward pass with this cache takes the fast path."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import DynamicCache
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from headwise.devices import free_bytes
from headwise.errors import ModelError
from headwise.fast import native, packed_cuda
from headwise.fast.cache import STEP, FastCache, FastLayer
from headwise.fast.coded import KERNEL_DEVICES, CodedFastLayer, layouts_of, supported
from headwise.fast.fused import Switch, fuse
from headwise.fast.joined import subclass
from headwise.fast.layer import fuse_layers
from headwise.fast.paths import Seen
from headwise.fast.step import DecodeStep
from headwise.runtime.modeling_headwise import TailoredAttention

ROOMY = 1.25  # times the bytes of a cache in bits: a faster one that takes more is worth a word
TOKENS = 2**15  # of a prompt, at once
CELLS = 2**28  # of a mask, or of logits where they are all made
KNOWN = {"input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "return_dict"}
OURS = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
HOLES = (
    "its attention mask has holes, or padding at the right. Pad prompts at the left; where the pad token is part of a "
    "prompt, pass attention_mask=torch.ones_like(input_ids)"
)
COUNTING = ("dynamic", "longrope")  # rotary tables that read positions on the host: such a step is not captured


class Fast:
    """The state of a fast model beside its weights."""

    def __init__(self, layers: list[Any], switch: Switch, capture: bool) -> None:
        self.switch, self.capture, self.layers = switch, capture, len(layers)
        windows = (layer.attend.sliding_window for layer in layers)
        self.window: int | None = min((window for window in windows if window is not None), default=None)
        capped = (layer.query_heads for layer in layers if layer.attend.softcap is not None)
        self.capped_heads: int = max(capped, default=0)  # whose logits are all made
        self.layouts = [layouts_of(layer) for layer in layers]  # of rows in bits
        self.coded = any(self.layouts)
        wide = layers[0].q_proj.weight.element_size()
        self.place_bytes = sum(_place_bytes(*both, wide) for both in zip(layers, self.layouts, strict=True))
        self.pool: FastCache | None = None  # of the last text, for the next one
        self.ordinary = 0  # forward passes with our cache that took the ordinary path
        self.warned: set[str] = set()  # reasons, each warned of once

    def fall_back(self, why: str) -> None:
        """Count a pass that takes the ordinary path, and warn once per reason: it is correct, but not faster."""
        self.ordinary += 1
        if why not in self.warned:
            self.warned.add(why)
            warnings.warn(f"this text takes the ordinary, slower way: {why}.", stacklevel=2)

    def __deepcopy__(self, memo: dict[int, Any]) -> Fast:
        made = copy.copy(self)
        made.switch, made.pool, made.warned = copy.deepcopy(self.switch, memo), None, set()
        return made

    def new_cache(self, length: int) -> FastCache:
        """An empty cache for so many tokens per row."""
        return FastCache(self.layers, length, self._layer)

    def _layer(self, index: int, places: int) -> FastLayer:
        layouts = self.layouts[index]
        return FastLayer(places) if layouts is None else CodedFastLayer(places, layouts)

    def cache(self, model: Any, rows: int, length: int) -> FastCache:
        """A cache for so many tokens per row: the last one if it fits, with its captured step."""
        last = self.pool
        if last is not None and last.batch == rows and length <= last.capacity <= 2 * length + STEP:
            kind = [(layer.dtype, layer.device) for layer in last.layers if layer.is_initialized]
            if set(kind) == {(model.dtype, model.device)}:
                last.reset()
                return last
        self.pool = last = None  # its memory may be needed
        self.pool = self.new_cache(length)
        return self.pool

    def release(self) -> None:
        """Free the memory of the last text's cache."""
        self.pool = None


def _place_bytes(layer: Any, layouts: Any, wide: int) -> int:
    """Bytes of a place in the cache of a layer."""
    if layouts is None:
        return int(layer.kv_heads * (layer.qk_dim + layer.v_dim) * wide)
    return int(layer.kv_heads * sum(2 * one.words + 4 * one.pairs for one in layouts))


def attentions(model: Any) -> list[Any]:
    """A model's own attention layers, in order."""
    return [module for module in model.modules() if isinstance(module, TailoredAttention)]


def _writes(model: Any) -> bool:
    decodes = hasattr(model, "generate") and not getattr(model.config, "is_encoder_decoder", False)
    return decodes and bool(attentions(model))


def covers(model: Any) -> bool:
    """Whether `optimise` changes a model: a decoder on our runtime whose tokens see no later ones.

    Rows in bits only on CUDA, where Triton is and no layer has a window; for those on a CPU see `native.attach`.
    """
    causal = not getattr(model.config, "use_bidirectional_attention", None)
    return _writes(model) and causal and supported(attentions(model))


def optimise(model: Any) -> Any:
    """Make a decoder on our runtime fast, in place."""
    if not _writes(model):
        raise ModelError(f"{type(model).__name__} cannot be optimised: that is for decoders that generate text.")
    if hasattr(model, "headwise_fast"):
        return model
    packed_cuda.attach(model)
    if not covers(model):
        native.attach(model)
        return model
    layers = attentions(model)
    switch = Switch()
    fuse(model, switch)
    fuse_layers(model, switch)
    native.attach(model)
    model.headwise_fast = Fast(layers, switch, capture=not _counts(model.config))
    model.__class__ = _hooked(type(model))
    counted = sum(layer.kv_heads * sum(coder.bytes for coder in layer.coders) for layer in layers if layer.coders)
    taken = model.headwise_fast.place_bytes
    if all(model.headwise_fast.layouts) and taken > ROOMY * counted:
        warnings.warn(
            f"the fast cache takes {taken:,} bytes a token where the saved model's own takes {counted:,}; load without "
            "optimise=True where memory is what counts.",
            stacklevel=2,
        )
    return model.eval()


def _counts(config: Any) -> bool:
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return any(kind.get("rope_type") in COUNTING for kind in kinds)


@functools.cache
def _hooked(base: type) -> type:
    """A model class whose forward pass is fast when its cache is a FastCache."""
    inner: Any = base

    @functools.wraps(inner.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        if len(args) > 1 or not isinstance(cache, FastCache):
            return inner.forward(self, *args, **kwargs)
        if args:
            kwargs["input_ids"] = args[0]
        with torch.no_grad():
            return _forward(self, functools.partial(inner.forward, self), cache, kwargs)

    def _prepare_cache_for_generation(
        self: Any, generation_config: Any, model_kwargs: Any, *args: Any, **kw: Any
    ) -> Any:
        done = inner._prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kw)
        mode = next((x for x in (*args, *kw.values()) if isinstance(x, GenerationMode)), None)
        if mode in OURS and type(model_kwargs.get("past_key_values")) is DynamicCache:
            batch = next((x for x in (*args, *kw.values()) if type(x) is int), 1)
            cache = _for_generation(self, generation_config, batch)
            model_kwargs["past_key_values"] = cache or model_kwargs["past_key_values"]
        return done

    return subclass(base, forward=forward, _prepare_cache_for_generation=_prepare_cache_for_generation)


def _for_generation(model: Any, config: Any, batch: int) -> FastCache | None:
    """Our cache, if a text of the wanted length fits into memory. A cache that the user keeps is not reused."""
    fast: Fast = model.headwise_fast
    if config.max_length is None or config.cache_implementation not in (None, "dynamic"):
        return None
    rows = batch * int(config.num_return_sequences or 1)
    if model.device.type == "cuda" and not _fits(model, rows, config.max_length):
        return None
    if config.return_dict_in_generate:
        return fast.new_cache(config.max_length)
    return fast.cache(model, rows, config.max_length)


def _fits(model: Any, rows: int, length: int) -> bool:
    own = model.headwise_fast.pool
    free = free_bytes(model.device) + (own.nbytes() if own is not None else 0)
    return bool(model.headwise_fast.place_bytes * rows * (length + STEP) < 0.9 * free)


def _forward(model: Any, base: Any, cache: FastCache, given: dict[str, Any]) -> Any:
    """The fast path where it covers this pass, the ordinary one otherwise; both use the same cache.

    Nothing here waits for the device, except for one check of a prompt's mask: a step only sets tokens and replays.
    """
    why = _unasked(model, given)
    if why is None:
        ids, mask, positions = (given.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
        length, (rows, tokens) = cache.get_seq_length(), ids.shape
        if length + tokens > cache.capacity:
            raise ModelError(f"this cache holds {cache.capacity} tokens, not {length + tokens}; make a longer one.")
        if length == 0 or tokens > 1:
            _look(cache, mask, rows, length + tokens, ids.device)
        why = HOLES if cache.irregular else "padding needs position_ids" if positions is None and cache.padded else None
    if why is None and model.headwise_fast.coded:
        why = _not_coded(cache, ids.device)
    if why is not None:
        model.headwise_fast.fall_back(why)
        return base(**given)
    if positions is None:
        positions = torch.arange(length, length + tokens, device=ids.device)[None]
    positions = positions.expand(rows, tokens)
    model.headwise_fast.switch.cache = cache
    try:
        work = _decode if tokens == 1 else _prefill
        logits = work(model, base, cache, ids, positions, given.get("logits_to_keep", 0))
    finally:
        model.headwise_fast.switch.cache = cache.seen = cache.place = None
    return CausalLMOutputWithPast(logits=logits, past_key_values=cache)


def _not_coded(cache: FastCache, device: torch.device) -> str | None:
    """Why rows in bits are not read by our kernels, or None."""
    if device.type not in KERNEL_DEVICES:
        return "rows in bits are fast on CUDA only"
    begun = any(isinstance(x, CodedFastLayer) and x.is_initialized and not x.sides for x in cache.layers)
    return "it began the ordinary way" if begun else None


def _unasked(model: Any, given: dict[str, Any]) -> str | None:
    """Why the fast path does not cover a pass, or None; decided by arguments and shapes, not by values."""
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    odd = {name for name, value in given.items() if value is not None and name not in KNOWN}
    odd -= {name for name in ("output_attentions", "output_hidden_states") if given.get(name) is False}
    if odd or given.get("input_ids") is None:
        return f"it is given {', '.join(sorted(odd)) or 'no input_ids'}"
    if model.config.output_attentions or model.config.output_hidden_states:
        return "attention weights or hidden states are asked for"
    if model.training or given.get("use_cache") is False or given.get("return_dict") is False:
        return "the model is in training, or is to use no cache or return a tuple"
    if mask is not None and mask.dim() != 2 or positions is not None and positions.dim() != 2:
        return "its mask or its positions have more than two dimensions"
    return None


def _look(cache: FastCache, mask: Any, rows: int, end: int, device: torch.device) -> None:
    """Read from a mask where each row starts; masks with holes or padding at the right are marked irregular."""
    if cache.starts_B is None or cache.batch != rows:
        cache.batch, cache.starts_B = rows, torch.zeros(rows, dtype=torch.int32, device=device)
        cache.captured = None
    if mask is None:
        if cache.get_seq_length() == 0:
            cache.starts_B.zero_()
        return
    real = mask.bool()
    starts_B = (real.cumsum(1) == 0).sum(1)
    holes = real.sum(1) + starts_B != end
    if cache.get_seq_length() > 0:
        holes |= starts_B != cache.starts_B
    irregular, padded = torch.stack((holes.any(), starts_B.any())).tolist()
    cache.irregular, cache.padded = cache.irregular or irregular or mask.shape[1] != end, bool(padded)
    cache.starts_B.copy_(starts_B)


def _logits(base: Any, cache: FastCache, ids: torch.Tensor, positions: torch.Tensor, keep: Any) -> torch.Tensor:
    """Logits by the model's own code. It passes a mask of four dimensions through unchanged, so it builds none."""
    none = torch.zeros(1, 1, 1, 1, device=ids.device)
    given = dict(input_ids=ids, attention_mask=none, position_ids=positions, past_key_values=cache, use_cache=True)
    logits: torch.Tensor = base(**given, logits_to_keep=keep).logits
    return logits


def _decode(model: Any, base: Any, cache: FastCache, ids: torch.Tensor, positions: torch.Tensor, keep: Any) -> Any:
    if ids.device.type == "cuda":
        step = decode_step(model, cache)
        step.set(ids, positions)
        return step.run().clone()
    return _part(base, cache, slice(0, len(ids)), 1, ids, positions, 1)


def decode_step(model: Any, cache: FastCache) -> DecodeStep:
    """The decode step of a cache, captured when it first runs."""
    if cache.captured is None:
        base = functools.partial(type(model).__base__.forward, model)  # its own, under our hook
        logits = functools.partial(_logits, base, cache, keep=1)
        device = cache.starts_B.device
        cache.captured = DecodeStep(logits, cache, cache.batch, device, model.headwise_fast.capture)
    found: DecodeStep = cache.captured
    return found


def _part(base: Any, cache: FastCache, rows: slice, tokens: int, ids: Any, positions: Any, keep: Any) -> torch.Tensor:
    """Logits of some rows' next tokens, written behind the filled places; the cache advances after the last rows."""
    assert cache.starts_B is not None
    starts_B, end = cache.starts_B[rows], cache.get_seq_length() + tokens
    cache.rows, cache.place = rows, None
    cache.seen = Seen(torch.full_like(starts_B, end), starts_B, end, cache.padded)
    try:
        return _logits(base, cache, ids, positions, keep)
    finally:
        cache.seen = None
        if rows.stop == cache.batch:
            cache.advance(tokens)


def _prefill(model: Any, base: Any, cache: FastCache, ids: torch.Tensor, positions: torch.Tensor, keep: Any) -> Any:
    """Read a prompt, in parts where it is long; only the logits that are wanted are computed."""
    logits = []
    whole = not (isinstance(keep, int) and keep == 1)
    for rows, tokens in parts(model.headwise_fast, cache, ids.shape[0], ids.shape[1], whole):
        here = (rows, tokens)
        found = _part(base, cache, rows, tokens.stop - tokens.start, ids[here], positions[here], keep)
        if tokens.stop == ids.shape[1]:
            logits.append(found)
    return torch.cat(logits)


def parts(fast: Fast, cache: FastCache, rows: int, tokens: int, whole: bool) -> Iterator[tuple[slice, slice]]:
    """Rows and tokens to read at once, few enough that activations and masks fit into memory."""
    length = cache.get_seq_length()
    places = length + tokens
    many, long = (rows, tokens) if whole else (max(1, min(rows, TOKENS // tokens)), min(tokens, TOKENS))
    masked = length > 0 or long < tokens or cache.padded or (fast.window is not None and places > fast.window)
    while not whole and long > 1:
        cells = (fast.capped_heads * many if fast.capped_heads else many if cache.padded else 1) * long * places
        if cells <= CELLS or not (masked or fast.capped_heads):
            break
        many, long = (many // 2, long) if many > 1 and (cache.padded or fast.capped_heads) else (many, long // 2)
    for low in range(0, tokens, long):
        for first in range(0, rows, many):
            yield slice(first, min(first + many, rows)), slice(low, min(low + long, tokens))
