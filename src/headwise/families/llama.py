"""Decoders with separate q, k, v and o projections, rotary positions, RMSNorm and a gated MLP.

Llama 2 and 3, SmolLM, Mistral, Qwen2: any head sharing, tied or untied embeddings, biases, every rope type.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headwise.errors import ModelError
from headwise.runtime.modeling_headwise import CLASSES, TailoredAttention
from headwise.types import Grain, LayerShape, ModelShape

NAME = "llama"
MODEL_TYPES = tuple(CLASSES)
UNITS = ("qk", "v", "mlp", "heads", "kv_heads")
PORTABLE = True
SUMMARY = "Llama 2/3, SmolLM, Mistral, Qwen2"


@dataclass(frozen=True, slots=True)
class Block:
    """The parts of one layer that Headwise works on; `prefix` is where its tensors are in the state dictionary."""

    attention: TailoredAttention
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    attention_norm: nn.Module
    mlp_norm: nn.Module
    activation: Any

    def channels(self, x: torch.Tensor) -> torch.Tensor:
        """The MLP's channels, before the down projection, for a residual stream `x`."""
        x = self.mlp_norm(x)
        hidden: torch.Tensor = self.activation(self.gate(x)) * self.up(x)
        return hidden


def shape_of(config: Any) -> ModelShape:
    """The shape of a stock or tailored configuration."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    stock = LayerShape(
        query_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        qk_dim=head_dim,
        v_dim=head_dim,
        mlp_width=config.intermediate_size,
        qk_width=head_dim,
    )
    layers = (stock,) * config.num_hidden_layers
    if tailored := getattr(config, "headwise", None):
        layers = tuple(LayerShape(**sizes) for sizes in tailored["layers"])
    bias = bool(getattr(config, "attention_bias", False))
    return ModelShape(
        family=NAME,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        tied_embeddings=config.tie_word_embeddings,
        layers=layers,
        grain=grain_of(head_dim, config.intermediate_size),
        qkv_bias=bias or config.model_type.endswith("qwen2"),
        o_bias=bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        other_parameters=(2 * config.num_hidden_layers + 1) * config.hidden_size,
        element_bytes=_element_bytes(config),
    )


def grain_of(head_dim: int, mlp_width: int) -> Grain:
    """Multiples of eight, which kernels like, or finer where heads are small; nothing below a quarter."""
    step = 8 if head_dim >= 64 else 4 if head_dim >= 32 else 2
    mlp_step = 32 if mlp_width >= 256 else 8
    return Grain(
        qk_step=step,
        v_step=step,
        mlp_step=mlp_step,
        qk_floor=max(step, head_dim // 4),
        v_floor=max(step, head_dim // 4),
        mlp_floor=max(mlp_step, mlp_width // 4),
        rotary=True,
        projectable=True,
    )


def _element_bytes(config: Any) -> int:
    dtype = getattr(config, "dtype", None) or torch.float32
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return int(torch.empty((), dtype=dtype).element_size())


def stock_type(config: Any) -> str:
    """The model_type of the stock architecture behind a stock or tailored configuration."""
    return str(config.model_type).removeprefix("headwise_")


def build(like: nn.Module, layers: tuple[LayerShape, ...], tensors: dict[str, torch.Tensor]) -> nn.Module:
    """A tailored model with the given layers and tensors; everything else as in `like`, which stays as it is."""
    config_class, _, model_class = CLASSES[stock_type(like.config)]
    settings = {k: v for k, v in like.config.to_dict().items() if k not in ("model_type", "architectures", "auto_map")}
    settings["headwise"] = {"version": 1, "layers": [layer.to_json() for layer in layers]}
    config = config_class(**settings)
    config._attn_implementation = like.config._attn_implementation
    with torch.device("meta"):
        model = model_class(config)
    model.tie_weights()
    missing, unexpected = model.load_state_dict(tensors, assign=True, strict=False)
    if unexpected or set(missing) - set(getattr(model, "all_tied_weights_keys", None) or ()):
        raise ModelError(f"the reshaped model lacks {missing} or has no place for {unexpected}.")
    model.tie_weights()
    model.model.rotary_emb = copy.deepcopy(like.model.rotary_emb)
    model.generation_config = copy.deepcopy(like.generation_config)
    return model.train(like.training)


def tailor(model: nn.Module) -> nn.Module:
    """A copy of a stock model that runs on our modules, bit for bit the same; a tailored model is copied as it is."""
    return build(model, shape_of(model.config).layers, state_of(model))


def block(layer: nn.Module) -> Block:
    """The parts of one layer of a tailored model."""
    return Block(
        attention=layer.self_attn,
        gate=layer.mlp.gate_proj,
        up=layer.mlp.up_proj,
        down=layer.mlp.down_proj,
        attention_norm=layer.input_layernorm,
        mlp_norm=layer.post_attention_layernorm,
        activation=layer.mlp.act_fn,
    )


def blocks(model: nn.Module) -> list[Block]:
    """The layers of a tailored model."""
    return [block(layer) for layer in model.model.layers]


TENSORS = {  # our name of a layer's tensor -> where it is below the layer
    **{f"{name}.{kind}": f"self_attn.{name}_proj.{kind}" for name in "qkvo" for kind in ("weight", "bias")},
    "q_down": "self_attn.q_down_GWK",
    "k_down": "self_attn.k_down_GWK",
    "pairs": "self_attn.pairs_GP",
    **{f"{name}.{kind}": f"mlp.{name}_proj.{kind}" for name in ("gate", "up", "down") for kind in ("weight", "bias")},
}


def take_layer(tensors: dict[str, torch.Tensor], index: int) -> dict[str, torch.Tensor]:
    """Remove the tensors of a layer that cuts concern from a state dictionary and return them by our names."""
    places = {name: f"model.layers.{index}.{place}" for name, place in TENSORS.items()}
    return {name: tensors.pop(place) for name, place in places.items() if place in tensors}


def put_layer(tensors: dict[str, torch.Tensor], index: int, layer: dict[str, torch.Tensor]) -> None:
    """Add the tensors of a layer to a state dictionary."""
    for name, tensor in layer.items():
        tensors[f"model.layers.{index}.{TENSORS[name]}"] = tensor


def state_of(model: nn.Module, clone: bool = True) -> dict[str, torch.Tensor]:
    """A model's tensors, copied unless said, tied ones once."""
    tensors = {name: tensor.clone() if clone else tensor for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return tensors


def embed(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The residual stream before the first layer."""
    stream: torch.Tensor = model.model.embed_tokens(ids)
    return stream


def run(model: nn.Module, ids: torch.Tensor, stream: torch.Tensor | None = None) -> torch.Tensor:
    """Logits of unpadded rows, from `stream` (the embedded ids) if it is given."""
    inputs = {"input_ids": ids} if stream is None else {"inputs_embeds": stream}
    out: torch.Tensor = model(**inputs, use_cache=False).logits
    return out


def logits(model: nn.Module, stream: torch.Tensor) -> torch.Tensor:
    """Logits from the residual stream after the last layer."""
    out: torch.Tensor = model.lm_head(model.model.norm(stream))
    return out


@torch.no_grad()
def layer_contexts(model: nn.Module, ids: torch.Tensor) -> list[dict[str, Any]]:
    """The keyword arguments (mask, positions) that the model hands each layer for one unpadded row of this length."""
    seen: list[dict[str, Any]] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _m, _a, kwargs: seen.append(dict(kwargs)), with_kwargs=True)
        for layer in model.model.layers
    ]
    try:
        model.model(ids[:1], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [{k: v for k, v in kwargs.items() if k not in ("past_key_values", "use_cache")} for kwargs in seen]


def run_layer(model: nn.Module, index: int, stream: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
    """One layer on a residual stream."""
    out: torch.Tensor = model.model.layers[index](stream, **context)
    return out


def build_layer(model: nn.Module, index: int, shape: LayerShape, tensors: dict[str, torch.Tensor]) -> nn.Module:
    """One layer with its own sizes and tensors (by our names), for a model that stays as it is."""
    layer: Any = copy.deepcopy(model.model.layers[index])
    with torch.device("meta"):
        layer.self_attn = TailoredAttention(model.model.layers[index].self_attn, shape.to_json())
        for name in ("gate", "up", "down"):
            rows, columns = tensors[f"{name}.weight"].shape
            setattr(layer.mlp, f"{name}_proj", nn.Linear(columns, rows, bias=f"{name}.bias" in tensors))
    copies = {TENSORS[name]: tensor.clone() for name, tensor in tensors.items()}  # the model keeps its own
    layer.load_state_dict(copies, assign=True, strict=False)
    return layer.train(model.training)


@contextmanager
def replaced(model: nn.Module, index: int, layer: nn.Module) -> Iterator[None]:
    """Put another layer in a layer's place; the model's own is put back in any case."""
    layers: Any = model.model.layers
    own = layers[index]
    layers[index] = layer
    try:
        yield
    finally:
        layers[index] = own


def to_stock(model: nn.Module) -> nn.Module:
    """The ordinary architecture that computes the same as a portable tailored model: all layers alike, one pair set.

    Stock code rotates the kept pairs when their frequencies are written as factors of a longrope table, and scales by
    the new head dimension, which the queries make up for.
    """
    layer = shape_of(model.config).layers[0]
    config_class, _, model_class = CLASSES[stock_type(model.config)]
    stock_config, stock_model = config_class.__mro__[1], model_class.__mro__[2]
    settings = {k: v for k, v in model.config.to_dict().items() if k not in ("model_type", "architectures", "headwise")}
    settings |= {
        "num_attention_heads": layer.query_heads,
        "num_key_value_heads": layer.kv_heads,
        "head_dim": layer.qk_dim,
        "intermediate_size": layer.mlp_width,
    }
    tensors = state_of(model)
    full = blocks(model)[0].attention.head_dim
    if layer.qk_dim < full:
        settings["rope_parameters"] = _kept_frequencies(model, layer.qk_dim)
        for name in list(tensors):
            if name.endswith("pairs_GP"):
                tensors.pop(name)
            elif ".q_proj." in name:
                tensors[name] *= (layer.qk_dim / full) ** 0.5
    stock = stock_model(stock_config(**settings)).to(model.dtype)
    missing, unexpected = stock.load_state_dict(tensors, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ModelError(f"this plan is not portable: stock code has no place for {sorted(unexpected)[:1]}.")
    stock.tie_weights()
    stock.generation_config = copy.deepcopy(model.generation_config)
    return stock.train(model.training)


def _kept_frequencies(model: nn.Module, width: int) -> dict[str, Any]:
    """A longrope table whose frequencies are exactly those of the kept pairs."""
    rotary = model.model.rotary_emb
    if rotary.rope_type in ("dynamic", "longrope"):
        raise ModelError(
            f"rope type '{rotary.rope_type}' changes its frequencies with the length, which a portable model cannot "
            "follow; leave out --portable."
        )
    sets = {tuple(map(tuple, block.attention.pairs_GP.tolist())) for block in blocks(model)}
    chosen = {pairs for groups in sets for pairs in groups}
    if len(chosen) != 1:
        raise ModelError("heads kept different rotary pairs, which a portable model cannot; allocate with --portable.")
    theta = rotary.inv_freq.double()[list(chosen.pop())]
    base = float(model.config.rope_parameters["rope_theta"])
    factors = (base ** (-torch.arange(0, width, 2).double() / width) / theta.cpu()).tolist()
    return {
        "rope_type": "longrope",
        "rope_theta": base,
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": float(rotary.attention_scaling),
        "original_max_position_embeddings": model.config.max_position_embeddings,
    }


def tiny(model_type: str = "llama", **changes: Any) -> nn.Module:
    """A tiny random stock model for tests."""
    config_class, _, model_class = CLASSES[model_type]
    stock_config, stock_model = config_class.__mro__[1], model_class.__mro__[2]
    sizes: dict[str, Any] = dict(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    return stock_model(stock_config(**{**sizes, **changes})).eval()
