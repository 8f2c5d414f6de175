"""What families read out of configurations, and what they write into them."""

from abc import abstractmethod
from dataclasses import replace
from typing import Any, ClassVar

import torch

from headwise.errors import ModelError
from headwise.files.json import shortened
from headwise.types import Grain, LayerShape, ModelShape
from headwise.types.shape import MOST_LAYERS
from headwise.types.weights import ENDS

NOT_COPIED = (  # into another configuration
    "model_type", "architectures", "auto_map", "headwise", "headwise_anatomy", "quantization_config",
)  # fmt: skip
BIASES = dict(qkv_bias=True, o_bias=True, mlp_bias=True)  # of a model that has them everywhere
STAGES = ("stage_names", "out_features", "out_indices")  # name layers that may be gone; only backbones use them


class Sizes:
    """The sizes of a family's models, by their configurations: what all have in common, and where a family differs."""

    name: ClassVar[str]
    width_setting: ClassVar[str] = "intermediate_size"  # what configurations call the width of the MLP
    folds: ClassVar[bool] = True  # no position lies between the weights of queries and keys and the softmax

    @abstractmethod
    def costs(self, config: Any) -> dict[str, Any]:
        """Fields of `ModelShape` that the sizes of layers do not tell: biases, norms, other parameters."""

    def tower(self, config: Any) -> Any:
        """The configuration of the layers, which may lie inside that of the model."""
        return config

    def mlp_width(self, config: Any) -> int:
        """Of the layers before any cut, by the configuration of the tower."""
        return int(getattr(config, self.width_setting))

    def stock_layer(self, config: Any) -> LayerShape:
        """A layer before any cut."""
        tower = self.tower(config)
        heads = tower.num_attention_heads
        dim = int(getattr(tower, "head_dim", None) or tower.hidden_size // heads)
        groups = getattr(tower, "num_key_value_heads", None) or heads
        return LayerShape(heads, groups, dim, dim, self.mlp_width(tower), dim)

    def stock_layers(self, config: Any) -> tuple[LayerShape, ...]:
        """All layers before any cut."""
        return (self.stock_layer(config),) * self.tower(config).num_hidden_layers

    def pairs(self, config: Any) -> bool:
        """Whether rotary pairs can be dropped."""
        return False

    def portable_cuts(self, config: Any) -> tuple[str, ...] | None:
        """What a portable plan may cut; None: everything."""
        return None

    def grain(self, config: Any) -> Grain:
        """Which sizes are legal."""
        layer = self.stock_layer(config)
        found = grain_of(layer.qk_dim, layer.mlp_width, pairs=self.pairs(config), folds=self.folds)
        return replace(found, portable=self.portable_cuts(config))

    def shape_of(self, config: Any) -> ModelShape:
        """The shape of a stock or tailored configuration."""
        known: dict[str, Any] = dict(
            family=self.name,
            hidden_size=getattr(config, "hidden_size", 0),
            vocab_size=getattr(config, "vocab_size", 0),  # 0: it reads no words
            layers=layers_of(config, self.stock_layers(config)),
            grain=self.grain(config),
            element_bytes=stored_dtype(config).itemsize,
            **ends_of(config),
        )
        return ModelShape(**(known | self.costs(config)))

    def longest(self, config: Any) -> int:
        """Tokens that a model takes at once."""
        return int(config.max_position_embeddings)

    def embedding_width(self, config: Any) -> int:
        """Of what a model without a head puts out."""
        return int(config.hidden_size)


def without(settings: dict[str, Any], kept: list[int], count: int) -> dict[str, Any]:
    """A configuration for fewer layers: their number, and every list that has one entry per layer."""
    names = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    found: dict[str, Any] = {
        k: len(kept) if k in names and v == count else v for k, v in settings.items() if k not in STAGES
    }
    if isinstance(inner := found.get("vision_config"), dict):
        found["vision_config"] = without(inner, kept, count)
    if "model_args" in found:  # timm reads the number here
        found["model_args"] = {**(found["model_args"] or {}), "depth": len(kept)}
    lists = [k for k, v in found.items() if isinstance(v, list) and len(v) == count and k != "label_names"]
    return {k: [v[i] for i in kept] if k in lists else v for k, v in found.items()}


def grain_of(head_dim: int, mlp_width: int, pairs: bool, folds: bool) -> Grain:
    """Multiples of eight, which kernels like, or finer where heads are small.

    Heads keep an eighth at least, MLPs a quarter. With a quarter for both a quarter of the cache would leave no choice.
    """
    step = 8 if head_dim >= 64 else 4 if head_dim >= 32 else 2
    floor = max(step, head_dim // 8 // step * step)
    mlp_step = 32 if mlp_width >= 256 else 8
    return Grain(
        qk_step=step,
        v_step=step,
        mlp_step=mlp_step,
        qk_floor=floor,
        v_floor=floor,
        mlp_floor=max(mlp_step, mlp_width // 4),
        rotary=pairs,
        projectable=True,
        folds=folds,
    )


def stored_dtype(config: Any) -> torch.dtype:
    """The number format that a model's file has."""
    found: Any = getattr(config, "dtype", None) or torch.float32
    found = getattr(torch, found, None) if isinstance(found, str) else found
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ModelError(
            f"the configuration's dtype {shortened(config.dtype)} is no format of weights, such as bfloat16."
        )
    return found


def computed_dtype(config: Any, asked: str, device: str) -> torch.dtype:
    """What a model is computed in: as `asked` or, where that is auto, as in its file on a GPU and else in float32.

    Of the short formats only bfloat16 has the range that gradients need.
    """
    if asked != "auto":
        found: torch.dtype = getattr(torch, asked)
        return found
    return torch.bfloat16 if device != "cpu" and stored_dtype(config) == torch.bfloat16 else torch.float32


def layers_of(config: Any, stock: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    """All layers: those that a tailored configuration names, or those of stock code."""
    if tailored := getattr(config, "headwise", None):
        layers = tailored.get("layers") if isinstance(tailored, dict) else None
        if not isinstance(layers, list) or not 1 <= len(layers) <= MOST_LAYERS:
            raise ModelError(
                "the configuration's field headwise does not list the sizes of layers; restore config.json."
            )
        kept = tailored.get("kept", [])
        if kept and not (isinstance(kept, list) and len(kept) == len(layers) and all(map(_is_index, kept))):
            raise ModelError("the configuration's field headwise does not name the layers kept; restore config.json.")
        return tuple(LayerShape.from_json(sizes, "headwise.layers") for sizes in layers)
    return stock


def ends_of(config: Any) -> dict[str, int]:
    """Bits of the tables of words, where a tailored configuration says that they are few."""
    named = getattr(config, "headwise", None) or {}
    return {name: named[name] for name in ENDS if isinstance(named, dict) and name in named}


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_LAYERS
